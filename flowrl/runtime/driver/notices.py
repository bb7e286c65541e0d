"""What a run tells as it goes on: each notice is an event of its record, and a line for who looks at the run."""

from __future__ import annotations

from ..local.python_warnings import Raised
from ..storage.recorder import Recorder
from .progress import Progress

WARNINGS = 1000  # of Python's that a run tells, each of another place or text


class Notices:
    """``Notices(recorder, progress)``: ``tell("stopped early", "after 12 steps")``, ``warn("--keep-best ...")``."""

    def __init__(self, recorder: Recorder, progress: Progress) -> None:
        self._recorder, self._progress = recorder, progress
        self._raised: dict[str, Raised] = {}  # the warnings of Python's that were told, by place and text
        self._once: set[tuple[str, str]] = set()  # what is told once, and was

    def tell(self, kind: str, text: str, line: str = "") -> None:
        """Tell something, of a kind that the events have; ``line``: in these words to who looks at the run."""
        self._recorder.event(kind, text)
        self._progress.note(line or text)

    def tell_once(self, kind: str, text: str) -> None:
        """Tell something unless it was told before."""
        if (kind, text) not in self._once:
            self._once.add((kind, text))
            self.tell(kind, text)

    def warn(self, text: str) -> None:
        """Warn of something; of what Python warns of once, whichever rank and step it came from."""
        if not isinstance(text, Raised) or self._is_new(text):
            self.tell("warning", text)

    def _is_new(self, raised: Raised) -> bool:
        """Whether no other rank and no other step has told of a warning of Python's, and there were not too many."""
        return len(self._raised) < WARNINGS and self._raised.setdefault(raised.key, raised) is raised
