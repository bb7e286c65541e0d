"""Where prompts come from: lists, JSONL, parquet, Hugging Face data sets, or a function; drawn in a seeded order.

``fl.data.jsonl("prompts.jsonl", batch=16, prompt="question")`` gives 16 rows a step. Nothing is read when a source is
made; checking a program reads the columns only. All constructors take the same options, :class:`Options`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from .mix import Mixture
from .source import Cursor, Options, Source
from .stores import Generated, Hf, Jsonl, Listed, Parquet

Paths = str | Path | Sequence[str | Path]


def rows(
    data: Sequence[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]], **options: Unpack[Options]
) -> Source:
    """Rows that are there, or a function that gives them, called when the program runs.

    ``fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)``
    """
    return Source(Listed(data), options)


def jsonl(paths: Paths, **options: Unpack[Options]) -> Source:
    """A JSON object per line. ``paths`` is a file, a pattern (``data/*.jsonl``) or a list of them.

    The file is not held in memory: where its lines begin is noted once, and lines are read as they are drawn.
    """
    return Source(Jsonl(paths), options)


def parquet(paths: Paths, **options: Unpack[Options]) -> Source:
    """Parquet files, through pyarrow (extra ``data``); row groups are decoded as they are drawn from."""
    return Source(Parquet(paths), options)


def hf(name: str | Path, config: str | None = None, *, split: str = "train", **options: Unpack[Options]) -> Source:
    """A data set by hub name, or a folder (of ``save_to_disk``, or of files), through ``datasets`` (extra ``data``).

    ``fl.data.hf("openai/gsm8k", "main", batch=16, prompt="question")``
    """
    return Source(Hf(str(name), config, split), options)


def generated(fn: Callable[[int], Mapping[str, Any]], *, size: int | None = None, **options: Unpack[Options]) -> Source:
    """Rows made by ``fn(index)``, a pure function of the index; ``size`` of them, or without end, in order.

    ``fl.data.generated(lambda i: {"prompt": f"{i}+{i}="}, batch=16)``
    """
    return Source(Generated(fn, size), options)


def mix(
    parts: Mapping[str, Source | Mixture],
    *,
    batch: int,
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
    column: str = "source",
) -> Mixture:
    """A mixture of sources: each row is drawn from one of them, with a chance in proportion to its weight.

    ``fl.data.mix({"math": math, "code": code}, weights={"math": 3, "code": 1}, batch=16)``; without ``weights`` all
    have the same. Which source gives a row depends on ``seed`` and the number of the draw alone. ``column`` is the name
    of the column that says the source. DataError for sources whose columns differ.
    """
    return Mixture(parts, weights, batch, seed, column)


__all__ = ["Cursor", "Mixture", "Options", "Source", "generated", "hf", "jsonl", "mix", "parquet", "rows"]
