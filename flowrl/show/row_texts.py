"""One row of the trajectories as the page shows it: its texts, numbers and tokens, cut where they are long."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

TEXT = 20_000  # characters of a field that a row is shown with
PREVIEW = 240  # characters of a prompt or response in a list
TOKENS = 2_000  # tokens of a strip
WIDE_LINE = 1 << 20  # bytes of a line that a list does not read
ROLES = 200  # messages of a conversation

Row = Mapping[str, Any]
Numbers = list[float | None]


class Decodes(Protocol):
    """What makes texts of token ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""
        ...


class TokenTexts:
    """Decodes with a tokenizer that a run has written."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, those that are special, too."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def tokenizer_of(run: Path) -> Decodes | None:
    """The tokenizer of a run's rows, else that of its first trained model; None where none can be read."""
    for path in (run / "tokenizer.json", *sorted(run.glob("model/*/tokenizer.json"))):
        if not path.exists():
            continue
        try:
            return TokenTexts(path)
        except Exception:  # the library raises its own for each kind of damage
            continue
    return None


def preview(row: Row) -> dict[str, str]:
    """The beginnings of a row's prompt and response, and why the response has ended."""
    named = {"prompt_text": "prompt", "response": "response", "finish_reason": "finish_reason"}
    return {shown: _readable(row.get(name))[:PREVIEW] for shown, name in named.items()}


def whole_row(row: Row, texts: Decodes | None) -> dict[str, Any]:
    """Everything of a row but its tokens: each field as a text, cut where it is long, and the conversation."""
    fields = []
    for name, value in row.items():
        if _is_by_token(name, value, row):
            continue
        text = _readable(value)
        fields.append({"name": name, "text": text[:TEXT], "size": len(text), "number": _is_number(value)})
    return {"fields": fields, "conversation": conversation(row, texts), "columns": sorted(by_token(row))}


def conversation(row: Row, texts: Decodes | None) -> list[dict[str, Any]]:
    """A row as messages, each with who says it: those that it has, or its prompt and the turns of its response.

    A turn is a stretch of tokens that the model has sampled, or of others between them, such as the answer of a tool.
    """
    for name in ("messages", "prompt"):
        messages = row.get(name)
        if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
            said = [_message(_readable(m.get("role", "")), _readable(m.get("content"))) for m in messages[:ROLES]]
            whole = name == "messages" and messages[-1].get("role") == "assistant"
            return said + ([] if whole else _response(row, texts))
    prompt = _readable(row.get("prompt"))
    return ([_message("prompt", prompt)] if prompt else []) + _response(row, texts)


def tokens_of(row: Row, texts: Decodes | None, first: int) -> dict[str, Any]:
    """A page of a row's tokens with every number that the row has by token: None for tokens that it has none of."""
    columns, ids = by_token(row), _ids(row)
    window = ids[first : first + TOKENS]
    prompt = len(ids) - _responses(row)
    return {
        "count": len(ids),
        "first": first,
        "prompt": max(0, prompt),
        "ids": window,
        "texts": None if texts is None else [_text_of(texts, id) for id in window],
        "columns": {name: values[first : first + TOKENS] for name, values in columns.items()},
    }


def by_token(row: Row) -> dict[str, Numbers]:
    """The columns of a row that have a number for each token, or for each token of the response."""
    count, responses = len(_ids(row)), _responses(row)
    found: dict[str, Numbers] = {}
    for name, value in row.items():
        if name not in ("tokens", "response_ids", "prompt_ids") and _is_by_token(name, value, row):
            numbers = [float(v) if isinstance(v, (int, float)) else None for v in value]
            found[name] = [None] * (count - len(numbers)) + numbers if len(numbers) == responses else numbers
    # Among the tokens that could be drawn an update computes what the row was sampled from.
    sampled = found.get("sampling_logprobs" if "support_ids" in row else "rollout_logprobs")
    advantage = row.get("advantages")
    if isinstance(advantage, (int, float)) and count:
        found["advantages"] = [None] * (count - responses) + [float(advantage)] * responses
    trainer = next((name for name in ("old_logprobs", "trained_logprobs") if name in found), "")
    for name, other in ((trainer, "gap"), ("ref_logprobs", "gap to the reference")):
        if sampled is not None and name in found:
            found[other] = _both(found[name], sampled, lambda a, b: a - b)
    if "gap" in found and "ratio" not in found:
        found["ratio"] = [None if gap is None else math.exp(min(gap, 50.0)) for gap in found["gap"]]
    return found


def _both(some: Numbers, others: Numbers, of: Callable[[float, float], float]) -> Numbers:
    return [None if a is None or b is None else of(a, b) for a, b in zip(some, others, strict=True)]


def field_of(row: Row, name: str) -> str:
    """A field of a row, all of it."""
    return _readable(row.get(name))


def _message(who: str, text: str) -> dict[str, Any]:
    return {"who": who, "text": text[:TEXT], "size": len(text)}


def _response(row: Row, texts: Decodes | None) -> list[dict[str, Any]]:
    ids, mask = _list(row.get("response_ids")), _list(row.get("response_mask"))
    if texts is None or len(ids) != len(mask) or len(set(map(bool, mask))) < 2:
        response = _readable(row.get("response"))
        return [_message("model", response)] if response else []
    said: list[dict[str, Any]] = []
    begin = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or bool(mask[end]) != bool(mask[begin]):
            said.append(_message("model" if mask[begin] else "environment", texts.decode(_numbers(ids[begin:end]))))
            begin = end
    return said[:ROLES]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _ids(row: Row) -> list[int]:
    for name in ("tokens", "response_ids"):
        if isinstance(row.get(name), list):
            return _numbers(row[name])
    return []


def _numbers(ids: Sequence[Any]) -> list[int]:
    return [id if isinstance(id, int) and 0 <= id < 1 << 31 else 0 for id in ids]


def _responses(row: Row) -> int:
    ids = row.get("response_ids")
    return len(ids) if isinstance(ids, list) else 0


def _is_by_token(name: str, value: Any, row: Row) -> bool:
    if name in ("tokens", "response_ids", "prompt_ids"):
        return isinstance(value, list)
    if not isinstance(value, list) or name == "key" or not value:
        return False
    return len(value) in (len(_ids(row)), _responses(row)) and all(
        v is None or isinstance(v, (int, float)) for v in value
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text_of(texts: Decodes, id: int) -> str:
    return texts.decode([id])[:200]


def _readable(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
