"""What can go wrong, as a user meets it: what, at which line of whose file, and how to mend it.

FlowError
├── ProgramError     the driver does what a program cannot (an op outside a program, an unknown option)
│   ├── FieldError   a field is missing, of the wrong type, or written twice
│   └── RowsError    two batches with different rows were put together
├── CheckError       a program with findings: it holds all of them
├── PlanError        a plan that does not fit
├── WorkerError      a worker that is wrongly declared or never used
├── ModelError       a model, tokenizer or configuration that cannot be loaded as asked
├── DataError        a data set that cannot be read as asked
├── RewardError      user code of a reward failed or ran out of time; names the row
├── RunError         an op failed while running; names the op and the driver's line
│   ├── NotFinite    a model gave numbers that are not finite; names the weights or fields that are not
│   ├── WrongAnswer  an engine or a rank gave rows that cannot be right; names the row
│   ├── EngineLost   the process behind an engine is gone: its rank is of no more use
│   ├── Stalled      nothing went on any more; tells the chain of waits, and who is to blame
│   ├── ClusterLost  Ray itself died, and all processes of the run with it
│   └── RankLost     a process died, or has not answered in time; names its rank and its pool
├── DiskError        a file of a run could not be written: a full disk, a quota, a broken disk
├── ResumeError      a run that cannot be continued as asked
└── UsageError       wrong words on the command line
"""

from __future__ import annotations

import builtins
import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

__all__ = [
    "At",
    "FlowError",
    "ProgramError",
    "FieldError",
    "RowsError",
    "PlanError",
    "WorkerError",
    "ModelError",
    "DataError",
    "RewardError",
    "RunError",
    "RankLost",
    "ClusterLost",
    "Stalled",
    "DiskError",
    "ResumeError",
    "UsageError",
    "CheckError",
]


@dataclass(frozen=True)
class At:
    """A line of somebody's file: ``At("algorithms/ppo.py", 31, "metrics = critic.update(batch)")``.

    >>> str(fl.errors.At("<notebook>", 31, "metrics = critic.update(batch)"))
    '<notebook>:31   metrics = critic.update(batch)'
    """

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        name = shown(self.file)
        place = f"{name}:{self.line}" if self.line else name
        return f"{place}   {self.text}" if self.text else place


def _cell(path: str) -> str | None:
    """What IPython calls the cell whose text was compiled under this name; None where it is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named: Callable[[str], tuple[str, str] | None] | None = getattr(
        getattr(shell, "compile", None), "format_code_name", None
    )
    said = named(path) if named is not None else None
    return None if said is None else " ".join(said).replace("\n", " ").strip()


def shown(path: str) -> str:
    """The path as a user would type it: relative to the working directory where it lies below it.

    That of a cell of a notebook is its number there: ``Cell In[3]``.
    """
    if (cell := _cell(path)) is not None:
        return cell
    if path.startswith("<"):  # of no file
        return path
    try:
        short = os.path.relpath(path)
    except ValueError:  # another drive
        return path
    return path if short.startswith("..") else short


class FlowError(Exception):
    """Base of all errors meant for users. Prints as ``Name: what`` and lines ``at``, ``have``, ``fix``.

    >>> try:
    ...     fl.Pipeline(staleness=-1)
    ... except fl.FlowError as error:
    ...     print(error)
    pipeline: staleness is a whole number from 0 up, not -1.
      fix  Write staleness: 0.
    """

    def __init__(
        self,
        what: str,
        *,
        at: At | None = None,
        have: Iterable[str] | str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.at = at
        self.have = None if have is None else have if isinstance(have, str) else ", ".join(sorted(have))
        self.fix = fix

    def __str__(self) -> str:
        rows = [self.what]
        if self.at is not None:
            rows.append(f"  at   {self.at}")
        if self.have is not None:
            rows.append(f"  have {self.have or 'nothing'}")
        if self.fix is not None:
            rows.append(f"  fix  {self.fix}")
        return "\n".join(rows)

    def report(self) -> str:
        """Return the whole message as it is printed, with the class name in front."""
        return f"{type(self).__name__}: {self}"

    def to_json(self) -> dict[str, object]:
        """Return the same as a record: ``{"error", "what", "file", "line", "text", "have", "fix"}``."""
        at = self.at
        return {
            "error": type(self).__name__,
            "what": self.what,
            "file": at.file if at else None,
            "line": at.line if at else None,
            "text": at.text if at else None,
            "have": self.have,
            "fix": self.fix,
        }


class ProgramError(FlowError):
    """The driver does what a program cannot."""


class FieldError(ProgramError):
    """A field is missing, of the wrong type, or written twice."""


class RowsError(ProgramError):
    """Two batches with different rows were put together."""


class PlanError(FlowError):
    """A plan that does not fit."""


class WorkerError(FlowError):
    """A worker that is wrongly declared or never used."""


class ModelError(FlowError):
    """A model, tokenizer or configuration that cannot be loaded as asked."""


class DataError(FlowError):
    """A data set that cannot be read as asked."""


class RewardError(FlowError):
    """User code of a reward or environment failed or ran out of time."""


class RunError(FlowError):
    """An op failed while running. ``__cause__`` is what the op raised."""


class NotFinite(RunError):
    """A model gave numbers that are not finite. ``names``: the weights or fields on this rank that are not."""

    def __init__(self, what: str, *, names: Iterable[str] = (), fix: str | None = None) -> None:
        super().__init__(what, fix=fix)
        self.names = tuple(names)


class WrongAnswer(RunError):
    """Rows that cannot be right: too few, one twice, of another version, or with numbers that are not finite."""


class EngineLost(RunError):
    """The process that an engine has begun is gone, or has ended itself. On ranks, that of the engine is started again,
    and its rows go on from the tokens that it had told. ``rank``: the one of the engine, where another one says it."""

    rank: int | None = None


class RankLost(RunError):
    """A process of a run died, or has not answered in time. ``ranks`` are those that are of no more use.

    ``answers``: what the other ranks of the call have said, by rank. ``inconsistent``: more was lost than can be made
    again while the program waits, such as a worker in the midst of an update. ``alive``: the processes are there again,
    and only what they held is lost.
    """

    def __init__(
        self,
        what: str,
        *,
        ranks: Iterable[int] = (),
        answers: Mapping[int, Any] | None = None,
        inconsistent: bool = False,
        alive: bool = False,
        at: At | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what, at=at, fix=fix)
        self.ranks, self.answers, self.inconsistent, self.alive = tuple(ranks), dict(answers or {}), inconsistent, alive


class ClusterLost(RunError):
    """What the processes of a run depend on died: the run can only be resumed."""


class Stalled(RunError):
    """Nothing went on in a run any more for as long as its plan allows (``pipeline: {hang: 1800}``)."""


class DiskError(FlowError):
    """A file of a run could not be written. ``number`` is the system's (``errno``), ``reason`` its words for it."""

    def __init__(self, path: Any, number: int, reason: str, *, bytes: int | None = None, more: str = "") -> None:
        what = f"{shown(str(path))} could not be written: {reason}" + (f" ({more})." if more else ".")
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "Make room" if full else "Have the disk take files again"
        super().__init__(what, fix=f"{fix}, then go on with --resume.")
        self.path, self.number, self.reason, self.bytes, self.more = str(path), number, reason, bytes, more

    def __reduce__(self) -> tuple[Any, ...]:  # it comes from ranks
        make = partial(DiskError, bytes=self.bytes, more=self.more)
        return make, (self.path, self.number, self.reason), self.__dict__


class ResumeError(FlowError):
    """A run that cannot be continued as asked."""


class UsageError(FlowError):
    """Wrong words on the command line."""


class CheckError(FlowError):
    """A program with findings. ``errors`` holds every one of them."""

    def __init__(self, errors: Sequence[FlowError]) -> None:
        self.errors = tuple(errors)
        count = len(self.errors)
        super().__init__(f"{count} {'error' if count == 1 else 'errors'} found before anything was loaded.")

    def __str__(self) -> str:
        return f"{self.what}\n\n{self.report()}"

    def report(self) -> str:
        return "\n\n".join(error.report() for error in self.errors)


LONGEST = 2000  # characters of what user code says that a message has


def cut(text: str, most: int = LONGEST) -> str:
    """A text of user code as a message has it: whole, or its beginning and how long it is.

    >>> cut("abcdef", 4)
    'abcd... (6 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


_FEW = 20  # names that are listed where none is near


def near(word: str, words: Iterable[str]) -> str | None:
    """The word of ``words`` that ``word`` was probably meant to be, or None."""
    matches = get_close_matches(word, list(words), n=1, cutoff=0.6)
    return matches[0] if matches else None


def names_instead(error: BaseException) -> tuple[str | None, list[str] | None]:
    """The fix for Python's own error about a name that is not there, and the names that are, where they are few.

    Of a module that lists its names in ``__all__`` these count alone, not what it imports.
    """
    if not isinstance(error, (AttributeError, NameError)) or not error.name:
        return None, None
    if isinstance(error, NameError):
        frame = [frame for frame, _ in walk_tb(error.__traceback__)][-1]
        names = [*frame.f_locals, *frame.f_globals, *vars(builtins)]
    else:
        names = list(getattr(error.obj, "__all__", dir(error.obj)))
    meant = did_you_mean(error.name, names)
    return meant, names if meant is None and len(names) <= _FEW else None


def near_file(path: Path, pattern: str, names: Iterable[str] = ()) -> str | None:
    """What a path that is not there was probably meant to be: a file beside it, or one of ``names``; else None.

    Files are compared without their endings, which all of them share.
    """
    beside = {p.stem: str(path.parent / p.name) for p in path.parent.glob(pattern)} if path.parent.is_dir() else {}
    known = {**{name: name for name in names}, **beside}
    found = get_close_matches(path.stem, known, n=1, cutoff=0.75)
    return known[found[0]] if found else None


def did_you_mean(
    word: str, words: Iterable[str], otherwise: str | None = None, *, form: str = "Did you mean '{}'?"
) -> str | None:
    """The fix for a name that is not there: what it was probably meant to be, in ``form``; else ``otherwise``.

    >>> did_you_mean("rewrads", ["rewards", "tokens"])
    "Did you mean 'rewards'?"
    """
    meant = near(word, words)
    return form.format(meant) if meant else otherwise
