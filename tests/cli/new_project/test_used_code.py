"""What of a module is kept: what is asked for and all that this uses, as it was written."""

from flowrl.cli.new_project.used_code import keep_used, names_asked_of

MODULE = '''"""Sums."""

from __future__ import annotations

import os
import random
from functools import cache, partial

CHARS = "01"  # of a sum
OTHER = len(CHARS)

# Tokens of a sum.
SIZES = {"chars": len(CHARS), "seed": random.random}


@cache
def draw(n: int) -> Row:
    """A sum."""
    return _row(n)


class Row:
    place = os.sep


def _row(n):
    return Row()


def unused():
    return partial(draw, OTHER)
'''


def test_what_is_used_is_kept_as_it_was_written():
    kept = keep_used(MODULE, {"draw"})
    assert "unused" not in kept and "SIZES" not in kept and "# Tokens of a sum." not in kept and "OTHER" not in kept
    assert kept.startswith(
        '"""Sums."""\n\nfrom __future__ import annotations\n\nimport os\nfrom functools import cache\n'
    )
    assert '@cache\ndef draw(n: int) -> Row:\n    """A sum."""\n    return _row(n)\n\n\nclass Row:\n' in kept
    space: dict = {}
    exec(kept, space)
    assert space["draw"](1).place == "/"


def test_comments_and_constants_come_along():
    kept = keep_used(MODULE, {"SIZES"})
    assert '\nimport random\n\nCHARS = "01"  # of a sum\n\n# Tokens of a sum.\nSIZES = {' in kept


def test_everything_is_everything():
    assert keep_used(MODULE, {"draw", "SIZES", "unused"}) == MODULE


def test_names_are_those_that_an_importer_takes():
    assert names_asked_of("from tasks import sums\nsums.draw(sums.CHARS)", "tasks.sums") == {"draw", "CHARS"}
    assert names_asked_of("from tasks.sums import draw as d, SIZES", "tasks.sums") == {"draw", "SIZES"}
    assert names_asked_of("from tasks import sums as s\ns.draw", "tasks.sums") == {"draw"}
    assert names_asked_of("from tasks import other\nother.draw", "tasks.sums") == set()
    assert names_asked_of("from tasks import sums\nvars(sums)", "tasks.sums") is None
