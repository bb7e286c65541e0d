"""``flowrl replay``: do a run, a step or a call of it again, and say whether it gives the same to the last bit."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..analysis.run_difference import RunDifference, compare_runs, in_words
from ..errors import FlowError, UsageError, did_you_mean, shown
from ..flow import Flow
from ..placement.plan.plan import Plan
from ..placement.plan.plan_file import read
from ..runtime.driver.run_texts import labels
from ..runtime.storage.digest_lines import read_begun, read_digests
from ..runtime.storage.replay_folder import Begin, prepare_replay
from ..runtime.storage.replay_record import Replay
from ..runtime.storage.run_record import records_within
from ..runtime.storage.sampled_rows import FOLDER as SAMPLED
from ..runtime.storage.sampled_rows import SampledAgain, read_sampled_again
from ..schedule.events import Begun, Groups
from ..workers.user_code.rows_in_progress import named_row
from .arguments.options import Words, put, read_run_words, whole_number
from .arguments.recorded_run import recorded_parameters, recorded_run, reopen


def replay_command(words: Sequence[str]) -> int:
    """Do what is asked again in a folder of its own. Returns the exit status: 0 where it is equal, bit for bit."""
    options = read_options(words)
    record = recorded_run(options.run)
    titles = labels(record["programs"])
    program, last = _last(options, record, titles)
    flow, said = reopen(record)
    parameters = recorded_parameters(flow, record, said)
    number = titles.index(program)
    how = Replay(str(options.run.absolute()), number, last, forced=options.forced)
    if options.forced and not (options.run / SAMPLED).is_dir():
        raise UsageError(
            f"--forced: the run in {shown(str(options.run))} has not kept the rows that it sampled.",
            fix="Start runs with --keep-sampled, or leave out --forced.",
        )
    how = _as_it_went(how, flow, record, parameters, options.run, program)
    first = (0, 0) if options.step is None else (number, options.step)
    with _folder(options.keep) as out:
        begin = prepare_replay(options.run, out, record, how, *first)
        changed = _run(flow, record, said, parameters, out, options.address)
        steps = None if options.step is None else (begin.step if begin.program == number else 0, options.step)
        which = program if options.step is not None else options.program
        found = compare_runs(options.run, out, program=which, steps=steps, node=options.node)
        again = read_sampled_again(out)
    if options.format == "json":
        put(json.dumps({"changed": changed, **found.to_json(), **_forced(again)}, indent=1), options.out)
    else:
        put(_text(found, begin, titles, changed, options, again), options.out)
    return 0 if found.is_equal else 1


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    return read_run_words("replay", words, _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the folder of the run; nothing is changed in it")
    parser.add_argument("--step", type=whole_number, metavar="K", help="up to this step, from the checkpoint before it")
    parser.add_argument("--node", metavar="NODE", help="compare the calls of this node alone, such as actor.update")
    parser.add_argument("--program", help="whose step; default: the last program of the run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="do it in this folder, and leave it there")
    parser.add_argument(
        "--forced",
        action="store_true",
        help="go on with the rows that the run has sampled, and say how those of the replay differ (--keep-sampled)",
    )
    parser.add_argument("--address", metavar="ADDRESS", help="of a run on ranks: running Ray cluster to join")


def _last(options: argparse.Namespace, record: Mapping[str, Any], titles: Sequence[str]) -> tuple[str, int | None]:
    """The program and the step that a replay ends with, None for the end of the run. Raises UsageError."""
    done: dict[str, int] = {}
    nodes: dict[str, None] = {}
    for made in read_digests(options.run):
        nodes[made.node] = None
        if not made.outside and made.program in titles:
            done[made.program] = made.step
    if not done:
        raise UsageError(
            f"the run in {options.run} has recorded no calls: it has done no step, or an older flowrl has written it.",
            fix="Run it again, and replay that run.",
        )
    if options.node is not None and options.node not in nodes:
        fix = did_you_mean(options.node, list(nodes), form="Write --node {}.")
        raise UsageError(f"the run has recorded no call of '{options.node}'.", have=list(nodes), fix=fix)
    program = options.program or (titles[-1] if titles[-1] in done else list(done)[-1])
    if program not in done:
        fix = did_you_mean(program, list(done), form="Write --program {}.")
        raise UsageError(f"the run in {options.run} has no steps of '{program}'.", have=list(done), fix=fix)
    if options.step is None:
        return program, None if record.get("status") == "done" and program == titles[-1] else done[program]
    if not 0 <= options.step <= done[program]:
        raise UsageError(f"--step {options.step}: '{program}' has done the steps 0 to {done[program]}.")
    return program, options.step


def _plan(record: Mapping[str, Any]) -> Plan | None:
    """The plan as the run has recorded it; None for that of one process."""
    said = record.get("plan")
    return read(json.dumps(said), "the plan of the run") if said and said != Plan.one_process().to_json() else None


def _as_it_went(
    how: Replay,
    flow: Flow,
    record: Mapping[str, Any],
    parameters: Mapping[str, Mapping[str, Any]],
    run: Path,
    program: str,
) -> Replay:
    """The same, with what timing has decided. Raises UsageError where it cannot be given again."""
    plan, name = _plan(record), record["programs"][how.program]
    if plan is None or record["runtime"] == "eager" or plan.pipeline.staleness == 0:
        return how
    steps = plan.pipeline
    if steps.staleness == 1 and (steps.order, steps.publish) == ("fifo", "drain"):
        return how  # the program alone decides it
    scheme = flow.study_with(parameters[name], plan, name, runtime=record["runtime"]).execution.scheme
    if not scheme.setup.sampling_pools:
        return how  # no worker is trained and sampled from
    begun, taken = _begun(run, program, f"order: {steps.order} and publish: {steps.publish}", how.forced)
    return replace(how, begun=begun, taken=taken)


def _begun(run: Path, program: str, what: str, forced: bool) -> tuple[list[Begun], dict[int, Groups]]:
    """What pools that sample began with, and the groups that calls have got. Raises UsageError where that cannot be
    given again; where rows are ``forced``, the groups alone matter."""
    begun, taken = read_begun(run, program)
    why = _why_not(run, program, begun)
    if not why:
        return begun, taken
    if forced:
        return [], taken
    raise UsageError(
        f"the run has {what}, and what timing has decided in it cannot be given again: {why}.",
        fix="Compare two runs with flowrl diff, or start runs with --keep-sampled and replay them with --forced.",
    )


def _why_not(run: Path, program: str, begun: Sequence[Begun]) -> str:
    """Return why what timing has decided in a run cannot be given again; nothing where it can."""
    if not begun:
        return "it has not recorded when its engines began with what"
    for line in records_within(run / "events.jsonl"):
        if line["kind"] == "resized":
            return f"a pool has lost or got ranks, and a replay begins with all: {line['text']}"
    titles = {made.call: f"{made.node} of step {made.step}" for made in read_digests(run) if made.program == program}
    for each in begun:
        for kept in each.kept:
            if kept.apart:
                what = titles.get(kept.call, f"call {kept.call}")
                return (
                    f"rank {each.part} was lost, and of {what} it began rows again that no engine was at, as those "
                    "that the ranks had made were lost with it"
                )
    return ""


def _run(
    flow: Flow,
    record: Mapping[str, Any],
    said: Words,
    parameters: Mapping[str, Mapping[str, Any]],
    out: Path,
    address: str | None,
) -> list[str]:
    """Run what is to be done again. Returns what has changed since the run, a line each; a failure has them too."""
    try:
        flow.run(
            *record["programs"],
            out=out,
            plan=_plan(record),
            runtime=record["runtime"],
            seed=record["seed"],
            parameters=parameters,
            arguments=record.get("arguments", ()),
            address=address,
            evaluate=[f"{said['program']}:{said['every']}" for said in record.get("evaluations", ())],
            stop_when=record.get("stop_when", ""),
            resume=True,
            allow_changed=True,
            save_models=False,
            trajectories=said.options.trajectories,
            trajectories_every=1,
            quiet=True,
        )
    except FlowError as error:
        for text in _changed(out):
            error.add_note(f"changed since the run: {text}")
        raise
    return _changed(out)


def _changed(out: Path) -> list[str]:
    return [line["text"] for line in records_within(out / "events.jsonl") if line["kind"] == "changed"]


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The folder of a replay: a temporary one, unless one is to be kept."""
    if keep is not None:
        yield keep
        return
    folder = Path(tempfile.mkdtemp(prefix="flowrl-replay-"))
    try:
        yield folder / "run"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _forced(again: Sequence[SampledAgain]) -> dict[str, Any]:
    """What a replay with forced rows has sampled itself, as plain data; nothing of another replay."""
    return {"sampled_again": [asdict(each) for each in again]} if again else {}


def _text(
    found: RunDifference,
    begin: Begin,
    titles: Sequence[str],
    changed: Sequence[str],
    options: argparse.Namespace,
    again: Sequence[SampledAgain],
) -> str:
    """What was done again, and how it compares, in words."""
    lines = ["Changed since the run:", *(f"  {text}" for text in changed)] if changed else []
    where = f"from checkpoint {begin.folder.name}, {titles[begin.program]} step {begin.step}" if begin.folder else ""
    where = where or "from its start"
    upto = f", up to step {options.step}" if options.step is not None else ""
    which = f"; compared: {options.node}" if options.node else ""
    lines.append(f"{shown(str(options.run))} was done again {where}{upto}{which}.")
    return "\n".join([*lines, *_sampled_in_words(again), in_words(found, "the run", "the replay")])


def _sampled_in_words(again: Sequence[SampledAgain]) -> Iterator[str]:
    """Yield of each node how what the replay has sampled differs from the rows that were given in its place."""
    for node in dict.fromkeys(each.node for each in again):
        calls = [each for each in again if each.node == node]
        rows, parted = sum(each.rows for each in calls), sum(each.parted for each in calls)
        text = f"{node} was given the {rows} rows of the run. It had sampled "
        if not parted:
            text += "the same tokens"
        else:
            first = min((each for each in calls if each.parted), key=lambda each: (each.step, each.call, each.token))
            assert first.key is not None, "a row that parts has a key"
            where = f"step {first.step}, row {named_row(first.key)}, token {first.token}"
            text += f"other tokens in {parted} of them, first in {where}"
        tokens, gap = sum(each.tokens for each in calls), max(each.gap for each in calls)
        yield f"{text}; log-probabilities of the {tokens} tokens that are alike differ by {gap:.2g} at most."
