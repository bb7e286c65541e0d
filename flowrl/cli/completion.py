"""``flowrl completion``: what completes the words of the commands in a shell, made from their help."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..shipped import names
from .arguments.options import read_words
from .help import COMMANDS, new_parser

#: Commands whose first word may be the name of a shipped algorithm.
NAMED = ("new", *(name for name, about in COMMANDS.items() if about.takes == "SCRIPT"))


@dataclass(frozen=True)
class Words:
    """What may follow a command: ``Words(("grpo", "ppo"), {"--runtime": ("eager", "local", "ray"), "--out": ()})``.

    ``first`` are its first words, beside files; ``options`` have their values, where they are few.
    """

    first: Sequence[str] = ()
    options: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


def completion_command(words: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Print what a shell reads; ``run`` runs a command, to ask for its help. Returns the exit status."""
    shell = read_options(words).shell
    print(SHELLS[shell]({name: _words(name, run) for name in COMMANDS}), end="")
    return 0


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    parser = new_parser("completion", "SHELL")
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that is to complete")
    return read_words(parser, words, "flowrl completion --help")


def _words(command: str, run: Callable[[Sequence[str]], int]) -> Words:
    """Return what may follow a command, by its help."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        run([command, "--help"])
    options: dict[str, Sequence[str]] = {}
    for line in re.findall(r"^  (-.*?)(?:  |$)", said.getvalue(), re.M):
        choices = re.search(r"\{(.*?)\}", line)
        for option in re.findall(r"(?<![\w-])--[\w-]+", line):
            options[option] = choices[1].split(",") if choices else ()
    return Words(names() if command in NAMED else tuple(SHELLS) if command == "completion" else (), options)


def _bash(commands: Mapping[str, Words]) -> str:
    values = [(f'"{c} {o}"', v) for c, words in commands.items() for o, v in words.options.items() if v]
    return f"""\
# In ~/.bashrc: eval "$(flowrl completion bash)"
_flowrl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" words=""
    if [ "$COMP_CWORD" = 1 ]; then
        words="{" ".join(commands)}"
    else
        case "$command $before" in
{_cases(values)}
        *)
            if [[ "$word" == -* ]]; then
                case "$command" in
{_cases([(c, tuple(words.options)) for c, words in commands.items()])}
                esac
            elif [ "$COMP_CWORD" = 2 ]; then
                case "$command" in
{_cases([(c, words.first) for c, words in commands.items() if words.first])}
                esac
            fi;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _flowrl flowrl
"""


def _cases(pairs: Sequence[tuple[str, Sequence[str]]]) -> str:
    return "\n".join(f'        {name}) words="{" ".join(words)}";;' for name, words in pairs)


def _zsh(commands: Mapping[str, Words]) -> str:
    """Return what bash reads: zsh reads it, too, once it is told to."""
    _, _, function = _bash(commands).partition("\n")
    first = ['# In ~/.zshrc: eval "$(flowrl completion zsh)"']
    first += [f"autoload -U +X {name} && {name}" for name in ("compinit", "bashcompinit")]
    return "\n".join([*first, function])


def _fish(commands: Mapping[str, Words]) -> str:
    lines = ["# In ~/.config/fish/config.fish: flowrl completion fish | source"]
    for name, words in commands.items():
        about = COMMANDS[name].does.replace("'", "")
        lines.append(f"complete -c flowrl -n __fish_use_subcommand -a {name} -d '{about}'")
        after = f"-n '__fish_seen_subcommand_from {name}'"
        if words.first:
            lines.append(f"complete -c flowrl {after} -a '{' '.join(words.first)}'")
        for option, values in words.options.items():
            lines.append(
                f"complete -c flowrl {after} -l {option[2:]}" + (f" -xa '{' '.join(values)}'" if values else "")
            )
    return "\n".join(lines) + "\n"


#: By name: what makes the text that a shell reads.
SHELLS: Mapping[str, Callable[[Mapping[str, Words]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
