"""Where rows lie: in a list, in lines of JSON, in parquet, in a data set of Hugging Face, or in a function."""

from __future__ import annotations

import glob
import json
import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ..errors import At, DataError, near

_LOOK = 32  # rows of a file or list whose keys are its columns
_CACHE = 1 << 30  # bytes of decoded row groups kept


class Row(dict[str, Any]):
    """A row as the data has it; ``index`` is its number there."""

    __slots__ = ("index",)

    def __init__(self, values: Mapping[str, Any], index: int) -> None:
        super().__init__(values)
        self.index = index


class Store(Protocol):
    """Rows by number. ``open`` makes ``size`` and ``read`` ready; ``columns`` and ``look`` are cheap, and come before.

    ``columns`` gives the names, and for each whether it holds lists. ``look`` gives a few rows, none where it would
    have to read more than these.
    """

    title: str
    size: int | None  # None: without end

    def columns(self) -> dict[str, bool]: ...
    def look(self) -> Sequence[Mapping[str, Any]]: ...
    def open(self) -> None: ...
    def read(self, places: Sequence[int]) -> list[Row]: ...
    def at(self, index: int) -> At: ...


class Listed:
    """Rows of a list, or of a function that gives them."""

    title = "the list of rows"

    def __init__(self, data: Any) -> None:
        self._data = data
        self._rows: Sequence[Any] | None = None if callable(data) else data
        self.size: int | None = None if callable(data) else len(data)
        if callable(data):
            self.title = f"{getattr(data, '__name__', 'the function')}()"

    @property
    def rows(self) -> Sequence[Any] | None:
        """The rows, where they are there already."""
        return self._rows

    @property
    def made_by(self) -> Any:
        """The function that gives them, if one does."""
        return self._data if callable(self._data) else None

    def columns(self) -> dict[str, bool]:
        return _keys(self._head())

    def _head(self) -> list[Mapping[str, Any]]:
        if self._rows is None:
            given = self._data()
            if isinstance(given, Sequence):  # no need to ask again
                self._rows, self.size = given, len(given)
            return _check_rows(self.title, list(islice(iter(given), _LOOK)))
        return _check_rows(self.title, list(self._rows[:_LOOK]))

    def look(self) -> Sequence[Mapping[str, Any]]:
        if self._rows is None:
            return self._head()
        apart = max(1, len(self._rows) // _LOOK)
        return _check_rows(self.title, list(self._rows[::apart][:_LOOK]))

    def open(self) -> None:
        if self._rows is None:
            self._rows = list(self._data())
        self.size = len(self._rows)

    def read(self, places: Sequence[int]) -> list[Row]:
        assert self._rows is not None, "open comes first"
        return [Row(_object(self._rows[i], self.at(i)), i) for i in places]

    def at(self, index: int) -> At:
        return At(f"<{self.title}, row {index}>", 0)


class Generated:
    """Rows of a pure function of their number."""

    def __init__(self, fn: Callable[[int], Mapping[str, Any]], size: int | None) -> None:
        self.size = size
        self.title = f"{getattr(fn, '__name__', 'the function')}(index)"
        self.made_by = self._fn = fn

    def columns(self) -> dict[str, bool]:
        return _keys(_check_rows(self.title, [self._fn(0)] if self.size != 0 else []))

    def look(self) -> Sequence[Mapping[str, Any]]:
        rows = range(_LOOK if self.size is None else min(_LOOK, self.size))
        return _check_rows(self.title, [self._fn(i) for i in rows])

    def open(self) -> None:
        pass

    def read(self, places: Sequence[int]) -> list[Row]:
        return [Row(_object(self._fn(i), self.at(i)), i) for i in places]

    def at(self, index: int) -> At:
        return At(f"<{self.title}, index {index}>", 0)


class _Files:
    """Files one after the other; row numbers go through all of them."""

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
        return _keys(self._head())

    def _head(self) -> list[Mapping[str, Any]]:
        rows: list[Mapping[str, Any]] = []
        for path in self.paths():
            with open(path, "rb") as file:
                lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
                rows += [_parsed(line, At(path, number)) for number, line in islice(lines, _LOOK - len(rows))]
        return _check_rows(self.title, rows)

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
                raise _no_text(error, self.at(index)) from error
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


class Hf:
    """A data set of the hub, or a folder that holds one."""

    def __init__(self, name: str, config: str | None, split: str) -> None:
        self.title = f"{name}[{split}]"
        self.size: int | None = None
        self.name = self._name = name
        self._config, self._split = config, split
        self._data: Any = None

    def columns(self) -> dict[str, bool]:
        """From the description beside the data where there is one; a data set without one is loaded."""
        features: Mapping[str, Any] | None = None
        for folder in (Path(self._name, self._split), Path(self._name)):
            if (folder / "state.json").exists():  # written by save_to_disk
                features = json.loads((folder / "dataset_info.json").read_text())["features"]
                return {name: _is_list(feature) for name, feature in (features or {}).items()}
        if self._data is None and not os.path.isdir(self._name):
            features = self._ask(lambda hub: hub.load_dataset_builder(self._name, self._config).info.features)
        if features is None:
            self.open()
            features = getattr(self._data, "features", None)
        return {name: _is_list(feature) for name, feature in (features or {}).items()}

    def look(self) -> Sequence[Mapping[str, Any]]:
        return ()  # the data set would have to be loaded

    def open(self) -> None:
        if self._data is None:
            self._data = self._ask(self._load)
        self.size = len(self._data)

    def _load(self, hub: Any) -> Any:
        folder = Path(self._name)
        if not any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
            return hub.load_dataset(self._name, self._config, split=self._split)
        data = hub.load_from_disk(self._name)
        if not isinstance(data, dict):
            return data
        if self._split not in data:
            meant = near(self._split, data) or next(iter(data))
            what = f"{self._name} has no split '{self._split}'."
            raise DataError(what, have=data, fix=f"Write split='{meant}'.")
        return data[self._split]

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        datasets = _import("datasets")
        try:
            return question(datasets)
        except DataError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            what = f"The data set {self.title} cannot be loaded: {first}."
            raise DataError(what, fix=_neighbour(self._name) or "Look at its name, configuration and split.") from error

    def read(self, places: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for i in places:
            try:
                rows.append(Row(self._data[i], i))
            except UnicodeError as error:
                raise _no_text(error, self.at(i)) from error
        return rows

    def at(self, index: int) -> At:
        return At(f"<{self.title}, row {index}>", 0)


def _keys(rows: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """All keys, in the order in which they appear, and whether they hold lists."""
    names: dict[str, bool] = {}
    for row in rows:
        for name, value in row.items():
            names[str(name)] = names.get(str(name), False) or isinstance(value, (list, tuple))
    return names


def _check_rows(title: str, rows: list[Any]) -> list[Mapping[str, Any]]:
    if not rows:
        raise DataError(f"{title} has no rows.", fix="Give it rows.")
    return [_object(row, At(f"<{title}, row {i}>", 0)) for i, row in enumerate(rows)]


def _object(row: Any, at: At | None) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        what = f"A row is {type(row).__name__}, not an object with columns."
        raise DataError(what, at=at, fix='Write rows as {"prompt": "..."}.')
    return row


def _parsed(line: bytes, at: At | None) -> Mapping[str, Any]:
    try:
        return _object(json.loads(line.decode("utf-8-sig")), at)
    except ValueError as error:  # of JSON or of UTF-8
        raise DataError(f"A line is no JSON: {error}.", at=at, fix="Write one JSON object per line.") from error


def _no_text(error: UnicodeError, at: At) -> DataError:
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


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        what = f"{package} is not installed ({error})."
        raise DataError(what, fix=f"Install flowrl with its extra 'data', or: pip install {package}") from error


def _parquet(path: str) -> Any:
    parquet = _import("pyarrow.parquet")
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


def _is_list(feature: Any) -> bool:
    """Whether a feature of ``datasets``, as an object or as JSON, is a list."""
    kind = feature.get("_type") if isinstance(feature, Mapping) else type(feature).__name__
    return isinstance(feature, list) or kind in ("List", "LargeList", "Sequence")


def _neighbour(path: str) -> str | None:
    """The file or folder that was probably meant, as a fix."""
    folder, name = os.path.split(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    meant = near(name, names)
    return f"Did you mean {os.path.join(folder, meant)}?" if meant else None


def _no_file(path: str) -> DataError:
    fix = _neighbour(path) or f"The working directory is {os.getcwd()}."
    return DataError(f"There is no file {path}.", fix=fix)


__all__ = ["Generated", "Hf", "Jsonl", "Listed", "Parquet", "Row", "Store"]
