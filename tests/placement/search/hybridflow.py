"""Whether the costs at hand put placements in the order that HybridFlow measured (arXiv 2409.19256, section 8.3).

There, on A100-80 in nodes of 8, PPO is fastest with all models colocated on 16 to 64 devices; from 96 on, splitting
them is as fast or faster. The first is what a roofline says as well. The second is not: with costs that fall nearly as
the number of devices grows, colocation is a lower bound by the way a step is put together (of the same devices, a set
that has them all is never worse than two that share them), so a crossover comes from what a roofline does not know,
such as collectives between many nodes under load. There the margins say how far the costs are from deciding.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cost.cost_model import Costs, Roofline
from flowrl.placement.cost.work import Role, Work, Workload
from flowrl.placement.model.model_shape import ModelShape, shape_named
from flowrl.placement.search.find_placement import error_of, search_shapes
from flowrl.placement.search.problem import Member, Problem

#: Devices at which the paper measured colocation to be fastest, and those at which it measured a split to be.
COLOCATED_AT, SPLIT_AT = (16, 32, 64), (96, 128)


@dataclass(frozen=True)
class Ordering:
    """Placements from the fastest: ``Ordering(16, (("colocate", 101.2), ("split", 130.4)), "roofline", error=0.3)``.

    Seconds per step; shapes that do not fit are not there.
    """

    devices: int
    seconds: tuple[tuple[str, float], ...]
    source: str
    error: float

    @property
    def fastest(self) -> str:
        """The shape that the costs say is fastest."""
        return self.seconds[0][0]

    @property
    def margin(self) -> float:
        """By what part the second takes longer; infinite without one."""
        return self.seconds[1][1] / self.seconds[0][1] - 1 if len(self.seconds) > 1 else float("inf")

    @property
    def decided(self) -> bool:
        """Whether the margin is outside the error of the costs, and the costs are none that measurements contradict."""
        contradicted = self.source == "roofline" and self.devices >= min(SPLIT_AT)
        return self.margin > self.error and not contradicted

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds)
        if len(self.seconds) == 1:
            return f"{self.devices} devices: {listed}; nothing else fits."
        side = "outside" if self.margin > self.error else "inside"
        said = f"{self.devices} devices: {listed}; margin {self.margin:.0%}, {side} the error of {self.error:.0%}"
        if self.source == "roofline" and self.devices >= min(SPLIT_AT):
            return f"{said}. HybridFlow measured a split to be as fast or faster here: a roofline does not decide."
        return f"{said}." if self.decided else f"{said}: a tie."


def ppo(cluster: Cluster, *, actor: ModelShape, critic: ModelShape, staleness: tuple[int, ...] = (0,)) -> Problem:
    """PPO as it is measured there: 1024 prompts of 1024 tokens, as many response tokens, one epoch of 8 updates.

    The reference is as large as the actor, the reward model as the critic.
    """
    load = Workload(1024, 1024, 1024)
    roles = {
        "actor": Role("actor", actor, trains=True, generates=True),
        "critic": Role("critic", critic, trains=True, head="scalar"),
        "ref": Role("ref", actor),
        "reward": Role("reward", critic, head="scalar"),
    }

    def call(op: str, kind: str) -> Work:
        worker = op.partition(".")[0]
        return Work(f"{op}#1", op, kind, roles[worker], load, minibatches=8 if kind == "train" else 1)

    generate, values = call("actor.generate", "generate"), call("critic.values", "forward")
    logprobs, ref, score = (call(op, "forward") for op in ("actor.logprobs", "ref.logprobs", "reward.score"))
    actor_update, critic_update = call("actor.update", "train"), call("critic.update", "train")
    return Problem(
        cluster,
        members=(
            Member(roles["actor"], "train", (logprobs, actor_update)),
            Member(roles["actor"], "generate", (generate,)),
            Member(roles["critic"], "train", (values, critic_update)),
            Member(roles["ref"], "train", (ref,)),
            Member(roles["reward"], "train", (score,)),
        ),
        stages=(
            (generate.node,),
            (logprobs.node, values.node, ref.node, score.node),
            (actor_update.node, critic_update.node),
        ),
        pairs=(("actor.train", "actor.generate"),),
        staleness=staleness,
        together=(("actor.train", "actor.generate"),) if staleness == (0,) else (),
    )


#: The placements that section 8.3 compares; the actor trains and generates in one place in all of them.
SHAPES = {
    "colocate": (("actor.train", "actor.generate", "critic.train", "ref.train", "reward.train"),),
    "split": (("actor.train", "actor.generate", "ref.train"), ("critic.train", "reward.train")),
    "standalone": (("actor.train", "actor.generate"), ("critic.train",), ("ref.train",), ("reward.train",)),
}


def ordering(devices: int, *, actor: str = "llama-13b", critic: str = "", costs: Costs | None = None) -> Ordering:
    """The three placements of section 8.3 on ``devices`` A100-80, each with the best allocation, by these costs."""
    cluster = Cluster((Nodes("a100-80", devices // 8, 8),))
    problem = ppo(cluster, actor=shape_named(actor), critic=shape_named(critic or actor))
    costs = costs or Roofline(cluster)
    found = search_shapes(problem, costs, SHAPES)
    seconds = {name: placed.step_seconds for name, placed in found.items() if placed is not None}
    return Ordering(devices, tuple(sorted(seconds.items(), key=lambda item: item[1])), costs.source, error_of(costs))
