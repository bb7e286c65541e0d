"""The command line: ``flowrl run | check | graph SCRIPT``. A script's own parameters become flags."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckError, DataError, FlowError, ModelError, ProgramError, UsageError, WorkerError, near, shown
from .flow import Flow
from .graph.check import Report
from .graph.draw import FORMATS, render
from .graph.site import own_frames, raised_at
from .graph.terms import Lint

if TYPE_CHECKING:
    from .runtime.run import Outcome

COMMANDS = ("run", "check", "graph")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0 fine, 1 findings or a failed run, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(words)
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
        print(
            "stopped" + (" at once; --resume goes on from the last checkpoint" if words[0] == "run" else ""),
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _wants_json(words: Sequence[str]) -> bool:
    return "--format=json" in words or ("--format", "json") in itertools.pairwise(words)


def _command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_HELP)
        return 0 if words else 2
    if words[0] == "--version":
        from . import __version__

        print(f"flowrl {__version__}")
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        meant = near(command, COMMANDS)
        raise UsageError(
            f"'{command}' is no command; the commands are {', '.join(COMMANDS)}.",
            fix=f"Did you mean flowrl {meant}?" if meant else None,
        )
    if not rest or rest[0].startswith("-"):
        if rest and rest[0] in ("-h", "--help"):
            print(_HELP)
            return 0
        raise UsageError(f"flowrl {command} needs a script.", fix=f"Write flowrl {command} SCRIPT.")
    flow = load_script(rest[0])
    return {"run": _run, "check": _check, "graph": _graph}[command](flow, rest[1:])


_HELP = """\
flowrl run   SCRIPT [options]   check a script's program, then run it
flowrl check SCRIPT [options]   find its mistakes; nothing is loaded
flowrl graph SCRIPT [options]   show its dataflow graph
flowrl COMMAND SCRIPT --help    all options, with the program's own parameters

python SCRIPT is flowrl run SCRIPT."""


def load_script(path: str) -> Flow:
    """The one flow of a script, which is loaded with its folder first on ``sys.path`` and not as ``__main__``."""
    script = Path(path)
    if not script.is_file():
        beside = [str(p) for p in script.parent.glob("*.py")] if script.parent.is_dir() else []
        meant = near(str(script), beside)
        if script.is_dir():
            inside = [str(p) for p in script.glob("*.py")]
            raise UsageError(f"{path} is a folder, not a script.", have=inside or None)
        raise UsageError(f"there is no script {path}.", fix=f"Did you mean {meant}?" if meant else None)
    folder = str(script.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _module(script.resolve())
    try:
        sys.modules[module.__name__] = module
        spec = module.__spec__
        assert spec is not None and spec.loader is not None, "a file has a loader"
        spec.loader.exec_module(module)
    except FlowError as error:
        error.at = error.at or raised_at(error)
        raise
    except (ImportError, SyntaxError) as error:
        raise UsageError(f"{shown(path)} cannot be loaded: {type(error).__name__}: {error}.") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}".rstrip(".")
        meant = near(error.name, dir(error.obj)) if isinstance(error, AttributeError) and error.name else None
        told = ProgramError(
            f"{shown(path)} failed while it was loaded: {said}.",
            at=raised_at(error),
            fix=f"Did you mean '{meant}'?" if meant else None,
        )
        raise told from (error if len(own_frames(error)) > 1 else None)
    names = vars(module)
    flows = [v for v in names.values() if isinstance(v, Flow)]
    if len(flows) != 1:
        raise UsageError(
            f"{shown(path)} has {len(flows)} flows; a script has one.",
            fix='Write flow = fl.Flow("name") once, at module level.',
        )
    flow = flows[0]
    if not flow.programs:
        raise UsageError(f"{shown(path)} has no program.", fix="Write a function under @flow.program.")
    return flow


def _module(script: Path) -> Any:
    """An empty module for a script, named like it unless something else has that name."""
    other = sys.modules.get(script.stem)
    taken = other is not None and getattr(other, "__file__", None) != str(script)
    name = f"{script.stem}_script" if taken or script.stem in sys.stdlib_module_names else script.stem
    spec = importlib.util.spec_from_file_location(name, script)
    if spec is None:
        raise UsageError(f"{shown(str(script))} is no Python file.", fix="A script's name ends in .py.")
    return importlib.util.module_from_spec(spec)


@dataclass(frozen=True)
class _Words:
    """Parsed options, and the parameters of each chosen program."""

    options: argparse.Namespace
    programs: tuple[str, ...]
    parameters: Mapping[str, Mapping[str, Any]]


def _parse(flow: Flow, command: str, words: Sequence[str], extra: Callable[[argparse.ArgumentParser], None]) -> _Words:
    parser = argparse.ArgumentParser(
        prog=f"flowrl {command} {shown(flow.script)}", allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("--program", help="which program, several with commas; default: the one named like the flow")
    parser.add_argument(
        "--model", action="append", default=[], metavar="WORKER=NAME", help="another model: hub name or folder"
    )
    parser.add_argument("--plan", metavar="FILE", help="where workers run (YAML)")
    parser.add_argument("--seed", type=int, help="seed of the run (0)")
    extra(parser)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--program")
    try:
        chosen = first.parse_known_args(list(words))[0].program
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}.") from None
    programs = tuple(chosen.split(",")) if chosen else (flow.default_program(),)
    found = {name: flow.find_program(name) for name in programs}
    known = {a for action in parser._actions for a in action.option_strings}  # pyright: ignore[reportPrivateUsage]
    shared = Counter(p for program in found.values() for p in program.parameters)
    flags: dict[str, tuple[str, str]] = {}
    for name, program in found.items():
        group = parser.add_argument_group(f"parameters of {name}")
        for parameter in program.parameters.values():
            both = dict.fromkeys((parameter.name.replace("_", "-"), parameter.name))
            spelled = [f"--{name}.{p}" for p in both] if len(found) > 1 else []
            spelled += [f"--{p}" for p in both] if shared[parameter.name] == 1 else []
            if any(s in known for s in spelled):
                raise UsageError(
                    f"program '{name}' has a parameter '{parameter.name}', which is an option of flowrl.", at=program.at
                )
            default = "has no default" if parameter.default is parameter.empty else f"({parameter.default})"
            dest = f"{name}.{parameter.name}"
            flags[dest] = (name, parameter.name)
            reader = _reader(parameter)
            bare: dict[str, Any] = {"nargs": "?", "const": True} if reader is _bool else {}
            told = [s for s in spelled if parameter.name.replace("_", "-") in s]
            for spellings, text in ((told, default), ([s for s in spelled if s not in told], argparse.SUPPRESS)):
                if spellings:
                    group.add_argument(
                        *spellings,
                        dest=dest,
                        type=reader,
                        default=argparse.SUPPRESS,
                        metavar=reader.__name__.upper(),
                        help=text,
                        **bare,
                    )
    known = {a for action in parser._actions for a in action.option_strings}  # pyright: ignore[reportPrivateUsage]
    try:
        options, unknown = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}.") from None
    if unknown:
        raise _unknown_option(unknown[0], known, f"flowrl {command} {shown(flow.script)} --help")
    parameters: dict[str, dict[str, Any]] = {name: {} for name in programs}
    for dest, (name, parameter) in flags.items():
        if hasattr(options, dest):
            parameters[name][parameter] = getattr(options, dest)
    for said in options.model:
        worker, sep, name = said.partition("=")
        if not sep or not name:
            raise UsageError(f"--model {said}: write --model WORKER=NAME.")
        flow.use_model(worker, name)
    return _Words(options, programs, parameters)


def _unknown_option(said: str, known: Iterable[str], help_: str) -> UsageError:
    word = said.split("=")[0]
    dotted = sorted(option for option in known if option.endswith("." + word.lstrip("-")))
    if dotted:
        fix = f"Several programs have it: write {' or '.join(dotted)}."
    else:
        meant = near(word, known)
        fix = f"Did you mean {meant}?" if meant else f"See {help_}."
    return UsageError(f"'{said}' is no option here.", fix=fix)


def _reader(parameter: inspect.Parameter) -> Callable[[str], Any]:
    """What makes a value of the words of a flag: by the annotation, else by the default."""
    said = parameter.annotation
    name = said.__name__ if isinstance(said, type) else str(said)
    if said is parameter.empty:
        name = "str" if parameter.default in (parameter.empty, None) else type(parameter.default).__name__
    kinds: dict[str, Callable[[str], Any]] = {"int": _int, "float": float, "bool": _bool, "str": str}
    parts = [part.strip() for part in name.split("|")]
    reader = kinds.get(parts[0], str)
    return _or_none(reader) if "None" in parts else reader


def _or_none(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() == "none" else reader(text)

    read.__name__ = f"{reader.__name__} or none"
    return read


def _int(text: str) -> int:
    return int(text.replace("_", ""))


_int.__name__ = "int"


def _bool(text: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


_bool.__name__ = "true or false"


def _graph(flow: Flow, words: Sequence[str]) -> int:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--format", default="text", help=", ".join(FORMATS))
        parser.add_argument("--out", "-o", metavar="FILE", help="write to a file instead of the screen")

    said = _parse(flow, "graph", words, extra)
    if said.options.format not in FORMATS:
        meant = near(said.options.format, FORMATS)
        raise UsageError(
            f"--format {said.options.format}: the formats are {', '.join(FORMATS)}.",
            fix=f"Did you mean {meant}?" if meant else None,
        )
    name = said.programs[0]
    if len(said.programs) > 1:
        raise UsageError("flowrl graph draws one program.", fix=f"Write --program {name}.")
    text = render(flow.graph(name, **said.parameters[name]), said.options.format)
    if said.options.out:
        try:
            Path(said.options.out).parent.mkdir(parents=True, exist_ok=True)
            Path(said.options.out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"--out {said.options.out}: {error.strerror}.", fix="Name a file that can be written."
            ) from None
        print(said.options.out)
    else:
        print(text, end="" if text.endswith("\n") else "\n")
    report = flow.check(name, **said.parameters[name])
    for error in report.errors:
        print(error.report(), file=sys.stderr)
    return 1 if report.errors else 0


def _check(flow: Flow, words: Sequence[str]) -> int:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--format", default="text", choices=("text", "json"), help="text or json")

    said = _parse(flow, "check", words, extra)
    if said.options.plan:
        from .backends import names as engines
        from .placement.plan import Plan

        Plan.load(said.options.plan).check_workers([h.name for h in flow.handles], engines())
    reports = [flow.check(name, **said.parameters[name]) for name in dict.fromkeys(said.programs)]
    if not said.options.program:  # the others too
        reports += [_checked(flow, name) for name in flow.programs if name not in said.programs]
    reports = _each_once(reports)
    if said.options.format == "json":
        print(json.dumps([r.to_json() for r in reports], indent=1))
    else:
        print("\n\n".join(r.text() for r in reports))
    return 1 if any(r.errors for r in reports) else 0


def _each_once(reports: Sequence[Report]) -> list[Report]:
    """What is wrong with a worker is said once, with the first program."""
    told: set[str] = set()
    found: list[Report] = []
    for report in reports:
        errors = tuple(e for e in report.errors if not (isinstance(e, WorkerError) and e.report() in told))
        told |= {e.report() for e in errors}
        found.append(Report(report.program, errors, report.lints))
    return found


def _checked(flow: Flow, name: str) -> Report:
    """The report on a program that nobody asked for: one that needs parameters of its own is left out."""
    try:
        return flow.check(name)
    except UsageError as error:
        at = flow.find_program(name).at
        return Report(name, (), (Lint("unchecked", f"{error.what} To check it, add --program {name}.", at),))


def _run(flow: Flow, words: Sequence[str]) -> int:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--runtime",
            default="local",
            choices=("eager", "local"),
            help="eager: one op at a time; local: pools overlap",
        )
        parser.add_argument("--out", metavar="DIR", help="folder of the run (runs/NAME-TIME)")
        parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
        parser.add_argument("--overwrite", action="store_true", help="start anew in a folder that holds a run")
        parser.add_argument(
            "--checkpoint-every", type=_int, default=50, metavar="STEPS", help="steps between checkpoints (50)"
        )
        parser.add_argument("--no-save", action="store_true", help="do not save the trained models at the end")
        parser.add_argument("--quiet", action="store_true", help="no progress display")

    begun = _recorded(words) if "--resume" in words else []
    said = _parse(flow, "run", [*begun, *words], extra)
    options = said.options
    if options.checkpoint_every < 1:
        raise UsageError(f"--checkpoint-every {options.checkpoint_every}: give 1 or more.")
    out = Path(options.out or f"runs/{flow.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    outcome = flow.run(
        *said.programs,
        out=out,
        plan=options.plan,
        runtime=options.runtime,
        seed=options.seed or 0,
        resume=options.resume,
        overwrite=options.overwrite,
        checkpoint_every=options.checkpoint_every,
        save_models=not options.no_save,
        quiet=options.quiet,
        parameters=said.parameters,
        arguments=[*begun, *_lasting(words, begun)],
    )
    if outcome.status == "interrupted":
        print(f"stopped after a checkpoint; go on with: {shown(flow.script)} --out {out} --resume", file=sys.stderr)
        return 130
    _summary(outcome, flow, said)
    return 0


def _lasting(words: Sequence[str], begun: Sequence[str]) -> list[str]:
    """The words that a later ``--resume`` needs again; those that a run began with name its folder already."""
    found, rest = [], iter(words)
    for word in rest:
        if begun and word == "--out":
            next(rest, None)
        elif word not in ("--resume", "--overwrite") and not (begun and word.startswith("--out=")):
            found.append(word)
    return found


def _recorded(words: Sequence[str]) -> list[str]:
    """The words that the run in ``--out`` was started with; words given now come after them and win."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--out")
    out = finder.parse_known_args(list(words))[0].out
    if out is None:
        raise UsageError("--resume needs to know which run.", fix="Name its folder: --out DIR --resume.")
    record = Path(out) / "run.json"
    if not record.exists():
        raise UsageError(
            f"--resume: {out} holds no run.", fix="Name the folder of a run with --out, or leave out --resume."
        )
    return [str(w) for w in json.loads(record.read_text()).get("arguments", [])]


def _summary(outcome: Outcome, flow: Flow, said: _Words) -> None:
    """Where things are, and what changed between two runs of the same program."""
    out, last, digest = outcome.out, outcome.last, outcome.weights_digest
    name = max(said.programs, key=lambda n: len(flow.graph(n, **said.parameters[n]).nodes))
    page = out / "graph.html"
    page.write_text(render(flow.graph(name, **said.parameters[name]), "html"), encoding="utf-8")
    if (out / "reward.png").exists():
        print(f"reward curve: {out / 'reward.png'}")
    print(f"graph: {page}")
    models = f"   models: {out / 'model'}" if (out / "model").is_dir() else ""
    print(f"metrics: {out / 'metrics.jsonl'}{models}   weights {digest[:12] if digest else 'none'}")
    for program in dict.fromkeys(p for p, _ in last):
        runs = [m for p, m in last if p == program]
        skip = ("program", "step", "seconds", "response_length", "tokens_per_second")
        numbers = {k: v for k, v in runs[-1].items() if isinstance(v, (int, float)) and k not in skip}
        for key, value in numbers.items():
            if len(runs) > 1 and isinstance(runs[0].get(key), (int, float)):
                print(f"{key.replace('_', ' ')}: {runs[0][key]:.2f} -> {value:.2f}")


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


if __name__ == "__main__":
    sys.exit(main())

__all__ = ["CheckError", "load_script", "main"]
