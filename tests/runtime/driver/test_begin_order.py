"""What an earlier run has begun, and when, is begun so again: publishes come between the same two tokens, and steps get
the same groups, whatever timing would give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flows import module_of

from flowrl.backends.continuous import ContinuousBatch
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.storage.digest_lines import read_begun
from flowrl.runtime.storage.replay_folder import Replay, prepare_replay
from flowrl.schedule.events import PUBLISH, Begun, Groups

TOKENS = 12  # of each row


@pytest.fixture(scope="module")
def module():
    return module_of("overlap_flow")


@pytest.fixture(autouse=True)
def whole_rows(monkeypatch):
    """Rows end with their last token, and never before."""
    monkeypatch.setattr(ContinuousBatch, "end_of", lambda batch, row: "length" if len(row.ids) >= row.limit else None)


def run(module, out: Path, *, resume: bool = False, **pipeline) -> None:
    module.Witness.rows.clear()
    pools = {"train": "cpu", "rollout": "cpu", "cpu": "cpu"}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
    module.flow.run(
        out=out,
        plan=Plan(pools, place, pipeline=Pipeline(**pipeline)),
        quiet=True,
        save_models=False,
        parameters={"overlap": {"steps": 4}},
        resume=resume,
        allow_changed=resume,
    )


def run_so(module, tmp_path: Path, begun: tuple[Begun, ...], taken: dict[int, Groups], **pipeline) -> Path:
    """Do a run again as if it had gone so."""
    run(module, tmp_path / "run", **pipeline)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    replay = Replay(str(tmp_path / "run"), 0, begun=begun, taken=taken)
    prepare_replay(tmp_path / "run", tmp_path / "again", record, replay, 0, 0)
    run(module, tmp_path / "again", resume=True, **pipeline)
    return tmp_path / "again"


@pytest.mark.parametrize("at", [1, 4])
def test_a_publish_comes_between_the_same_two_tokens(module, tmp_path, at):
    """Call 10, of the second step, begins at token 5 of the first one's, and the publish comes after 8 tokens of it."""
    begun = (Begun(1, 0), Begun(10, 0, {0: 5}), Begun(PUBLISH, 1, {0: TOKENS - 5 + at}))
    out = run_so(module, tmp_path, begun, {}, staleness=1, publish="interrupt")
    assert tuple(read_begun(out, "overlap")[0][:3]) == begun
    (rows,) = [batch for step, batch in module.Witness.rows if step == 1]
    before = TOKENS - 5 + at
    assert rows["versions"].to_list() == [[0] * before + [1] * (TOKENS - before)] * len(rows)


def test_steps_get_the_same_groups(module, tmp_path):
    taken: dict[int, Groups] = {
        1: ((1, 3), (10, 2), (1, 0), (10, 1)),
        10: ((10, 0), (1, 1), (10, 3), (1, 2)),
    }
    out = run_so(module, tmp_path, (), taken, staleness=2, order="window", window=0.3)
    found = read_begun(out, "overlap")[1]
    assert {call: found[call] for call in taken} == taken
    prompts = {step: list(dict.fromkeys(key[0] for key in batch.keys)) for step, batch in module.Witness.rows}
    assert prompts[0] == [3, 6, 0, 5] and prompts[1] == [4, 1, 7, 2]
