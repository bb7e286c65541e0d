"""The words of a command line: options that every command has, and the parameters of a script's programs."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import UsageError, did_you_mean, near, shown
from ...flow import Flow
from ...program import Program
from ..help import COMMANDS, as_is, new_parser
from .arg_option import help_on_arguments, use_said_arguments
from .config_file import FromFile, expand_config


@dataclass(frozen=True)
class Words:
    """Parsed options, and the parameters of each chosen program.

    ``words`` are what was said, with the options of files in the place of these.
    """

    options: argparse.Namespace
    programs: tuple[str, ...]
    parameters: Mapping[str, Mapping[str, Any]]
    words: tuple[str, ...] = ()


def parse(
    flow: Flow,
    command: str,
    words: Sequence[str],
    extra: Callable[[argparse.ArgumentParser], None],
    *,
    begun: Sequence[str] = (),
) -> Words:
    """Read a command's words; ``extra`` adds the options of that command. Raises UsageError with the near miss.

    ``begun``: words that come before these, of the run that they go on with.
    """
    parser = new_parser(command, shown(flow.script))
    expanded, from_files = expand_config(words)
    words = [*begun, *expanded]
    programs = chosen(flow, words)
    between = [name for name in _evaluations(words) if name in flow.programs and name not in programs]
    asked = {name: flow.find_program(name) for name in (*programs, *between)}
    add_common(parser, tuple(dict.fromkeys(preset for program in asked.values() for preset in program.presets)))
    extra(parser)
    known = _reserved() | dict.fromkeys(_options(parser), command)
    shared = Counter(p for name in dict.fromkeys(programs) for p in asked[name].parameters)
    flags: dict[str, tuple[str, str]] = {}
    fixes: dict[str, str] = {}  # of errors, by how these begin
    taken: list[tuple[str, str, str]] = []  # options of commands, the parameters of their names, how these are said
    for name, program in asked.items():
        group = parser.add_argument_group(f"parameters of {name}")
        for parameter in program.parameters.values():
            if not _sayable(parameter):
                said = f"No flag says what '{parameter.name}' may be: give it by a preset, or by flow.run."
                fixes |= {f"'--{p}{end}": said for p in _spellings(parameter.name) for end in "'="}
                continue
            both = _spellings(parameter.name)
            spelled = [f"--{name}.{p}" for p in both]
            plain = [f"--{p}" for p in both] if name in programs else []
            dest = f"{name}.{parameter.name}"
            if others := [s for s in plain if s in known]:
                whose = f"{others[0]} is an option of flowrl {known[others[0]]}"
                said = f"{whose}: the parameter of the program is {spelled[0]}."
                taken += [(other, dest, said) for other in others]
                fixes |= {b: said for s in plain for b in (f"argument {s}:", f"argument {s}/", f"'{s}'", f"'{s}=")}
            plain = [] if others or shared[parameter.name] > 1 else plain
            spelled += plain
            default = "has no default" if parameter.default is parameter.empty else f"({parameter.default})"
            flags[dest] = (name, parameter.name)
            reader = _reader(parameter)
            bare: dict[str, Any] = {"nargs": "?", "const": True} if reader is _bool else {}
            told = plain[:1] if plain and len(asked) == 1 else [spelled[0], *plain[:1]]
            for spellings, text in ((told, as_is(default)), ([s for s in spelled if s not in told], argparse.SUPPRESS)):
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
    if ("--help" in words or "-h" in words) and (about := help_on_arguments(flow)):
        parser.add_argument_group("arguments of workers, for --arg WORKER.NAME=VALUE", about)
    help_ = f"flowrl {command} {shown(flow.script)} --help"
    try:
        if from_files:
            words = _without_others(parser, words, from_files, help_)
        options = read_words(parser, words, help_, [handle.name for handle in flow.handles])
    except UsageError as error:
        error.fix = next((fix for begin, fix in fixes.items() if error.what.startswith(begin)), error.fix)
        raise
    said_now = {word.partition("=")[0] for word in expanded}
    for option, dest, said in taken:
        if option in said_now and not hasattr(options, dest):
            print(said, file=sys.stderr)
    parameters = _presets(asked, options.preset)
    for dest, (name, parameter) in flags.items():
        if hasattr(options, dest):
            parameters[name][parameter] = getattr(options, dest)
    for given in options.model:
        worker, _, name = given.partition("=")
        if not name:
            raise UsageError(f"--model {given}: write --model WORKER=NAME.")
        flow.use_model(worker, name)
    use_said_arguments(flow, options.arg)
    return Words(options, programs, parameters, tuple(expanded))


def _reserved() -> dict[str, str]:
    """The options of all commands of a script, with a command that has each: a word means the same in all of them.

    ``--steps`` of ``flowrl simulate`` is not among them, which gives way to a parameter of that name.
    """
    found: dict[str, str] = {}
    for command in (name for name, about in COMMANDS.items() if about.takes == "SCRIPT"):
        parser = argparse.ArgumentParser(add_help=False)
        import_module(f"..{command}", __package__).add_options(parser)
        found = dict.fromkeys(_options(parser).keys() - {"--steps"}, command) | found
    return found


def _spellings(name: str) -> tuple[str, ...]:
    """``--group-size`` and ``--group_size`` without their dashes; the first one is shown."""
    return tuple(dict.fromkeys((name.replace("_", "-"), name)))


def add_common(parser: argparse.ArgumentParser, presets: Sequence[str] = ()) -> None:
    """Add the options that every command of a script has."""
    program = parser.add_argument_group("program")
    program.add_argument(
        "--program", metavar="NAME,...", help="which programs (default: the one that is named like the flow)"
    )
    named = f": {', '.join(presets)}" if presets else ""
    program.add_argument(
        "--config", metavar="FILE", help="options from a YAML file, at this place: NAME: VALUE; later words win"
    )
    program.add_argument("--preset", metavar="NAME", help=f"values of the program's parameters{as_is(named)}")
    program.add_argument(
        "--model", action="append", default=[], metavar="WORKER=NAME", help="another model: hub name or folder"
    )
    program.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="WORKER.NAME=VALUE",
        help="another argument of a worker (YAML), such as actor.lr=2e-6; again for another one",
    )
    program.add_argument(
        "--plan",
        metavar="FILE",
        type=name_of,
        help="where workers run (YAML), the name of a shipped plan, or auto: searched for this machine",
    )
    program.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="another value in the plan, such as pipeline.staleness=1; again for another one",
    )
    program.add_argument("--seed", type=int, metavar="N", help="seed of the run (0)")


def _without_others(
    parser: argparse.ArgumentParser, words: Sequence[str], from_files: Sequence[FromFile], help_: str
) -> list[str]:
    """Return the words without those of files that are for ``flowrl run`` alone.

    Raises UsageError, with the line of the file, for an option that is not known or whose value does not fit.
    """
    known, of_run = _options(parser), argparse.ArgumentParser(add_help=False)
    import_module("..run", __package__).add_options(of_run)
    kept = list(words)
    for option in from_files:
        name = f"--{option.name}"
        if name not in known and name in _options(of_run):
            for word in option.words:
                kept.remove(word)  # once: who writes it on the command line too is told
            continue
        try:
            found = vars(read_words(parser, option.words, help_))
            if len(option.words) > 1 and not isinstance(found.get(known[name].dest), list):
                raise UsageError(f"{name} takes one value.", fix=f"Write {option.name}: {option.texts[-1]}.")
        except UsageError as error:
            error.at = option.at
            raise
    return kept


def name_of(said: str) -> str:
    """Return the name of a file or a run, unless it is empty: that is a shell variable that is not set."""
    if not said:
        raise argparse.ArgumentTypeError("the name is empty, as of a variable of the shell that is not set")
    return said


def read_known(
    parser: argparse.ArgumentParser, words: Sequence[str], fix: str | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """Read the words that a parser knows; the others come back. Raises UsageError for a value that does not fit."""
    try:
        return parser.parse_known_args(list(_switched(parser, words)))
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}.", fix=fix) from None


def _switched(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Yield the words, with ``--quiet=true`` for a switch as ``--quiet``, and without ``--quiet=false``."""
    known = _options(parser)
    for word in words:
        name, _, value = word.partition("=")
        if name in known and known[name].nargs == 0 and value.lower() in ("true", "false"):
            yield from [name] * (value.lower() == "true")
        else:
            yield word


def _presets(programs: Mapping[str, Program], preset: str | None) -> dict[str, dict[str, Any]]:
    """Return what a preset gives each of the programs that have it. Raises UsageError where none has."""
    if preset is not None and not any(preset in program.presets for program in programs.values()):
        with_some = [program for program in programs.values() if program.presets]
        (with_some or list(programs.values()))[0].preset(preset)
    return {n: p.preset(preset) if preset is not None and preset in p.presets else {} for n, p in programs.items()}


def chosen(flow: Flow, words: Sequence[str]) -> tuple[str, ...]:
    """The names of the programs that the words choose. Raises UsageError."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--program")
    names = read_known(first, words)[0].program
    return tuple(names.split(",")) if names else (flow.default_program(),)


def _evaluations(words: Sequence[str]) -> list[str]:
    """The names of the programs that a run is to evaluate by: their parameters are given by these names alone."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--evaluate", action="append", default=[])
    return list(dict.fromkeys(word.rpartition(":")[0] for word in read_known(first, words)[0].evaluate))


def read_run_words(
    command: str,
    words: Sequence[str],
    add: Callable[[argparse.ArgumentParser], None],
    *,
    runs: Sequence[str] = ("RUN",),
    formats: Sequence[str] = ("text", "json"),
) -> argparse.Namespace:
    """Read the words of a command about runs; ``add`` adds its own options, the folders too. Raises UsageError."""
    if not words:
        what = "the folder of a run" if len(runs) == 1 else "the folders of two runs"
        raise UsageError(f"flowrl {command} needs {what}.", fix=f"Write flowrl {command} {' '.join(runs)}.")
    parser = new_parser(command, " ".join(runs))
    add(parser)
    parser.add_argument("--format", default=formats[0], choices=formats, help=", ".join(formats))
    parser.add_argument("--out", "-o", metavar="FILE", help="write to a file instead of the screen")
    return read_words(parser, words, f"flowrl {command} --help")


def read_words(
    parser: argparse.ArgumentParser, words: Sequence[str], help_: str, workers: Collection[str] = ()
) -> argparse.Namespace:
    """Read the words of a command, all of which its parser knows. Raises UsageError, which may name ``help_``.

    ``workers``: names of those that have arguments (``--arg``).
    """
    options, unknown = read_known(parser, words)
    if not unknown:
        return options
    error = _unknown_option(unknown[0], _options(parser), help_)
    name, equals, value = unknown[0].lstrip("-").partition("=")
    if name.partition(".")[0] in workers:
        value = value if equals else unknown[1] if len(unknown) > 1 else "VALUE"
        error.fix = f"Write --arg {name}={value}."
    raise error


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: a for a in parser._actions for name in a.option_strings}  # pyright: ignore[reportPrivateUsage]


def _unknown_option(option: str, known: Mapping[str, argparse.Action], help_: str) -> UsageError:
    """The error for an option that a command does not have, with what was probably meant. ``known``: those it has."""
    word = option.split("=")[0]
    name = word.lstrip("-")
    dotted = sorted(own for own in known if own.endswith("." + name))
    if dotted:
        fix = f"Several programs have it: write {' or '.join(dotted)}."
    elif f"--no-{name}" in known:
        fix = f"Leave it out: so it is unless you write --no-{name}."
    elif word.startswith("--no-"):
        fix = _negated(name.removeprefix("no-"), known) or f"See {help_}."
    else:
        meant = near(name, names := {own.lstrip("-"): own for own in known})  # dashes are alike in all of them
        fix = f"Did you mean {names[meant]}?" if meant else f"See {help_}."
    return UsageError(f"'{option}' is no option here.", fix=fix)


def refuse_unused(words: Sequence[str], unused: Sequence[str], why: str, fix: str) -> None:
    """Raise UsageError for the first of the words that is an option which does nothing here.

    One of a file is left alone: the file may be for several commands.
    """
    for word in words:
        name, _, value = word.partition("=")
        if name in unused and value.lower() != "false":
            raise UsageError(f"{name} {why}", fix=fix)


def check_format(format: str, formats: Sequence[str]) -> None:
    """Raise UsageError for a format that a command does not have."""
    if format not in formats:
        fix = did_you_mean(format, formats, form="Did you mean {}?")
        raise UsageError(f"--format {format}: the formats are {', '.join(formats)}.", fix=fix)


def _negated(name: str, known: Mapping[str, argparse.Action]) -> str | None:
    """How the opposite of an option is written; None where nothing like it is known.

    Only the name is compared: ``--no-meant`` looks more like ``--format`` than it is.
    """
    names = {option.removeprefix("--no-").lstrip("-"): option for option in known}
    meant = names.get(name) or names.get(near(name, names) or "")
    if meant is None:
        return None
    if meant.startswith("--no-"):
        return f"Did you mean {meant}?"
    if known[meant].nargs == 0:
        return f"Leave {meant} out."
    reader = known[meant].type
    if getattr(reader, "__name__", "").startswith(_bool.__name__):
        return f"Write {meant} false."
    return f"{meant} is no switch: leave it out for its default."


def _sayable(parameter: inspect.Parameter) -> bool:
    """Whether a parameter has a flag. Others, such as losses, are given by presets."""
    if parameter.default is None:
        return parameter.annotation is parameter.empty or _kind(parameter.annotation) is not None
    return parameter.default is parameter.empty or isinstance(parameter.default, (bool, int, float, str))


def _text(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _kind(annotation: Any) -> str | None:
    """The first of the words int, float, bool and str in ``int | None``, ``Optional[float]``; None for others.

    That of ``Literal[1, 2]`` is what all of its values are, or str.
    """
    text = _text(annotation)
    if listed := re.search(r"\bLiteral\[(.*?)\]", text):
        return _kind_of_values(listed[1])
    holds = set(re.findall(r"(\w+)\s*\[", text)) - {"Optional", "Union", "Annotated"}  # tuple[int, ...] is no int
    word = None if holds or "Callable" in text else re.search(r"\b(int|float|bool|str)\b", text)
    return word[0] if word else None


def _kind_of_values(listed: str) -> str:
    """What all of ``1, 2`` are; str where they are not alike, or no values by their text."""
    try:
        kinds = {type(value).__name__ for value in ast.literal_eval(f"[{listed}]") if value is not None}
    except (ValueError, SyntaxError):
        return "str"
    return kinds.pop() if len(kinds) == 1 else "str"


def _reader(parameter: inspect.Parameter) -> Callable[[str], Any]:
    """Return the function that reads the words of a flag: by the annotation, else by the default."""
    annotation = None if parameter.annotation is parameter.empty else parameter.annotation
    usual = "str" if parameter.default in (parameter.empty, None) else type(parameter.default).__name__
    kinds: dict[str, Callable[[str], Any]] = {"int": whole_number, "float": float, "bool": _bool, "str": str}
    reader = kinds.get(usual if annotation is None else _kind(annotation) or "str", str)
    optional = annotation is not None and ("None" in _text(annotation) or "Optional" in _text(annotation))
    return _or_none(reader) if optional else reader


def _or_none(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() == "none" else reader(text)

    read.__name__ = f"{reader.__name__} or none"
    return read


def whole_number(text: str) -> int:
    """Reads 4000 and 4_000."""
    return int(text.replace("_", ""))


whole_number.__name__ = "int"


def _bool(text: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


_bool.__name__ = "true or false"


def put(text: str, out: str | None) -> None:
    """Print a text, or write it to a file and print the file's name. Raises UsageError where it cannot be written."""
    if out:
        save(text, out)
        print(out)
    else:
        print(text, end="" if text.endswith("\n") else "\n")


def save(text: str, out: str) -> None:
    """Write a text to the file of ``--out``. Raises UsageError where it cannot be written."""
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}.", fix="Name a file that can be written.") from None
