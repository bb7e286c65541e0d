"""A taskset of verifiers 0.4, as such packages are written: tasks, stop conditions, rewards and metrics."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import verifiers.v1 as vf


class LettersData(vf.TaskData):
    letter: str


class LettersTask(vf.Task[LettersData, vf.State, vf.TaskConfig]):
    async def setup(self, trace, runtime) -> None:
        trace.info["begun"] = self.data.letter

    @vf.reward(weight=0.5)
    async def letters(self, trace) -> float:
        return float(sum(answer.count(self.data.letter) for answer in said(trace)))

    @vf.reward(weight=2.0)
    async def first(self, trace: vf.Trace) -> float:
        return float("".join(said(trace))[:1] == trace.info["begun"])

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len("".join(said(trace))))


class BrokenTask(LettersTask):
    @vf.reward()
    async def fails(self, trace: vf.Trace) -> float:
        if "c" in "".join(said(trace)):
            raise ValueError("this reward is broken")
        return 1.0


class BoxedTask(LettersTask):
    NEEDS_CONTAINER: ClassVar[bool] = True


class SlowTask(LettersTask):
    async def setup(self, trace, runtime) -> None:
        await super().setup(trace, runtime)
        await asyncio.sleep(4)


class LettersConfig(vf.TasksetConfig):
    kind: str = "plain"


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        kind = {"plain": LettersTask, "broken": BrokenTask, "boxed": BoxedTask, "slow": SlowTask}[self.config.kind]
        for letter in "abcd":
            data = LettersData(prompt=f"say {letter}", system_prompt="be short", letter=letter)
            yield kind(data, self.config.task)


def said(trace) -> list[str]:
    return [m.content or "" for m in trace.branches[-1].messages if m.role == "assistant"] if trace.branches else []


__all__ = ["LettersTaskset"]
