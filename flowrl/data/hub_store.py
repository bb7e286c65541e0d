"""Rows of a data set of Hugging Face: on the hub, or in a folder that holds one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import At, DataError, near
from .file_stores import import_package, neighbour, no_text
from .stores import Row


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
        datasets = import_package("datasets")
        try:
            return question(datasets)
        except DataError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            what = f"The data set {self.title} cannot be loaded: {first}."
            raise DataError(what, fix=neighbour(self._name) or "Look at its name, configuration and split.") from error

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


def _is_list(feature: Any) -> bool:
    """Whether a feature of ``datasets``, as an object or as JSON, is a list."""
    kind = feature.get("_type") if isinstance(feature, Mapping) else type(feature).__name__
    return isinstance(feature, list) or kind in ("List", "LargeList", "Sequence")
