"""The run that ``kills.py`` disturbs: a small GRPO on six ranks, in a process of its own.

    python benchmarks/kills_driver.py OUT [--steps 40] [--deadline 15] [--backend fsdp2] [--gloo] [--resume]
                                      [--staleness 0] [--copies 1] [--publish drain] [--runtime ray] [--engine hf]
                                      [--order fifo] [--program plain] [--tokens 5]

Two ranks train, two generate and are the reference, two give rewards, each row apart. With ``--runtime local`` one
process does it all, with a pool for each of the three. Every reward that is given is also a line in
``OUT.faults/answers.jsonl``, so that real calls are counted, and not what the run says of them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "algorithms")]

import faults

import flowrl as fl
from flowrl import rl
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.storage.answers.answer_book import MOMENT
from tasks import arithmetic

ENGINE = "vllm" if "vllm" in sys.argv else "hf"
SMALL = {
    **(arithmetic.MODEL.config or {}),
    "hidden_size": 64 if ENGINE == "vllm" else 32,  # on a CPU vLLM computes heads of 32 numbers, and none of 16
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
EVERY = 3  # steps from one checkpoint to the next
PROMPTS, GROUP = 4, 3  # of a step, and rows of each
TOKENS = 5  # of a response, at most
LATENCY = 2 * MOMENT  # seconds that a reward takes, as of a service
TRAIN, ROLLOUT, REWARDS = (0, 1), (2, 3), (4, 5)
GLOO = "--gloo" in sys.argv  # weights go as from host to host
OUT = next((word for word in sys.argv[1:] if not word.startswith("--")), "")  # the run, where there are no ranks


class Armed(fl.Actor):
    """An actor whose ranks take faults."""

    def open(self, opening: Any) -> None:
        faults.arm(shared=not GLOO)
        super().open(opening)


class Judge(fl.FunctionReward):
    """A reward whose ranks take faults."""

    def open(self, opening: Any) -> None:
        faults.arm()
        super().open(opening)


def odd(prompt: str, response: str) -> float:
    """A reward with something to learn from the first token on."""
    here = faults.here()
    here.come_to("answer", "before")  # it was asked, and has not answered
    time.sleep(LATENCY)
    faults.append(here.out or OUT, "answers.jsonl", [os.getpid(), prompt, response])
    return odds(response)


def odds(response: str) -> float:
    """What a response is worth."""
    return sum(c in "13579" for c in response) - 0.1 * len(response)


def text_of(tokens: str) -> str:
    """A response as its reward sees it, of a text with all its tokens."""
    return re.sub("<pad>|;", "", tokens)


flow = fl.Flow("kills")
actor = flow.worker(Armed, fl.Model(config=SMALL, tokenizer=arithmetic.build_tokenizer), lr=3e-3)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(Judge, odd, concurrency=1)
HELD_OUT = arithmetic.heldout(2, repeat=True)


@flow.program
def kills(steps: int = 40, tokens: int = TOKENS, refill: bool = False, evaluate: bool = False):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        if evaluate:  # before the rows that are trained on: the last ones of a step are written down
            held = reward.score(actor.generate(flow.take(HELD_OUT), greedy=True, max_tokens=tokens))
            at = held.versions.row_mean()
            flow.log(step, at=at.min(), most=at.max(), held=held.rewards.mean())
        batch = reward.score(actor.generate(batch, n=GROUP, max_tokens=tokens))
        if refill:
            batch = differing(batch)
            for _ in range(2):
                if batch.count() >= PROMPTS * GROUP:
                    break
                more = reward.score(actor.generate(flow.more(PROMPTS), n=GROUP, max_tokens=tokens))
                batch = batch.concat(differing(more))
            batch = rl.first_groups(batch, PROMPTS)
        batch = ref.logprobs(batch)
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip(kl=1e-3))
        flow.log(step, metrics, reward=batch.rewards.mean())


def differing(batch: fl.Batch) -> fl.Batch:
    """The groups that are not alike."""
    return batch.filter(batch.group_std("rewards") > 0.5)


MESHES = {"fsdp2": "fsdp=2", "megatron": "tp=2"}


def plan(asked: argparse.Namespace) -> Plan:
    """Two ranks in each of three pools, or three pools of one process."""
    pipeline = Pipeline(
        deadline=asked.deadline,
        staleness=asked.staleness,
        publish=asked.publish,
        order=asked.order,
        window=1.0 if asked.order == "window" else Pipeline.window,
        copies=asked.copies,
        restart=asked.restart,
    )
    options = {"kv_cache": 0.0625, "rows": 32} if ENGINE == "vllm" else {}
    sampled = Place("rollout", backend=ENGINE, options=options)
    if asked.runtime == "local":
        where = {"actor": {"train": Place("train"), "generate": sampled}, "ref": Place("train")}
        pools = {"train": "cpu", "rollout": "cpu", "rewards": "cpu"}
        return Plan(pools, {**where, "reward": Place("rewards")}, pipeline=pipeline)
    trained = Place("train", Mesh.of(MESHES[asked.backend]), asked.backend)
    return Plan(
        {
            "train": Pool("train", devices=TRAIN),
            "rollout": Pool("rollout", devices=ROLLOUT),
            "rewards": Pool("rewards", processes=len(REWARDS)),
        },
        {
            "actor": {"train": trained, "generate": sampled},
            "ref": Place("rollout"),
            "reward": Place("rewards"),
        },
        cluster=Cluster.of("cpu:1x4"),
        pipeline=pipeline,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--deadline", type=float, default=15.0)
    parser.add_argument("--backend", choices=MESHES, default="fsdp2")
    parser.add_argument("--gloo", action="store_true", help="weights go as from host to host")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--restart", type=float, default=Pipeline.restart, help="seconds that a replica is waited for")
    parser.add_argument("--publish", choices=("drain", "interrupt", "continue"), default="drain")
    parser.add_argument("--order", choices=("fifo", "window"), default="fifo")
    parser.add_argument("--program", choices=("plain", "refill", "evaluate"), default="plain")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a response, at most")
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="what samples")
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()
    if asked.runtime == "ray":
        faults.hold_back(asked.out)
    program = dict.fromkeys({asked.program} - {"plain"}, True)
    flow.run(
        out=asked.out,
        parameters={"kills": {"steps": asked.steps, "tokens": asked.tokens, **program}},
        runtime=asked.runtime,
        plan=plan(asked),
        checkpoint_every=EVERY,
        trajectories=10**6,  # all rows that are trained on
        trajectories_every=1,
        resume=asked.resume,
    )


if __name__ == "__main__":
    main()
