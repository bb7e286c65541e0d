"""What of the engine vllm is there without vLLM: its options in a plan, its versions, shared weights and the proof."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.backends import open_engine
from flowrl.backends.draw import draw_from
from flowrl.backends.hf.generation.sample import draw
from flowrl.backends.probe import TOLERANCE, expected, probe_rows
from flowrl.backends.vllm import server as process
from flowrl.backends.vllm import versions
from flowrl.backends.vllm.columns import differing, picked, wanted
from flowrl.backends.vllm.proof import check_probe, check_weights
from flowrl.backends.vllm.weight_memory import WeightMemory, open_weights
from flowrl.errors import ModelError, PlanError, RunError
from flowrl.lowering.deployment import deploy_on_ranks
from flowrl.placement.backends import backend
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.model_shape import ModelShape
from flowrl.placement.model.rank_parameters import parameters_of
from flowrl.placement.model.weight_layout import Layout
from flowrl.placement.plan.plan import Place, Plan, Pool
from flowrl.placement.plan.plan_file import read
from flowrl.workers.model_options import Build, Model, Sampling
from flowrl.workers.weights.weight_boxes import Shard, digest, sums

CONFIG = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 20,
}
TEXT = """pools: {train: {device: cpu}, rollout: {device: cpu}}
place:
  actor:
    train:    {pool: train}
    generate: {pool: rollout, engine: vllm, SAID}
"""


def test_options_stand_beside_the_engine_and_read_back():
    plan = read(TEXT.replace("SAID", "kv_cache: 2, rows: 8, compiled: true"))
    options = {"kv_cache": 2, "rows": 8, "compiled": True}
    assert plan.place_of("actor", "generate").options == options
    assert read(plan.to_yaml()) == plan
    assert plan != read(TEXT.replace("SAID", "rows: 8"))
    made = Plan({"a": "cpu", "b": "cpu"}, {"actor": {"generate": Place("b", backend="vllm", options=options)}})
    assert read(made.to_yaml()).place == made.place


@pytest.mark.parametrize(
    ("said", "what", "fix"),
    [
        ("kv_cach: 2", "actor.generate has no 'kv_cach'", "Did you mean 'kv_cache'?"),
        ("kv_cache: 0", "kv_cache is a number from 0.0625 up, not 0", "Write kv_cache: 1."),
        ("rows: 2.5", "rows is a whole number from 1 up, not 2.5", "Write rows: 256."),
        ("compiled: 1", "compiled is true or false, not 1", "Write compiled: false."),
        ("context: true", "context is a whole number from 2 up, not true", "Write context: 2."),
        ("kv_cache: nan", "kv_cache is a number from 0.0625 up, not nan", "Write kv_cache: 1."),
    ],
)
def test_a_wrong_option_is_told_with_its_line(said, what, fix):
    with pytest.raises(PlanError) as info:
        read(TEXT.replace("SAID", said), "here.yaml")
    assert what in info.value.what and info.value.fix == fix
    assert info.value.at is not None and (info.value.at.file, info.value.at.line) == ("here.yaml", 5)


def test_an_option_of_another_engine_is_told():
    with pytest.raises(PlanError, match="actor.generate has no 'rows'"):
        read(TEXT.replace("engine: vllm, SAID", "engine: hf, rows: 8"))
    with pytest.raises(PlanError, match="'actor': hf has no option 'rows'"):
        Plan({"a": "cpu"}, {"actor": {"generate": Place("a", options={"rows": 8})}})


def test_a_run_has_it_with_dp_and_tp():
    row = backend("vllm")
    plan = Plan({"a": Pool("a", processes=2)}, {"actor": {"generate": Place("a", backend="vllm")}})
    wrong = ("vllm has pp=2 in no run yet.", "Write dp in place of pp.")
    on_gpus = "vllm has run with tp=2 on CPUs alone, and this place has h100-80."
    assert [what for what, _ in row.unrun({"dp": 2, "tp": 2}, {}, "h100-80")] == [on_gpus]
    assert list(row.unrun({"dp": 2}, {}, "h100-80")) == [] and list(row.unrun({"tp": 1}, {}, "cuda")) == []
    assert list(row.unrun({"dp": 2, "tp": 2}, {})) == [] and list(row.unrun({"dp": 2, "pp": 2}, {})) == [wrong]
    plan.check_workers(["actor"], ["hf", "vllm"])
    text = "cluster: {device: cpu, devices_per_node: 2}\npools: {a: {devices: all}}\nplace:\n  actor:\n"
    split = read(text + "    generate: {pool: a, mesh: {pp: 2}, engine: vllm}\n", "here.yaml")
    split.check_workers(["actor"])  # it can be looked at
    with pytest.raises(PlanError, match="actor: vllm has pp=2 in no run yet") as info:
        split.check_workers(["actor"], ["vllm"])
    assert info.value.at is not None and info.value.at.line == 5 and info.value.fix == wrong[1]


@pytest.mark.parametrize(("devices", "crosses"), [("0-3", False), ("1-4", True), ("0-1,4-5", False), ("3-6", True)])
def test_ranks_that_split_it_are_on_one_node(devices, crosses):
    """Two of them read each other's memory: a plan that has them on two nodes is refused before anything is started."""
    pools = f"cluster: {{device: cpu, nodes: 2, devices_per_node: 4}}\npools: {{a: {{devices: '{devices}'}}}}\n"
    text = pools + "place:\n  actor:\n    generate: {pool: a, mesh: {dp: 2, tp: 2}, engine: vllm}\n"
    plan = read(text, "here.yaml")
    plan.check_workers(["actor"])  # it can be looked at
    if not crosses:
        return plan.check_workers(["actor"], ["vllm"])
    with pytest.raises(PlanError, match="groups of tp=2 cross nodes, and vllm splits a model inside a node") as info:
        plan.check_workers(["actor"], ["vllm"])
    assert info.value.at is not None and info.value.at.line == 5 and "groups of 2" in str(info.value.fix)


def test_replicas_answer_each_for_itself_and_split_models_together(monkeypatch):
    import flowrl as fl

    flow = fl.Flow("one")
    actor: Any = flow.worker(fl.Actor, model=Model(config=CONFIG), name="actor")
    for axes, together in (({"dp": 2}, False), ({"tp": 2}, True)):
        cluster = fl.Cluster.of("cpu:1x3")
        places = {"actor": {"train": Place("t"), "generate": Place("r", Mesh(axes), "vllm", options={"rows": 4})}}
        plan = Plan({"t": Pool("t", devices=(0,)), "r": Pool("r", devices=(1, 2))}, places, cluster)
        found = deploy_on_ranks([actor], plan, trained=["actor"], sampled=["actor"])["actor", True]
        assert (found.spec.collective, found.spec.options) == (together, {"rows": 4})
        assert found.shares == ((0, 0) if together else (0, 1))


def test_a_version_that_is_not_supported_is_told(monkeypatch):
    versions.check_version("0.32.7")
    versions.check_version("0.33.0+cpu")
    with pytest.raises(ModelError, match=r"vLLM 0\.34\.0 is installed; flowrl supports 0\.32, 0\.33"):
        versions.adapter("0.34.0")

    there, found = metadata.version, {}

    def version(name):
        if name in versions.PACKAGES and name not in found:
            raise metadata.PackageNotFoundError(name)
        return found.get(name) or there(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ModelError, match="needs vLLM, which is not installed") as info:
        open_engine("vllm", Build(Model(config=CONFIG)))
    assert "make vllm" in str(info.value.fix)
    found["vllm"] = "0.32.1"
    assert versions.installed() == "0.32.1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2])
def test_boxes_of_weights_are_views_on_shared_parameters(dtype, tp):
    model = ModelShape.from_config(CONFIG)
    layout = Layout(model, Mesh({"tp": tp}), rules=backend("vllm").layout)
    whole = {w.name: torch.randn(w.shape).to(dtype) for w in model.weights()}
    parts = []
    for rank in range(tp):
        shared = WeightMemory(list(parameters_of(layout, rank)), dtype)
        _, parameters, boxes = open_weights(json.loads(json.dumps(shared.told)))
        for box in shared.shards:
            box.tensor.copy_(whole[box.name][tuple(slice(a, b) for a, b in box.box)])
        assert [(b.name, b.shape, b.box) for b in boxes] == [(b.name, b.shape, b.box) for b in shared.shards]
        assert all(torch.equal(b.tensor, s.tensor) for b, s in zip(boxes, shared.shards, strict=True)), "in one memory"
        assert shared.size == sum(b.tensor.nbytes for b in boxes)
        first = [whole[f"model.layers.0.self_attn.{n}_proj.weight"].chunk(tp)[rank] for n in "qkv"]
        assert torch.equal(parameters["model.layers.0.self_attn.qkv_proj.weight"], torch.cat(first))
        vocabulary = parameters["model.embed_tokens.weight"]
        assert len(vocabulary) == 64 // tp and not vocabulary[40 - 32 * rank :].any(), "rows that are added are zeros"
        parts.append([b for b in boxes if not rank or b.box != tuple((0, n) for n in b.shape)])
    every = [Shard(name, tuple(w.shape), (0,) * w.dim(), w) for name, w in whole.items()]
    assert digest(map(sums, parts)) == digest([sums(every)])


def proved(said, sums, wanted):
    check_weights("publish 1", said, sums)
    return check_probe("publish 1", said["probe"], wanted, TOLERANCE["float32"])


def test_the_proof_names_what_does_not_agree():
    engine = open_engine("hf", Build(Model(config=CONFIG), device="cpu"))
    rows = probe_rows(40, engine.positions)
    assert rows == probe_rows(40, 20) and {len(row) for row in rows} == {19} and len(probe_rows(40, None)[0]) == 24
    wanted = expected(engine, rows)
    logits = engine.net.model(input_ids=torch.tensor(rows)).logits.log_softmax(-1)
    for row, ids, each in zip(wanted, rows, logits, strict=True):
        assert row == pytest.approx([float(each[t, ids[t + 1]]) for t in range(18)], abs=1e-5)
    totals = {"a": ("float32", (3, 4), 17), "b": ("float32", (4,), 5)}
    said = {
        "lacking": [],
        "sums": json.loads(json.dumps(totals)),
        "differing": {},
        "seen": 2,
        "prefixes": 0,
        "probe": [[v + 1e-5 for v in row] for row in wanted],
    }
    how = {"sums": totals, "wanted": wanted}
    assert proved(said, **how) == pytest.approx(1e-5, abs=1e-6)
    said["probe"][2][4] += 0.25
    with pytest.raises(
        RunError, match="publish 1: each weight that was looked at is as .* token 5 in row 2 of the probe .* 0.25 apart"
    ):
        proved(said, **how)
    said["probe"][2][4] = float("nan")
    with pytest.raises(RunError, match="token 5 in row 2"):
        proved(said, **how)
    with pytest.raises(RunError, match="with other numbers in b[.]"):
        proved({**said, "sums": {**totals, "b": ["float32", [4], 6]}}, **how)
    with pytest.raises(RunError, match="in 5 of 2 that were looked at. zeros: a; old: b, c, d and 1 more"):
        proved({**said, "differing": {"zeros": ["a"], "old": ["b", "c", "d", "e"]}}, **how)
    with pytest.raises(RunError, match="still has 3 blocks"):
        proved({**said, "prefixes": 3}, **how)
    with pytest.raises(RunError, match="among those published: model.norm.weight"):
        proved({**said, "lacking": ["model.norm.weight"]}, **how)


def test_tokens_are_drawn_from_logits_as_from_hidden_states():
    engine = open_engine("hf", Build(Model(config=CONFIG), device="cpu"))
    hidden, uniform = torch.randn(5, 32), torch.rand(5, dtype=torch.float64)
    head, how = engine.net.head.cast(), Sampling(4, temperature=0.7, top_k=5)
    for one, other in zip(
        draw(hidden, head, uniform, how), draw_from(head.logits(hidden), uniform, how, None), strict=True
    ):
        assert torch.equal(one, other)


def test_a_process_that_sleeps_already_is_not_emptied_again_and_keeps_its_rows(monkeypatch):
    """The other side may wake and sleep without a publish between, which alone brings memory back here."""
    begun, slept, told = [], [], []
    there = SimpleNamespace(
        open_engine=lambda *_, **__: SimpleNamespace(abort_request=lambda names: None),
        add_row=lambda engine, name, tokens, *_: begun.append(tokens),
        sleep=lambda engine, parameters: slept.append(parameters) or 512,
        wake=lambda engine: slept.clear(),
        running_rows=lambda engine: 0,
    )
    monkeypatch.setattr(process, "adapter", lambda version: there)
    monkeypatch.setattr(process, "open_weights", lambda memory: (None, {}, []))
    monkeypatch.setitem(sys.modules, "flowrl.backends.vllm.draw", SimpleNamespace(SAMPLING={}, DRAWN={}))
    line: Any = SimpleNamespace(send_bytes=lambda said: told.append(json.loads(said)))
    opened = dict.fromkeys(("version", "folder", "dtype", "positions", "ranks"), "") | {"options": {"rows": 4}}
    server: Any = process.Server(line, opened)
    sampling = vars(Sampling(4)) | {"stop": []}
    said = {"prompts": [[5, 6], [7]], "n": 1, "seeds": [1, 2], "starts": [0, 0], "limits": [4, 4], "stops": []}
    server.submit({"call": 1, "sampling": sampling, "kept": [], **said})
    for call in (2, 3, 4):
        server.sleep({"call": call, "weights": {}})
    assert [answer.get("freed") for answer in told] == [None, 512, 0, 0] and len(slept) == 1
    with pytest.raises(AttributeError, match="hold"):  # once it is awake a publish goes on with more than is here
        server.publish({"call": 5, "number": 1, "weights": {}})
    assert not slept and begun[2:] == [[5, 6], [7]]


def test_what_is_wrong_with_a_weight_is_named():
    here = {name: torch.randn(6, 4) for name in ("a", "b", "c", "d", "e", "f", "g", "h")}
    here["i"] = here["a"].clone()
    before = {name: torch.randn(6, 4) for name in here}
    there = {name: value.clone() for name, value in here.items()}
    assert differing(there, here, before) == {}
    there["a"], there["b"] = before["a"], torch.zeros(6, 4)
    there["c"], there["d"] = here["b"], here["d"].bfloat16().float()
    there["e"][:3] = before["e"][:3]
    there["f"], there["g"] = here["f"].flip(0), here["g"] + 1e-6
    there["h"][2, 2] = torch.inf
    assert differing(there, here, before) == {
        "as before this publish": ["a"],
        "zeros": ["b"],
        "those of b": ["c"],
        "rounded to bfloat16": ["d"],
        "as before this publish in a part": ["e"],
        "in another order": ["f"],
        "other numbers": ["g"],
        "not finite": ["h"],
    }


def test_the_columns_that_are_looked_at_are_those_of_the_checkpoint():
    weights = {"model.embed_tokens.weight": torch.randn(40, 8), "model.norm.weight": torch.randn(8)}
    found = wanted(weights, 3)
    rows, columns = picked(40, 3), picked(8, 3)
    assert torch.equal(found["model.embed_tokens.weight"], weights["model.embed_tokens.weight"][rows].T)
    assert torch.equal(found["lm_head.weight"], weights["model.embed_tokens.weight"][:, columns]), "a tied head"
    weights["lm_head.weight"] = torch.randn(40, 8)
    assert torch.equal(wanted(weights, 3)["lm_head.weight"], weights["lm_head.weight"][:, columns])
    assert {0, 39} <= set(rows) and len({tuple(picked(4096, publish)) for publish in range(9)}) == 9
