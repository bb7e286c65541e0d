"""What an earlier run has begun, and when, is begun so again: publishes come between the same two tokens, and steps get
the same groups, whatever timing would give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from flows import module_of

from flowrl.backends.continuous import ContinuousBatch
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.driver.begin_order import BeginOrder
from flowrl.runtime.storage.digest_lines import read_begun
from flowrl.runtime.storage.replay_folder import prepare_replay
from flowrl.runtime.storage.replay_record import Replay
from flowrl.schedule.events import PUBLISH, Begun, Follower, Groups, Publish, Setup, Start
from flowrl.schedule.scheme import Scheme

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
    publish = Begun("rollout", PUBLISH, 1, {0: TOKENS - 5 + at}, worker="actor")
    begun = (Begun("rollout", 1, 0, None), Begun("rollout", 10, 0, {0: 5}), publish)
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


def test_what_began_where_nothing_ran_waits_until_nothing_runs(module, tmp_path):
    """As after a checkpoint from which a run went on: the call of the second step waits for the rows of the first one,
    though its engine has made no step since then in the session that began with it."""
    begun = (Begun("rollout", 1, 0, None), Begun("rollout", 10, 0, None))
    out = run_so(module, tmp_path, begun, {}, staleness=1, publish="interrupt")
    assert read_begun(out, "overlap")[0][1] == Begun("rollout", 10, 0, {0: TOKENS})


class Engines:
    """An executor whose engine makes no step."""

    def engine_steps(self, name: str) -> dict[int, tuple[int, bool]]:
        return {0: (5, True)}

    def hold_engines(self, name: str, steps: object) -> None: ...
    def keep_open(self, name: str, parts: object) -> None: ...

    def rows_begun_again(self, name: str) -> list[object]:
        return []


def test_what_was_handed_out_later_does_not_overtake_what_waits_for_its_turn():
    """A publish that may begin at once comes after a call that waits for steps of the engine."""
    known = (
        Begun("rollout", 1, 0, None),
        Begun("rollout", 10, 0, {0: 3}),
        Begun("rollout", PUBLISH, 1, {}, worker="actor"),
    )
    setup = Setup(("train", "rollout"), {"actor": Follower("train", "rollout")}, 1, publish="interrupt", begun=known)
    order = BeginOrder(Scheme({"actor": "train"}, setup=setup), cast("Any", Engines()))
    first, second = (Start(number, 0, 1, ("rollout",), {"actor": 0}) for number in (1, 10))
    publish = Publish(-1, "actor", 1, 0, ("rollout",))
    for command in (first, second, publish):
        order.hand_out(command)
    order.begin(first)
    assert not order.may_begin(second), "the engine is not there yet"
    assert not order.may_begin(publish), "it is its turn after that"
