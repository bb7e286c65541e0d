"""What the functions of an environment may return: a state, an observation, a reward and an end; else it raises.

The results of ``reset``, ``step`` and ``anchor`` go through here before an episode takes them.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from ...data.surrogates import half_of_pair


def check_reset(returned: Any) -> tuple[Any, str]:
    """What a reset returned. Raises ValueError and TypeError for another thing."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise TypeError(f"it returned {returned!r}, not (state, observation)")
    return returned[0], _text(returned[1])


def check_step(returned: Any) -> tuple[Any, str, float, str]:
    """What a step returned, with the outcome as a text: ``done``, or its name. Raises ValueError and TypeError."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 4:
        raise TypeError(f"it returned {returned!r}, not (state, observation, reward, done)")
    state, observation, reward, done = returned
    if not math.isfinite(number := float(reward)):
        raise ValueError(f"it returned the reward {number}")
    return state, _text(observation), number, done if isinstance(done, str) else "done" if done else ""


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"it returned the observation {observation!r}, which is no text")
    if (half := half_of_pair(observation)) is not None:
        raise ValueError(f"it returned an observation with half of a surrogate pair at character {half}")
    return observation


def check_anchor(anchor: Any) -> int:
    """The number of an anchor state: 63 bits of a hash that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(_written(anchor).encode(), digest_size=8).digest(), "little") >> 1


def _written(anchor: Any) -> str:
    """An anchor as text, another one for each. Raises TypeError for a thing whose text may change from run to run."""
    if isinstance(anchor, str):
        return ascii(str(anchor))
    if isinstance(anchor, int):
        return str(int(anchor))
    if isinstance(anchor, tuple):
        return f"({''.join(_written(part) + ',' for part in anchor)})"
    raise TypeError(f"it returned {anchor!r}, which is no text, whole number or tuple of such")
