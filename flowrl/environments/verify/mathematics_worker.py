"""A process that compares mathematical answers for :mod:`.mathematics`: a line of JSON comes in, a line goes out.

It does not keep to any time: its own timer, or whoever asks, ends it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any


def main() -> None:
    """Answer questions until there are no more."""
    answers = os.dup(1)
    os.dup2(2, 1)  # nothing that a library prints is an answer
    memory = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from math_verify import parse, verify

    untimed: dict[str, Any] = {"parsing_timeout": None}
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    os.write(answers, b'{"ready": true}\n')
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])  # its signal ends this process
        try:
            expected = parse(asked["answer"], **untimed)
            found = parse(asked["response"], **untimed)
            right = bool(found) and bool(expected) and verify(expected, found, timeout_seconds=None)
            said = {"expected": bool(expected), "found": bool(found), "right": bool(right)}
        except MemoryError:
            said = {"memory": True}
        except (RecursionError, Exception) as error:
            said = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(answers, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main()
