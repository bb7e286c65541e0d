"""``flowrl run``: check a script's programs, then run them."""

from __future__ import annotations

import argparse
import faulthandler
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckError, ClusterLost, DiskError, UsageError, shown
from ..flow import Flow
from ..graph.tracing.log_names import ALWAYS
from ..lowering.lower import choose_runtime
from ..placement.plan.plan import Plan
from ..run_options import RUN_OPTIONS
from .arguments.auto_plan import auto_plan
from .arguments.options import Words, parse, whole_number
from .arguments.plan_option import asks_auto, said_plan
from .arguments.resume_command import how_to_go_on, lasting_words, recorded_words
from .pages_process import draw_apart

if TYPE_CHECKING:
    from ..runtime.driver.run_settings import Outcome


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--runtime",
        default="",
        choices=RUN_OPTIONS["runtime"].words,
        help="eager: one op at a time; local: pools overlap; ray: a process for each device of the plan "
        "(local; with --plan auto the one that the plan needs)",
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", help="with --runtime ray: running Ray cluster to join (one is started here)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the run (runs/NAME-TIME)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument(
        "--allow-changed",
        action="store_true",
        help="with --resume: also where code, data or settings are not those that the run was started with",
    )
    parser.add_argument(
        "--unlock", action="store_true", help="the process on another host that has the folder is gone: take it"
    )
    parser.add_argument("--overwrite", action="store_true", help="start anew in a folder that holds a run")
    parser.add_argument(
        "--checkpoint-every", type=whole_number, default=50, metavar="STEPS", help="steps between checkpoints (50)"
    )
    parser.add_argument(
        "--keep-last", type=whole_number, default=2, metavar="COUNT", help="newest checkpoints that are kept (2)"
    )
    parser.add_argument(
        "--keep-best",
        default="",
        metavar="METRIC",
        help="keep the checkpoint with the largest METRIC too (METRIC:min: the smallest), and save its models in best/",
    )
    parser.add_argument(
        "--evaluate",
        action="append",
        default=[],
        metavar="PROGRAM:STEPS",
        help="run PROGRAM between steps, every so many, and at the end; again for another one",
    )
    parser.add_argument(
        "--stop-when",
        default="",
        metavar="METRIC:PATIENCE",
        help="end a loop when METRIC was not above its best PATIENCE times in a row (METRIC:min:PATIENCE: below)",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="begin with a checkpoint of the RUN that is named in place of SCRIPT: last, best or a number",
    )
    parser.add_argument(
        "--no-save", dest="save_models", action="store_false", help="do not save the trained models at the end"
    )
    parser.add_argument(
        "--trajectories",
        type=whole_number,
        default=2,
        metavar="GROUPS",
        help="prompts of a step whose rows are kept (2)",
    )
    parser.add_argument(
        "--trajectories-every",
        type=whole_number,
        default=10,
        metavar="STEPS",
        help="steps from one kept to the next (10)",
    )
    parser.add_argument(
        "--keep-sampled",
        action="store_true",
        help="keep all sampled rows, so that flowrl replay --forced can give them again",
    )
    parser.add_argument(
        "--track",
        action="append",
        default=[],
        metavar="TRACKER",
        help="show the run in tensorboard, wandb, mlflow, trackio or module:Class too; again for another one",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def run_command(flow: Flow, words: Sequence[str]) -> int:
    """Run programs. Returns the exit status."""
    begun = recorded_words(words) if "--resume" in words else []
    given = parse(flow, "run", words, add_options, begun=begun)
    options = given.options
    for name in ("checkpoint_every", "keep_last", "trajectories", "trajectories_every"):
        rule, value = RUN_OPTIONS[name], getattr(options, name)
        if not rule.accepts(value):
            raise UsageError(f"--{name.replace('_', '-')} {value}: give {rule.least:g} or more.")
    if options.overwrite and not options.out:
        raise UsageError("--overwrite needs to know which run.", fix="Name its folder: --out DIR --overwrite.")
    if options.allow_changed and not options.resume:
        raise UsageError("--allow-changed is for a run that goes on.", fix="Write --out DIR --resume --allow-changed.")
    out = Path(options.out) if options.out else flow.new_folder()
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a crash of user code says where it was
    try:
        outcome = _run(flow, given, out, arguments=[*begun, *lasting_words(given.words, begun)])
    except (CheckError, UsageError):
        raise  # nothing has run
    except KeyboardInterrupt as stopped:
        print(f"stopped at once; {how_to_go_on(flow, out)}", file=sys.stderr)
        return getattr(stopped, "status", 130)
    except ClusterLost as lost:
        print(f"{lost.what.rstrip('.')}; {how_to_go_on(flow, out)}", file=sys.stderr, flush=True)
        os._exit(1)  # Ray's own way out of this process waits for what is gone, and logs that
    except DiskError as error:
        print(f"{error.report()}\n{how_to_go_on(flow, out)}", file=sys.stderr)
        return 1
    except BaseException:
        _show_what_there_is(out)
        raise
    if outcome.status == "interrupted":
        print(f"stopped after a checkpoint; {how_to_go_on(flow, out)}", file=sys.stderr, flush=True)
        _show_what_there_is(out)
        return outcome.exit_status
    _summary(outcome, flow, given)
    return 0


def _run(flow: Flow, said: Words, out: Path, *, arguments: Sequence[str]) -> Outcome:
    options = said.options
    given: dict[str, Any] = {name: getattr(options, name) for name in RUN_OPTIONS} | {"seed": options.seed or 0}
    given |= {"track": options.track, "evaluate": options.evaluate, "checkpoint": options.checkpoint}
    parameters, address = said.parameters, options.address
    auto = asks_auto(options)
    plan = _searched(flow, said) if auto else said_plan(options)
    given["runtime"] = options.runtime or (choose_runtime(plan) if auto and plan is not None else "local")
    return flow.run(
        *said.programs, out=out, plan=plan, parameters=parameters, arguments=arguments, address=address, **given
    )


def _searched(flow: Flow, said: Words) -> Plan:
    """The plan on this machine of the program with most calls, which is told."""
    name = max(said.programs, key=lambda program: len(flow.graph(program, **said.parameters[program]).nodes))
    plan = auto_plan(flow, name, said.parameters[name])
    if not said.options.quiet:
        other = shlex.join(["flowrl", "plan", shown(flow.script), "--cluster", "auto", "--out", "plan.yaml"])
        print(f"{plan.to_yaml()}# one step after another; plans in which steps overlap too: {other}", file=sys.stderr)
    return plan


def _show_what_there_is(out: Path) -> None:
    """The pages of a run that failed or was stopped, if it came so far that it has any."""
    if (out / "run.json").exists():
        print(draw_apart(out), file=sys.stderr)


def _summary(outcome: Outcome, flow: Flow, said: Words) -> None:
    """Print where things are, and what changed between two runs of the same program."""
    out, last, digest = outcome.out, outcome.last, outcome.weights_digest
    if (out / "reward.png").exists():
        print(f"reward curve: {out / 'reward.png'}")
    models = f"   models: {out / 'model'}" if (out / "model").is_dir() else ""
    print(f"metrics: {out / 'metrics.jsonl'}{models}   weights {digest[:12] if digest else 'none'}")
    for program in dict.fromkeys(p for p, _ in last):
        runs = [m for p, m in last if p == program]
        for key, value in runs[-1].items():
            asked = isinstance(value, (int, float)) and key.rpartition("/")[2] not in ALWAYS
            if asked and len(runs) > 1 and isinstance(runs[0].get(key), (int, float)):
                print(f"{key.replace('_', ' ')}: {runs[0][key]:.2f} -> {value:.2f}")
    print(end="", flush=True)
    print(draw_apart(out))
