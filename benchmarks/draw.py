"""How long a large graph takes to be checked and drawn: several learners with a refill loop each, on pools of a plan.

    python benchmarks/draw.py [--learners 2]

Two learners make a graph of about 60 nodes. Prints seconds of CPU by format, with the imports and the trace before.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "algorithms"))

import flowrl as fl
from flowrl import rl
from flowrl.analysis.placed_graph import placed_graph
from flowrl.graph.draw import FORMATS, render
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Place, Plan, Pool
from tasks import arithmetic

ROUNDS = 3


def score(prompt: str, response: str) -> float:
    """A reward of no meaning: nothing is run here."""
    return float(len(response))


def learners(count: int) -> tuple[fl.Flow, Plan]:
    """A flow of that many independent PPO learners, and a plan with a pool for each and one more for its samples."""
    flow = fl.Flow("learners")
    sets: list[tuple[fl.Actor, fl.Reference, fl.Critic, fl.FunctionReward]] = []
    pools = {"cpu": Pool("cpu", processes=16)}
    place: dict[str, dict[str, Place] | Place] = {}
    for n in range(count):
        actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=1e-4, max_tokens=4, name=f"actor{n}")
        ref = flow.worker(fl.Reference, of=actor, name=f"ref{n}")
        critic = flow.worker(fl.Critic, arithmetic.MODEL, name=f"critic{n}")
        reward = flow.worker(fl.FunctionReward, score, name=f"reward{n}")
        sets.append((actor, ref, critic, reward))
        first = 16 * n
        pools |= {
            f"train{n}": Pool(f"train{n}", devices=tuple(range(first, first + 8))),
            f"rollout{n}": Pool(f"rollout{n}", devices=tuple(range(first + 8, first + 16))),
        }
        trains = Place(f"train{n}", Mesh.of("fsdp=8"), "fsdp2")
        place |= {
            f"actor{n}": {"train": trains, "generate": Place(f"rollout{n}", Mesh.of("dp=8"))},
            f"ref{n}": trains,
            f"critic{n}": trains,
            f"reward{n}": Place("cpu"),
        }

    @flow.program
    def learn(steps: int = 4) -> None:
        for step, prompts in flow.steps(arithmetic.prompts(8), steps):
            for n, (actor, ref, critic, reward) in enumerate(sets):
                batch = _informative(actor, reward, prompts)
                for _ in range(ROUNDS - 1):
                    if batch.count() >= 32:
                        break
                    batch = batch.concat(_informative(actor, reward, flow.more(8)))
                batch = rl.first_groups(batch, 8)
                batch = batch.with_columns({"rewards": batch.scores * 2 - 1})
                batch = ref.logprobs(batch)
                batch = critic.values(batch)
                batch = rl.gae(batch)
                critic.update(batch)
                actor.update(batch, loss=rl.ppo_clip(kl=0.01))
                flow.log(step, **{f"reward_of_{n}": batch.scores.mean()})

    return flow, Plan(pools, place, cluster=Cluster.of(f"h100-80:{2 * count}x8"))


def _informative(actor: fl.Actor, reward: fl.FunctionReward, prompts: fl.Batch) -> fl.Batch:
    batch = actor.generate(prompts, n=4)
    batch = reward.score(batch, into={"rewards": "scores"})
    return batch.filter(batch.group_std("scores") > 0)


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=2)
    flow, plan = learners(parser.parse_args().learners)
    begun = time.process_time()
    graph = placed_graph(flow.study(plan), flow.graph())
    nodes = len(graph.nodes)
    print(f"{nodes} nodes, {len(graph.edges)} edges, {len(plan.pools)} pools")
    print(f"trace   {time.process_time() - begun:6.2f} s")
    for format in FORMATS:
        begun = time.process_time()
        size = len(render(graph, format))
        print(f"{format:8}{time.process_time() - begun:6.2f} s   {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
