"""The forecast of memory counts weights that several workers have in common once, as the engines hold them."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from letters import model_of

import flowrl as fl
from flowrl import rl
from flowrl.launch import launch
from flowrl.lowering.bases import bases_of
from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Place, Plan, Pool
from flowrl.workers.model_options import dtypes

pytest.importorskip("peft", reason="adapters need peft (extra 'lora')")


MODEL = model_of(
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=3,
    tie_word_embeddings=False,
)
LORA = fl.Lora(r=4)


def flow_of(*more, **actor):
    """An actor with adapters, its reference, and more actors over its model; each is trained on rows of its own."""
    flow = fl.Flow("bases")
    first = flow.worker(fl.Actor, MODEL, name="actor", max_tokens=4, **{"lora": LORA, **actor})
    ref = flow.worker(fl.Reference, of=first, name="ref")
    others = [flow.worker(fl.Actor, of=first, name=name, max_tokens=4, lora=lora) for name, lora in more]
    source = fl.data.rows([{"prompt": "ab"}, {"prompt": "cd"}], batch=2)

    @flow.program
    def train() -> None:
        for step, rows in flow.steps(source, 1):
            for worker in (first, *others):
                batch = ref.logprobs(worker.generate(rows, n=2))
                batch = batch.with_columns({"advantages": batch.rollout_logprobs})
                flow.log(step, **{f"of_{worker.name}": worker.update(batch, loss=rl.ppo_clip(kl=0.1))})

    return flow


def plan_of(**pools):
    """A core for each pool; ``pools`` are the workers of each."""
    cluster = Cluster((Nodes("cpu", 1, len(pools)),))
    made = {name: Pool(name, devices=(number,)) for number, name in enumerate(pools)}
    return Plan(made, {w: {"train": Place(pool)} for pool, workers in pools.items() for w in workers}, cluster=cluster)


def held(flow, plan):
    """Bytes of distinct tensors that open engines have, by pool: weights, and moments once they are there."""
    place = launch([flow.study(plan).execution], flow.handles, out=None)
    found = defaultdict(dict)
    opened = {handle: place.open(handle.name) for handle in flow.handles}  # before adapters are trained
    for handle, worker in opened.items():
        if getattr(worker, "trains", False):
            rows = fl.Batch.of(
                1,
                tokens=fl.Column.of([[2, 3, 4]], dim="token", dtype="i32"),
                response_mask=fl.Column.of([[True, True]], dim="response", dtype="bool"),
            )
            worker.update(rows, loss=rl.sft())
        tensors = [*worker.engine.net.model.parameters(), *(s.tensor for s in worker.engine.state_shards()[0])]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            found[plan.pool(handle.name)][storage.data_ptr()] = storage.nbytes()
    return {pool: sum(sizes.values()) for pool, sizes in found.items()}


def forecast(flow, plan, **how):
    """What the study says stays between calls, by pool."""
    memory = flow.study(plan, "train", **how).pool_memory
    return {pool: sum(u.staying for u in found.residents.values()) for pool, found in memory.items()}


@pytest.mark.parametrize(
    "more",
    [[], [("second", LORA)], [("second", fl.Lora(r=2)), ("third", fl.Lora(r=8, targets=("q_proj", "v_proj")))]],
    ids=["one", "two", "three"],
)
def test_one_base_is_counted_once(more):
    flow, names = flow_of(*more), ["actor", "ref", *(name for name, _ in more)]
    plan = plan_of(main=names)
    found = forecast(flow, plan)
    assert found == held(flow, plan)
    assert found["main"] < 2.3 * MODEL_BYTES, "one base, and adapters with their moments"


def test_in_another_pool_it_is_a_copy():
    flow = flow_of(("second", LORA), ("third", LORA))
    plan = plan_of(a=["actor", "ref"], b=["second", "third"])
    found = forecast(flow, plan)
    assert found == held(flow, plan)
    apart = forecast(flow, plan_of(a=["actor", "ref", "second", "third"]))
    assert sum(found.values()) == sum(apart.values()) + 2 * MODEL_BYTES  # second and third have of=actor: a copy each


def test_weights_are_as_wide_as_the_engine_holds_them():
    """On a CPU a model has four bytes a number, whatever it was saved in; two on a GPU, four where fp32 is asked for."""
    gpu = Plan({"main": Pool("main", devices=(0,))}, {}, cluster=Cluster((Nodes("h100-80", 1, 1),)))
    cpu = plan_of(main=["actor", "ref"])
    for plan, said, width in ((gpu, "auto", 2), (gpu, "fp32", 4), (cpu, "auto", 4), (cpu, "bf16", 2), (cpu, "fp64", 8)):
        roles = flow_of(dtype=said).study(plan, "train").roles
        assert {r.model.dtype_bytes for r in roles.values()} == {width}


def test_a_micro_batch_has_the_tokens_that_the_call_says():
    """What the fix of a plan that does not fit asks for is in the forecast."""

    def activations(**how):
        flow = fl.Flow("micro")
        actor = flow.worker(fl.Actor, MODEL, name="actor")
        source = fl.data.rows([{"prompt": "ab" * 20, "response": "cd" * 20}] * 64, batch=64, response="response")

        @flow.program
        def train() -> None:
            for step, rows in flow.steps(source, 1):
                flow.log(step, actor.update(rows, loss=rl.sft(), **how))

        study = flow.study(plan_of(main=["actor"]), "train")
        return study.pool_memory["main"].residents["actor.train"].working["activations"]

    assert activations(micro_tokens=160) == pytest.approx(activations(micro_tokens=320) / 2)
    assert activations() > activations(micro_tokens=320)


def test_recomputation_that_is_assumed_is_said():
    flow = flow_of()
    plan = Plan(
        {"main": Pool("main", devices=(0, 1))},
        {n: {"train": Place("main", Mesh({"fsdp": 2}), "fsdp2")} for n in ("actor", "ref")},
        cluster=Cluster((Nodes("cpu", 1, 2),)),
    )
    notes = [n for n in flow.study(plan, "train").simulate(1).notes if "recomputed" in n]
    assert notes == [
        "actor.update: activations are taken to be recomputed in the backward pass (assumed for fsdp2); actor does so "
        "with gradient_checkpointing=True"
    ]
    asked = flow_of(gradient_checkpointing=True).study(plan, "train").simulate(1)
    alone = flow_of().study(plan_of(main=["actor", "ref"]), "train").simulate(1)
    assert not any("recomputed" in note for note in (*asked.notes, *alone.notes))


def test_on_ranks_every_worker_has_its_own():
    flow, plan = flow_of(("second", LORA)), plan_of(main=["actor", "ref", "second"])
    assert sum(forecast(flow, plan, runtime="ray").values()) == sum(forecast(flow, plan).values()) + 2 * MODEL_BYTES


def test_a_copy_is_expected_where_dtypes_differ_or_adapters_are_begun(tmp_path):
    """On CUDA what is trained has fp32 weights, and its frozen reference bf16 ones."""
    handles = {h.name: h for h in flow_of(("second", LORA)).handles}.values()
    gpu = Plan({"main": Pool("main", devices=(0,))}, {}, cluster=Cluster((Nodes("h100-80", 1, 1),)))
    assert bases_of(list(handles), gpu) == {"second": "actor"}
    assert bases_of(list(handles), plan_of(main=["actor"])) == {"ref": "actor", "second": "actor"}
    wide = flow_of(dtype="fp32")
    assert bases_of(wide.handles, gpu) == {"ref": "actor"}
    worker = fl.open(fl.Actor(MODEL, lora=LORA))
    worker.save(str(tmp_path / "saved"))
    begun = flow_of(lora=fl.Lora(path=tmp_path / "saved" / "adapter"))
    assert bases_of(begun.handles, plan_of(main=["actor"])) == {}
    split = Plan(
        {"main": Pool("main", devices=(0, 1))},
        {n: {"train": Place("main", Mesh({"fsdp": 2}), "fsdp2")} for n in ("actor", "ref")},
        cluster=Cluster((Nodes("cpu", 1, 2),)),
    )
    assert bases_of(flow_of().handles, split) == {}


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("said", ["auto", "fp32", "bf16", "fp64"])
def test_dtypes(said, trained, cuda):
    held, computed = dtypes(said, trained=trained, cuda=cuda)
    assert computed == ({True: "bf16", False: "fp32"}[cuda] if said == "auto" else said)
    assert held == ("fp32" if trained and computed == "bf16" else computed)


def test_whoever_shares_weights_has_them_on_the_device_when_it_is_at_work():
    """The base is never away while one of its adapters works, and its cache has the room that is left."""
    flow, plan = flow_of(("second", LORA)), plan_of(main=["actor", "ref", "second"])
    study = flow.study(plan, "train")
    memory, turns = study.pool_memory["main"], study.turns("main")
    holder = [n for n, u in memory.residents.items() if u.idle.get("weights", 0) > MODEL_BYTES]
    assert holder == ["actor.train"]
    for moment in memory.timeline(turns).moments:
        assert moment.parts["actor.train weights"] > MODEL_BYTES
    second = next(t for t in turns if t.title == "second.generate")
    staying = sum(usage.staying for usage in memory.residents.values())
    own = sum(memory.residents[n].idle["weights"] for n in ("actor.train", "second.train"))
    working = memory.residents["second.generate"].working
    other = sum(size for part, size in working.items() if part != "kv cache")
    assert memory.held(second, turns) == pytest.approx(staying - own + other)


MODEL_BYTES = 4 * sum(p.numel() for p in fl.open(fl.Actor(MODEL)).engine.net.model.parameters())
torch.set_num_threads(1)
