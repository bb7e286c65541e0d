"""flowrl: RL algorithms as plain Python programs over typed worker groups, compiled to a dataflow graph.

``import flowrl as fl`` is light: torch, transformers and the rest are imported where a worker opens. The public API is
what ``__all__`` lists here and in ``fl.data``, ``fl.allowed``, ``fl.errors``, ``fl.testing``, ``rl`` and ``rl.gates``;
docs/reference has every entry.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import data, errors, rl, testing
from .batch import Batch, Column
from .by_hand import open_worker as open
from .errors import FlowError
from .flow import Flow
from .graph.ops import allowed
from .graph.ops.check_arguments import takes
from .graph.ops.declare import op
from .graph.ops.update_metrics import Metrics
from .placement.cluster.cluster import Cluster
from .placement.cluster.mesh import Mesh
from .placement.plan.plan import Pipeline, Place, Plan, Pool
from .workers.actor import Actor
from .workers.base import Worker
from .workers.critic import Critic, RewardModel
from .workers.env import Env
from .workers.model_options import Lora, Model
from .workers.reference import Reference
from .workers.reward import FunctionReward

if TYPE_CHECKING:
    from . import environments
    from .cli.arguments.script import load_script
    from .graph.draw import render
    from .opened_run import OpenedRun, open_run
    from .placement.cost.given_costs import GivenCosts

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "Batch",
    "Cluster",
    "Column",
    "Critic",
    "Env",
    "Flow",
    "FlowError",
    "FunctionReward",
    "GivenCosts",
    "Lora",
    "Mesh",
    "Metrics",
    "Model",
    "OpenedRun",
    "Pipeline",
    "Place",
    "Plan",
    "Pool",
    "Reference",
    "RewardModel",
    "Worker",
    "allowed",
    "data",
    "environments",
    "errors",
    "load_script",
    "op",
    "open",
    "open_run",
    "render",
    "rl",
    "takes",
    "testing",
]

#: What few scripts use is imported when it is first asked for.
_LATER = {
    "GivenCosts": "placement.cost.given_costs",
    "OpenedRun": "opened_run",
    "load_script": "cli.arguments.script",
    "open_run": "opened_run",
    "render": "graph.draw",
}

if not TYPE_CHECKING:  # a type checker would take any name to be there

    def __getattr__(name: str) -> Any:
        """Import ``environments`` or an entry of ``_LATER``. Raises AttributeError for any other name."""
        if name == "environments":
            return import_module(".environments", __name__)
        if name not in _LATER:
            raise AttributeError(f"module 'flowrl' has no attribute '{name}'")
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
