"""What one field of all rows is, as a column; :class:`Column` is all that programs need of it."""

from __future__ import annotations

from .column import Column, concat, read_marks, row_index
from .shared_values import of_each
from .tensors import raw_bytes, segment_sums

__all__ = ["Column", "concat", "of_each", "raw_bytes", "read_marks", "row_index", "segment_sums"]
