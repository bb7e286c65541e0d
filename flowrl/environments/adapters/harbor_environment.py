"""Task folders of Harbor: a policy works in a shell, in our sandbox, and the tests of the task give the reward."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import WorkerError
from ...workers.base import Opening
from ..environment import Environment, State
from ..hooks import reward, stop
from ..opened_once import opened_once
from ..verify.commands import Files, Ran, run_command, text_of
from ..verify.sandbox import Limits
from .harbor_tasks import HarborTask, places_of, read_tasks

_HOME = {"HOME": "/root", "TERM": "dumb", "DEBIAN_FRONTEND": "noninteractive"}
#: Folders that can be written to, whatever a task says.
_PLACES = ("/tmp", "/root", "/home", "/app", "/workspace", "/opt", "/srv", "/mnt", "/var", "/tests", "/logs")
_HALF = 3500  # characters of what a command prints that are shown of its beginning, and of its end


def bash(command: str, state: Any) -> str:
    """Run a command in the shell of the task's machine, and read what it prints. Files stay, processes do not.

    Args:
        command: what bash runs
    """
    machine: _Machine = state.machine
    ran = machine.run(command)
    state.scores["commands"] = state.scores.get("commands", 0.0) + 1
    if ran.end != "done":
        state.scores[f"commands_{ran.end}"] = state.scores.get(f"commands_{ran.end}", 0.0) + 1
    told = ran.why or (f"exit status {ran.status}" if ran.status else "")
    shown = _shortened(ran.output)
    between = "\n" if told and shown and not shown.endswith("\n") else ""
    return f"{shown}{between}[{told}]" if told else shown


def _shortened(text: str) -> str:
    """The beginning and the end of a long text."""
    left_out = len(text) - 2 * _HALF
    return f"{text[:_HALF]}\n[{left_out} characters]\n{text[-_HALF:]}" if left_out > 0 else text


class HarborEnvironment(Environment):
    """Play task folders of Harbor that need no container: ``HarborEnvironment("tasks/")``.

    ``folder`` is a task, or holds tasks. A task that an ordinary Linux with Python and without network cannot stand in
    for is refused, with the file and the reason. The prompt is ``instruction.md``. The policy works by a tool ``bash``,
    whose commands run in the sandbox of unit tests, over files that stay with the episode; an answer without a call
    ends it. Then ``tests/test.sh`` runs over the same files, and the reward is what it writes to
    ``/logs/verifier/reward.json`` or ``reward.txt``; of several rewards the one named ``rewarded`` counts, and all are
    in ``scores``. Tests that write none, or run out of time, are a ``grader_failure``, without a reward.

    ``limits`` bound each command. The commands of an episode have as many seconds as ``task.toml`` gives its agent, and
    the tests as many as it gives the verifier.

    >>> shell = fl.environments.HarborEnvironment("tasks", rewarded="correct")
    >>> shell.limits.memory_mb, shell.schemas[0]["function"]["name"]
    (2048, 'bash')
    """

    tools = (bash,)
    turns: int = 50

    def __init__(self, folder: str = "", *, rewarded: str = "reward", limits: Limits | None = None) -> None:
        self.folder, self.rewarded = folder, rewarded
        self.limits = limits or Limits(60, 60.0, 2048, 64, 64, 64)

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The tasks: the instruction of each, and its name."""
        return [{"prompt": task.instruction, "task": task.name} for task in self._tasks.values()]

    def open(self, opening: Opening) -> None:
        super().open(opening)
        _ = self._tasks  # before several threads ask for them

    def setup(self, state: Any) -> None:
        """Lay out the files of the task."""
        task = self._tasks.get(state.row["task"])
        if task is None:
            raise ValueError(f"there is no task '{state.row['task']}' in {self.folder}")
        state.machine, state.rewards = _Machine(task, self.limits), {}

    @stop
    def agent_timeout(self, state: Any) -> bool:
        """Whether the commands have taken the seconds that the task gives its agent."""
        return state.machine.left <= 0

    @reward()
    def tests(self, state: Any) -> float:
        """What the tests of the task say."""
        found = state.machine.graded()
        state.rewards = found
        if len(found) == 1:
            return next(iter(found.values()))
        if self.rewarded not in found:
            raise ValueError(f"the tests give {', '.join(found)} and no '{self.rewarded}'; name one by rewarded=")
        return found[self.rewarded]

    async def _graded(self, state: State) -> tuple[float, dict[str, float]]:
        total, scores = await super()._graded(state)
        return total, {**state.rewards, **scores}  # type: ignore[attr-defined]

    @opened_once
    def _tasks(self) -> dict[str, HarborTask]:
        if not self.folder or not Path(self.folder).is_dir():
            fix = "Name a folder with a task.toml, or one whose folders have that."
            raise WorkerError(f"{type(self).__name__}: there is no folder '{self.folder}'.", fix=fix)
        return {task.name: task for task in read_tasks(self.folder, memory_mb=self.limits.memory_mb)}


class _Machine:
    """The files of an episode, and commands that run over them."""

    def __init__(self, task: HarborTask, limits: Limits) -> None:
        self._task, self._limits = task, limits
        self._places = list(dict.fromkeys([*_PLACES, *places_of(task.workdir, task.files)]))
        self._files: Files = [*_folders(task.workdir), *task.files]
        self.left = task.agent_seconds or math.inf

    def run(self, command: str) -> Ran:
        """Run a command of the policy."""
        ran = self._run(command, self._files, min(self._limits.seconds, self.left), self._task.env)
        self._files, self.left = ran.files, self.left - ran.seconds
        return ran

    def graded(self) -> dict[str, float]:
        """Run the tests, and read the rewards that they give. Raises ValueError where they give none."""
        kept = [each for each in self._files if not each["path"].startswith(("/tests", "/logs"))]
        files = [*kept, *self._task.tests, *_folders("/logs/verifier"), *_folders("/logs/agent")]
        env = {**self._task.env, **self._task.verifier_env}
        ran = self._run("bash /tests/test.sh", files, self._task.verifier_seconds, env)
        if ran.end != "done":
            raise ValueError(f"the tests of '{self._task.name}': {ran.why}")
        for name in ("reward.json", "reward.txt"):
            text = text_of(ran.files, f"/logs/verifier/{name}")
            if text is not None:
                return _rewards(text, name)
        raise ValueError(f"the tests of '{self._task.name}' write no reward; they say {ran.output[-500:]!r}")

    def _run(self, command: str, files: Files, seconds: float, env: Mapping[str, str]) -> Ran:
        seconds = max(seconds, 0.1)
        limits = replace(self._limits, seconds=seconds, cpu_seconds=max(1, math.ceil(seconds)))
        given = {**_HOME, **env}
        return run_command(command, files, cwd=self._task.workdir, env=given, places=self._places, limits=limits)


def _folders(path: str) -> Files:
    """A folder and those above it."""
    parts = [part for part in path.split("/") if part]
    return [{"path": "/" + "/".join(parts[: n + 1]), "mode": 0o755} for n in range(len(parts))]


def _rewards(text: str, name: str) -> dict[str, float]:
    """Rewards by name, as Harbor reads them. Raises ValueError for a file that has none."""
    try:
        found = json.loads(text) if name.endswith(".json") else float(text)
    except ValueError:
        raise ValueError(f"{name} is no reward: {text[:200]!r}") from None
    rewards = found if isinstance(found, dict) else {"reward": found}
    for key, value in rewards.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} is no reward: {key} is {value!r}")
    if not rewards:
        raise ValueError(f"{name} has no reward")
    return {key: float(value) for key, value in rewards.items()}
