"""A run that is opened again says what its words say, and tells nothing that was told when it began."""

from __future__ import annotations

from flowrl.cli.arguments.recorded_run import reopen

SCRIPT = """
import flowrl as fl

flow = fl.Flow("t")


@flow.program
def t(steps: int = 2, seed: int = 3):
    flow.log(0, seed=seed)
"""


def test_what_was_told_of_its_words_is_not_told_again(tmp_path, capsys):
    (tmp_path / "t.py").write_text(SCRIPT)
    _, said = reopen({"script": str(tmp_path / "t.py"), "arguments": ["--seed", "7", "--steps", "4"]})
    assert said.options.seed == 7 and said.parameters == {"t": {"steps": 4}}
    assert capsys.readouterr() == ("", "")
