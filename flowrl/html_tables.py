"""Tables and pictures as a notebook shows them: any text is shown as text, long ones are cut."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

LONGEST = 200  # characters of a cell
ROWS = 10


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], *, title: str = "", note: str = "") -> str:
    """Return the HTML of a table, with a ``title`` above and a ``note`` below.

    >>> from flowrl.html_tables import table
    >>> table(["prompt"], [["<b>1+2=</b>"]])
    '<table><tr><th>prompt</th></tr><tr><td>&lt;b&gt;1+2=&lt;/b&gt;</td></tr></table>'
    """
    above = f"<p><strong>{cell(title)}</strong></p>" if title else ""
    below = f"<p>{cell(note)}</p>" if note else ""
    lines = [f"<tr>{''.join(f'<th>{cell(value)}</th>' for value in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{cell(value)}</td>' for value in row)}</tr>" for row in rows]
    return f"{above}<table>{''.join(lines)}</table>{below}"


def picture(path: Path, alt: str) -> str:
    """Return the HTML of a PNG file; empty where there is none."""
    if not path.is_file():
        return ""
    return f'<img alt="{cell(alt)}" src="data:image/png;base64,{b64encode(path.read_bytes()).decode()}">'


def cell(value: Any) -> str:
    """Return a value as text for HTML: control characters and marks of direction are written out."""
    text = value if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else repr(value)
    text = text[: LONGEST + 1]
    plain = "".join(c if c.isprintable() or c == " " else c.encode("unicode_escape").decode() for c in text)
    return escape(plain[:LONGEST] + ("..." if len(plain) > LONGEST else ""))
