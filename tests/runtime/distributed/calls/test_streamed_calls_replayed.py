"""A run that has lost a rank in the middle of rows is done again bit for bit: a rank of the replay begins the same rows
again, from as many of their tokens, after as many steps of its engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from direct import run_direct
from flows import module_of

from flowrl.analysis.run_difference import compare_runs
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.calls import streamed_calls
from flowrl.runtime.distributed.rank_process import rank_streams
from flowrl.runtime.distributed.told_tokens import ToldTokens
from flowrl.runtime.local.shared_engine import KeptRows
from flowrl.runtime.storage.digest_lines import read_begun
from flowrl.runtime.storage.replay_folder import prepare_replay
from flowrl.runtime.storage.replay_record import Replay
from flowrl.schedule.events import AGAIN, Begun, KeptTokens
from flowrl.workers.streaming import SampledRow


@pytest.fixture(scope="module")
def module():
    return module_of("overlap_flow")


def plan(dp: int, **pipeline: Any) -> Plan:
    pools = {"train": "cpu", "rollout": Pool("rollout", processes=dp), "cpu": "cpu"}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
    return Plan(pools, place, pipeline=Pipeline(**pipeline))


def tell(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Have ranks answer after each token, and tell tokens after so many."""
    for name in ("SLICE", "TOLD_EVERY", "TOLD_TIMES"):
        monkeypatch.setattr(rank_streams, name, 0.0)
    collect = rank_streams._collect_told

    def sometimes(shared: Any, begun: Any) -> None:
        if shared.steps % every == 0:
            collect(shared, begun)

    monkeypatch.setattr(rank_streams, "_collect_told", sometimes)


def run(module: Any, out: Path, made: Plan, **how: Any) -> Any:
    module.Witness.rows.clear()
    outcome, place = run_direct(module.flow, made, out, parameters={"overlap": {"steps": 4}}, save_models=False, **how)
    assert outcome.status == "done"
    return place


def replayed(module: Any, run_: Path, out: Path, made: Plan, begun: Sequence[Begun], taken: Any) -> Any:
    """Do a run again as if it had gone so; returns how it differs."""
    record = json.loads((run_ / "run.json").read_text())
    prepare_replay(run_, out, record, Replay(str(run_), 0, begun=begun, taken=taken), 0, 0)
    run(module, out, made, resume=True, allow_changed=True)
    return compare_runs(run_, out)


def run_and_lose(module: Any, out: Path, made: Plan, count: int, *, tokens: bool) -> tuple[list[Begun], Any, Path]:
    """Run until rank 1 dies in the midst of rows, of which some tokens are known if that is asked for; which of its
    answers is the one is a matter of timing. Returns what was begun and taken, and the folder."""
    for at in range(count, count + 8):
        folder = out / f"run-{at}"
        run(module, folder, made, kill=("advance", at, 1))
        begun, taken = read_begun(folder, "overlap")
        kept = [kept for each in begun if each.number == AGAIN for kept in each.kept]
        if kept and (not tokens or sum(count for each in kept for count in each.tokens.values())):
            assert not any(each.apart for each in kept)
            return begun, taken, folder
    raise AssertionError("no rows were lost")


@pytest.mark.parametrize(
    ("count", "every", "dp", "how"),
    [
        (9, 1, 2, {"publish": "interrupt"}),
        (12, 3, 2, {"publish": "interrupt"}),
        (12, 3, 2, {"publish": "drain"}),
        (11, 3, 2, {"publish": "continue"}),
        (12, 2, 2, {"publish": "interrupt", "chunks": 2}),
        (10, 3, 2, {"publish": "interrupt", "order": "window", "window": 1.0}),
        (13, 3, 1, {"publish": "interrupt", "copies": 2}),
        (7, 1000, 2, {"publish": "interrupt"}),
    ],
)
def test_a_run_that_lost_a_rank_is_done_again_bit_for_bit(module, tmp_path, monkeypatch, count, every, dp, how):
    """Tokens that the rank had told are kept, those that it had not are sampled once more; with ``every=1000`` all."""
    tell(monkeypatch, every)
    made = plan(dp, staleness=2, **how)
    begun, taken, folder = run_and_lose(module, tmp_path, made, count, tokens=every < 1000)
    found = replayed(module, folder, tmp_path / "again", made, begun, taken)
    assert found.is_equal and found.calls
    same, groups = read_begun(tmp_path / "again", "overlap")
    least = min(len(begun), len(same))
    assert same[:least] == begun[:least] and groups == taken and least > 6


def test_without_what_was_kept_a_replay_is_another_run(module, tmp_path, monkeypatch):
    """The control: nothing was told, so that rows began again from their first token, some of them with newer weights."""
    tell(monkeypatch, 1000)
    made = plan(2, staleness=2, publish="interrupt")
    for count in range(9, 25):
        out = tmp_path / str(count)
        run(module, out, made, kill=("advance", count, 1))
        begun, taken = read_begun(out, "overlap")
        starts = [each for each in begun if each.number != AGAIN]
        if (
            len(starts) < len(begun)
            and not replayed(module, out, tmp_path / f"again-{count}", made, starts, taken).is_equal
        ):
            assert replayed(module, out, tmp_path / f"so-{count}", made, begun, taken).is_equal
            return
    raise AssertionError("all replays are equal without it")


def test_a_run_that_went_back_to_a_checkpoint_is_done_again_bit_for_bit(module, tmp_path, monkeypatch):
    """The rank that trains has died: the run goes on from its checkpoint, where no rows run."""
    tell(monkeypatch, 3)
    made = plan(1, staleness=2, publish="interrupt")
    for count in range(5, 16):  # of its calls, the one that it dies in
        out = tmp_path / f"run-{count}"
        run(module, out, made, kill=("run", count, 0), checkpoint_every=1)
        kinds = [json.loads(line)["kind"] for line in (out / "events.jsonl").read_text().splitlines()]
        begun, taken = read_begun(out, "overlap")
        if "recovered" in kinds and sum(each.after is None for each in begun) > 1:
            break
    else:
        raise AssertionError("no run went back to a checkpoint")
    found = replayed(module, out, tmp_path / "again", made, begun, taken)
    assert found.is_equal and found.calls


@pytest.mark.parametrize(("answered", "epoch", "apart"), [(False, 0, False), (True, 0, True), (False, -1, True)])
def test_rows_that_no_engine_was_at_are_marked(answered, epoch, apart):
    """What a rank had answered and went with its copy, or could not begin: a replay says that it cannot give it again."""
    call: Any = SimpleNamespace(call=SimpleNamespace(index=7), part=2)
    logprobs = (-0.5, -1.0)
    rows = (
        SampledRow(0, 0, (5, 7), logprobs, logprobs, ((3, 2),), "aborted"),
        SampledRow(0, 4, (5, 2), logprobs, logprobs, ((3, 2),), "stop"),
    )
    part = streamed_calls._Part(cast("Any", None), epoch, was_answered=answered)
    kept = streamed_calls._kept_tokens(call, part, ToldTokens.of(KeptRows(rows, kept_cache=True)))
    assert kept == KeptTokens(7, 2, {0: 2, 4: 3}, kept_cache=True, apart=apart)
    assert streamed_calls._kept_tokens(call, part, None).tokens == {}
