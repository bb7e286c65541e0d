"""The shipped algorithms as modules: ``from flowrl.algorithms import grpo`` gives its driver, ``grpo.flow`` its flow.

The files lie in ``algorithms/`` of the source tree, and in ``drivers/`` beside this one where flowrl is installed.
"""

from __future__ import annotations

import sys

from .shipped import FOLDER

__path__ = [str(FOLDER)]
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))  # as when a driver is run: it imports tasks and presets from beside it
