"""``flowrl doctor``: tell what a run waits for and who is to blame, or what this machine can run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.driver.monitoring.wait_story import wait_story
from .arguments.options import put, read_words
from .help import new_parser

if TYPE_CHECKING:
    from .machine.self_test import Trial


def doctor_command(words: Sequence[str]) -> int:
    """Print what a run waits for, or what the machine has. Returns the exit status: 1 where something is wrong."""
    options = read_options(words)
    if options.run is None:
        return _look_at_machine(options)
    story = wait_story(options.run)
    put(json.dumps(story.to_json(), indent=1) if options.format == "json" else story.text(), options.out)
    return 1 if story.blame else 0


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    parser = new_parser("doctor", "[RUN]")
    parser.add_argument("run", nargs="?", type=Path, help="the folder of a run; without one, the machine is looked at")
    parser.add_argument(
        "--test",
        action="store_true",
        help="without RUN: train a tiny model in each runtime and with each backend, in minutes",
    )
    parser.add_argument("--format", default="text", choices=("text", "json"), help="text, json")
    parser.add_argument("--out", "-o", metavar="FILE", help="write to a file instead of the screen")
    return read_words(parser, words, "flowrl doctor --help")


def _look_at_machine(options: argparse.Namespace) -> int:
    """Print what the machine has, and with ``--test`` what became of each runtime."""
    from .machine.machine_report import this_machine
    from .machine.self_test import TRIED, try_runtime

    machine = this_machine(Path.cwd())
    runtimes = [name for name in TRIED if name == "local" or machine.can(name)] if options.test else []
    as_json = options.format == "json"
    if not as_json and not options.out:
        print(machine.text(), flush=True)  # the tests take a while
    tested = [try_runtime(name) for name in runtimes]
    fine = machine.is_fine and all(test.passed for test in tested)
    verdict = "fine: " if fine else "not fine: "
    verdict += _verdict(machine.is_fine, tested, [name for name in TRIED if name not in runtimes] if tested else [])
    lines = [*(["", "self test", *(f"  {test.line()}" for test in tested)] if tested else []), "", verdict]
    if as_json:
        record = {**machine.to_json(), "tested": [asdict(test) for test in tested], "fine": fine}
        put(json.dumps(record, indent=1), options.out)
    elif options.out:
        put("\n".join([machine.text(), *lines]), options.out)
    else:
        print("\n".join(lines))
    return 0 if fine else 1


def _verdict(complete: bool, tested: Sequence[Trial], left_out: Sequence[str]) -> str:
    if not complete:
        return "what every run needs is not complete."
    failed = [test.runtime for test in tested if not test.passed]
    if failed:
        return f"no training with {' or '.join(failed)}."
    if not tested:
        return "what every run needs is there; flowrl doctor --test tries it."
    trains = f"this machine trains with {_listed([test.runtime for test in tested])}"
    few = "was not tried, as it is not" if len(left_out) == 1 else "were not tried, as they are not"
    return trains + (f"; {_listed(left_out)} {few} installed." if left_out else ".")


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
