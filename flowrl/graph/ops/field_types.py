"""What a field is: a dtype and named dims, written ``rewards: f32[]`` or ``values: f32[*response]``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import near

DTYPES = ("i32", "i64", "f32", "f64", "bf16", "bool", "any")
_FIELD = re.compile(r"^(?P<name>[A-Za-z_]\w*)\s*(:\s*(?P<type>.+))?$")
_TYPE = re.compile(r"^(?P<dtype>\w+)\s*(\[(?P<dims>[^\]]*)\])?$")
_DIM = re.compile(r"^\*?[A-Za-z_]\w*$|^\d+$")


class TypeTextError(ValueError):
    """A field type that cannot be read. ``fix`` says how to write it, where that can be guessed."""

    def __init__(self, what: str, fix: str | None = None) -> None:
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True)
class FieldType:
    """A dtype and dims beyond the row; ``*`` marks the ragged one: ``FieldType("f32", ("*response",))``."""

    dtype: str
    dims: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "any" if self.dtype == "any" else f"{self.dtype}[{', '.join(self.dims)}]"

    @staticmethod
    def parse(text: str) -> FieldType:
        """Read ``f32[*response]``. Raises TypeTextError with what is wrong in the text."""
        match = _TYPE.match(text.strip())
        if match is None:
            raise TypeTextError(f"'{text}' is no field type", "Write it like f32[*response], i32[] or any.")
        dtype = match["dtype"]
        if dtype not in DTYPES:
            meant = near(dtype, DTYPES) or near(dtype.lower().replace("int", "i").replace("float", "f"), DTYPES)
            raise TypeTextError(
                f"'{dtype}' is no dtype; the dtypes are {', '.join(DTYPES)}", f"Write {meant}." if meant else None
            )
        dims = tuple(d.strip() for d in (match["dims"] or "").split(",") if d.strip())
        for number, dim in enumerate(dims):
            if not _DIM.match(dim):
                raise TypeTextError(f"'{dim}' is no dim", "Write a name, a size, or *name for a ragged dim.")
            if dim.startswith("*") and number > 0:
                raise TypeTextError(f"'{text}' has a ragged dim that is not the first", "Put it first.")
        return FieldType(dtype, dims)

    def accepts(self, other: FieldType) -> bool:
        """Whether a field of type ``other`` can be read as this type."""
        return "any" in (self.dtype, other.dtype) or self == other


Fields = Mapping[str, FieldType | None]


def parse_fields(text: str) -> dict[str, FieldType | None]:
    """Read ``"tokens: i32[*token], rewards"`` into types by name; None (or the standard type) where none is given."""
    return dict(_parsed(text))


@functools.lru_cache(maxsize=4096)  # declarations are read again at every call of an op
def _parsed(text: str) -> tuple[tuple[str, FieldType | None], ...]:
    types: dict[str, FieldType | None] = {}
    for part in _split(text):
        match = _FIELD.match(part)
        if match is None:
            raise TypeTextError(f"'{part}' is no field", "Write it like rewards: f32[].")
        name, type_ = match["name"], match["type"]
        types[name] = FieldType.parse(type_) if type_ else STANDARD.get(name)
    return tuple(types.items())


def _split(text: str) -> list[str]:
    """Split at the commas that are not inside brackets."""
    parts: list[str] = []
    depth = start = 0
    for i, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p.strip() for p in [*parts, text[start:]] if p.strip()]


def _standard(text: str) -> dict[str, FieldType]:
    return {n: FieldType.parse(t) for n, t in (line.split(": ") for line in text.strip().splitlines())}


#: The fields that every part of flowrl gives the same meaning (docs/vocabulary.md).
STANDARD: Mapping[str, FieldType] = _standard("""prompt_ids: i32[*prompt]
response_ids: i32[*response]
tokens: i32[*token]
response_mask: bool[*response]
rollout_logprobs: f32[*response]
sampling_logprobs: f32[*response]
support_ids: i32[*support]
support_sizes: i32[*response]
versions: i32[*response]
temperature: f32[]
finished: bool[]
finish_reason: any
rewards: f32[]
token_rewards: f32[*response]
old_logprobs: f32[*response]
entropies: f32[*response]
ref_logprobs: f32[*response]
values: f32[*response]
advantages: f32[*response]
returns: f32[*response]
preferred: bool[]
turns: i32[]
turn_rewards: f32[*turn]
turn_states: i64[*turn]
turn_ids: i32[*response]
outcome: any
sampled_tokens: i32[]
delivered_tokens: i32[]
retries: i32[]
replaced: i32[]
forks: i32[]
repairs: i32[]
scores: any""")
