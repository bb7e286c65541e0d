"""What columns ask of tensors: dtypes by name, sums over rows of unequal lengths, and their bits."""

from __future__ import annotations

import base64
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import FieldError

if TYPE_CHECKING:
    from torch import Tensor


@cache
def dtypes() -> dict[str, Any]:
    """The dtypes of columns, by the name that signatures give them."""
    import torch

    return {
        "i32": torch.int32,
        "i64": torch.int64,
        "f32": torch.float32,
        "f64": torch.float64,
        "bf16": torch.bfloat16,
        "bool": torch.bool,
    }


@cache
def dtype_names() -> dict[Any, str]:
    """The names of dtypes."""
    return {dtype: name for name, dtype in dtypes().items()}


def as_tensor(data: Any, dtype: str | None) -> Tensor:
    """Numbers as a tensor: whole ones i64, others f32, unless ``dtype`` says. FieldError for what no column holds."""
    import torch

    if dtype is not None and dtype not in dtypes():
        raise FieldError(f"'{dtype}' is no dtype of a column.", have=dtypes())
    wanted = None if dtype is None else dtypes()[dtype]
    if isinstance(data, list) and wanted is None and any(isinstance(x, float) for x in data):
        wanted = torch.float32
    try:
        values = torch.as_tensor(data, dtype=wanted)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise FieldError(f"These values are no numbers: {cause}.") from cause
    if values.dtype not in dtype_names():
        names = ", ".join(dtypes())
        raise FieldError(f"A column cannot hold {values.dtype}.", fix=f"Convert it to one of {names}.")
    if values.dim() == 0:
        raise FieldError("A column has one value per row; this is a single number.")
    return values


def row_ends(lengths: Tensor) -> Tensor:
    """Where rows of these lengths begin, and the end of the last: i64[rows + 1]."""
    ends = lengths.new_zeros(len(lengths) + 1)
    ends[1:] = lengths.cumsum(0)
    return ends


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums over neighbouring rows of these lengths; each is a sum of its own rows only."""
    import torch

    if not len(values):
        return values.new_zeros((len(lengths), *values.shape[1:]))
    return torch.segment_reduce(values, "sum", lengths=lengths.to(values.device), axis=0, unsafe=True, initial=0)


def row_sums(values: Tensor, lengths: Tensor | None) -> Tensor:
    """The sum of each row: over its elements where rows are ragged, and over all dims."""
    sums = values if lengths is None else segment_sums(values, lengths)
    return sums.flatten(1).sum(1) if sums.dim() > 1 else sums


def _bits(values: Tensor) -> Tensor:
    import torch

    return values.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    import torch

    return torch.equal(_bits(a), _bits(b.to(a.device)))


def raw_bytes(values: Tensor) -> bytes:
    """The bytes of a tensor, element after element."""
    return _bits(values).cpu().numpy().tobytes()


def to_array(values: Tensor) -> Any:
    """A tensor as an array that shares its memory, of whole numbers where numpy has no such type."""
    import torch

    values = values.detach().cpu().contiguous()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def from_array(array: Any) -> Any:
    """An array as a tensor that shares its memory; None stays None."""
    import warnings

    import torch

    if array is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of arrays that cannot be written, which nobody does
        return torch.from_numpy(array)


def encoded(values: Tensor) -> str:
    """A tensor as text, for JSON."""
    return base64.b64encode(zlib.compress(raw_bytes(values), 1)).decode()


def decoded(text: str, dtype: str) -> Tensor:
    """The flat tensor that :func:`encoded` wrote."""
    import torch

    raw = bytearray(zlib.decompress(base64.b64decode(text)))
    return torch.frombuffer(raw, dtype=dtypes()[dtype]) if raw else torch.empty(0, dtype=dtypes()[dtype])
