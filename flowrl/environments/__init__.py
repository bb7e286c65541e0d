"""Environments of messages and tools: ``fl.environments.Environment``, what marks its functions, and how one is found.

docs/environments.md shows one in twenty lines.
"""

from __future__ import annotations

from . import verify
from .adapters.aviary_environment import AviaryEnvironment
from .adapters.gymnasium_environment import GymnasiumEnvironment
from .adapters.harbor_environment import HarborEnvironment
from .adapters.nemo_gym_environment import NeMoGymEnvironment
from .adapters.openenv_environment import OpenEnvEnvironment
from .adapters.reasoning_gym_environment import ReasoningGymEnvironment
from .adapters.taskset_environment import TasksetEnvironment
from .adapters.textarena_environment import TextArenaEnvironment
from .adapters.verifiers_environment import VerifiersEnvironment
from .environment import Environment, State
from .gateway.agent_environment import AgentEnvironment
from .gateway.agents import Task
from .hooks import group_reward, metric, reward, stop
from .loading import find_environment, load_environment

__all__ = [
    "AgentEnvironment",
    "AviaryEnvironment",
    "Environment",
    "GymnasiumEnvironment",
    "HarborEnvironment",
    "NeMoGymEnvironment",
    "OpenEnvEnvironment",
    "ReasoningGymEnvironment",
    "State",
    "Task",
    "TasksetEnvironment",
    "TextArenaEnvironment",
    "VerifiersEnvironment",
    "find_environment",
    "group_reward",
    "load_environment",
    "metric",
    "reward",
    "stop",
    "verify",
]
