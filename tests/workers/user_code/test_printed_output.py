"""What user code prints is bounded, whichever of its threads print, and it is told once that it was too much."""

from __future__ import annotations

import threading

from flowrl.workers.user_code.printed_output import LIMIT, Printed
from flowrl.workers.user_code.rows_in_progress import Row

WAIT = 60  # seconds, far more than any of this takes


def test_threads_that_print_too_much_together_are_warned_of_once():
    """Each looked at what was left as the last of them had left it: there was a warning for each that was writing."""
    warned, shown = [], []
    printed = Printed(lambda: Row(op="reward.score"), warned.append)

    def show(text: str) -> None:
        if not shown:
            shown.append(text)
            other = threading.Thread(target=printed.write, args=(shown.append, "b" * LIMIT))
            other.start()
            other.join(WAIT)

    printed.write(show, "a" * 10)
    assert [len(text) for text in shown] == [10, LIMIT - 10] and len(warned) == 1
