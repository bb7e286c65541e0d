"""``flowrl eval``: play an environment's tasks with a model, save what came of it, and compare two evaluations."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..data.template_arguments import wrong_arguments
from ..errors import UsageError
from ..placement.backends import REFERENCE, listed
from .arguments.arg_option import read_argument
from .arguments.options import name_of, read_words, whole_number
from .help import new_parser

if TYPE_CHECKING:
    from ..data import Source
    from ..workers.env import Env


def eval_command(words: Sequence[str]) -> int:
    """Evaluate, or compare two evaluations. Returns the exit status."""
    options = read_options(words)
    from ..environments.evaluate import Record, SoFar, compare, evaluate, summary_of

    if options.compare:
        print(json.dumps(compare(*options.compare), indent=1))
        return 0
    from ..by_hand import open_worker
    from ..environments import Environment, load_environment
    from ..workers.actor import Actor
    from .arguments.policy_engine import find_engine

    spec = find_engine(options.plan, options.engine)
    arguments = dict(read_argument(word) for word in options.arg)
    env = load_environment(options.environment, **arguments)
    kwargs = options.chat_template_kwargs
    if kwargs is not None and not isinstance(env, Environment):
        what = f"{type(env).__name__} is no Environment, and --chat-template-kwargs is for the chats of one."
        raise UsageError(what, fix="Leave it out.")
    if kwargs is not None and isinstance(env, Environment):
        env.chat_template_kwargs = {**(env.chat_template_kwargs or {}), **kwargs}
    source = _tasks_of(env, options)
    played = {name: getattr(options, name) for name in ("n", "rows", "seed", "greedy", "turns", "tokens", "seconds")}
    played |= {"temperature": options.temperature, "retries": options.retries}
    begun, so_far = perf_counter(), SoFar(options.out)

    def note(records: Sequence[Record]) -> None:
        so_far.add(records)
        told = f"{so_far.tasks} of {options.rows} tasks, reward {so_far.reward:.4g}"
        print(f"{told}, {perf_counter() - begun:.0f} s: {so_far.path}", file=sys.stderr, flush=True)

    actor = Actor(options.policy, lr=None, max_tokens=options.max_tokens)
    where = {"device": spec.device, "backend": spec.backend, "options": spec.options}
    with closing(open_worker(actor, name="policy", **where)) as policy:
        records = evaluate(open_worker(env), policy, source, **played, note=note)
    about = {"environment": options.environment, "arguments": arguments, "policy": options.policy, **played}
    about |= {"max_tokens": options.max_tokens, "engine": spec.backend, "right_at": options.right_at}
    about |= {"chat_template_kwargs": kwargs} if kwargs is not None else {}
    summary = summary_of(records, about, right_at=options.right_at)
    so_far.finish(summary)
    print(json.dumps(summary, indent=1))
    return 0


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    parser = new_parser("eval", "ENV")
    parser.add_argument("environment", nargs="?", help="an installed name, package.module:Class or file.py:Class")
    parser.add_argument("--policy", metavar="MODEL", help="a hub name or a folder, such as RUN/model/actor")
    engines = f"what samples: {listed('generate', built=True)} (that of the plan, or {REFERENCE})"
    parser.add_argument("--engine", metavar="NAME", help=engines)
    parser.add_argument(
        "--plan", metavar="FILE", type=name_of, help="a plan, whose place to generate has the engine and its options"
    )
    parser.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", help="of the environment's __init__ (YAML)"
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=_template_arguments,
        metavar="JSON",
        help="arguments of the chat template, before those of the environment",
    )
    parser.add_argument("--data", metavar="FILE", help="tasks as JSON lines, in the place of the environment's own")
    parser.add_argument("--rows", type=whole_number, default=64, metavar="N", help="tasks at most (64)")
    parser.add_argument("--n", type=whole_number, default=1, metavar="N", help="episodes of each task (1)")
    parser.add_argument(
        "--right-at", type=float, default=1.0, metavar="R", help="the reward from which on an episode is right (1)"
    )
    parser.add_argument("--batch", type=whole_number, default=64, metavar="N", help="tasks that are live at once (64)")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest tokens")
    parser.add_argument("--temperature", type=float, metavar="T", help="what logits are divided by (1)")
    parser.add_argument("--max-tokens", type=whole_number, default=256, metavar="N", help="tokens of a turn (256)")
    parser.add_argument("--turns", type=whole_number, metavar="N", help="turns of an episode at most")
    parser.add_argument("--tokens", type=whole_number, metavar="N", help="sampled tokens of an episode at most")
    parser.add_argument("--seconds", type=float, metavar="S", help="seconds of an episode at most")
    parser.add_argument("--retries", type=int, default=0, metavar="N", help="how often what fails is played anew (0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (0)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where results.jsonl and summary.json go")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FOLDER", help="two evaluations of the same tasks")
    options = read_words(parser, words, "flowrl eval --help")
    missing = [word for word in ("environment", "policy", "out") if getattr(options, word) is None]
    if missing and not options.compare:
        said = {"environment": "an environment", "policy": "--policy MODEL", "out": "--out FOLDER"}[missing[0]]
        fix = "Write flowrl eval ENV --policy MODEL --out FOLDER."
        raise UsageError(f"flowrl eval needs {said}.", fix=fix)
    if not math.isfinite(options.right_at):
        raise UsageError(
            f"--right-at {options.right_at}: no reward is right or wrong by it.", fix="Write --right-at 1."
        )
    return options


def _tasks_of(env: Env, options: argparse.Namespace) -> Source:
    """The tasks that are played: those of ``--data``, else the environment's own. Raises UsageError without any."""
    from ..data import jsonl
    from ..environments import Environment

    how: dict[str, Any] = {"batch": min(options.rows, options.batch), "shuffle": False, "repeat": False}
    if options.data is not None:
        of_env = isinstance(env, Environment)
        return env.source_of(jsonl, options.data, **how) if of_env else jsonl(options.data, **how)
    if isinstance(env, Environment):
        return env.source(**how)
    raise UsageError(f"{type(env).__name__} has no tasks of its own.", fix="Give --data FILE.jsonl.")


def _template_arguments(word: str) -> dict[str, Any]:
    """The arguments of a chat template. Raises UsageError."""
    found: Any = word
    with suppress(ValueError):
        found = json.loads(word)
    if wrong := wrong_arguments(found):
        fix = "Write --chat-template-kwargs '{\"enable_thinking\": false}'."
        raise UsageError(f"--chat-template-kwargs: {wrong[0]}", fix=fix)
    return found
