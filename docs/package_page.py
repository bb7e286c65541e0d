"""What the page of the package on an index shows: README with links that work there, and the project's addresses.

``FLOWRL_URL=https://host/owner/flowrl python -m build`` says where the source is published. Links and pictures of
README are relative, so that they work in the source tree; in the package they lead to that address. Without it they
stay as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PackagePage(MetadataHookInterface):
    """Fills in ``readme`` and ``urls`` as a package is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        text, url = (
            Path(self.root, "README.md").read_text(encoding="utf-8"),
            os.environ.get("FLOWRL_URL", "").rstrip("/"),
        )
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, url) if url else text}
        metadata["urls"] = addresses(url) if url else {}


def addresses(url: str) -> dict[str, str]:
    """Where the source is, by what is looked for."""
    pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    return {
        "Source": url,
        "Issues": f"{url}/issues",
        **{name: f"{url}/blob/main/{path}" for name, path in pages.items()},
    }


def absolute(text: str, url: str) -> str:
    """README with the links to files of the source tree, and its pictures, at the address."""
    text = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({url}/blob/main/\1)", text)
    return re.sub(r'(src|srcset)="(?!https?:)([^"]+)"', rf'\1="{url}/raw/main/\2"', text)
