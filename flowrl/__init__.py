"""flowrl: RL algorithms as plain Python programs over typed worker groups, compiled to a dataflow graph.

``import flowrl as fl`` is light: torch, transformers and the rest are imported where a worker opens.
"""

from __future__ import annotations

from . import data, rl
from .batch import Batch, Column
from .by_hand import open_worker as open
from .errors import FlowError
from .flow import Flow
from .graph import allowed
from .graph.arguments import takes
from .graph.declare import op
from .graph.metrics import Metrics
from .placement.cluster.cluster import Cluster
from .placement.cluster.mesh import Mesh
from .placement.plan.plan import Pipeline, Place, Plan, Pool
from .workers.actor import Actor
from .workers.base import Worker
from .workers.critic import Critic, RewardModel
from .workers.env import Env
from .workers.records import Lora, Model
from .workers.reference import Reference
from .workers.reward import FunctionReward

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
    "Lora",
    "Mesh",
    "Metrics",
    "Model",
    "Pipeline",
    "Place",
    "Plan",
    "Pool",
    "Reference",
    "RewardModel",
    "Worker",
    "allowed",
    "data",
    "op",
    "open",
    "rl",
    "takes",
]
