"""Files of models of the hub that are on this machine already: in the local Hugging Face cache, without a network."""

from __future__ import annotations

import os
from pathlib import Path


def cached_file(name: str, file: str, *, current: bool = False) -> Path | None:
    """Return a file of a cached model of the hub, of the snapshot that ``refs/main`` names; None where there is none.

    Without such a snapshot it is that of another one, unless it has to be the ``current`` one. ``name`` may differ in
    the case of its letters.
    """
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    wanted = "models--" + name.replace("/", "--").lower()
    folder = next((f for f in hub.iterdir() if f.name.lower() == wanted), None) if hub.is_dir() else None
    if folder is None:
        return None
    copies = sorted((folder / "snapshots").glob(f"*/{file}"))
    main = folder / "refs" / "main"
    named = main.read_text().strip() if main.is_file() else ""
    return next((p for p in copies if p.parent.name == named), None if current or not copies else copies[-1])
