"""A taskset of verifiers 0.4 with a tool, which verifiers starts as a server for each episode: the letter at a place."""

from __future__ import annotations

import verifiers.v1 as vf
from letters_taskset import LettersConfig, LettersData, LettersTask, said


class LetterTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def letter(self, place: int) -> str:
        """The letter at a place."""
        return "abcd"[place % 4]


class ToolTask(LettersTask):
    @classmethod
    def toolsets(cls, config):
        return [LetterTools(vf.ToolsetConfig())]

    @vf.metric
    async def seen(self, trace: vf.Trace) -> float:
        return float(sum(m.role == "tool" and "b" in str(m.content) for m in trace.branches[-1].messages))


class ToolTaskset(vf.Taskset[ToolTask, LettersConfig]):
    def load(self):
        for letter in "ab":
            yield ToolTask(LettersData(prompt=f"say {letter}", letter=letter), self.config.task)


__all__ = ["LettersConfig", "ToolTaskset", "said"]

if __name__ == "__main__":
    LetterTools.run()
