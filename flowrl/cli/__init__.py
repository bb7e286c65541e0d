"""The command line: ``flowrl run | check | graph | plan | simulate SCRIPT``. A script's own parameters become flags."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import CheckError, DataError, FlowError, ModelError, UsageError, did_you_mean
from ..flow import Flow
from ..graph.script.site import own_frames
from .arguments.options import add_common
from .arguments.script import load_script
from .calibrate import calibrate_command
from .check import add_options as check_options
from .check import check_command
from .completion import completion_command
from .diff import diff_command
from .doctor import doctor_command
from .eval import eval_command
from .export import export_command
from .gap import gap_command
from .graph import add_options as graph_options
from .graph import graph_command, graph_of_run
from .help import COMMANDS, new_parser, overview
from .new import new_command
from .plan import add_options as plan_options
from .plan import plan_command, show_command
from .replay import replay_command
from .reshard import reshard_command
from .run import add_options as run_options
from .run import run_command
from .show import show_runs_command
from .simulate import add_options as simulate_options
from .simulate import simulate_command
from .timeline import timeline_command

#: Commands of a script: what runs them, and what adds their options to a parser.
OF_SCRIPTS: Mapping[str, tuple[Callable[[Flow, Sequence[str]], int], Callable[[argparse.ArgumentParser], None]]] = {
    "run": (run_command, run_options),
    "check": (check_command, check_options),
    "graph": (graph_command, graph_options),
    "plan": (plan_command, plan_options),
    "simulate": (simulate_command, simulate_options),
}
#: The other commands, by what runs them.
WITHOUT_SCRIPT: Mapping[str, Callable[[Sequence[str]], int]] = {
    "reshard": reshard_command,
    "calibrate": calibrate_command,
    "show": show_runs_command,
    "timeline": timeline_command,
    "gap": gap_command,
    "diff": diff_command,
    "replay": replay_command,
    "doctor": doctor_command,
    "eval": eval_command,
    "export": export_command,
    "new": new_command,
    "completion": lambda words: completion_command(words, lambda asked: _command([*asked], None)),
}


def main(argv: Sequence[str] | None = None, module: str | None = None) -> int:
    """Run a command. Exit status: 0 fine, 1 findings or a failed run, 2 wrong usage, 130 interrupted.

    ``module`` is the dotted name of its script, where Python runs it as a module.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # what data and user code say is shown, whatever the terminal can
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _command(words, module)
    except UsageError as error:
        print(error.report(), file=sys.stderr)
        return 2
    except FlowError as error:
        if words[0] == "check" and _wants_json(words):
            print(json.dumps([{"program": None, "errors": [error.to_json()], "lints": []}], indent=1))
            return 1
        print(error.report(), file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        _show_cause(error)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _wants_json(words: Sequence[str]) -> bool:
    return "--format=json" in words or ("--format", "json") in itertools.pairwise(words)


def _command(words: list[str], module: str | None) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0 if words else 2
    if words[0] == "--version":
        from .. import __version__

        print(f"flowrl {__version__}")
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        fix = did_you_mean(command, COMMANDS, form="Did you mean flowrl {}?")
        raise UsageError(f"'{command}' is no command; the commands are {', '.join(COMMANDS)}.", fix=fix)
    if command in WITHOUT_SCRIPT:
        return WITHOUT_SCRIPT[command](rest)
    if command == "graph" and rest and (Path(rest[0]) / "run.json").exists():
        return graph_of_run(rest)
    if not rest or rest[0].startswith("-"):
        if rest and rest[0] in ("-h", "--help"):
            print(_help(command))
            return 0
        if command == "plan" and rest and rest[0] == "--show":
            return show_command(rest[1:])
        raise UsageError(f"flowrl {command} needs a script.", fix=f"Write flowrl {command} SCRIPT.")
    run, _ = OF_SCRIPTS[command]
    return run(load_script(rest[0], module), rest[1:])


def _help(command: str) -> str:
    """The help of a command of a script, without one."""
    parser = new_parser(command)
    add_common(parser)
    OF_SCRIPTS[command][1](parser)
    return parser.format_help() + "\nThe parameters of a script's program are options, too: add the script to see them."


def _show_cause(error: BaseException) -> None:
    """The traceback of what user code raised, below the message, from the first line that is the user's."""
    import traceback

    cause = error.__cause__
    if cause is None or isinstance(cause, (FlowError, TimeoutError)):
        return
    first, step = own_frames(cause), cause.__traceback__
    if not first and isinstance(error, (DataError, ModelError)):  # what a library says of a file: the message has it
        return
    while first and step is not None and step.tb_frame.f_code.co_filename != first[0].filename:
        step = step.tb_next
    print("", "".join(traceback.format_exception(type(cause), cause, step)), sep="\n", end="", file=sys.stderr)


__all__ = ["CheckError", "load_script", "main"]
