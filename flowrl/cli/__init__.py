"""The command line: ``flowrl run | check | graph | plan | simulate SCRIPT``. A script's own parameters become flags."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import CheckError, DataError, FlowError, ModelError, UsageError, did_you_mean
from ..graph.script.site import own_frames
from .arguments.options import add_common
from .arguments.script import load_script
from .help import COMMANDS, new_parser, overview

#: Commands of a script. Each has a module of its name, with what runs it and what adds its options to a parser.
OF_SCRIPTS = ("run", "check", "graph", "plan", "simulate")


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
    if command == "completion":
        return _function(command)(rest, lambda asked: _command([*asked], None))
    if command not in OF_SCRIPTS:
        return _function(command)(rest)
    if command == "graph" and rest and (Path(rest[0]) / "run.json").exists():
        return _function(command, "graph_of_run")(rest)
    if command == "run" and rest and (Path(rest[0]) / "run.json").exists():
        return _function("run_of_run")(rest)
    if not rest or rest[0].startswith("-"):
        if rest and rest[0] in ("-h", "--help"):
            print(_help(command))
            return 0
        if command == "plan" and rest and rest[0] == "--show":
            return _function(command, "show_command")(rest[1:])
        ways = "SCRIPT, or to go on with a run, flowrl run RUN --resume" if "--resume" in rest else "SCRIPT"
        raise UsageError(f"flowrl {command} needs a script.", fix=f"Write flowrl {command} {ways}.")
    return _function(command)(load_script(rest[0], module), rest[1:])


def _function(command: str, name: str | None = None) -> Callable[..., Any]:
    """A function of a command's module, which is loaded where it is asked for: ``check_command`` runs ``check``."""
    return getattr(import_module(f".{command}", __name__), name or f"{command}_command")


def _help(command: str) -> str:
    """The help of a command of a script, without one."""
    parser = new_parser(command)
    add_common(parser)
    _function(command, "add_options")(parser)
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
