"""Where a column comes from: the marks that it carries, and which columns must not be combined.

A mark is a kind and a value. Columns keep theirs while rows are taken, put together, renamed, written down and sent; a
column that is computed has none of what it was computed from. The trace gives marks to fields before there is a row,
with the same kinds, and asks the same questions (docs/design/0010-columns-know-where-they-come-from.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

from .errors import FieldError, ModelError, ProgramError
from .hub import cached_file

#: ``("tokenizer", digest)`` of token ids; ``("sampler", "actor")`` and ``("temperature", "0.6")`` of what was sampled;
#: ``("scale", "row")`` of log-probabilities at the temperature of each row, ``("scale", "1")`` of those at one for all;
#: ``("cut", "top_p=0.9")`` of those of a distribution that was cut; ``("by", "actor.generate")`` of who computed them,
#: ``("dtype", "bf16")`` of what they were computed in; ``("cache", "kept")`` of the versions of tokens whose rows kept
#: keys and values of the version before through a publish; ``("system", text)`` of messages before which a system
#: message of the policy was put, which their data do not have. A value that begins with ``?`` is not known yet.
Mark = tuple[str, str]
Marks = frozenset[Mark]
UNMARKED: Marks = frozenset()
#: What says of which kind log-probabilities are.
KIND = ("scale", "temperature", "cut", "by", "dtype")
#: Fields of token ids that reading data adds.
IDS = ("prompt_ids", "response_ids", "tokens")
OWN = "log p"  # among what is compared: what the call itself computes


def marks(**said: str | Iterable[str]) -> Marks:
    """``marks(sampler="actor", scale=("row", "1"))``; an empty text marks nothing."""
    pairs = ((kind, [v] if isinstance(v, str) else v) for kind, v in said.items())
    return frozenset((kind, value) for kind, values in pairs for value in values if value)


def values(of: Marks, kind: str) -> frozenset[str]:
    """The values of one kind."""
    return frozenset(value for k, value in of if k == kind)


def spelled(value: Any) -> str:
    """A number as a mark has it: to six digits, ``?...`` for one that the trace does not know."""
    if isinstance(value, (int, float)):
        return f"{float(value):.6g}"
    return f"?{getattr(getattr(value, 'ref', None), 'key', id(value))}"


# -- tokenizers -----------------------------------------------------------------------------------------------------


_KNOWN: dict[tuple[int, int], tuple[Any, str]] = {}


def vocabulary(tokenizer: Any) -> str:
    """A digest of which id stands for which token; empty where the tokenizer does not say."""
    table = getattr(tokenizer, "get_vocab", None)
    if table is None:
        return ""
    key = (id(tokenizer), len(tokenizer) if hasattr(tokenizer, "__len__") else 0)
    if key not in _KNOWN:  # with the tokenizer itself, so that the id stays its own
        if len(_KNOWN) >= 64:
            _KNOWN.clear()
        _KNOWN[key] = (tokenizer, _digest(table()))
    return _KNOWN[key][1]


def saved_vocabulary(name: str) -> str:
    """The digest of a tokenizer from its ``tokenizer.json`` alone, in a folder or in the local cache of the hub.

    Empty where there is none, or where the cache does not say which of its snapshots is the current one.
    """
    try:
        folder = Path(name).expanduser()
        path = folder / "tokenizer.json" if folder.is_dir() else cached_file(name, "tokenizer.json", current=True)
        return "" if path is None else _read_vocabulary(path, path.stat().st_mtime_ns)
    except (OSError, RuntimeError, ValueError):  # such as a name that is no path
        return ""


@lru_cache(maxsize=32)
def _read_vocabulary(path: Path, changed: int) -> str:
    """Return the digest of a file, read once as long as it is not ``changed``."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        table = record["model"]["vocab"]
        numbers = dict(table) if isinstance(table, dict) else {entry[0]: i for i, entry in enumerate(table)}
        return _digest({**numbers, **{token["content"]: token["id"] for token in record.get("added_tokens", ())}})
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""


def _digest(table: Mapping[str, int]) -> str:
    total = hashlib.sha256()
    for token, number in sorted(table.items(), key=lambda item: (item[1], item[0])):
        total.update(f"{number} {token}\n".encode("utf-8", "surrogatepass"))
    return total.hexdigest()[:16]


def other_ids(reader: str, field: str, maker: str = "", own: str = "", instead: str = "") -> ModelError:
    """The error of ids that another tokenizer made; ``maker`` and ``own`` say which two, where that is known.

    ``instead`` is the call that reads the text of the rows, where the reader has one: ``judge.score_text(batch)``.
    """
    between = f": {maker} made them, and this one has {own}" if maker and own else ""
    same = "take a model of the same tokenizer, or give it that of the rows with tokenizer=."
    return ModelError(
        f"{reader} reads '{field}', whose ids another tokenizer made{between}.",
        fix=f"Write {instead}, which reads the text of the rows in its own tokens. Or {same}"
        if instead
        else f"{same.capitalize()} Between tokenizers only text can be handed on.",
    )


def text_call(worker: Any, op: str, title: str) -> str:
    """The call that reads the text of rows in the place of one that reads their ids; empty where there is none.

    ``worker`` is one, or the class of one, and ``title`` that of the call of ``op``: ``judge.score``.
    """
    other = getattr(worker, "reads_text", {}).get(op, "")
    return other and f"{title.removesuffix(op)}{other}(batch)"


# -- log-probabilities ----------------------------------------------------------------------------------------------


def logprob_kind(of: Marks) -> Marks:
    """The marks that say of what kind log-probabilities are; none of other columns."""
    return frozenset((kind, value) for kind, value in of if kind in KIND) if values(of, "scale") else UNMARKED


def kind_said(of: Marks) -> str:
    """The kind of log-probabilities in words; empty for other columns.

    >>> kind_said(marks(scale="row", temperature="0.6", cut="top_p=0.9", by="actor.generate", dtype="f32"))
    'by actor.generate, at temperature 0.6, cut by top_p=0.9, computed in f32'
    """
    if not values(of, "scale"):
        return ""
    by, dtype = (" and ".join(sorted(values(of, kind))) for kind in ("by", "dtype"))
    return ", ".join(filter(None, [by and f"by {by}", _said(of), dtype and f"computed in {dtype}"]))


def unlike(reader: str, columns: Mapping[str, Marks]) -> FieldError | None:
    """The error of log-probabilities that are compared with each other, and are not of one kind.

    Who computed them, and in which dtype, may differ: that is what importance weights and a KL are for.
    """
    scaled = {name: m for name, m in columns.items() if values(m, "scale")}
    for one, other in combinations(scaled, 2):
        if _differ(scaled[one], scaled[other]):
            a, b = (f"{'its own' if n == OWN else repr(n)} {_said(scaled[n])}" for n in (one, other))
            return FieldError(
                f"{reader} compares log-probabilities of different kinds: {a}, {b}.",
                fix=_alike(scaled[one], scaled[other]),
            )
    return None


def _alike(a: Marks, b: Marks) -> str:
    """How to get log-probabilities of one kind in place of these."""
    if values(a, "cut") == values(b, "cut"):
        if values(a, "scale") == values(b, "scale") == {"row"}:
            return "Sample both at one temperature."
        return "Leave out temperature=: every row is read at the temperature that it was sampled at."
    cuts = values(a, "cut") | values(b, "cut")
    if any("repetition_penalty" in cut or cut == "greedy" for cut in cuts):
        return "Read rollout_logprobs: of the whole vocabulary, as those of the trainer are."
    return (
        "Read rollout_logprobs: of the whole vocabulary, as those of the trainer are. Or take both sides of the tokens "
        'that could be drawn: generate(support=True), sampling_logprobs (a loss: anchor="sampling"), and support=True '
        "in logprobs and update."
    )


def _numbers(of: Marks) -> frozenset[str]:
    """The temperatures of log-probabilities."""
    scale = values(of, "scale")
    return (scale - {"row"}) | (values(of, "temperature") if "row" in scale else frozenset())


def _differ(a: Marks, b: Marks) -> bool:
    """Whether two are known to be of different kinds."""
    cuts = values(a, "cut"), values(b, "cut")
    if cuts[0] != cuts[1] and "?" not in cuts[0] | cuts[1]:
        return True
    x, y = _numbers(a), _numbers(b)
    return x != y and bool(x and y) and not any(n.startswith("?") for n in x | y)


def _said(of: Marks) -> str:
    numbers, cut = _numbers(of), ", ".join(sorted(values(of, "cut")))
    known = " and ".join(sorted(numbers)) if not any(n.startswith("?") for n in numbers) else ""
    said = f"at temperature {known}" if known else "at the temperature of each row"
    return said + (f", cut by {cut}" if cut else "")


# -- rows -----------------------------------------------------------------------------------------------------------


def foreign_rows(title: str, loss: Any, others: list[str], trained: str) -> ProgramError:
    """The error of an update on rows that other workers sampled, with a loss of the policy that sampled them."""
    return ProgramError(
        f"{title}: loss {getattr(loss, 'name', loss)} is one of the policy that sampled the rows, and these were "
        f"sampled by {' and '.join(others)}.",
        fix=f"Sample them with {trained}, or write foreign=True if they are meant. Losses that ask not who sampled, "
        "such as rl.sft(), need no word.",
    )


def other_temperature(title: str, loss: Any, own: Marks, rows: Marks) -> ProgramError | None:
    """The error of an update of the policy at another temperature than that of its rows."""
    here, there = _numbers(own), values(rows, "temperature")
    if not here or not there or here == there or any(n.startswith("?") for n in here | there):
        return None
    if values(own, "scale") == {"row"}:
        return None
    return ProgramError(
        f"{title}: loss {getattr(loss, 'name', loss)} is trained at temperature {' and '.join(sorted(here))}, and the "
        f"rows were sampled at {' and '.join(sorted(there))}.",
        fix="Leave out temperature=, or write foreign=True if it is meant.",
    )
