"""The run that ``overlap.py`` measures: GRPO on two ranks, of which one trains and the other generates.

    python benchmarks/overlap_driver.py OUT [--steps 12] [--staleness 0] [--publish drain] [--sigma 1.0]
                                       [--epochs 1] [--runtime ray] [--paced]

Every response has 128 tokens, or with ``--sigma`` a length by its row's seed, whose logarithm is normal with that
standard deviation; so a step asks for the same work under every plan. The rows of a call leave the engine one by one
under each of them.

With ``--paced`` each rank waits after its computation, as a core does for its GPU: a pass of the engine takes
``PASS_SECONDS`` and ``TOKEN_SECONDS`` for each of its tokens, an update ``TRAINED_SECONDS`` for each of its own. That
is about two and a half times what a core takes, so what two cores take from each other does not show.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from types import MethodType
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "algorithms")]

import flowrl as fl
from flowrl import rl
from flowrl.backends.stream import generate_streamed
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from tasks import arithmetic

MODEL = {**(arithmetic.MODEL.config or {}), "max_position_embeddings": 1024}
SIGMA = float(sys.argv[sys.argv.index("--sigma") + 1]) if "--sigma" in sys.argv else 0.0
TOKENS, MEDIAN, MOST = 128, 40.0, 900
PACED = "--paced" in sys.argv
PASS_SECONDS, TOKEN_SECONDS, TRAINED_SECONDS = 4e-3, 1.5e-4, 4e-4


def length(seed: int) -> int:
    """Tokens of the row with a seed."""
    if not SIGMA:
        return TOKENS
    part = ((seed * 0x9E3779B97F4A7C15 >> 11) % (1 << 32) + 0.5) / (1 << 32)
    return min(MOST, max(1, round(MEDIAN * math.exp(SIGMA * NormalDist().inv_cdf(part)))))


def lasting(action: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
    """The action, which takes at least the seconds that its first argument comes to."""

    def paced(*args: Any, **how: Any) -> Any:
        ends = time.perf_counter() + seconds(args[0])
        given = action(*args, **how)
        time.sleep(max(0.0, ends - time.perf_counter()))
        return given

    return paced


class Drawn(fl.Actor):
    """An actor whose responses are as long as their seeds say."""

    def open(self, opening: Any) -> None:
        super().open(opening)
        engine: Any = self.generating_engine()
        if PACED:
            engine.net.hidden = lasting(engine.net.hidden, lambda ids: PASS_SECONDS + TOKEN_SECONDS * ids.numel())
            trained: Any = self.engine
            trained.update = lasting(trained.update, lambda batch: TRAINED_SECONDS * tokens_of(batch))
        batch = engine.batch
        submit = batch.submit

        def limited(*asked: Any, **how: Any) -> int:
            call = submit(*asked, **how)
            for (whose, _), row in batch._rows.items():
                if whose == call:
                    row.limit, row.stops = length(row.seed), frozenset()
            return call

        batch.submit = limited
        engine.generate = MethodType(generate_streamed, engine)


def tokens_of(batch: fl.Batch) -> int:
    """Tokens of the rows of a batch, with their prompts."""
    return sum(map(len, batch["tokens"].to_list()))


def answer_length(prompt: str, response: str) -> float:
    """A reward with something to learn from."""
    return sum(c in "13579" for c in response) / max(1, len(response))


flow = fl.Flow("overlap")
actor = flow.worker(Drawn, fl.Model(config=MODEL, tokenizer=arithmetic.build_tokenizer), lr=1e-5, max_tokens=MOST)
reward = flow.worker(fl.FunctionReward, answer_length)


@flow.program
def overlap(steps: int = 12, prompts: int = 16, n: int = 4, epochs: int = 1):
    for step, batch in flow.steps(arithmetic.prompts(prompts), steps):
        batch = actor.generate(batch, n=n)
        batch = reward.score(batch)
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip(), epochs=epochs)
        flow.log(step, metrics, reward=batch.rewards.mean())


def plan(staleness: int, publish: str, runtime: str = "ray") -> Plan:
    """A rank that trains and rewards, and a rank that generates; with ``local`` threads of one process."""
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("train")}
    pipeline = Pipeline(staleness=staleness, publish=publish, deadline=600.0)
    if runtime == "local":
        return Plan({"train": "cpu", "rollout": "cpu"}, place, pipeline=pipeline)
    pools = {"train": Pool("train", devices=(0,)), "rollout": Pool("rollout", devices=(1,))}
    return Plan(pools, place, cluster=Cluster.of("cpu:1x2"), pipeline=pipeline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--publish", choices=("drain", "interrupt", "continue"), default="drain")
    parser.add_argument("--sigma", type=float, default=0.0, help="0 gives all responses one length")
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--paced", action="store_true", help="take as long as devices that share nothing")
    asked = parser.parse_args()
    flow.run(
        out=asked.out,
        parameters={"overlap": {"steps": asked.steps, "epochs": asked.epochs}},
        runtime=asked.runtime,
        plan=plan(asked.staleness, asked.publish, asked.runtime),
        overwrite=True,
        quiet=True,
        save_models=False,
        checkpoint_every=10**9,
    )


if __name__ == "__main__":
    main()
