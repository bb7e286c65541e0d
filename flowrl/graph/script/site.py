"""Where in the user's script something happened: file, line and source text of the nearest frame outside flowrl."""

from __future__ import annotations

import dis
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from ...errors import At
from ...shipped import FOLDER

_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_STAND_INS = tuple(os.path.join(_HOME, "graph", "stand_ins", name) for name in ("scalars.py", "symbols.py"))
_SHIPPED = str(FOLDER) + os.sep
_PACKAGE = __name__.partition(".")[0] + "."


def _libraries() -> tuple[str, ...]:
    """Return where libraries lie: Python's own folders, and packages that were installed into others on its path.

    Those of ``pip install --target`` and of Debian are no folders of its own. What lies beside them, and what an
    editable install names, is the user's.
    """
    own = [sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others = [os.path.abspath(path) for path in dict.fromkeys(sys.path) if path]
    found = [path for folder in others if folder + os.sep not in own for path in _installed(folder)]
    return tuple(dict.fromkeys(own + found))


def _installed(folder: str) -> Iterator[str]:
    """Yield files and folders of the packages that say, by a record, that they were installed there."""
    try:
        infos = [name for name in os.listdir(folder) if name.endswith(".dist-info")]
    except OSError:  # it is not there, or may not be read
        return
    for info in infos:
        for record in ("RECORD", "top_level.txt"):
            try:
                lines = Path(folder, info, record).read_text(encoding="utf-8").splitlines()
            except OSError:
                continue
            for name in {line.split(",")[0].split("/")[0] for line in lines} - {"", "..", info}:
                yield os.path.join(folder, name) + ("" if name.endswith(".py") else os.sep)


_LIBRARIES = _libraries()


def caller() -> At:
    """The line of the user's code that called into flowrl."""
    frame = user_frame()
    return At("<unknown>", 0) if frame is None else place(frame)


def user_frame() -> FrameType | None:
    """The nearest frame of the stack that is not flowrl's own."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and _ours(frame):
        frame = frame.f_back
    return frame


def own_call() -> bool:
    """Whether the method of a value that asks was called by flowrl itself, and not by the user or a library."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.startswith(_STAND_INS):
        frame = frame.f_back
    return frame is not None and _ours(frame)


def users_line() -> At:
    """The nearest line of the user's own code, also where a library of others was called from there."""
    frame = first = user_frame()
    while frame is not None and not is_users_code(frame.f_code):
        frame = frame.f_back
    frame = frame or first
    return At("<unknown>", 0) if frame is None else place(frame)


def is_users_code(code: CodeType) -> bool:
    """Whether code is the user's own: of no library, and not of flowrl."""
    return not in_a_library(code.co_filename, "<frozen")


def in_a_library(file: str, *others: str) -> bool:
    """Whether a file is flowrl's own or that of a library, or begins with one of ``others``; no shipped driver is.

    Files of Cython's are known by their end: they are named as they were where the library was built.
    """
    return (file.startswith((_HOME, *_LIBRARIES, *others)) and not is_shipped(file)) or file.endswith((".pyx", ".pxd"))


def is_shipped(file: str) -> bool:
    """Whether a file is a shipped driver or lies beside one: a script like a user's own, wherever it is installed."""
    return file.startswith(_SHIPPED)


def instruction() -> tuple[int, int]:
    """The frame outside of flowrl that is nearest, and how far it is: equal for calls of one instruction."""
    frame = user_frame()
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def stores() -> bool:
    """Whether that instruction puts something into a list or a dict: ``seen[x] = y``."""
    frame = user_frame()
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("STORE_S")


def _ours(frame: FrameType) -> bool:
    """Whether a frame is flowrl's own, which the ``__init__`` is that a record gets, though it lies in no file."""
    file = frame.f_code.co_filename
    return (file.startswith(_HOME) and not is_shipped(file)) or (
        file == "<string>" and str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE)
    )


def place(frame: FrameType) -> At:
    """The place of a frame, with the text of its line."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return At(file, line, linecache.getline(file, line).strip())


def cell() -> CodeType | None:
    """The code of the notebook cell, or of the line of an interactive Python, that is running; None in a script.

    Each run of a cell has a code object of its own, so identity tells one run from the next.
    """
    frame = user_frame()
    while frame is not None:
        code = frame.f_code
        if code.co_name.startswith(("<module>", "<cell line")) and is_typed(code.co_filename):
            return code
        frame = frame.f_back
    return None


def is_typed(file: str) -> bool:
    """Whether this is the name of a text that was typed in, and lies in no file."""
    return not file.startswith("<frozen") and not os.path.exists(file)


def raised_at(error: BaseException) -> At | None:
    """The innermost line of the user's own code that an exception passed through; None where it passed none."""
    own = own_frames(error)
    return At(own[-1].filename, own[-1].lineno or 0, own[-1].line or "") if own else None


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines of the user's own code that an exception passed through, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if not in_a_library(f.filename, "<")]


def defined_at(fn: Callable[..., Any]) -> At:
    """The line of a function's ``def``, below its decorators; that of a lambda."""
    code = fn.__code__
    first = line = code.co_firstlineno
    if code.co_name == "<lambda>":
        return At(code.co_filename, first, linecache.getline(code.co_filename, first).strip())
    while line < first + 50 and (text := linecache.getline(code.co_filename, line)):
        if text.lstrip().startswith(("def ", "async def ")):
            return At(code.co_filename, line, text.strip())
        line += 1
    return At(code.co_filename, first, f"def {fn.__name__}")


def call_path(upto: object) -> tuple[tuple[str, int, int], ...]:
    """The chain of user calls from the program's own frame (whose code is ``upto``) down to here.

    One entry per frame: file, line and instruction. Two calls with the same path are the same place in the program.
    """
    return tuple((f.f_code.co_filename, f.f_lineno, f.f_lasti) for f in reversed(own_stack(upto)))


def call_lines(upto: object) -> tuple[tuple[str, int], ...]:
    """The chain of lines from the program's own frame, whose code is ``upto``, down to here: file and line of each.

    Each is there once: a function that calls itself does so more often in a run than in its trace.
    """
    return tuple(dict.fromkeys((f.f_code.co_filename, f.f_lineno) for f in reversed(own_stack(upto))))


def source_path(upto: object) -> tuple[tuple[str, Hashable], ...]:
    """The chain of places in the source from the program's own frame, whose code is ``upto``, down to here.

    Two conditions on one line are two places. The two copies that Python makes of a loop's condition are one, and so
    are the calls of a function by itself, however many are open.
    """
    places = [(f.f_code.co_filename, _operands(f.f_code).get(f.f_lasti)) for f in reversed(own_stack(upto))]
    return tuple(dict.fromkeys(places))


@lru_cache
def _operands(code: CodeType) -> dict[int, Hashable]:
    """By instruction, where in the source its last operand is: copies of one have it in common, and no others do.

    Its own place is no help: that of the jumps of ``a or b or c`` is the whole of it.
    """
    found: dict[int, Hashable] = {}
    before: Hashable = None
    for step in dis.get_instructions(code):
        if step.opname != "EXTENDED_ARG":
            found[step.offset] = before
            has_columns = step.positions is not None and step.positions.col_offset is not None
            before = step.positions if has_columns else step.offset
    last: Hashable = None
    for offset in range(0, len(code.co_code), 2):  # a frame that has called another one may be behind the instruction
        last = found.setdefault(offset, last)
    return found


def own_stack(upto: object) -> list[FrameType]:
    """The frames that are not flowrl's own, from here out to the program's, whose code is ``upto``."""
    frames: list[FrameType] = []
    frame = user_frame()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_HOME) or is_shipped(frame.f_code.co_filename):
            frames.append(frame)
        if frame.f_code is upto:
            break
        frame = frame.f_back
    return frames


def is_users(thing: Any) -> bool:
    """Whether a module, a function or a class is the user's own: of no library, and not of flowrl."""
    module = thing if isinstance(thing, ModuleType) else sys.modules.get(getattr(thing, "__module__", "") or "")
    if module is None:  # of a script that was loaded under no name
        code = getattr(thing, "__code__", None)
        file: str | None = code.co_filename if code is not None else None
    else:
        file = getattr(module, "__file__", None)
    if file is None:
        return module is not None and module.__name__ == "__main__"  # a notebook
    return not in_a_library(os.path.abspath(file))


def asks_to_call() -> bool:
    """Whether the user's code takes an attribute in order to call it: ``batch.where(...)``, not ``batch.rewards``."""
    frame = user_frame()
    if frame is None:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti
    name = dis.opname[code[at]]
    return name == "LOAD_METHOD" or (name == "LOAD_ATTR" and sys.version_info >= (3, 12) and code[at + 1] & 1 == 1)
