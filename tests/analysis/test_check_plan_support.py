"""What a backend never ran or refuses, told by check, search and run by one rule: a remark, or an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.analysis.check_plan import plan_findings, refuse
from flowrl.analysis.row_lengths import Tokens
from flowrl.analysis.search_problem import find_plan
from flowrl.cli.arguments.script import load_script
from flowrl.errors import FlowError, PlanError
from flowrl.placement.backends import BACKENDS
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

GRPO = str(Path(__file__).parents[2] / "algorithms" / "grpo.py")
TRAIN = Place("gpu", Mesh.of("fsdp=8"), "fsdp2")
ENGINE = Place("gpu", Mesh.of("dp=8"), "vllm")


def study(
    cluster: str = "h100-80:1x8",
    *,
    train: Place = TRAIN,
    generate: Place = ENGINE,
    model: str = "qwen3-8b",
    prompt: float | None = 100.0,
    response: float = 1024.0,
    rows: int = 16,
):
    flow = load_script(GRPO)
    for handle in flow.handles:
        if handle.arguments.get("model") is not None:
            flow.use_model(handle.name, model)
    whole = Cluster.of(cluster)
    pools = {"gpu": Pool("gpu", devices=tuple(range(whole.size))), "cpu": Pool("cpu", processes=4)}
    place = {
        "actor": {"train": train, "generate": generate},
        "ref": {"train": train},
        "reward": {"train": Place("cpu")},
    }
    plan = Plan(pools, place, cluster=whole)
    tokens = Tokens(prompt, "fixed", (response,))
    return flow, flow.study(plan, "grpo", tokens=tokens, steps=4, prompts_per_step=rows)


def said(study) -> tuple[list[str], dict[str, str]]:
    errors, lints = plan_findings(study)
    by_kind: dict[str, list[str]] = {}
    for lint in lints:
        by_kind.setdefault(lint.kind, []).append(lint.what)
    return [e.what for e in errors], {kind: "\n".join(what) for kind, what in by_kind.items() if kind != "turns"}


def test_a_plan_that_runs_has_no_remark():
    assert said(study(generate=Place("gpu", Mesh.of("dp=8"), "hf"))[1]) == ([], {})


WORDS = {
    "vllm": ("tp=8", "vllm has run with tp=8 on CPUs alone", "Write dp in place of tp, or"),
    "sglang": ("dp=8", "sglang has run on CPUs alone", "Write engine: hf, or"),
}


@pytest.mark.parametrize("name", list(WORDS))
def test_an_engine_that_ran_on_cpus_alone_is_a_remark_on_gpus_and_run_refuses_it_in_the_same_words(name):
    mesh, what, fix = WORDS[name]
    _, hand = study(generate=Place("gpu", Mesh.of(mesh), name))
    words = f"actor.generate: {what}, and this place has h100-80."
    assert said(hand) == ([], {"unrun": f"{words} flowrl run refuses it."})
    with pytest.raises(PlanError) as refused:
        hand.plan.check_workers(["actor", "ref", "reward"], ["fsdp2", name, "hf"])
    assert refused.value.what == words and fix in str(refused.value.fix)
    hand.plan.check_workers(["actor", "ref", "reward"])  # looked at on another machine
    on_cores = Place("gpu", Mesh.of("dp=2"), name)
    _, tiny = study("cpu:1x2", train=Place("gpu", Mesh.of("fsdp=2"), "fsdp2"), generate=on_cores, model="qwen3-0.6b")
    assert "unrun" not in said(tiny)[1]
    tiny.plan.check_workers(["actor", "ref", "reward"], ["fsdp2", name, "hf"])


def test_a_server_that_runs_may_have_gpus():
    _, hand = study(generate=Place("gpu", Mesh.of("dp=8"), "sglang", options={"url": "http://localhost:30000"}))
    assert said(hand) == ([], {})


def test_axes_that_no_run_has_are_a_remark_on_gpus_and_an_error_on_a_cpu():
    stages = Place("gpu", Mesh.of("pp=2,dp=4"), "vllm")
    errors, lints = said(study(generate=stages)[1])
    assert errors == [] and "actor.generate: vllm has pp=2 in no run yet. flowrl run refuses it." in lints["unrun"]
    tiny = study(
        "cpu:1x2", train=Place("gpu", Mesh.of("fsdp=2"), "fsdp2"), generate=Place("gpu", Mesh.of("pp=2"), "vllm")
    )
    assert any("vllm has pp=2 in no run yet" in what for what in said(tiny[1])[0])


def test_fp8_engines_are_a_remark_are_smaller_and_faster_and_are_refused_by_run():
    _, plain = study()
    _, fp8 = study(generate=replace(ENGINE, options={"fp8_weights": True, "fp8_cache": True}))
    errors, lints = said(fp8)
    assert errors == [] and lints["unrun"].startswith("actor.generate: vllm has fp8_")
    kept = [s.pool_memory["gpu"].residents["actor.generate"] for s in (plain, fp8)]
    assert kept[1].row == kept[0].row / 2 and 0.5 < kept[1].staying / kept[0].staying < 0.7, (
        "embeddings stay as they are"
    )
    assert fp8.simulate().step_seconds < plain.simulate().step_seconds
    with pytest.raises(PlanError, match="vllm has fp8_weights in no run yet"):
        fp8.plan.check_workers(["actor", "ref", "reward"], ["fsdp2", "vllm", "hf"])


def test_what_run_refuses_is_what_check_remarks():
    _, hand = study(generate=Place("gpu", Mesh.of("pp=2,dp=4"), "vllm"))
    with pytest.raises(PlanError, match="vllm has pp=2 in no run yet"):
        hand.plan.check_workers(["actor", "ref", "reward"], ["fsdp2", "vllm", "hf"])


STAYS = "sglang does not leave its memory between turns, and pool 'gpu' has no room for its 0.6 GB beside the others."


@pytest.fixture
def stays(monkeypatch):
    """SGLang as an engine that never leaves its memory."""
    monkeypatch.setitem(BACKENDS, "sglang", replace(BACKENDS["sglang"], sleeps=False))


def on_24(engine: Place):
    return study("cpu:1x24", model="qwen3-0.6b", train=Place("gpu", Mesh.of("fsdp=24"), "fsdp2"), generate=engine)[1]


@pytest.mark.usefixtures("stays")
def test_an_engine_that_would_have_to_leave_memory_and_does_not_is_an_error_of_check_and_run():
    tight = on_24(Place("gpu", Mesh.of("dp=6,tp=4"), "sglang"))
    assert "actor.generate" in tight.memory["gpu"].sizes, "it would take turns"
    assert f"actor.generate: {STAYS}" in said(tight)[0]
    with pytest.raises(FlowError) as info:
        refuse(tight, planned=True)
    assert f"actor.generate: {STAYS}" in str(info.value)
    assert "Place it in a pool of its own, or write engine: hf or vllm." in str(info.value)
    here = said(replace(tight, runtime="local"))[0]
    assert not any(STAYS in what for what in here), "in one process nobody leaves"


def test_engines_that_leave_memory_or_have_room_are_not_refused(monkeypatch):
    engines = [
        Place("gpu", Mesh.of("dp=24"), "hf"),
        *(Place("gpu", Mesh.of("dp=6,tp=4"), n) for n in ("vllm", "sglang")),
    ]
    for engine in engines:
        tight = on_24(engine)
        assert "actor.generate" in tight.memory["gpu"].sizes, "it takes turns"
        assert not any("does not leave its memory" in what for what in said(tight)[0])
    monkeypatch.setitem(BACKENDS, "sglang", replace(BACKENDS["sglang"], sleeps=False))
    roomy = study("cpu:1x48", model="qwen3-0.6b", train=Place("gpu", Mesh.of("fsdp=48"), "fsdp2"),
                  generate=Place("gpu", Mesh.of("dp=12,tp=4"), "sglang"))[1]  # fmt: skip
    assert not any("leave its memory" in what for what in said(roomy)[0]) and not roomy.memory


@pytest.mark.usefixtures("stays")
def test_on_gpus_it_is_a_remark_of_check_and_an_error_of_run():
    wide = study("h100-80:2x8", model="qwen3-32b", train=Place("gpu", Mesh.of("fsdp=16"), "fsdp2"),
                 generate=Place("gpu", Mesh.of("dp=8,tp=2"), "sglang"))[1]  # fmt: skip
    errors, lints = said(wide)
    assert "actor.generate" in wide.memory["gpu"].sizes and errors == []
    assert "sglang does not leave its memory between turns" in str(lints["unrun"])
    assert "flowrl run refuses it." in lints["unrun"]
    with pytest.raises(FlowError, match="sglang does not leave its memory between turns"):
        refuse(wide, planned=True)


def test_the_table_says_which_engines_sleep():
    from importlib import import_module

    for row in BACKENDS.values():
        engines = [e for n, e in vars(import_module(row.module)).items() if n.endswith("Engine")]
        assert engines and {hasattr(engine, "sleep") for engine in engines} == {row.sleeps}, row.name


def test_two_axes_that_a_backend_orders_differently_are_an_error():
    mesh = Place("gpu", Mesh.of("cp=2,ep=4"), "megatron")
    errors, _ = said(study(train=mesh, model="qwen3-30b-a3b")[1])
    assert "actor.train: megatron orders ranks differently along cp=2 and ep=4, and does not have both." in errors
    folded = Place("gpu", Mesh.of("cp=2,dp=8,folded_ep=16"), "megatron")
    engine = Place("gpu", Mesh.of("dp=8,tp=2"), "vllm")
    assert said(study("h100-80:2x8", train=folded, generate=engine, model="qwen3-30b-a3b")[1])[0] == []


def test_devices_of_several_kinds_in_one_pool_are_a_remark():
    errors, lints = said(study("h100-80:1x4+l40s:1x4", model="qwen3-0.6b")[1])
    assert errors == [] and "several kinds, h100-80 and l40s" in lints["kinds"]


def test_a_model_on_processes_of_the_host_is_a_remark():
    errors, lints = said(study(generate=Place("cpu", backend="vllm", options={"context": 4096}))[1])
    assert errors == [] and lints["processes"] == (
        "actor.generate: each of the 4 processes of pool 'cpu' computes a whole qwen3-8b on the cores of a host, "
        "whose memory is not checked."
    )


def test_prompts_beyond_the_positions_are_an_error_for_check_and_search_and_cut_responses_a_remark():
    flow, long = study(prompt=50_000.0, rows=1)
    words = "actor.generate: prompts of 50000 tokens; qwen3-8b has 40960 positions in all."
    assert words in said(long)[0]
    cluster = Cluster.of("h100-80:1x8")
    with pytest.raises(PlanError, match="40960 positions in all"):
        find_plan(long.under(Plan(cluster=cluster)), flow.graph("grpo", steps=4, prompts_per_step=1), cluster, (0,))
    _, lints = said(study(prompt=4000.0, response=38_000.0)[1])
    assert lints["positions"] == "actor.generate: rows of 42000 tokens end at the 40960 positions of qwen3-8b."
    assert "positions" not in said(study(prompt=None, response=1024.0)[1])[1]


@pytest.mark.parametrize("staleness", [1001, 10**9, -1])
def test_staleness_that_no_run_keeps_rows_for_is_an_error(staleness):
    with pytest.raises(PlanError, match="staleness is"):
        Pipeline(staleness=staleness)


def test_a_search_refuses_the_same_staleness():
    flow, asked = study()
    cluster = Cluster.of("h100-80:1x8")
    graph = flow.graph("grpo", steps=4, prompts_per_step=16)
    with pytest.raises(PlanError, match="staleness is"):
        find_plan(asked.under(Plan(cluster=cluster)), graph, cluster, (0, 10**9))


MOE = "qwen3-30b-a3b"
CPU = Place("gpu", Mesh.of("dp=4"), "hf")


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("along cp=2 and ep=4", {"train": Place("gpu", Mesh.of("cp=2,ep=4"), "megatron"), "model": MOE}),
        ("no experts for ep=8", {"train": Place("gpu", Mesh.of("ep=8"), "megatron")}),
        ("does not split a model along fsdp", {"train": Place("gpu", Mesh.of("fsdp=8"), "megatron")}),
        ("hf trains on one device", {"train": Place("gpu", Mesh.of("dp=8"), "hf")}),
        ("40960 positions in all", {"prompt": 50_000.0}),
        ("a mixture of experts by tp=2 on CUDA alone", {"train": Place("gpu", Mesh.of("ep=2,tp=2"), "megatron")}),
        ("vllm has pp=2 in no run yet", {"generate": Place("gpu", Mesh.of("pp=2,dp=2"), "vllm")}),
    ],
)
def test_a_run_refuses_what_check_calls_an_error_in_the_same_words(words, asked):
    cpu = "CUDA" in words or "no run yet" in words
    usual = {"train": Place("gpu", Mesh.of("fsdp=4"), "fsdp2"), "generate": CPU, "model": MOE} if cpu else {}
    _, hand = study("cpu:1x4" if cpu else "h100-80:1x8", **{**usual, **asked})
    told = [e for e in plan_findings(hand)[0] if words in e.what]
    assert told, [e.what for e in plan_findings(hand)[0]]
    with pytest.raises(FlowError) as refused:
        refuse(hand, planned=True)
    assert told[0].what in str(refused.value)


# memory that others keep


def test_a_cache_has_what_others_leave_it():
    """The reference and the trained copy stay on the devices: fewer rows are decoded at once, and simulate says so."""
    _, alone = study(rows=2048, response=8192.0)
    work = alone.works["actor.generate"]
    turns = alone.turns("gpu")
    turn = next(t for t in turns if t.title == "actor.generate")
    assert work.held == alone.pool_memory["gpu"].held(turn, turns) > 0
    made = alone.calls["actor.generate"]
    assert alone.work(made) == work, "what a simulation prices"


# a published plan

NEMO = """
cluster: {device: h100-80, nodes: 32, devices_per_node: 8}
pools: {train: {devices: "0-127"}, rollout: {devices: "128-255"}, cpu: {processes: 64}}
place:
  actor:
    train:    {pool: train, mesh: {pp: 8, dp: 4, tp: 4, EP: 16}, backend: megatron}
    generate: {pool: rollout, mesh: {dp: 16, tp: 8}, engine: vllm}
  ref:    {pool: train, mesh: {pp: 8, dp: 4, tp: 4, EP: 16}, backend: megatron}
  reward: {pool: cpu}
pipeline: {staleness: 1}
"""


def test_a_published_plan_of_235_billion_parameters_is_accepted(tmp_path):
    """NVIDIA-NeMo/RL, recipes/llm/performance/grpo-qwen3-235b-32n8g-async-1off.yaml: etp=1, so experts fold."""
    flow = load_script(GRPO)
    for handle in flow.handles:
        if handle.arguments.get("model") is not None:
            flow.use_model(handle.name, "qwen3-235b-a22b")
    plan = tmp_path / "plan.yaml"
    plan.write_text(NEMO.replace("EP", "folded_ep"))
    loaded = Plan.load(plan)
    (tmp_path / "again.yaml").write_text(loaded.to_yaml())
    assert Plan.load(tmp_path / "again.yaml") == loaded
    hand = flow.study(loaded, "grpo", tokens=Tokens(512.0, "fixed", (3000.0,)), steps=4, prompts_per_step=16)
    errors, lints = said(hand)
    assert errors == [] and "folded_ep=16 in no run yet" in lints["unrun"]
    plan.write_text(NEMO.replace("EP", "ep"))
    with pytest.raises(PlanError, match="needs 2048 devices") as caught:
        Plan.load(plan)
    assert caught.value.fix == "Change an axis size, or write folded_ep: 16 in place of ep."
