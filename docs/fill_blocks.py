"""Fresh blocks between the markers of a page: scripts of this folder write the parts of pages that are tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def fill(text: str, blocks: Mapping[str, Callable[[], str]], script: str) -> str:
    """The text of a page with each block made anew. Raises ValueError for one whose markers are not there once each.

    >>> page = "<!-- sizes: written by docs/make_sizes.py -->\\n\\nold\\n\\n<!-- end of sizes -->"
    >>> print(fill(page, {"sizes": lambda: "new"}, "docs/make_sizes.py"))
    <!-- sizes: written by docs/make_sizes.py -->
    <BLANKLINE>
    new
    <BLANKLINE>
    <!-- end of sizes -->
    """
    for block, make in blocks.items():
        start, end = f"<!-- {block}: written by {script} -->", f"<!-- end of {block} -->"
        before, begin, rest = text.partition(start)
        _, found, after = rest.partition(end)
        if not begin or not found or start in rest or end in after:
            raise ValueError(f"{start} and {end} have to stand on the page once each, in this order.")
        text = f"{before}{start}\n\n{make()}\n\n{end}{after}"
    return text
