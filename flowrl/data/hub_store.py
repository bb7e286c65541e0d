"""Rows of a data set of Hugging Face: on the hub, in a folder that holds one, or one that is loaded already."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import At, DataError, near
from .file_stores import import_package, neighbour, no_text
from .stores import Row

_GIVEN = "The data set"  # one that has no name


class Hf:
    """A data set of the hub, a folder that holds one, one that is loaded, or a function that loads one."""

    skips = False

    def __init__(self, name: Any, config: str | None, split: str) -> None:
        self.given = None if isinstance(name, str) else name
        self.name = name if isinstance(name, str) else getattr(name, "__name__", _GIVEN)
        self.title = f"{self.name}[{split}]" if self.given is None else f"{self.name}{'()' * callable(name)}"
        self.size: int | None = None
        self._config, self._split = config, split
        self._data: Any = None

    @property
    def made_by(self) -> Any:
        """The function that loads it, if one does."""
        return self.given if callable(self.given) else None

    @property
    def folder(self) -> Path | None:
        """Where it lies, if it is in a folder."""
        return Path(self.name) if self.given is None and os.path.isdir(self.name) else None

    def columns(self) -> dict[str, bool]:
        """From the description beside the data where there is one; a data set without one is loaded."""
        if (features := self._described()) is None:
            self.open()
            features = _lists(getattr(self._data, "features", None) or {})
        return features

    def _described(self) -> dict[str, bool] | None:
        """The columns that are known without loading the data; None where they are not."""
        if self.given is not None:
            features = getattr(self.given, "features", None)
            return None if features is None else _lists(features)
        for folder in (Path(self.name, self._split), Path(self.name)):
            if (folder / "state.json").exists():  # written by save_to_disk
                return _lists(json.loads((folder / "dataset_info.json").read_text())["features"] or {})
        if self._data is None and self.folder is None:
            features = self._ask(lambda hub: hub.load_dataset_builder(self.name, self._config).info.features)
            return None if features is None else _lists(features)
        return None

    def look(self) -> Sequence[Mapping[str, Any]]:
        return ()  # the data set would have to be loaded

    def open(self) -> None:
        if self._data is None:
            self._data = self._ask(self._load)
            if not hasattr(self._data, "__len__"):
                raise DataError(
                    f"{self.title} is a stream: {type(self._data).__name__} has no rows by number.",
                    fix="Write fl.data.hf(..., streaming=True).",
                )
        self.size = len(self._data)

    def _load(self, hub: Any, streaming: bool = False) -> Any:
        if self.given is not None:
            return self._split_of(self.given() if callable(self.given) else self.given)
        folder = Path(self.name)
        if not any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
            return hub.load_dataset(self.name, self._config, split=self._split, streaming=streaming)
        return self._split_of(hub.load_from_disk(self.name))

    def _split_of(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if self._split not in data:
            meant = near(self._split, data) or next(iter(data))
            what = f"{self.name} has no split '{self._split}'."
            raise DataError(what, have=data, fix=f"Write split='{meant}'.")
        return data[self._split]

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        datasets = import_package("datasets")
        try:
            return question(datasets)
        except DataError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            what = f"{_GIVEN if self.title == _GIVEN else f'{_GIVEN} {self.title}'} cannot be loaded: {first}."
            fix = self._other_place() if self.given is None else None
            raise DataError(what, fix=fix or "Look at its name, configuration and split.") from error

    def _other_place(self) -> str | None:
        """What was probably meant, as a fix: another constructor for a file, or another name."""
        if not os.path.isfile(self.name):
            return neighbour(self.name)
        kind = "parquet" if self.name.endswith(".parquet") else "jsonl"
        return f"It is a file: write fl.data.{kind}({self.name!r}, ...)."

    def read(self, places: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for i in places:
            try:
                rows.append(Row(self._data[i], i))
            except UnicodeError as error:
                raise no_text(error, self.at(i)) from error
        return rows

    def at(self, index: int) -> At:
        return At(f"<{self.title}, row {index}>", 0)


def _lists(features: Mapping[str, Any]) -> dict[str, bool]:
    """The columns of a data set, and for each whether it holds lists."""
    return {name: _is_list(feature) for name, feature in features.items()}


def _is_list(feature: Any) -> bool:
    """Whether a feature of ``datasets``, as an object or as JSON, is a list."""
    kind = feature.get("_type") if isinstance(feature, Mapping) else type(feature).__name__
    return isinstance(feature, list) or kind in ("List", "LargeList", "Sequence")
