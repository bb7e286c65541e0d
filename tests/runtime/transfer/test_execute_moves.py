"""Real processes, by shared memory and by gloo: what arrives, how many bytes that took, and who is missing."""

import os
import random
import signal
import time

import pytest
import torch
from fusing import MODELS, checkpoint, fuse
from ranks import copies

from flowrl.errors import FlowError, PlanError, RunError
from flowrl.placement.backends import backend
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.model_shape import ModelShape
from flowrl.placement.model.rank_parameters import parameters_of
from flowrl.placement.model.weight_layout import Layout
from flowrl.placement.reshard.planner import plan_reshard
from flowrl.placement.reshard.senders import Move
from flowrl.runtime.transfer.execute_moves import execute
from flowrl.runtime.transfer.message_order import ALONE, messages_of
from flowrl.runtime.transfer.plan_moves import Held, Moves, holdings, plan_moves
from flowrl.runtime.transfer.rendezvous import new_meeting
from flowrl.runtime.transfer.wire import Wire
from flowrl.workers.weights.weight_boxes import Shard, digest, sums

SMALL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 37,
    "tie_word_embeddings": True,
}
MODEL = ModelShape.from_config(SMALL, "small")
UNIFORM = ModelShape.uniform(layers=12, columns=24)

#: Name: (model, source, its processes, destination, its processes, dtype before, dtype after, bytes of a bucket).
CASES = {
    "dp to tp": (MODEL, "dp=4", range(4), "tp=4", range(4), "float32", "float32", 1 << 20),
    "fsdp to tp and dp": (MODEL, "fsdp=4", range(4), "dp=2,tp=2", range(4), "float32", "float32", 1 << 20),
    "tp to uneven fsdp": (MODEL, "tp=2", range(2), "fsdp=3", range(1, 4), "float32", "float32", 1 << 20),
    "other processes": (MODEL, "fsdp=2", (0, 1), "tp=2", (2, 3), "float32", "float32", 1 << 20),
    "the way back": (MODEL, "tp=2", (2, 3), "fsdp=2", (0, 1), "float32", "float32", 1 << 20),
    "nothing to move": (MODEL, "tp=2,dp=2", range(4), "dp=2,tp=2", range(4), "float32", "float32", 1 << 20),
    "rounded on the way": (MODEL, "fsdp=4", range(4), "tp=4", range(4), "float32", "bfloat16", 1 << 20),
    "widened on the way": (MODEL, "tp=4", range(4), "fsdp=4", range(4), "bfloat16", "float32", 1 << 20),
    "tiny buckets": (MODEL, "fsdp=4", range(4), "tp=4", range(4), "float32", "float32", 100),
    "stages": (MODEL, "pp=3", range(3), "tp=2,dp=2", range(4), "float32", "float32", 1000),
    "nested": (UNIFORM, "tp=4", range(4), "dp=2,tp=2", range(4), "bfloat16", "bfloat16", 1 << 20),
    "passed on": (MODEL, "1", (0,), "dp=3", (1, 2, 3), "float32", "float32", 1000),
    "passed on, rounded": (MODEL, "fsdp=2", (0, 1), "dp=2", (2, 3), "float32", "bfloat16", 1000),
    "passed on by some": (MODEL, "dp=2", (0, 1), "dp=3", (1, 2, 3), "float32", "float32", 1 << 20),
}
#: Where processes are, of cases with several nodes: what comes to a node comes there once, and is passed on.
NODES = {
    "passed on": lambda process: min(process, 1),
    "passed on, rounded": lambda process: process // 2,
    "passed on by some": lambda process: process // 2,
}
#: Into the parameters of an engine's ranks. Name: (model, source, its processes, tp, its processes, engine).
ENGINES = {
    "on other processes": ("llama with biases", "fsdp=2", (0, 1), 2, (2, 3), "vllm"),
    "a tied head": ("qwen3, tied", "pp=2", (0, 1), 2, (2, 3), "vllm"),
    "where ranks train": ("qwen2, tied", "fsdp=2,tp=2", range(4), 4, range(4), "vllm"),
    "experts": ("experts", "ep=2,tp=2", range(4), 4, range(4), "sglang"),
    "a whole model": ("a shared expert", "fsdp=3", (1, 2, 3), 1, (0,), "vllm"),
}


def numbers(model, dtype):
    """Every weight in full, the same in each process."""
    made = torch.Generator().manual_seed(1)
    stacks = [w for s in model.stacks for w in s.weights()]
    return {w.name: torch.randn(w.shape, generator=made).to(getattr(torch, dtype)) for w in stacks}


def shards_of(model, mesh, rank, dtype, full=None):
    """The shards of a rank of a mesh, without ``full`` of no numbers. They want gradients, as those of a model do."""
    layout, found = Layout(model, mesh), []
    earlier = {(w.name, box) for r in range(rank) for w, box in layout.holds(r)}
    for weight, box in layout.holds(rank):
        part = inside(full[weight.name], box).clone() if full else torch.full([b - a for a, b in box], float("nan"))
        tensor = part.to(getattr(torch, dtype)).requires_grad_()
        main = (weight.name, box) not in earlier
        found.append(Shard(weight.name, weight.shape, tuple(a for a, _ in box), tensor, main=main))
    return found


def inside(tensor, box):
    return tensor[tuple(slice(a, b) for a, b in box)]


def planned(case):
    """The moves, and what the planner of layouts says of them; its hosts, where it takes that many processes."""
    model, src, sources, dst, targets, before, after, _ = CASES[case]
    move = plan_reshard(model, Mesh.of(src), Mesh.of(dst), tuple(sources), tuple(targets))
    ranks = dict(zip(move.devices, move.ranks, strict=True))
    held = {p: holdings(shards_of(model, Mesh.of(src), r, before)) for r, p in enumerate(sources)}
    wanted = {p: holdings(shards_of(model, Mesh.of(dst), r, after)) for p, r in ranks.items()}
    return plan_moves(held, wanted, node=NODES.get(case)), ranks, move


def run_case(case, me, wire):
    """One process: both sides of it, the move, and what is there afterwards."""
    model, src, sources, dst, _, before, after, bucket = CASES[case]
    moves, ranks, _ = planned(case)
    full = numbers(model, before)
    source = shards_of(model, Mesh.of(src), list(sources).index(me), before, full) if me in sources else []
    target = shards_of(model, Mesh.of(dst), ranks[me], after) if me in ranks else []
    moved = execute(moves, me=me, source=source, target=target, wire=wire, bucket_bytes=bucket)
    return {
        "moved": moved,
        "equal": all(torch.equal(s.tensor, inside(full[s.name], s.box).to(s.tensor.dtype)) for s in target),
        "kept": all(torch.equal(s.tensor, inside(full[s.name], s.box)) for s in source),
        "before": sums(source, getattr(torch, after)),
        "after": sums(target),
    }


def planned_into_engine(case):
    """The planner's move of layouts: who hosts which rank of the engine, and what each receives."""
    name, src, sources, tp, targets, engine = ENGINES[case]
    mesh, rules = Mesh({"tp": tp}), backend(engine).layout
    return plan_reshard(MODELS[name], Mesh.of(src), mesh, tuple(sources), tuple(targets), rules=rules)


def received_shards(parameters):
    """Zeros for each parameter of a rank, and its parts as views that a move writes into."""
    tensors = {one.name: torch.zeros(one.shape) for one in parameters}
    parts = ((one.name, part) for one in parameters for part in one.parts)
    views = [
        Shard(part.name, part.shape, tuple(a for a, _ in part.box), inside(tensors[name], part.at))
        for name, part in parts
    ]
    return tensors, views


def engine_case(case, me, wire):
    """One process of a move into engines: whether its parameters are those of plain fusing, and what it moved."""
    name, src, sources, tp, _, _ = ENGINES[case]
    model, move = MODELS[name], planned_into_engine(case)
    whole, ranks = checkpoint(model), dict(zip(move.devices, move.ranks, strict=True))
    full = {n: torch.tensor(array, dtype=torch.float32) for n, array in whole.items()}
    parameters = {p: list(parameters_of(move.dst, rank)) for p, rank in ranks.items()}
    source = {p: shards_of(model, Mesh.of(src), r, "float32", full) for r, p in enumerate(sources)}
    wanted = {p: holdings(received_shards(own)[1]) for p, own in parameters.items()}
    moves = plan_moves({p: holdings(own) for p, own in source.items()}, wanted)
    tensors, target = received_shards(parameters.get(me, []))
    moved = execute(moves, me=me, source=source.get(me, []), target=target, wire=wire, bucket_bytes=1000)
    plain = fuse(whole, model, tp=tp, rank=ranks[me]) if me in ranks else {}
    found = {n.replace(".routed_experts.", "."): tensor for n, tensor in tensors.items()}
    equal = found.keys() == plain.keys() and all(
        torch.equal(found[n], torch.tensor(array, dtype=torch.float32)) for n, array in plain.items()
    )
    return {"equal": equal, "moved": moved, "parts": target}


DTYPES = ("float32", "bfloat16", "int64", "uint8", "bool", "float64", "float8_e4m3fn")


def random_case(seed, me, wire):
    """Boxes of all kinds of weights, cut and copied without any order, between four processes."""
    chance, made = random.Random(seed), torch.Generator().manual_seed(seed)
    weights = {}
    for number in range(8):
        shape = tuple(chance.randint(1, 9) for _ in range(chance.randint(0, 3)))
        whole = torch.randint(0, 2, shape, generator=made) if number % 2 else torch.randn(shape, generator=made)
        weights[f"w{number}"] = whole.to(getattr(torch, DTYPES[chance.randrange(len(DTYPES))]))

    def box(shape):
        return tuple(tuple(sorted((chance.randint(0, n), chance.randint(0, n)))) for n in shape)

    held, wanted = [[] for _ in range(4)], [[] for _ in range(4)]
    for name, whole in weights.items():
        full = tuple((0, n) for n in whole.shape)
        for at in (full, *(box(whole.shape) for _ in range(4))):
            held[chance.randrange(4)].append((name, at))
        for _ in range(4):
            wanted[chance.randrange(4)].append((name, box(whole.shape)))

    def shards(boxes, fill):
        return [
            Shard(n, tuple(weights[n].shape), tuple(a for a, _ in b), fill(inside(weights[n], b))) for n, b in boxes
        ]

    told = [{p: holdings(shards(boxes, torch.Tensor.clone)) for p, boxes in enumerate(side)} for side in (held, wanted)]
    moves = plan_moves(*told)
    source, target = shards(held[me], torch.Tensor.clone), shards(wanted[me], torch.zeros_like)
    moved = execute(moves, me=me, source=source, target=target, wire=wire, bucket_bytes=chance.choice((8, 50, 1000)))
    assert moved.received == moves.received.get(me, 0)
    assert moved.sent == moves.sent.get(me, 0)
    return all(same(s.tensor, inside(weights[s.name], s.box)) for s in target)


def same(a, b):
    a, b = (torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def large_case(me, wire):
    """More than a buffer in all directions, most of it as it lies in memory: process p wants what all others have."""
    rows = 3 * ALONE // 4 // 256
    weights = {f"w{p}": torch.arange(rows * 256, dtype=torch.float32).view(rows, 256) + p for p in range(4)}
    at = ((0, rows), (0, 256))
    told = {p: {f"w{p}": Held("float32", 4, (rows, 256), (at,))} for p in range(4)}
    asked = {p: {f"w{q}": Held("float32", 4, (rows, 256), (at,)) for q in range(4)} for p in range(4)}
    moves = plan_moves(told, asked)
    target = [Shard(n, (rows, 256), (0, 0), torch.zeros(rows, 256)) for n in weights]
    source = [Shard(f"w{me}", (rows, 256), (0, 0), weights[f"w{me}"].t().contiguous().t() if me else weights["w0"])]
    moved = execute(moves, me=me, source=source, target=target, wire=wire, bucket_bytes=ALONE)
    return moved, all(torch.equal(s.tensor, weights[s.name]) for s in target)


def ring():
    """Each process to the next one."""
    return Moves(tuple(Move("w", p, (p + 1) % 4, ((0, 4),)) for p in range(4)), {"w": ("float32", 4)})


def go_round(me, wire, moves):
    """The ring; what a FlowError says, and how long that took."""
    begun = time.perf_counter()
    whole = Shard("w", (4,), (0,), torch.full((4,), float(me)))
    target = [Shard("w", (4,), (0,), torch.zeros(4))]
    try:
        execute(moves, me=me, source=[whole], target=target, wire=wire)
    except FlowError as error:
        return error.what, time.perf_counter() - begun
    return "", time.perf_counter() - begun


#: The processes that read each other's memory.
WAYS = {"shared memory": range(4), "one by gloo": (0, 1, 3)} if hasattr(os, "memfd_create") else {"all by gloo": ()}


def process(me, way, meetings, together, said):
    """What one of four processes does, all cases in a row; its findings are said."""
    torch.set_num_threads(1)
    shared = me in WAYS[way]
    with Wire(me=me, size=4, meeting=meetings[0], timeout=30, shared=shared) as wire:
        found = {"shares": [(a, b) for a in range(4) for b in range(4) if wire.shares(a, b)]}
        for case in CASES:
            found[case] = run_case(case, me, wire)
        found["engines"] = {case: engine_case(case, me, wire) for case in ENGINES}
        for one in found["engines"].values():
            one["parts"] = sums(one["parts"])
        found["random"] = [random_case(seed, me, wire) for seed in range(12)]
        found["large"] = large_case(me, wire)
        found["ring"] = go_round(me, wire, ring())
    found["closed"] = go_round(me, wire, ring())
    other = Moves(ring().moves, {"w": ("float64", 8)}) if me == 2 else ring()
    with Wire(me=me, size=4, meeting=meetings[1], timeout=30, shared=shared) as wire:
        found["other moves"] = go_round(me, wire, other)
    with Wire(me=me, size=4, meeting=meetings[2], timeout=30, shared=shared) as wire:
        wire.timeout = 1
        if me < 3:
            found["late"] = go_round(me, wire, ring())
        together.wait()
    if me < 3:
        found["absent"] = come(me, meetings[3])
    with Wire(me=me, size=4, meeting=meetings[4], timeout=30, shared=shared) as wire:
        said.send(found)
        if me == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        said.send(go_round(me, wire, ring()))


def come(me, meeting):
    """To a meeting that process 3 never comes to."""
    begun = time.perf_counter()
    try:
        Wire(me=me, size=4, meeting=meeting, timeout=2)
    except RunError as error:
        return error.what, time.perf_counter() - begun


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    """How the four processes reach each other."""
    return request.param


@pytest.fixture(scope="module")
def found(way, tmp_path_factory):
    """What the four processes found, by process."""
    folder = tmp_path_factory.mktemp("run")
    meetings = [new_meeting(folder) for _ in range(5)]
    context = copies()
    together = context.Barrier(4)
    pipes = [context.Pipe(duplex=False) for _ in range(4)]
    processes = [
        context.Process(target=process, args=(p, way, meetings, together, said), daemon=True)
        for p, (_, said) in enumerate(pipes)
    ]
    for one in processes:
        one.start()
    for _, said in pipes:
        said.close()
    told = [heard.recv() for heard, _ in pipes]
    for one, (heard, _) in zip(told[:3], pipes, strict=False):
        one["killed"] = heard.recv()
    for one in processes:
        one.join(20)
    assert [one.exitcode for one in processes] == [0, 0, 0, -signal.SIGKILL]
    return told


# ---- what arrives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_destination_is_the_full_tensor_bit_for_bit(found, case):
    assert all(one[case]["equal"] and one[case]["kept"] for one in found)


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_plan(found, case):
    model, *_, after, _ = CASES[case]
    moves, _, move = planned(case)
    size = getattr(torch, after).itemsize
    planner = {d: n // model.dtype_bytes * size for d, n in zip(move.devices, move.received, strict=True) if n}
    assert {p: one[case]["moved"].received for p, one in enumerate(found) if one[case]["moved"].received} == planner
    for p, one in enumerate(found):
        moved = one[case]["moved"]
        assert moved.received == moves.received.get(p, 0)
        assert moved.sent == moves.sent.get(p, 0)
        assert moved.local == moves.local.get(p, 0)


@pytest.mark.parametrize("case", NODES)
def test_every_number_comes_to_a_node_once_and_is_passed_on_there(case):
    moves, ranks, move = planned(case)
    node = NODES[case]
    across = [m for m in moves.moves if not m.local and node(m.source) != node(m.target)]
    assert sum(m.numbers for m in across) == MODEL.parameters
    assert len({(node(m.target), m.name, m.box) for m in across}) == len(across)
    relayed = [m for m in moves.moves if m.relayed]
    assert sum(m.numbers for m in relayed) == MODEL.parameters * (len([p for p in ranks if node(p) == 1]) - 1)
    assert {m.source for m in relayed} == {p for p in ranks if node(p) == 1}, "they take turns"
    assert moves.total == move.total // MODEL.dtype_bytes * moves.dtypes["model.norm.weight"][1]


@pytest.mark.parametrize("case", CASES)
def test_the_digest_is_the_same_before_and_after(found, case):
    before, after = (digest(one[case][side] for one in found) for side in ("before", "after"))
    assert before == after == digest([sums(whole(numbers(CASES[case][0], CASES[case][5]), CASES[case][6]))])


def whole(weights, dtype):
    return [Shard(n, tuple(t.shape), (0,) * t.dim(), t.to(getattr(torch, dtype))) for n, t in weights.items()]


def test_nested_layouts_receive_what_hybridflow_allows(found):
    model_bytes = UNIFORM.parameters * 2
    assert {one["nested"]["moved"].received for one in found} == {(4 - 2) * model_bytes // (2 * 4)}


def test_where_all_is_there_nothing_is_sent(found):
    for case in ("dp to tp", "nothing to move"):
        assert {one[case]["moved"].received for one in found} == {0}


@pytest.mark.parametrize("case", ENGINES)
def test_ranks_of_an_engine_get_their_parameters_in_the_bytes_of_the_plan(found, case):
    name, _, _, tp, _, _ = ENGINES[case]
    move = planned_into_engine(case)
    forecast = dict(zip(move.devices, (n // MODELS[name].dtype_bytes * 4 for n in move.received), strict=True))
    for p, one in enumerate(found):
        assert one["engines"][case]["equal"]
        assert one["engines"][case]["moved"].received == forecast.get(p, 0)
    assert sum(forecast.values()) == sum(one["engines"][case]["moved"].sent for one in found) > 0
    if tp == 1:
        whole = {n: torch.tensor(array, dtype=torch.float32) for n, array in checkpoint(MODELS[name]).items()}
        full = [Shard(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in whole.items()]
        assert digest([found[0]["engines"][case]["parts"]]) == digest([sums(full)])


def test_staging_is_bounded(found, way):
    most = 8 if way == "one by gloo" else 4
    for one in found:
        assert 0 < one["tiny buckets"]["moved"].peak_staging <= most * (1 << 20)  # buffers stay from earlier cases
        moved, equal = one["large"]
        assert equal and moved.received == moved.sent == 9 * ALONE
        assert moved.peak_staging <= most * ALONE


def test_all_know_who_reads_whose_memory(found, way):
    for one in found:
        assert one["shares"] == [(a, b) for a in WAYS[way] for b in WAYS[way] if a != b]


def test_any_boxes_of_any_dtype(found):
    assert all(all(one["random"]) and len(one["random"]) == 12 for one in found)


# ---- who is missing -----------------------------------------------------------------------------------------------


def test_a_process_with_other_moves_is_found(found):
    assert found[0]["ring"][0] == ""
    for p, peers in ((2, "process 1 and process 2"), (3, "process 2 and process 3")):
        said = found[p]["other moves"][0]
        assert f"{peers} have planned other moves" in said and "w" in said


def test_a_process_that_does_not_come_is_named(found):
    said, seconds = found[0]["late"]
    assert said == "w, and what goes with it, did not get from process 3 to process 0: not in 1 s."
    assert seconds < 3


def test_a_process_that_never_was_there_is_named(found):
    said, seconds = found[0]["absent"]
    assert said == "of 4 processes that are to move weights, 3 did not come in 2 s."
    assert seconds < 4
    assert [one["absent"][0] for one in found[1:3]] == [said, said]


@pytest.mark.parametrize("me", [0, 1])
def test_a_process_that_is_told_waits_for_nobody(me, tmp_path):
    """The first one for the others, or another for the first."""
    asked = []

    def wanted():
        asked.append(True)
        return len(asked) < 2

    start = time.monotonic()
    with pytest.raises(RunError, match=f"process {me} was told that the others will not come"):
        Wire(me=me, size=2, meeting=new_meeting(tmp_path), timeout=60, wanted=wanted)
    assert time.monotonic() - start < 10


def test_a_killed_process_is_found_at_once(found):
    assert found[0]["killed"][0].startswith(
        "w, and what goes with it, did not get from process 3 to process 0: process 3 is gone"
    )
    assert "to process 3" in found[2]["killed"][0] or "process 1 to process 2" in found[2]["killed"][0]
    assert max(one["killed"][1] for one in found[:3]) < 5


def test_a_closed_wire_says_so(found):
    assert found[1]["closed"][0] == "this wire of process 1 is of no more use: it was closed."


# ---- in one process -----------------------------------------------------------------------------------------------


def test_one_process_moves_between_two_engines_of_its_own():
    full = numbers(MODEL, "float32")
    source = shards_of(MODEL, Mesh(), 0, "float32", full)
    halves = [shards_of(MODEL, Mesh.of("tp=2"), r, "bfloat16") for r in (0, 1)]
    target = halves[0] + halves[1]
    moves = plan_moves({0: holdings(source)}, {0: holdings(target)})
    moved = execute(moves, me=0, source=source, target=target)
    assert (moved.received, moved.sent, moved.local) == (0, 0, 2 * sum(t.numel() for t in full.values()))
    assert all(torch.equal(s.tensor, inside(full[s.name], s.box).bfloat16()) for s in target)


def test_moves_to_others_need_a_wire():
    with pytest.raises(RunError, match="no wire"):
        execute(ring(), me=0)


def test_shards_that_were_not_planned_with_are_an_error():
    moves = Moves((Move("w", 0, 0, ((0, 4),)),), {"w": ("float32", 4)})
    with pytest.raises(RunError, match=r"take w\[0:4\] from shards that do not have it") as info:
        execute(moves, me=0, source=[Shard("w", (4,), (2,), torch.zeros(2))])
    assert info.value.have == "[2:4]"


# ---- plans and messages -------------------------------------------------------------------------------------------


def held(*boxes, dtype="float32", shape=(8,)):
    return {"w": Held(dtype, 4, shape, boxes)}


@pytest.mark.parametrize(
    ("sources", "targets", "said"),
    [
        ({0: held(((0, 8),), shape=(8,))}, {1: held(((0, 9),), shape=(9,))}, "w is [9] where it goes (process 1)"),
        ({0: held(((0, 8),)), 1: held(shape=(9,))}, {}, "w as held is [8] in process 0, [9] in process 1"),
        ({0: held(((0, 8),))}, {1: held(((0, 4),)), 2: held(((4, 8),), dtype="int32")}, "and int32 in process 2"),
        ({0: held(((0, 4),))}, {1: held(((0, 8),))}, "process 1 is to have w[4:8], and no process holds it"),
    ],
)
def test_what_does_not_fit_is_found_before_anything_is_sent(sources, targets, said):
    with pytest.raises(PlanError) as info:
        plan_moves(sources, targets)
    assert said in info.value.what


def test_sources_may_differ_in_dtype():
    moves = plan_moves({0: held(((0, 4),)), 1: held(((4, 8),), dtype="bfloat16")}, {2: held(((0, 8),))})
    assert moves.received == {2: 32} and moves.sent == {0: 16, 1: 16} and moves.total == 32 and moves.local == {}


def all_pairs(count, chance):
    """Moves between all processes, of any sizes, in any order."""
    found, sizes = [], {}
    for number in range(60):
        name = f"w{number}"
        sizes[name] = chance.choice((("float64", 8), ("float32", 4), ("bfloat16", 2), ("bool", 1)))
        source, target = chance.sample(range(count), 2)
        found.append(Move(name, source, target, ((0, chance.randint(1, 400)), (3, 3 + chance.randint(1, 5)))))
    return Moves(tuple(found), sizes)


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_bounded_whole_and_the_same_at_both_ends(seed):
    chance = random.Random(seed)
    moves = all_pairs(5, chance)
    lists = [messages_of(moves, p, size=5, most=512) for p in range(5)]
    for p, mine in enumerate(lists):
        assert all(m.size <= 512 and p in (m.source, m.target) for m in mine)
        for m in mine:
            assert m in lists[m.source] and m in lists[m.target]
            sizes = [moves.dtypes[piece.name][1] for piece in m.pieces]
            assert all(piece.first % size == 0 for piece, size in zip(m.pieces, sizes, strict=True))
        assert sum(m.size for m in mine if m.target == p) == moves.received.get(p, 0)


def test_large_pieces_go_together_where_memory_is_shared():
    box = ((0, ALONE // 4),)
    moves = Moves(
        tuple(Move(f"w{n}", 0, target, box) for target in (1, 2) for n in range(5)),
        {f"w{n}": ("float32", 4) for n in range(5)},
    )
    made = messages_of(moves, 0, size=3, most=2 * ALONE, shares=lambda source, target: target == 1)
    assert [len(m.pieces) for m in made if m.target == 1] == [2, 2, 1]
    assert [len(m.pieces) for m in made if m.target == 2] == [1] * 5


@pytest.mark.parametrize("window", [1, 2, 64])
@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_arrival_stops_them(seed, window):
    """A message gets through when both its ends have opened it; each end waits for its oldest one."""
    chance = random.Random(seed)
    left = [messages_of(all_pairs(5, random.Random(seed)), p, size=5, most=512) for p in range(5)]
    flying = [[] for _ in range(5)]
    while any(left) or any(flying):
        moved = False
        for p in chance.sample(range(5), 5):
            while left[p] and len(flying[p]) < window:
                flying[p].append(left[p].pop(0))
                moved = True
            if flying[p]:
                first = flying[p][0]
                peer = first.source if first.target == p else first.target
                if first not in left[peer]:
                    flying[p].pop(0)
                    moved = True
        assert moved, "all wait for each other"
