"""Where prompts come from: lists, JSONL, parquet, Hugging Face data sets, or a function; drawn in a seeded order.

``fl.data.jsonl("prompts.jsonl", batch=16, prompt="question")`` gives 16 rows a step. Nothing is read when a source is
made; checking a program reads the columns only. All constructors take the same options, :class:`Options`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from ..errors import DataError
from ..graph.ops.allowed import check_values, flag, text, whole
from .file_stores import Jsonl, Parquet
from .hub_store import Hf
from .mix import Mixture
from .shown_options import shows_options
from .source import Cursor, Options, Source
from .stores import Generated, Listed
from .strata import strata_of
from .streamed import Stream

Paths = str | Path | Sequence[str | Path]
_OF_HUB = {"split": text(), "streaming": flag(), "buffer_size": whole(least=1)}


@shows_options
def rows(
    data: Sequence[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]], **options: Unpack[Options]
) -> Source:
    """Draw from rows that are there, or from a function that gives them, called when the program runs.

    >>> source = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
    >>> source.cursor().draw()
    [{'prompt': '1+2=', 'answer': '3'}]
    >>> list(source.schema())
    ['prompt', 'prompt_ids', 'answer']
    """
    return Source(Listed(data), options)


@shows_options
def jsonl(paths: Paths, **options: Unpack[Options]) -> Source:
    r"""Draw from files of a JSON object per line. ``paths`` is a file, a pattern (``data/*.jsonl``) or a list of them.

    The file is not held in memory: where its lines begin is noted once, and lines are read as they are drawn.

    >>> import json, pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "prompts.jsonl"
    >>> _ = file.write_text(json.dumps({"question": "1+2="}) + "\n")
    >>> fl.data.jsonl(file, batch=1, prompt="question").cursor().draw()
    [{'question': '1+2='}]
    """
    return Source(Jsonl(paths), options)


@shows_options
def parquet(paths: Paths, **options: Unpack[Options]) -> Source:
    """Draw from Parquet files, by pyarrow (extra ``data``); row groups are decoded as they are drawn from.

    >>> import pathlib, pyarrow, pyarrow.parquet, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "prompts.parquet"
    >>> pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+2="]}), file)
    >>> fl.data.parquet(file, batch=1).cursor().draw()
    [{'prompt': '1+2='}]
    """
    return Source(Parquet(paths), options)


@shows_options
def hf(
    name: Any,
    config: str | None = None,
    *,
    split: str = "train",
    streaming: bool = False,
    buffer_size: int = 1000,
    **options: Unpack[Options],
) -> Source:
    """Draw from a data set by hub name or folder (of ``save_to_disk``, or of files), through ``datasets``.

    ``fl.data.hf("openai/gsm8k", "main", batch=16, prompt="question")``; needs the extra ``data``. ``name`` may also be
    a data set that is loaded, or a function that loads one. With ``streaming=True`` rows are fetched as they are
    drawn, and ``buffer_size`` of them at a time are shuffled. Raises DataError for a wrong option.

    >>> import contextlib, datasets, io, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with contextlib.redirect_stderr(io.StringIO()):  # a bar
    ...     datasets.Dataset.from_list([{"question": "1+2="}]).save_to_disk(folder)
    >>> fl.data.hf(folder, batch=1, prompt="question").cursor().draw()
    [{'question': '1+2='}]
    """
    values = {"split": split, "streaming": streaming, "buffer_size": buffer_size}
    check_values("A data set", values, _OF_HUB, DataError)
    given = str(name) if isinstance(name, (str, Path)) else name
    return Source(Stream(given, config, split, buffer_size) if streaming else Hf(given, config, split), options)


@shows_options
def generated(fn: Callable[[int], Mapping[str, Any]], *, size: int | None = None, **options: Unpack[Options]) -> Source:
    """Draw rows that ``fn(index)`` makes, a pure function of the index: ``size`` of them, or without end, in order.

    >>> source = fl.data.generated(lambda i: {"prompt": f"{i}+{i}="}, batch=2)
    >>> source.cursor().draw()
    [{'prompt': '0+0='}, {'prompt': '1+1='}]
    """
    return Source(Generated(fn, size), options)


def mix(
    parts: Mapping[str, Source | Mixture],
    *,
    batch: int,
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
    column: str | None = "source",
    exact: bool = False,
) -> Mixture:
    """Draw each row from one of several sources, with a chance in proportion to its weight.

    ``fl.data.mix({"math": math, "code": code}, weights={"math": 3, "code": 1}, batch=16)``; without ``weights`` all
    have the same. Which source gives a row depends on ``seed`` and the number of the draw alone. With ``exact=True`` it
    is no chance: sources take turns, and every batch has as many rows of each as its weight says; where that is no
    whole number, it is made good in the next batches. ``column`` is the name of the column that says the source; None
    adds none. Raises DataError for sources whose columns differ.

    >>> math = fl.data.rows([{"prompt": "1+2="}], batch=1)
    >>> code = fl.data.rows([{"prompt": "print("}], batch=1)
    >>> mixed = fl.data.mix({"math": math, "code": code}, weights={"math": 3, "code": 1}, batch=4)
    >>> [(name, row["prompt"]) for name, row in mixed.cursor().draw()]
    [('math', '1+2='), ('code', 'print('), ('math', '1+2='), ('math', '1+2=')]
    """
    return Mixture(parts, weights, batch, seed, column, exact)


def stratified(
    source: Source, *, by: str, weights: Mapping[Any, float] | None = None, batch: int | None = None
) -> Mixture:
    """Draw batches that have as many rows of each value of a column as ``weights`` says: its strata.

    An exact :func:`mix` of the source's rows by value. Each value goes on in an order of its own. Without ``weights``
    all values have the same, and the source must be a list of rows; rows with a value that ``weights`` does not name
    are left out. ``batch`` is that of the source unless it is given. Raises DataError for a column that is not there.

    >>> tasks = [{"prompt": f"{a}+{a}=", "level": "hard" if a > 9 else "easy"} for a in range(40)]
    >>> source = fl.data.stratified(fl.data.rows(tasks, batch=8), by="level", weights={"easy": 3, "hard": 1})
    >>> [row["level"] for _, row in source.cursor().draw()]
    ['easy', 'easy', 'hard', 'easy', 'easy', 'easy', 'hard', 'easy']
    """
    parts, shares = strata_of(source, by, weights)
    return Mixture(parts, shares, source.batch if batch is None else batch, source.reading.seed, None, exact=True)


__all__ = ["Cursor", "Mixture", "Options", "Source", "generated", "hf", "jsonl", "mix", "parquet", "rows", "stratified"]
