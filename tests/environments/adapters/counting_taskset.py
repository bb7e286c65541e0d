"""A taskset of verifiers 0.4 whose environment replies: a user that asks again until an answer holds an e."""

from __future__ import annotations

import verifiers.v1 as vf
from letters_taskset import LettersConfig, LettersTask, LettersTaskset, said


class AgainTaskset(LettersTaskset):
    INFINITE = True

    def load(self):
        while True:
            yield from super().load()


class AgainConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class AgainEnv(vf.Env[AgainConfig]):
    async def run(self, task: LettersTask, agents) -> None:
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and "e" not in segment.last_reply and len(said(talk.trace)) < 3:
                segment = await talk.turn("d" + segment.last_reply[-1:])
        talk.trace.record_reward("turns", float(len(said(talk.trace))), 0.25)


__all__ = ["AgainEnv", "AgainTaskset", "LettersConfig"]
