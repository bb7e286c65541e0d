"""Graphs as the trace makes them, put together by hand, also with hostile names: the drawings are tested on these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import pytest

from flowrl.graph.draw import render
from flowrl.graph.ops.field_types import STANDARD
from flowrl.graph.record import Edge, Graph, Node, PoolInfo, SourceInfo, WorkerInfo

TYPES = {name: str(type_) for name, type_ in STANDARD.items()} | {"answer": "any", "prompt": "any"}
GENERATED = "response_ids tokens response_mask rollout_logprobs sampling_logprobs versions"

GENERATE: Mapping[str, Any] = {"rows": "expand", "cost": "generate"}
SCORE: Mapping[str, Any] = {"cost": "external", "external": True}
TRAIN: Mapping[str, Any] = {"updates": "weights", "cost": "train"}
FORWARD: Mapping[str, Any] = {"cost": "forward"}
LOCAL: Mapping[str, Any] = {"cost": "local"}


def call(id: str, line: int, source: str, fields: str = "->", *, branch: str | None = None, **more: Any) -> Node:
    """A node that reads and adds the fields left and right of the arrow."""
    worker, _, op = id.partition("#")[0].partition(".")
    reads, adds = (tuple(side.split()) for side in fields.split("->"))
    types = {name: TYPES.get(name, "f32[]") for name in (*reads, *adds)}
    left, right = (", ".join(f"{name}: {types[name]}" for name in side) for side in (reads, adds))
    about = {"types": types, "signature": f"({left}) -> ({right})", "branch": branch} | more
    return Node(id, worker, op, "", line, source, reads, adds, **about)


def flow_data(nodes: list[Node]) -> list[Edge]:
    """Data edges: what a call reads comes from the last one before that adds it, or has made other rows of it.

    Calls that expand rows read the source, which is no node.
    """
    edges: list[Edge] = []
    for number, node in enumerate(nodes):
        wanted: dict[str, list[str]] = {}
        for name in node.reads if node.rows == "same" else ():
            before = [n for n in nodes[:number] if n.branch in (None, node.branch)]
            found = [n.id for n in before if name in n.adds or n.rows != "same"]
            if found:
                wanted.setdefault(found[-1], []).append(name)
        edges += [Edge(src, node.id, "data", tuple(names), branch=node.branch) for src, names in wanted.items()]
    return edges


def program(
    name: str, workers: list[WorkerInfo], nodes: list[Node], extra: list[Edge], source: str, paths: int = 1
) -> Graph:
    """A graph of those calls with their data edges, and ``extra`` ones."""
    file = f"algorithms/{name}.py"
    placed = [Node(**{**vars(n), "file": file}) for n in nodes]
    there = tuple(WorkerInfo(w.name, w.kind, file, w.line, w.describes) for w in workers)
    between = (*flow_data(placed), *extra)
    fields = tuple(source.split())
    given = [(e.dst, name) for e in between if e.kind in ("data", "carried") for name in e.fields]
    wanted = [(n, tuple(f for f in n.reads if f in fields and (n.id, f) not in given)) for n in placed]
    drawn = [Edge("data.prompts", n.id, "data", read, branch=n.branch) for n, read in wanted if read]
    prompts = SourceInfo("data.prompts", "prompts", "train.jsonl, 16 rows a step", fields, file=file, line=9)
    return Graph(name, tuple(placed), (*drawn, *between), there, fields, paths, sources=(prompts,))


def workers(*declared: str) -> list[WorkerInfo]:
    """Workers declared like ``ref: Reference, of actor``, on lines 7 and following."""
    found: list[WorkerInfo] = []
    for line, text in enumerate(declared, 7):
        name, _, rest = text.partition(": ")
        kind, _, describes = rest.partition(", ")
        found.append(WorkerInfo(name, kind, "", line, describes))
    return found


GRPO = program(
    "grpo",
    workers("actor: Actor", "ref: Reference, of actor", "reward: FunctionReward, exact_match"),
    [
        call(
            "actor.generate",
            14,
            "batch = actor.generate(batch, n=8)",
            f"prompt_ids -> {GENERATED}",
            **GENERATE,
        ),
        call(
            "reward.score",
            15,
            "batch = reward.score(batch)",
            "prompt answer response_ids -> rewards",
            **SCORE,
        ),
        call(
            "ref.logprobs",
            16,
            "batch = ref.logprobs(batch)",
            "tokens response_mask -> ref_logprobs",
            **FORWARD,
        ),
        call(
            "rl.group_advantages",
            17,
            "batch = rl.group_advantages(batch)",
            "rewards response_mask -> advantages",
            **LOCAL,
        ),
        call(
            "actor.update",
            18,
            "metrics = actor.update(batch, loss=rl.ppo_clip(kl=kl))",
            "tokens response_mask rollout_logprobs advantages ref_logprobs ->",
            **TRAIN,
        ),
        call("batch.mean", 19, "flow.log(step, metrics, reward=batch.rewards.mean())", "rewards ->", **LOCAL),
    ],
    [Edge("actor.update", "actor.generate", "weights", lag=0)],
    "prompt prompt_ids answer",
)

_PPO_WORKERS = workers(
    "actor: Actor", "critic: Critic", "ref: Reference, of actor", "reward: FunctionReward, exact_match"
)
_PPO_CALLS = [
    call("actor.generate", 16, "batch = actor.generate(batch)", f"prompt_ids -> {GENERATED}", **GENERATE),
    call("reward.score", 17, "batch = reward.score(batch)", "prompt answer response_ids -> rewards", **SCORE),
    call("ref.logprobs", 18, "batch = ref.logprobs(batch)", "tokens response_mask -> ref_logprobs", **FORWARD),
    call("critic.values", 19, "batch = critic.values(batch)", "tokens response_mask -> values", **FORWARD),
    call(
        "rl.kl_penalty",
        20,
        "batch = rl.kl_penalty(batch, kl)",
        "rewards rollout_logprobs ref_logprobs response_mask -> token_rewards",
        **LOCAL,
    ),
    call(
        "rl.gae",
        21,
        "batch = rl.gae(batch, gamma=1.0, lam=0.95)",
        "token_rewards values response_mask -> advantages returns",
        **LOCAL,
    ),
    call(
        "critic.update",
        22,
        "value_loss = critic.update(batch)",
        "tokens response_mask values returns ->",
        **TRAIN,
    ),
    call(
        "actor.update",
        23,
        "metrics = actor.update(batch, loss=rl.ppo_clip())",
        "tokens response_mask rollout_logprobs advantages ->",
        **TRAIN,
    ),
]
_PPO_WEIGHTS = [
    Edge("actor.update", "actor.generate", "weights", lag=1),
    Edge("critic.update", "critic.values", "weights", lag=0),
]

PPO = program(
    "ppo",
    _PPO_WORKERS,
    [
        *_PPO_CALLS,
        call("batch.mean", 24, "flow.log(step, metrics, reward=batch.rewards.mean())", "rewards ->", **LOCAL),
    ],
    _PPO_WEIGHTS,
    "prompt prompt_ids answer",
)

_EVERY = "step % 50 == 0"
_KL = "kl = kl * (1 + 0.1 * (metrics.kl - 6.0))"
PPO_CARRIED = program(
    "ppo_adaptive",
    _PPO_WORKERS,
    [
        *_PPO_CALLS,
        call("batch.sub", 24, _KL, **LOCAL),
        call("batch.mul", 24, _KL, **LOCAL),
        call("batch.add", 24, _KL, **LOCAL),
        call("batch.mul#2", 24, _KL, **LOCAL),
        call(
            "actor.generate#2",
            26,
            "held_out = actor.generate(held_out, greedy=True)",
            f"prompt_ids -> {GENERATED}",
            branch=_EVERY,
            **GENERATE,
        ),
        call(
            "reward.score#2",
            27,
            "held_out = reward.score(held_out)",
            "prompt answer response_ids -> rewards",
            branch=_EVERY,
            **SCORE,
        ),
        call(
            "batch.mean",
            28,
            "flow.log(step, accuracy=held_out.rewards.mean())",
            "rewards ->",
            branch=_EVERY,
            **LOCAL,
        ),
        call("batch.mean#2", 29, "flow.log(step, metrics, reward=batch.rewards.mean())", "rewards ->", **LOCAL),
        call("actor.save", 30, 'actor.save("out")', stage="once"),
    ],
    [
        *_PPO_WEIGHTS,
        Edge("actor.update", "batch.sub", "data", ("kl",)),
        Edge("batch.sub", "batch.mul", "data", ("value",)),
        Edge("batch.mul", "batch.add", "data", ("value",)),
        Edge("batch.add", "batch.mul#2", "data", ("value",)),
        Edge("batch.mul#2", "batch.mul#2", "carried", ("value",)),
        Edge("batch.mul#2", "rl.kl_penalty", "carried", ("value",)),
        Edge("actor.update", "actor.generate#2", "weights", lag=0, branch=_EVERY),
        Edge("actor.update", "actor.save", "weights", lag=0),
        Edge("actor.update", "actor.save", "order"),
    ],
    "prompt prompt_ids answer",
    paths=2,
)

ENV = program(
    "guess",
    workers("actor: Actor", "game: GuessingGame, 1 to 64"),
    [
        call(
            "game.rollout",
            12,
            "batch = game.rollout(batch, policy=actor, n=8)",
            f"prompt_ids secret -> {GENERATED} rewards",
            rows="expand",
            **SCORE,
        ),
        call(
            "rl.group_advantages",
            13,
            "batch = rl.group_advantages(batch)",
            "rewards response_mask -> advantages",
            **LOCAL,
        ),
        call(
            "actor.update",
            14,
            "metrics = actor.update(batch, loss=rl.ppo_clip())",
            "tokens response_mask rollout_logprobs advantages ->",
            **TRAIN,
        ),
        call("batch.mean", 15, "flow.log(step, metrics, reward=batch.rewards.mean())", "rewards ->", **LOCAL),
    ],
    [
        Edge("actor", "game.rollout", "serves"),
        Edge("actor.update", "game.rollout", "weights", lag=2),
    ],
    "prompt_ids secret",
)

SAMPLES = {graph.program: graph for graph in (GRPO, PPO, PPO_CARRIED, ENV)}


# -- the same with plans ------------------------------------------------------------------------------------


def placed(
    graph: Graph,
    pools: tuple[PoolInfo, ...],
    places: Mapping[str, str],
    *,
    move: str = "publish",
    bytes: Mapping[str, float] = MappingProxyType({}),
    seconds: Mapping[str, float] = MappingProxyType({}),
    transport: str = "network",
) -> Graph:
    """The graph with a plan put on it: the actor's weights go by a node of their own to where it generates.

    ``places`` says ``pool | mesh | layout`` of calls, ``seconds`` the overlay; shares are those of the time of a pool.
    """
    fields: dict[str, dict[str, Any]] = {
        id: dict(zip(("pool", "mesh", "layout"), (part.strip() or None for part in place.split("|")), strict=True))
        for id, place in places.items()
    }
    reader = "game.rollout" if graph.program == "guess" else "actor.generate"
    target = fields[reader]["pool"] if reader == "actor.generate" else fields["actor.update"]["pool"]
    mover = Node(f"actor.{move}", "actor", move, kind=move)
    fields[mover.id] = fields.get(mover.id, {"pool": target})
    after = next(i for i, node in enumerate(graph.nodes) if node.id == "actor.update") + 1
    nodes = [*graph.nodes[:after], mover, *graph.nodes[after:]]
    works = {pool.name: 0.0 for pool in pools}
    for id, time in seconds.items():
        works[fields[id]["pool"]] += time
    step = 1.1 * max(works.values())
    for id, time in seconds.items():
        fields[id] |= {"seconds": time, "share": time / step}
    nodes = [replace(node, **fields.get(node.id, {})) for node in nodes]
    pool_of = {node.id: node.pool for node in nodes}
    edges: list[Edge] = []
    for edge in graph.edges:
        ends = {pool_of[end] for end in (edge.src, edge.dst) if pool_of.get(end)}
        there = transport if len(ends) == 2 else "same pool"
        if edge.kind == "weights" and edge.dst == reader:
            first = Edge(edge.src, mover.id, "weights", lag=0)
            edges.append(
                replace(first, bytes=bytes.get("weights"), transport=transport if move == "publish" else "same pool")
            )
            version = f"v(k-{edge.lag})" if edge.lag else "v(k)"
            edges.append(replace(edge, src=mover.id, bytes=0.0, transport="same pool", version=version))
        elif edge.kind == "data":
            edges.append(replace(edge, bytes=bytes.get(edge.src, 4096.0 * len(edge.fields)), transport=there))
        else:
            edges.append(edge)
    if seconds:
        pools = tuple(replace(p, busy=works[p.name] / step, seconds=works[p.name]) for p in pools)
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges), pools=pools)


_TRAIN = PoolInfo("train", devices="0-7", kind="h100-80", count=8)
_ROLLOUT = PoolInfo("rollout", devices="8-15", kind="h100-80", count=8)
_ALL = PoolInfo("all", devices="0-7", kind="h100-80", count=8)
_CPU = PoolInfo("cpu", "4 processes")

GRPO_SPLIT = placed(
    GRPO,
    (_ROLLOUT, _TRAIN),
    {
        "actor.generate": "rollout | dp=4,tp=2 | rows over dp; weights over tp",
        "reward.score": "rollout | |",
        "ref.logprobs": "train | fsdp=8 | rows over fsdp; weights over fsdp",
        "actor.update": "train | fsdp=4,tp=2 | rows over fsdp; weights over fsdp x tp",
    },
    bytes={"weights": 16.4e9, "actor.generate": 38.2e6},
)
PPO_APART = placed(
    PPO,
    (_ROLLOUT, _TRAIN, _CPU),
    {
        "actor.generate": "rollout | dp=4,tp=2 | rows over dp; weights over tp",
        "reward.score": "cpu | |",
        "ref.logprobs": "train | fsdp=8 | rows over fsdp; weights over fsdp",
        "critic.values": "train | fsdp=8 | rows over fsdp; weights over fsdp",
        "critic.update": "train | fsdp=8 | rows over fsdp; weights over fsdp",
        "actor.update": "train | fsdp=4,tp=2 | rows over fsdp; weights over fsdp x tp",
    },
    bytes={
        "weights": 16.4e9,
        "actor.generate": 38.2e6,
        "rl.kl_penalty": 2.1e6,
        "rl.gae": 4.2e6,
        "critic.values": 2.1e6,
        "ref.logprobs": 2.1e6,
    },
    seconds={
        "actor.generate": 6.2,
        "actor.publish": 0.31,
        "reward.score": 0.4,
        "ref.logprobs": 0.7,
        "critic.values": 0.75,
        "critic.update": 2.4,
        "actor.update": 2.6,
    },
)
_ON_ALL = "rows over fsdp; weights over fsdp"
PPO_TOGETHER = placed(
    PPO,
    (_ALL,),
    {
        "actor.generate": "all | dp=4,tp=2 | rows over dp; weights over tp",
        "reward.score": "all | |",
        **{
            id: f"all | fsdp=8 | {_ON_ALL}" for id in ("ref.logprobs", "critic.values", "critic.update", "actor.update")
        },
    },
    move="reshard",
    bytes={"weights": 12.3e9, "actor.generate": 38.2e6},
)
GUESS_SERVED = placed(
    replace(
        ENV,
        workers=tuple(replace(w, pool="rollout", mesh="dp=4,tp=2") if w.name == "actor" else w for w in ENV.workers),
    ),
    (_TRAIN, _ROLLOUT, _CPU, PoolInfo("spare", devices="16-17")),
    {
        "game.rollout": "cpu | |",
        "actor.update": "train | fsdp=8 | rows over fsdp; weights over fsdp",
        "actor.publish": "rollout | dp=4,tp=2 |",
    },
    bytes={"weights": 16.4e9, "game.rollout": 12e6},
)
PLACED = {
    "grpo split": GRPO_SPLIT,
    "ppo apart": PPO_APART,
    "ppo together": PPO_TOGETHER,
    "guess served": GUESS_SERVED,
}

EVERY = pytest.mark.parametrize("graph", [*SAMPLES.values(), *PLACED.values()], ids=[*SAMPLES, *PLACED])


_DRAWN: dict[str, str] = {}


EVIL = "</script><img src=x onerror=pwned()>\"'&\\N {a|b} `$program` ]]> %s\n\x00 é漢"


HOSTILE = Graph(
    EVIL,
    (
        Node(
            f"{EVIL}.go",
            EVIL,
            f"go{EVIL}",
            file=f"{EVIL}.py",
            line=3,
            source=EVIL,
            reads=(EVIL,),
            adds=(f"{EVIL}2",),
            types={EVIL: EVIL},
            branch=EVIL,
            signature=EVIL,
        ),
        Node("batch.mean", "batch", "mean", reads=(f"{EVIL}2",)),
    ),
    (
        Edge(f"{EVIL}.go", "batch.mean", "data", (f"{EVIL}2",), branch=f"not {EVIL}"),
        Edge(EVIL, "batch.mean", "serves"),
    ),
    (WorkerInfo(EVIL, EVIL, describes=EVIL),),
    (EVIL,),
    sources=(SourceInfo(f"data.{EVIL}", EVIL, EVIL, (EVIL,), {EVIL: EVIL}, branch=EVIL),),
)


HOSTILE_PLACED = replace(
    HOSTILE,
    nodes=(
        replace(HOSTILE.nodes[0], pool=EVIL, mesh=EVIL, layout=EVIL, seconds=1.0, share=2.0),
        Node(f"{EVIL}.publish", EVIL, "publish", kind="publish", pool=EVIL),
        HOSTILE.nodes[1],
    ),
    edges=(replace(HOSTILE.edges[0], bytes=1e30, transport=EVIL, version=EVIL), HOSTILE.edges[1]),
    pools=(PoolInfo(EVIL, EVIL, EVIL, EVIL, 3, 1.5, 0.0),),
    plan=EVIL,
)


WILD = pytest.mark.parametrize(
    "graph",
    [*SAMPLES.values(), HOSTILE, *PLACED.values(), HOSTILE_PLACED],
    ids=[*SAMPLES, "hostile", *PLACED, "hostile placed"],
)


def once(graph: Graph, format: str) -> str:
    """The drawing, made once for all tests of a graph."""
    key = format + json.dumps(graph.to_json())
    if key not in _DRAWN:
        _DRAWN[key] = render(graph, format)
    return _DRAWN[key]


def drawn(graph: Graph) -> ElementTree.Element:
    return ElementTree.fromstring(once(graph, "svg"))


def with_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in root.iter() if name in e.get("class", "").split()]
