"""Which tokens of a row come from weights that it began with, where keys and values were kept through a publish."""

from __future__ import annotations

from collections.abc import Sequence


def versions_begun_with(versions: Sequence[int], mask: Sequence[bool]) -> list[int | None]:
    """Return of each sampled token the version of the first one of its turn; None for what was observed.

    There keys and values were computed anew; where a later token has another version they are older than its weights.

    >>> versions_begun_with([3, 4, 0, 4, 4], [True, True, False, True, True])
    [3, 3, None, 4, 4]
    """
    found: list[int | None] = []
    begun: int | None = None
    for version, sampled in zip(versions, mask, strict=True):
        begun = (version if begun is None else begun) if sampled else None
        found.append(begun)
    return found


def has_older_cache(versions: Sequence[int], mask: Sequence[bool]) -> bool:
    """Return whether a turn of a row went on under other weights than those that it had begun with.

    >>> has_older_cache([3, 4], [True, True]), has_older_cache([3, 0, 4], [True, False, True])
    (True, False)
    """
    begun = versions_begun_with(versions, mask)
    return any(first is not None and first != version for first, version in zip(begun, versions, strict=True))
