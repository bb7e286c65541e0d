"""Rows in files: in lines of JSON, or in parquet."""

from __future__ import annotations

import glob
import json
import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import At, DataError, near
from .stores import LOOK, Row, check_row, check_rows, keys_of

_CACHE = 1 << 30  # bytes of decoded row groups kept


class _Files:
    """Files one after the other; row numbers go through all of them."""

    skips = False

    def __init__(self, paths: Any) -> None:
        self._said = [paths] if isinstance(paths, (str, Path)) else list(paths)
        self.title = str(self._said[0]) if len(self._said) == 1 else f"{len(self._said)} files"
        self.size: int | None = None
        self._starts: list[int] = []  # row number of the first row of each file

    def paths(self) -> list[str]:
        """All files, patterns filled in. DataError for one that is not there, naming its nearest neighbour."""
        found: list[str] = []
        for path in map(str, self._said):
            matches = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
            if not matches or not os.path.isfile(matches[0]):
                raise _no_file(path)
            found += matches
        if not found:
            raise DataError("No file is given.", fix="Give a path, or a list of paths.")
        return found

    def _place(self, index: int) -> tuple[int, int]:
        """Number of the file, and of the row in it."""
        file = bisect_right(self._starts, index) - 1
        return file, index - self._starts[file]

    def _begin(self, counts: Iterable[int]) -> None:
        total, self._starts = 0, []
        for count in counts:
            self._starts.append(total)
            total += count
        self.size = total


class Jsonl(_Files):
    """A JSON object per line; blank lines are passed over."""

    _offsets: list[array[int]] | None = None

    def columns(self) -> dict[str, bool]:
        return keys_of(self._head())

    def _head(self) -> list[Mapping[str, Any]]:
        rows: list[Mapping[str, Any]] = []
        looked, bad = 0, None
        for path in self.paths():
            with open(path, "rb") as file:
                lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
                for number, line in islice(lines, LOOK - looked):
                    looked += 1
                    try:
                        rows.append(_parsed(line, At(path, number)))
                    except DataError as error:
                        if not self.skips:
                            raise
                        bad = bad or error
        if bad is not None and not rows:
            raise bad
        return check_rows(self.title, rows)

    def look(self) -> Sequence[Mapping[str, Any]]:
        return self._head()

    def open(self) -> None:
        if self._offsets is None:
            self._names = self.paths()
            self._offsets = [_line_offsets(path) for path in self._names]
            self._begin(map(len, self._offsets))

    def read(self, places: Sequence[int]) -> list[Row]:
        assert self._offsets is not None, "open comes first"
        rows: dict[int, Row] = {}
        by_file: dict[int, list[tuple[int, int]]] = {}
        for index in places:
            file, row = self._place(index)
            by_file.setdefault(file, []).append((self._offsets[file][row], index))
        for number, wanted in by_file.items():
            with open(self._names[number], "rb") as file:
                for offset, index in sorted(wanted):
                    file.seek(offset)
                    line = file.readline()
                    try:
                        rows[index] = Row(_parsed(line, None), index)
                    except DataError as error:
                        error.at = self.at(index)
                        raise
        return [rows[index] for index in places]

    def at(self, index: int) -> At:
        """The line; counted only when somebody asks, which is when something is wrong."""
        assert self._offsets is not None, "open comes first"
        number, row = self._place(index)
        offset, line = self._offsets[number][row], 1
        with open(self._names[number], "rb") as file:
            while offset > 0 and (block := file.read(min(offset, 1 << 20))):
                line += block.count(b"\n")
                offset -= len(block)
        return At(self._names[number], line)


class Parquet(_Files):
    """Parquet files; decoded row groups are kept, the last used ones, up to a gigabyte."""

    _files: list[Any] | None = None

    def columns(self) -> dict[str, bool]:
        names: dict[str, bool] = {}
        for path in self.paths():
            names |= {f.name: "list" in str(f.type)[:10] for f in _parquet(path).schema_arrow}
        return names

    def look(self) -> Sequence[Mapping[str, Any]]:
        return ()  # a row group would have to be decoded

    def open(self) -> None:
        if self._files is None:
            self._names = self.paths()
            self._files = [_parquet(path) for path in self._names]
            self._begin(file.metadata.num_rows for file in self._files)
            self._groups = [_group_starts(file.metadata) for file in self._files]
            self._decoded: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def read(self, places: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for index in places:
            file, row = self._place(index)
            group = bisect_right(self._groups[file], row) - 1
            table = self._group(file, group)
            try:
                [values] = table.slice(row - self._groups[file][group], 1).to_pylist()
            except UnicodeError as error:
                raise no_text(error, self.at(index)) from error
            rows.append(Row(values, index))
        return rows

    def _group(self, file: int, group: int) -> Any:
        assert self._files is not None, "open comes first"
        key = (file, group)
        if key not in self._decoded:
            self._decoded[key] = self._files[file].read_row_group(group)
            while len(self._decoded) > 1 and sum(t.nbytes for t in self._decoded.values()) > _CACHE:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(key)
        return self._decoded[key]

    def at(self, index: int) -> At:
        file, row = self._place(index)
        return At(self._names[file], 0, f"row {row}")


def _parsed(line: bytes, at: At | None) -> Mapping[str, Any]:
    fix = "Write one JSON object per line."
    if line.lstrip().startswith(b"["):
        fix += " A file that is one list is read by fl.data.rows(json.load(open(path)), ...)."
    if line.startswith(b"PAR1"):
        raise DataError("The file is parquet, and no lines of JSON.", at=at, fix="Read it with fl.data.parquet.")
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeError as error:
        raise no_text(error, at) from error
    except RecursionError as error:
        what = "A line is JSON with lists or objects within each other, too deep to be read."
        raise DataError(what, at=at, fix="Write the value as a text.") from error
    except ValueError as error:
        raise DataError(f"A line is no JSON: {error}.", at=at, fix=fix) from error
    return check_row(row, at, fix=fix if isinstance(row, list) else None)


def no_text(error: UnicodeError, at: At | None) -> DataError:
    """Return the error of a row that cannot be decoded."""
    return DataError(f"A row holds a text that is no UTF-8: {error}.", at=at, fix="Write the data again as UTF-8.")


def _line_offsets(path: str) -> array[int]:
    """Where the lines that are not blank begin."""
    offsets, place = array("Q"), 0
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                offsets.append(place)
            place += len(line)
    return offsets


def import_package(name: str) -> Any:
    """Return a module that reads data. Raises DataError with the extra that installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        what = f"{package} is not installed ({error})."
        raise DataError(what, fix=f"Install flowrl with its extra 'data', or: pip install {package}") from error


def _parquet(path: str) -> Any:
    parquet = import_package("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path, memory_map=True)
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        what = f"This is no parquet file: {str(error).rstrip('.')}."
        raise DataError(what, at=At(path, 0), fix="Give a file that pyarrow reads.") from error


def _group_starts(metadata: Any) -> list[int]:
    starts, total = [], 0
    for group in range(metadata.num_row_groups):
        starts.append(total)
        total += metadata.row_group(group).num_rows
    return starts


def neighbour(path: str) -> str | None:
    """Return the file or folder that was probably meant, as a fix."""
    folder, name = os.path.split(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    meant = near(name, names)
    return f"Did you mean {os.path.join(folder, meant)}?" if meant else None


def _no_file(path: str) -> DataError:
    fix = neighbour(path) or f"The working directory is {os.getcwd()}."
    return DataError(f"There is no file {path}.", fix=fix)
