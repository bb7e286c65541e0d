"""Write the tables of docs/reshard.md: ``python docs/make_reshard_table.py``. A test keeps the page up to date."""

from pathlib import Path

from flowrl.placement.backends import backend
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.model_shape import ModelShape, shape_named
from flowrl.placement.model.model_weights import TP_DIM
from flowrl.placement.model.weight_layout import Layout
from flowrl.placement.reshard.planner import plan_layouts, plan_reshard

PAGE = Path(__file__).parent / "reshard.md"
START, END = "<!-- tables: written by docs/make_reshard_table.py -->", "<!-- end of tables -->"
#: HybridFlow, figure 14: model, training mesh, generation mesh.
NESTED = [
    ("llama-7b", "tp=8,dp=16", "tp=2"),
    ("llama-13b", "tp=8,dp=16", "tp=4"),
    ("llama-34b", "tp=8,pp=4,dp=4", "tp=8"),
    ("llama-70b", "tp=8,pp=8,dp=2", "tp=8"),
    ("qwen3-30b-a3b", "tp=4,pp=2,dp=2", "tp=4"),
]
OTHER = [("tp=4,dp=4", "tp=8"), ("tp=2,dp=8", "tp=4"), ("fsdp=8", "tp=2"), ("fsdp=16", "tp=4"), ("fsdp=64", "tp=8")]
#: What generates with an engine: model, sizes of tp.
ENGINES = [
    ("qwen3-8b", (2, 4, 8)),
    ("qwen3-0.6b", (2, 4)),
    ("qwen3-32b", (4, 8)),
    ("llama-70b", (8, 16)),
    ("qwen3-30b-a3b", (4, 8)),
]
UNIFORM = ModelShape.uniform(layers=8, columns=128)


def tables() -> str:
    """All tables, as Markdown."""
    nested = [
        "| model | M, GB | from | to | gather | vanilla | HybridFlow | formula | ours | peak | redundant |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_nested_row, NESTED),
    ]
    other = [
        "| from | to | model | gather | ranks in a row | ours | peak | redundant |",
        "|---|---|---|---|---|---|---|---|",
        *(_other_row(src, dst, model) for src, dst in OTHER for model in (UNIFORM, shape_named("llama-7b"))),
        *(_other_row(src, dst, shape_named("llama-70b")) for src, dst in OTHER[-1:]),
    ]
    return "\n".join(
        [
            "Received per device in GB, at most:",
            "",
            *nested,
            "",
            "Received per device as a part of M, at most:",
            "",
            *other,
            "",
            "Received by each rank of an engine on other devices, in GB, at most:",
            "",
            "| model | tp | whole model | `nccl_m2n` | ours | ours / `nccl_m2n` | with its vocabulary split |",
            "|---|---|---|---|---|---|---|",
            *(_engine_row(shape_named(name), tp) for name, sizes in ENGINES for tp in sizes),
        ]
    )


def _nested_row(row: tuple[str, str, str]) -> str:
    name, src, dst = row
    model, old, new = shape_named(name), Mesh.of(src), Mesh.of(dst)
    whole, before, after = model.bytes, old["tp"] * old["pp"], new["tp"] * new["pp"]
    shards = Mesh({"fsdp": old.size})  # as DeepSpeed-Chat trains
    found = [plan_reshard(model, shards, new, grouping="gather")]
    found += [plan_reshard(model, old, new, grouping=g) for g in ("vanilla", "hybridflow", "overlap")]
    gather, vanilla, hybridflow, ours = (max(move.received) for move in found)
    formula = (before - after) / (after * before) * whole
    peak, redundant = max(found[-1].peak), max(found[-1].redundant)
    bytes_ = [gather, vanilla, hybridflow, formula, ours, peak, redundant]
    return (
        f"| {name} | {whole / 1e9:.1f} | {_mesh(old)} | {_mesh(new)} | {' | '.join(f'{n / 1e9:.2f}' for n in bytes_)} |"
    )


def _other_row(src: str, dst: str, model: ModelShape) -> str:
    old, new = Mesh.of(src), Mesh.of(dst)
    whole = model.bytes
    gather = max(plan_reshard(model, old, new, grouping="gather").received)
    row = _ranks_in_a_row(model, old, new)
    ours = plan_reshard(model, old, new)
    cells = [gather, row, max(ours.received), max(ours.peak), max(ours.redundant)]
    return f"| {_mesh(old)} | {_mesh(new)} | {model.name} | {' | '.join(f'{n / whole:.4f}' for n in cells)} |"


def _ranks_in_a_row(model: ModelShape, src: Mesh, dst: Mesh) -> float:
    """Received on average if devices fetch what they lack, but host the destination in the order of their numbers."""
    devices, ranks = range(src.size), [device % dst.size for device in range(src.size)]
    lacks = plan_layouts(Layout(model, src), devices, Layout(model, dst), devices, ranks).received
    return sum(lacks.values()) * model.dtype_bytes / src.size


def _engine_row(model: ModelShape, tp: int) -> str:
    trains, generates = Mesh({"fsdp": 16}), Mesh({"tp": tp})
    rules = backend("vllm").layout
    ours = max(plan_reshard(model, trains, generates, dst_devices=range(16, 16 + tp), rules=rules).received)
    theirs, split = whole_weights(model, tp), whole_weights(model, tp, vocabulary=False)
    bytes_ = " | ".join(f"{n / 1e9:.3f}" for n in (model.bytes, theirs, ours))
    return f"| {model.name} | {tp} | {bytes_} | {ours / theirs:.3f} | {ours / split:.3f} |"


def whole_weights(model: ModelShape, tp: int, *, vocabulary: bool = True) -> float:
    """Bytes that a rank gets where fused weights, and those of the ``vocabulary``, are sent whole to every rank."""
    found = 0.0
    for stack in model.stacks:
        weight = stack.weight
        whole = weight.fused or weight.kind.startswith("expert") or (vocabulary and weight.kind == "vocab")
        parts = 1 if whole or TP_DIM[weight.kind] is None else tp
        found += stack.layers * weight.elements / parts * model.dtype_bytes
    return found


def _mesh(mesh: Mesh) -> str:
    return " ".join(f"{axis}{size}" for axis, size in mesh.axes.items())


def page(text: str) -> str:
    """The page with fresh tables between its markers."""
    before, rest = text.split(START)
    return f"{before}{START}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
