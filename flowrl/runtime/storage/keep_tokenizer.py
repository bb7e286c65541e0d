"""``tokenizer.json``: what makes texts of the token ids in a run's trajectories, for those who look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .disk import replace_file

NAME = "tokenizer.json"


def keep_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write a tokenizer of the ``tokenizers`` library into the folder of a run, once; others cannot be written so.

    Raises DiskError.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str") and not (folder / NAME).exists():
        replace_file(folder / NAME, backend.to_str())
