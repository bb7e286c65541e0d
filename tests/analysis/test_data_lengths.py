"""Lengths of a forecast: from the rows of a script, from its max_tokens, from a run, else assumed; and it says which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.analysis.data_lengths import Texts, texts_of
from flowrl.analysis.row_lengths import Tokens
from flowrl.cli import main
from flowrl.cli.arguments.script import load_script
from flowrl.placement.cost.length_distribution import Lengths

ROOT = Path(__file__).parents[2]
CHAT = [{"role": "user", "content": "12345"}, {"role": "user", "content": "123"}]
CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def notes(study) -> tuple[str, ...]:
    return study.simulate(2).notes


def flow_of(source, *, vocab: int, max_tokens: int | None = 24):
    flow = fl.Flow("texts")
    more = {} if max_tokens is None else {"max_tokens": max_tokens}
    model = fl.Model(config={**CONFIG, "vocab_size": vocab}, tokenizer=lambda: None)
    actor = flow.worker(fl.Actor, model, name="actor", **more)

    @flow.program
    def texts(steps: int = 2):
        for step, batch in flow.steps(source, steps):
            batch = actor.generate(batch, n=2)
            batch = batch.with_columns({"advantages": batch.rollout_logprobs * 0.0})
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    return flow


ROWS = [{"prompt": "a" * 40}, {"prompt": "a" * 80}]


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        (fl.data.rows(ROWS, batch=2), Texts(2, 60.0)),
        (fl.data.rows(lambda: ROWS, batch=2), Texts(2, 60.0)),
        (fl.data.generated(lambda i: {"prompt": "a" * (i + 1)}, batch=2), Texts(32, 16.5)),
        (fl.data.rows([{"q": CHAT}], batch=1, prompt="q"), Texts(1, 8.0)),
        (fl.data.rows([{"prompt": "ab", "answer": "abc"}], batch=1, response="answer"), Texts(1, 2.0, 3.0)),
    ],
    ids=["rows", "function", "generated", "messages", "supervised"],
)
def test_texts_of_a_source(source, texts):
    assert texts_of(source) == texts


def test_a_file_is_looked_at_and_not_read(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": "a" * 10}) + "\n" for _ in range(1000)))
    source = fl.data.jsonl(str(tmp_path / "a.jsonl"), batch=4)
    assert texts_of(source) == Texts(32, 10.0)
    assert getattr(source._store, "_offsets", 0) is None, "no line was counted"
    assert texts_of(fl.data.jsonl(str(tmp_path / "none.jsonl"), batch=4)) is None


def test_a_forecast_takes_the_rows_of_the_script_and_says_so():
    small = flow_of(fl.data.rows(ROWS, batch=2), vocab=32).study()
    large = flow_of(fl.data.rows(ROWS, batch=2), vocab=32000).study()
    assert small.works["actor.generate"].load.prompt == 60 and large.works["actor.generate"].load.prompt == 15
    assert notes(small)[0] == (
        "tokens of a prompt: 60 (2 rows of the data, a token a character); of a response: 24 (max_tokens, the most)"
    )
    assert "15 (2 rows of the data, 4 characters a token)" in notes(large)[0]


def test_what_is_not_known_is_assumed_and_says_so():
    class Unknown:
        batch = 2

        def schema(self):
            return fl.data.rows(ROWS, batch=2).schema()

    study = flow_of(Unknown(), vocab=32, max_tokens=None).study()
    assert study.works["actor.generate"].load.prompt == 512
    assert notes(study)[0].startswith("tokens of a prompt: 512 (assumed); of a response: ")


def test_a_distribution_is_said_whole():
    flow = flow_of(fl.data.rows(ROWS, batch=2), vocab=32)
    said = notes(flow.study(tokens=Tokens(100, "lognormal", (800, 1.0))))[0]
    assert said == "tokens of a prompt: 100 (said); of a response: lognormal, mean 800, sigma 1 (said)"
    assert notes(flow.study(tokens=Tokens(kind="uniform", numbers=(1, 9))))[0].endswith("uniform from 1 to 9 (said)")


def test_supervised_rows_have_the_responses_of_the_data():
    study = load_script(str(ROOT / "algorithms" / "sft.py")).study()
    load = study.works["actor.update"].load
    assert 1 < load.prompt < 10 and 1 < load.response < 5, "sums and their results, a character each"


def test_measured_lengths_have_the_mean_and_the_ends_of_their_quantiles():
    lengths = Lengths(5, float("inf"), "measured", (1.0, 2.0, 2.0, 9.0))
    drawn = lengths.draw(4000, "seed")
    assert lengths.mean == pytest.approx((1.5 + 2 + 5.5) / 3)
    assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean, rel=0.05)
    assert min(drawn) >= 1 and 8 < max(drawn) <= 9 and lengths.varies


def test_lengths_of_a_run(tmp_path, monkeypatch, capsys):
    """A real run, and a forecast of the same script with its lengths and seconds."""
    monkeypatch.chdir(ROOT)
    script, out = "algorithms/grpo.py", str(tmp_path / "run")
    words = ("--prompts-per-step", "2", "--steps", "4")
    assert main(["run", script, "--out", out, "--quiet", "--no-save", *words]) == 0
    capsys.readouterr()
    measured = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    mean = sum(line["response_length"] for line in measured) / len(measured)

    def simulated(*more: str) -> dict:
        assert main(["simulate", script, *words, "--format", "json", *more]) == 0
        return json.loads(capsys.readouterr().out)

    lengths = simulated("--run", out)
    assert lengths["cost_source"] == "roofline" and f"(measured: {out})" in lengths["notes"][0]
    score = next(e["bytes"] for e in lengths["edges"] if (e["src"], e["dst"]) == ("ref.logprobs", "actor.update"))
    assert score == pytest.approx(16 * 4 * mean, rel=0.1)
    both = simulated("--run", out, "--costs", out)
    took = sorted(line["seconds"] for line in measured[2:])
    assert both["cost_source"].startswith("calibrated: ") and took[0] / 3 < both["step_s"] < 3 * took[-1]
    assert main(["simulate", script, *words, "--costs", out, "--plan", "algorithms/plans/colocated_8.yaml"]) == 1
    refused = capsys.readouterr().err
    assert "its seconds were measured on hf, one device, and the plan has it on" in refused
    assert f"--calibrated-by {out}" in refused and "colocated_8.yaml:" in refused
    carried = simulated("--calibrated-by", out, "--plan", "algorithms/plans/colocated_8.yaml")
    assert carried["cost_source"] == f"roofline (efficiencies: {out})"
    assert main(["calibrate", out]) == 0
    capsys.readouterr()
    words_saved = ("--costs", f"{out}/costs.yaml", "--plan", "algorithms/plans/colocated_8.yaml")
    assert main(["simulate", script, *words, *words_saved]) == 1
    assert "they do not carry over" in capsys.readouterr().err
    assert main(["calibrate", out, "--efficiency", f"{out}/efficiency.yaml", "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    fitted = {call["title"]: call for call in record["fitted"]}
    ratio = fitted["actor.update"]["predicted"] / fitted["actor.update"]["measured"]
    assert 0.05 < ratio < 20  # seconds of a busy machine
    assert 0 < record["efficiency"]["train"] <= 1
    again = simulated("--efficiency", f"{out}/efficiency.yaml", "--plan", "algorithms/plans/colocated_8.yaml")
    assert again["step_s"] == pytest.approx(carried["step_s"], rel=1e-3)
    assert main(["calibrate", out, "--efficiency", f"{out}/nowhere/efficiency.yaml"]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert main(["simulate", script, "--calibrated-by", out, "--costs", out]) == 2
    assert "both say how long calls take" in capsys.readouterr().err
    assert main(["simulate", script, "--run", out, "--lengths", "fixed:8"]) == 2
    assert "both say how long rows are" in capsys.readouterr().err
    assert main(["simulate", script, "--run", str(tmp_path)]) == 2
    assert "is no folder of a run" in capsys.readouterr().err
    assert main(["simulate", script, "--program", "warmup", "--run", out]) == 1
    assert "has no rows that 'warmup' has sampled." in capsys.readouterr().err
