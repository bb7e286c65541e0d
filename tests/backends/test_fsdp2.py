"""The engine on ranks is one process: losses, gradients, weights, moments and what it reads, on every kind of mesh."""

import math
from dataclasses import replace

import pytest
import tiny as T
import torch
from ranks import run
from safetensors.torch import load_file
from sharded import EXACT, apart, apart_by_token, build, opened, pairs, part, rollouts

from flowrl import rl
from flowrl.backends import open_engine
from flowrl.batch import CallInfo
from flowrl.errors import ModelError, NotFinite, PlanError, ProgramError, RunError
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.work import Role, Workload
from flowrl.placement.cost.worker_memory import training
from flowrl.placement.model.model_shape import ModelShape
from flowrl.placement.model.weight_layout import Layout
from flowrl.workers.model_options import Build, Lora, Model


def names(shards):
    """What all ranks together have."""
    lists = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lists, [s.name for s in shards])
    return {name for listed in lists for name in listed}


def from_whole(shards, whole):
    """How far boxes are from the whole tensors that they are of."""
    worst = 0.0
    for shard in shards:
        there = whole[shard.name]
        assert tuple(there.shape) == shard.shape and there.dtype == shard.tensor.dtype
        there = there[tuple(slice(a, b) for a, b in shard.box)]
        assert there.shape == shard.tensor.shape
        if there.numel():
            worst = max(worst, float((there - shard.tensor).abs().max()))
    return worst


# -- training ----------------------------------------------------------------------------------------------------------

CORRECTIONS = [rl.correct(high=1.05), rl.correct("geometric", "mask", low=0.95, high=1.05)]

#: What is trained: the head, the rows, and an update for each step.
TOKENS = (
    "lm",
    rollouts,
    [
        (rl.ppo_clip(kl=0.05, entropy=0.02), {"micro_tokens": 40}),
        (rl.ppo_clip(aggregate="seq-mean-token-mean"), {"minibatch": 5, "epochs": 2}),
        (rl.reinforce(correction=CORRECTIONS), {"micro_tokens": 40}),
        (rl.sft(), {"minibatch_tokens": 30, "pretraining": True, "pretraining_weight": 0.5}),
    ],
)
PAIRS = ("lm", pairs, [(rl.dpo(), {}), (rl.orpo(), {"minibatch": 6, "micro_tokens": 30}), (rl.kto(), {"epochs": 2})])
VALUES = ("scalar", rollouts, [(rl.value_clip(), {}), (rl.value_clip(clip=None), {"minibatch": 7, "micro_tokens": 30})])
SCORES = ("scalar", pairs, [(rl.bradley_terry(), {}), (rl.bradley_terry(), {"minibatch": 6, "micro_tokens": 40})])
WHAT = {"tokens": TOKENS, "pairs": PAIRS, "values": VALUES, "scores": SCORES}


def train(axes, kind, what, sizes, extra, more):
    """Train both engines with the same rows; how far they are from each other, and how far they went."""
    head, made, steps = WHAT[what]
    one, engine = opened(axes, kind, extra, head=head, **more)
    assert engine.digest() == one.digest()
    batch = made()
    batch = batch.with_call(replace(batch.call or CallInfo(), recorded=(0, 1, 2, 3)))
    mine = part(batch, engine, sizes)
    before = {s.name: s.tensor.clone() for s in engine.shards()}
    metrics = 0.0
    for loss, how in steps:
        here = dict(how)
        there = dict(how)
        if how.get("pretraining"):
            here["pretraining"] = batch.select("tokens", "response_mask")
            there["pretraining"] = mine.select("tokens", "response_mask")
        wanted, found = one.update(batch, loss, **here), engine.update(mine, loss, **there)
        assert list(wanted) == list(found)
        metrics = max(metrics, apart(wanted, found), apart_by_token(wanted.rows_seen, found.rows_seen))
        assert bool(wanted.rows_seen) == (loss.on == "logprobs")
    state, meta = one.state()
    shards, again = engine.state_shards()
    assert again == meta and names(shards) == set(state)
    whole = {s.name: s.tensor for s in one.shards()}
    moved = [float((s.tensor - before[s.name]).abs().max()) for s in engine.shards() if s.tensor.numel()]
    return {
        "metrics": metrics,
        "weights": from_whole(engine.shards(), whole),
        "state": from_whole(shards, state),
        "reads": reads(one, engine, batch, mine),
        "moved": max(moved, default=1.0),
        "rows": wanted["rows"],
    }


def reads(one, engine, batch, mine):
    """How far what they read is apart."""
    if engine.build.head == "lm":
        given = [e.logprobs(b, micro_tokens=40, entropy=True) for e, b in ((one, batch), (engine, mine))]
        given = [(*g, e.distribution(b)) for g, e, b in zip(given, (one, engine), (batch, mine), strict=True)]
    else:
        given = [
            (e.values(b, micro_tokens=30), e.scores(b, micro_tokens=30)) for e, b in ((one, batch), (engine, mine))
        ]
    worst = 0.0
    for whole, here in zip(*given, strict=True):
        rows = [batch.keys.index(key) for key in mine.keys]
        there = whole.take(rows)
        assert there.type == here.type and len(here) == len(mine)
        if len(mine):
            worst = max(worst, float((there.values - here.values).abs().max()))
    return worst


CORE = {
    "fsdp=2": ({"fsdp": 2}, "qwen2", "tokens", [9, 7], {}, {}),
    "fsdp=2, a rank without rows": ({"fsdp": 2}, "llama", "tokens", [16, 0], {}, {}),
    "tp=2": ({"tp": 2}, "qwen2", "tokens", [16], {"vocab_size": 41}, {}),
    "tp=2, pairs, norms of heads": ({"tp": 2}, "qwen3", "pairs", [16], {}, {}),
    "dp=3, uneven": ({"dp": 3}, "llama", "tokens", [5, 11, 0], {}, {}),
    "fsdp=2 x tp=2": ({"fsdp": 2, "tp": 2}, "qwen2", "tokens", [7, 9], {"vocab_size": 41, "hidden_size": 40}, {}),
    "fsdp=2, values": ({"fsdp": 2}, "llama", "values", [3, 13], {}, {}),
    "fsdp=2 x tp=2, scores": ({"fsdp": 2, "tp": 2}, "llama", "scores", [4, 12], {}, {}),
    "fsdp=2, adapters": ({"fsdp": 2}, "qwen2", "tokens", [9, 7], {}, {"lora": Lora(r=3)}),
    "fsdp=2, frozen weights": ({"fsdp": 2}, "llama", "tokens", [9, 7], {}, {"freeze": ("embeddings", "layers[0]")}),
    "fsdp=2, layers computed again": ({"fsdp": 2}, "llama", "tokens", [8, 8], {}, {"gradient_checkpointing": True}),
    "pp=2": ({"pp": 2}, "llama", "tokens", [16], {}, {}),
}
NIGHTLY = {
    "dp=2": ({"dp": 2}, "llama", "tokens", [9, 7], {}, {}),
    "dp=5": ({"dp": 5}, "llama", "tokens", [3, 0, 7, 4, 2], {}, {}),
    "fsdp=3, uneven weights": ({"fsdp": 3}, "qwen2", "tokens", [5, 0, 11], {}, {}),
    "fsdp=5, parts that are empty": ({"fsdp": 5}, "qwen3", "tokens", [3, 0, 7, 4, 2], {}, {}),
    "dp=2 x fsdp=2": ({"dp": 2, "fsdp": 2}, "llama", "tokens", [3, 5, 8, 0], {}, {}),
    "dp=2 x fsdp=2, adapters": ({"dp": 2, "fsdp": 2}, "llama", "tokens", [3, 5, 8, 0], {}, {"lora": Lora(r=4)}),
    "dp=2 x fsdp=2, frozen weights": (
        {"dp": 2, "fsdp": 2},
        "llama",
        "tokens",
        [3, 5, 8, 0],
        {},
        {"freeze": ("model",)},
    ),
    "fsdp=2 x tp=2, frozen weights": (
        {"fsdp": 2, "tp": 2},
        "qwen2",
        "tokens",
        [7, 9],
        {},
        {"freeze": ("layers[:-1]",)},
    ),
    "dp=2 x tp=2, tied": ({"dp": 2, "tp": 2}, "qwen2", "tokens", [9, 7], {}, {}),
    "fsdp=3 x tp=2": ({"fsdp": 3, "tp": 2}, "qwen3", "tokens", [5, 0, 11], {"vocab_size": 43}, {}),
    "dp=2 x fsdp=2 x tp=2": ({"dp": 2, "fsdp": 2, "tp": 2}, "qwen2", "tokens", [4, 4, 8, 0], {"vocab_size": 41}, {}),
    "tp=4": ({"tp": 4}, "llama", "tokens", [16], {"num_key_value_heads": 4, "vocab_size": 42}, {}),
    "tp=2, biases": ({"tp": 2}, "llama", "tokens", [16], {"attention_bias": True, "mlp_bias": True}, {}),
    "tp=2, caps and windows": ({"tp": 2}, "gemma2", "tokens", [16], {}, {}),
    "tp=2, layers computed again": ({"tp": 2}, "qwen3", "tokens", [16], {}, {"gradient_checkpointing": True}),
    "tp=2, values": ({"tp": 2}, "qwen3", "values", [16], {}, {}),
    "fsdp=2, pairs": ({"fsdp": 2}, "llama", "pairs", [6, 10], {}, {}),
    "fsdp=2, scores": ({"fsdp": 2}, "qwen3", "scores", [2, 14], {}, {}),
    "fsdp=2, another kind of layers": ({"fsdp": 2}, "gpt2", "tokens", [9, 7], {}, {}),
    "fsdp=2, a bias in the head": ({"fsdp": 2}, "phi", "tokens", [9, 7], {}, {}),
    "pp=2, tied": ({"pp": 2}, "qwen2", "tokens", [16], {"num_hidden_layers": 3}, {}),
    "pp=3, tied": ({"pp": 3}, "qwen2", "tokens", [16], {"num_hidden_layers": 4}, {}),
    "pp=3, tied, layers computed again": (
        {"pp": 3},
        "qwen3",
        "tokens",
        [16],
        {"num_hidden_layers": 3, "tie_word_embeddings": True},
        {"gradient_checkpointing": True},
    ),
    "pp=2, pairs": ({"pp": 2}, "llama", "pairs", [16], {}, {}),
    "pp=2, values": ({"pp": 2}, "qwen2", "values", [16], {}, {}),
    "pp=2, scores": ({"pp": 2}, "llama", "scores", [16], {}, {}),
    "pp=2 x fsdp=2": ({"pp": 2, "fsdp": 2}, "llama", "tokens", [9, 7], {"num_hidden_layers": 3}, {}),
    "pp=2 x fsdp=2, tied": ({"pp": 2, "fsdp": 2}, "qwen2", "tokens", [16, 0], {"num_hidden_layers": 3}, {}),
    "pp=2 x fsdp=2, layers computed again": (
        {"pp": 2, "fsdp": 2},
        "llama",
        "tokens",
        [5, 11],
        {},
        {"gradient_checkpointing": True},
    ),
    "pp=2 x dp=2, tied": ({"pp": 2, "dp": 2}, "qwen2", "tokens", [3, 13], {}, {}),
    "pp=2 x tp=2, tied": ({"pp": 2, "tp": 2}, "qwen2", "tokens", [16], {"vocab_size": 41}, {}),
    "pp=2 x tp=2, scores": ({"pp": 2, "tp": 2}, "llama", "scores", [16], {}, {}),
}


def is_one_process(case):
    count = math.prod(case[0].values())
    for found in run(train, count, *case):
        far = {k: found[k] for k in ("metrics", "weights", "state")}
        assert max(far.values()) < EXACT, far
        assert found["reads"] < 1e-6 and found["moved"] > 1e-3 and found["rows"] > 0, found


@pytest.mark.parametrize("case", CORE.values(), ids=CORE)
def test_training_is_that_of_one_process(case):
    is_one_process(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", NIGHTLY.values(), ids=NIGHTLY)
def test_training_is_that_of_one_process_on_every_mesh(case):
    is_one_process(case)


# -- where weights are -------------------------------------------------------------------------------------------------


def whole_of(shards):
    """The whole tensors of all ranks' boxes, put together from the main ones; every number is there once."""
    lists = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lists, [(s.name, s.shape, s.box, s.tensor, s.main) for s in shards])
    found, count = {}, {}
    for name, shape, box, tensor, main in (item for listed in lists for item in listed):
        found.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
        count.setdefault(name, torch.zeros(shape))
        if main:
            at = tuple(slice(a, b) for a, b in box)
            found[name][at] = tensor
            count[name][at] += 1
    assert all(bool((c == 1).all()) for c in count.values())
    return found


def reader(whole):
    def read(shard):
        if shard.name not in whole:
            return False
        shard.tensor.copy_(whole[shard.name][tuple(slice(a, b) for a, b in shard.box)])
        return True

    return read


def layouts(kind, extra, meshes):
    """On each mesh boxes are the plan's, bit for bit of the whole weights, and views on what is used."""
    for axes in meshes:
        one, engine = opened(axes, kind, extra)
        whole = one.weights()
        assert from_whole(engine.shards(), whole) == 0.0
        together = whole_of(engine.shards())
        assert set(together) == set(whole) and all(torch.equal(together[n], whole[n]) for n in whole)
        plan = Layout(ModelShape.from_config({**one.net.config.to_dict(), **T.CONFIGS[kind], **extra}), Mesh(axes))
        planned = {w.name: box for w, box in plan.holds(torch.distributed.get_rank())}
        assert planned == {s.name: s.box for s in engine.shards() if s.tensor.numel()}
        batch = rollouts()
        mine = batch.take(range(len(batch) if engine.team.place == 0 else 3))
        before = engine.logprobs(mine)
        for shard in engine.shards():
            shard.tensor.mul_(1.25)
        engine.weights_written()
        with torch.no_grad():
            for weight in one.net.model.parameters():
                weight.mul_(1.25)
        wanted, found = one.logprobs(batch).take(range(len(mine))), engine.logprobs(mine)
        assert float((wanted.values - found.values).abs().max()) < 1e-6 < float(abs(before - found).max())
        assert engine.digest() == one.digest()
    return True


@pytest.mark.parametrize(
    "meshes", [[{"fsdp": 2}, {"tp": 2}, {"pp": 2}], [{"fsdp": 2, "tp": 2}, {"dp": 2, "tp": 2}, {"fsdp": 4}]]
)
def test_boxes_are_those_of_the_plan(meshes):
    run(layouts, math.prod(meshes[0].values()), "qwen2", {"vocab_size": 41, "hidden_size": 40}, meshes)


@pytest.mark.nightly
def test_boxes_are_those_of_the_plan_where_nothing_divides():
    meshes = [{"fsdp": 3, "tp": 2}, {"dp": 3, "tp": 2}, {"dp": 2, "fsdp": 3}, {"fsdp": 6}]
    run(layouts, 6, "qwen3", {"vocab_size": 45, "hidden_size": 20}, meshes)


@pytest.mark.nightly
def test_boxes_are_those_of_the_plan_in_stages():
    meshes = [{"pp": 2, "fsdp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 4}]
    run(layouts, 4, "qwen2", {"vocab_size": 41, "num_hidden_layers": 5}, meshes)


def saved_and_loaded(folder, axes):
    """State from one mesh goes on in one process and on another mesh; a folder holds the whole model."""
    batch, loss = rollouts(), rl.ppo_clip(kl=0.05)
    _, first = opened(axes, "qwen2", {"vocab_size": 41})

    def rows(engine):
        return part(batch, engine, [9, 7] if engine.team.data > 1 else [16])

    first.update(rows(first), loss, minibatch=3)
    shards, meta = first.state_shards()
    whole = whole_of(shards)
    assert meta == {"steps": 6} and {n.partition(".")[0] for n in whole} == {"weights", "exp_avg", "exp_avg_sq"}
    first.save(folder)
    torch.distributed.barrier()
    kept = open_engine("hf", Build(Model(folder), dtype="fp64"))
    assert all(torch.equal(w, whole[f"weights.{n}"]) for n, w in kept.weights().items())
    assert kept.digest() == first.digest()

    others = [open_engine("fsdp2", build({"tp": 2}, extra={"vocab_size": 41}))]
    others.append(open_engine("hf", build({}, extra={"vocab_size": 41})))
    others += [open_engine("fsdp2", build({axis: 2}, extra={"vocab_size": 41})) for axis in ("dp", "pp")]
    wanted = first.update(rows(first), loss)
    for other in others:
        other.load_state_shards(reader(whole), meta)
        again, meta_again = other.state_shards()
        assert meta_again == meta and from_whole(again, whole) == 0.0
        assert apart(wanted, other.update(rows(other), loss)) < EXACT
    bare = open_engine("fsdp2", build({"tp": 2}, extra={"vocab_size": 41}))
    bare.load_state_shards(reader({n: w for n, w in whole.items() if n.startswith("weights.")}), {"steps": 0})
    assert not bare.trainer.adamw.state and bare.digest() == kept.digest()
    with pytest.raises(ModelError, match="The state to load has no weight 'model.embed_tokens.weight'"):
        bare.load_state_shards(reader({}), {"steps": 0})
    frozen = open_engine("fsdp2", build({"tp": 2}, extra={"vocab_size": 41}, optim=None))
    assert {s.name for s in frozen.state_shards()[0]} == {n for n in whole if n.startswith("weights.")}
    frozen.load_state_shards(reader(whole), {})
    assert frozen.digest() == kept.digest()
    return True


def test_state_goes_on_elsewhere_bit_for_bit(tmp_path):
    run(saved_and_loaded, 2, str(tmp_path / "model"), {"fsdp": 2})


@pytest.mark.nightly
def test_state_of_stages_goes_on_elsewhere_bit_for_bit(tmp_path):
    run(saved_and_loaded, 2, str(tmp_path / "model"), {"pp": 2})


def saved_untied(folder):
    one, engine = opened({"pp": 2}, "llama")
    engine.save(folder)
    torch.distributed.barrier()
    assert open_engine("hf", Build(Model(folder), dtype="fp64")).digest() == one.digest() == engine.digest()
    for whole in (engine.plain_weights, engine.weights):
        with pytest.raises(ModelError, match="are split over ranks, so no rank has them whole"):
            whole()


def test_a_folder_holds_all_stages(tmp_path):
    run(saved_untied, 2, str(tmp_path / "model"))


def saved_with_buffers(folder):
    """Experts are chosen with a correction that is no weight: each layer has its own, on the stage where it is."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
    kind = {"model_type": "glm4_moe", "head_dim": 8, "first_k_dense_replace": 0, "num_hidden_layers": 3, **experts}
    engine = open_engine("fsdp2", build({"pp": 2}, "llama", kind, optim=None, dtype="fp32"))
    corrections = {n: b for n, b in engine.net.model.named_buffers() if n.endswith("e_score_correction_bias")}
    for name, correction in corrections.items():
        correction.copy_(torch.arange(4).roll(int(name.split(".")[2])) / 2)
    batch = rollouts()
    before = engine.logprobs(batch)
    engine.save(folder)
    torch.distributed.barrier()
    saved = load_file(f"{folder}/model.safetensors")
    found = {n: saved[n] for n in saved if n.endswith("e_score_correction_bias")}
    assert len(found) == 3 and all(torch.equal(found[name], b) for name, b in corrections.items())
    for name, axes in (("hf", {}), ("fsdp2", {"pp": 2})):
        after = open_engine(name, Build(Model(folder), axes=axes, dtype="fp32")).logprobs(batch)
        assert float(abs(after - before).max()) < 1e-4, name
    return len(corrections)


def test_a_folder_holds_the_buffers_of_all_stages(tmp_path):
    assert run(saved_with_buffers, 2, str(tmp_path / "model")) == [2, 1]


def adapted(folder):
    one, engine = opened({"fsdp": 2}, "llama", lora=Lora(r=3), gradient_checkpointing=True)
    batch, loss = rollouts(), rl.ppo_clip()
    for _ in range(2):
        one.update(batch, loss)
        engine.update(part(batch, engine, [9, 7]), loss)
    merged = {s.name: s.tensor for s in one.shards()}
    assert set(merged) == set(open_engine("hf", build({}, "llama")).weights())
    assert from_whole(engine.shards(), merged) < EXACT
    engine.save(folder)
    torch.distributed.barrier()
    kept = open_engine("hf", Build(Model(folder), dtype="fp64"))
    assert max(float((w - merged[n]).abs().max()) for n, w in kept.weights().items()) < EXACT
    apart = load_file(f"{folder}/adapter/adapter_model.safetensors")
    own = {f"base_model.model.{n.replace('.default', '')}": w for n, w in one.weights().items() if ".lora_" in n}
    assert set(apart) == set(own) and max(float((apart[n] - own[n]).abs().max()) for n in own) < EXACT
    follower = open_engine("fsdp2", build({"fsdp": 2}, "llama", optim=None))
    follower.copy_weights_from(engine)
    assert from_whole(follower.shards(), merged) < EXACT
    return True


def test_adapters_are_merged_on_the_way_out(tmp_path):
    run(adapted, 2, str(tmp_path / "model"))


def follows():
    def judges(seed):
        model = Model(config=T.CONFIGS["llama"], seed=seed)
        return [open_engine(n, Build(model, dtype="fp64", axes=a)) for n, a in (("hf", {}), ("fsdp2", {"fsdp": 2}))]

    (one, split), (other, parted) = judges(0), judges(1)
    for decay in (0.75, 0.0):
        assert split.blend(parted, decay) == pytest.approx(one.blend(other, decay), abs=EXACT)
        assert from_whole(split.shards(), one.weights()) < EXACT
    assert split.blend(other, 0.5) == 0.0, "a whole model has every part"
    apart_on = open_engine("fsdp2", build({"tp": 2}, "llama", optim=None))
    with pytest.raises(ModelError, match="has other parts of its weights on this rank"):
        apart_on.copy_weights_from(split)
    for whole in (split.plain_weights, split.weights):
        with pytest.raises(ModelError, match="are split over ranks, so no rank has them whole"):
            whole()


def test_weights_follow_those_of_an_engine_on_the_same_mesh():
    run(follows, 2)


# -- memory ------------------------------------------------------------------------------------------------------------


def held_bytes():
    """Bytes of weights, gradients and moments of this rank, those of the whole, and of gathered weights left behind."""
    engine = open_engine(
        "fsdp2", build({"fsdp": 4}, "llama", {"vocab_size": 64, "num_attention_heads": 4}, dtype="fp32")
    )
    grads = []
    clip = engine.parameters.clip

    def watched(limit):
        grads.append(sum(leaf.grad.numel() * leaf.grad.itemsize for leaf in engine.parameters.trained.values()))
        return clip(limit)

    engine.parameters.clip = watched
    batch = rollouts()
    engine.update(part(batch, engine, [4, 4, 4, 4]), rl.ppo_clip())
    engine.logprobs(part(batch, engine, [4, 4, 4, 4]))
    weights = [p.to_local() for p in engine.net.model.parameters()]  # split again, all of them
    moments = [m for state in engine.trainer.adamw.state.values() for m in (state["exp_avg"], state["exp_avg_sq"])]
    held = sum(t.untyped_storage().nbytes() for t in [*weights, *moments]) + grads[0]
    whole = sum(p.numel() * p.itemsize for p in engine.net.model.parameters())
    return held, 4 * whole


def test_a_rank_of_four_holds_a_quarter_as_the_plan_foretells():
    config = {**T.CONFIGS["llama"], "vocab_size": 64, "num_attention_heads": 4}
    role = Role("actor", ModelShape.from_config(config), trains=True)
    said = training(role, Mesh.of("fsdp=4"), Workload(16, 5, 5), backend="fsdp2")
    forecast = said.staying + said.working["gradients"]
    for held, whole in run(held_bytes, 4):
        assert held == whole / 4
        assert held == pytest.approx(forecast, rel=0.15)


# -- half precision ----------------------------------------------------------------------------------------------------


def in_half():
    batch, loss = rollouts(), rl.ppo_clip()
    exact, _ = opened({"fsdp": 2}, dtype="fp32")
    _, engine = opened({"fsdp": 2}, dtype="bf16")
    mine = part(batch, engine, [9, 7])
    assert {s.tensor.dtype for s in engine.shards()} == {torch.float32}
    rows = [batch.keys.index(key) for key in mine.keys]
    assert float(abs(engine.logprobs(mine) - exact.logprobs(batch).take(rows)).max()) < 0.3
    wanted = exact.update(batch, loss)
    assert engine.update(mine, loss)["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)
    assert {p.dtype for p in engine.net.model.parameters()} == {torch.float32}
    frozen = open_engine("fsdp2", build({"tp": 2}, optim=None, dtype="bf16"))
    assert {s.tensor.dtype for s in frozen.shards()} == {torch.bfloat16}
    frozen.copy_weights_from(exact)
    assert float(abs(frozen.logprobs(batch) - exact.logprobs(batch)).max()) < 1.0
    return True


def test_bfloat16_trains_float32_weights():
    run(in_half, 2)


def in_half_of_each_layer():
    batch = rollouts()
    exact, _ = opened({"tp": 2}, "qwen3", dtype="fp32")
    _, engine = opened({"tp": 2}, "qwen3", dtype="bf16", gradient_checkpointing=True)
    assert float(abs(engine.logprobs(batch) - exact.logprobs(batch)).max()) < 0.5
    wanted, found = (e.update(batch, rl.ppo_clip()) for e in (exact, engine))
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)


@pytest.mark.nightly
def test_bfloat16_where_layers_are_split():
    run(in_half_of_each_layer, 2)


def in_half_in_stages():
    batch = rollouts()
    exact, _ = opened({"pp": 2}, "qwen3", dtype="fp32")
    _, engine = opened({"pp": 2}, "qwen3", dtype="bf16", gradient_checkpointing=True)
    wanted, found = (e.update(batch, rl.ppo_clip()) for e in (exact, engine))
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)
    assert {s.tensor.dtype for s in engine.shards()} == {torch.float32}


@pytest.mark.nightly
def test_bfloat16_in_stages():
    run(in_half_in_stages, 2)


def with_experts(axes):
    one, engine = opened(axes, "mixtral", dtype="fp32")  # torch groups the products of experts in no fp64
    batch = rollouts()
    mine = part(batch, engine, [9, 7] if engine.team.data > 1 else [16])
    for loss in (rl.ppo_clip(), rl.sft()):
        assert apart(one.update(batch, loss), engine.update(mine, loss)) < 1e-4
    assert set(one.weights()) == names(engine.shards())


@pytest.mark.nightly
@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"pp": 2}], ids=str)
def test_a_mixture_of_experts(axes):
    run(with_experts, 2, axes)


# -- what cannot be ----------------------------------------------------------------------------------------------------


def recovers(axes, sizes):
    """Nothing is left of a step in whose second pass the loss failed."""
    calls = []
    engine, twin = (open_engine("fsdp2", build(axes)) for _ in range(2))
    mine = part(rollouts(), engine, sizes)

    @rl.loss(reads="response_mask")
    def breaks(x):
        calls.append(None)
        if len(calls) == 2:
            raise ZeroDivisionError
        return -x.predicted

    last = axes.get("pp", 1) == 1 or torch.distributed.get_rank() == 1
    with pytest.raises(ZeroDivisionError if last else RunError):
        engine.update(mine, breaks(), micro_tokens=40)
    assert engine.digest() == twin.digest()
    told = [each.update(mine, rl.ppo_clip(), micro_tokens=40) for each in (engine, twin)]
    assert told[0] == told[1] and engine.digest() == twin.digest()


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"dp": 2}, {"pp": 2}], ids=str)
def test_a_step_that_fails_leaves_nothing(axes):
    run(recovers, 2, axes, [16] if "pp" in axes else [9, 7])


def refused():
    for axis in ("cp", "ep"):
        with pytest.raises(PlanError, match=f"The backend fsdp2 has no axis {axis}") as caught:
            open_engine("fsdp2", build({axis: 2}))
        assert "megatron" in caught.value.fix
    with pytest.raises(PlanError, match="needs 4 ranks, and there are 2"):
        open_engine("fsdp2", build({"fsdp": 4}))
    with pytest.raises(PlanError, match="hf has the whole model in each process, so it is not on a mesh tp=2"):
        open_engine("hf", build({"tp": 2}))
    with pytest.raises(ModelError, match="1 heads of keys and values cannot be split by tp=2"):
        open_engine("fsdp2", build({"tp": 2}, extra={"num_key_value_heads": 1}))
    with pytest.raises(ModelError, match="has adapters, which the backend fsdp2 does not split by tp=2"):
        open_engine("fsdp2", build({"tp": 2}, lora=Lora()))
    with pytest.raises(ModelError, match="how tensor parallel splits it is not known"):
        open_engine("fsdp2", build({"tp": 2}, "gpt2"))
    with pytest.raises(PlanError, match="LlamaForCausalLM has 1 layers, too few for pp=2"):
        open_engine("fsdp2", build({"pp": 2}, "llama", {"num_hidden_layers": 1}))
    with pytest.raises(ModelError, match="has adapters, which the backend fsdp2 does not split by pp=2"):
        open_engine("fsdp2", build({"pp": 2}, lora=Lora()))
    with pytest.raises(ModelError, match="has frozen weights, which the backend fsdp2 does not have in stages"):
        open_engine("fsdp2", build({"pp": 2}, freeze=("embeddings",)))
    with pytest.raises(ModelError, match="GPT2LMHeadModel is no embedding, layers and a norm one behind the other"):
        open_engine("fsdp2", build({"pp": 2}, "gpt2"))
    with pytest.raises(ModelError, match="The hidden states of GraniteForCausalLM, split over ranks, differ by"):
        open_engine("fsdp2", build({"pp": 2}, "granite", {"embedding_multiplier": 3.0}))  # each stage would multiply
    engine = open_engine("fsdp2", build({"fsdp": 2}))
    with pytest.raises(ProgramError, match="split over ranks here, where it does not generate"):
        T.rollouts(engine)
    mine = part(pairs(), engine, [5, 11])
    with pytest.raises(
        ProgramError, match="dpo compares rows of one prompt, and those of prompt 2 are on ranks 0 and 1"
    ):
        engine.update(mine, rl.dpo())
    batch, before = rollouts(), engine.digest()
    mine = part(batch, engine, [9, 7])
    bad = mine
    if engine.team.place == 1:
        bad = mine.drop("advantages").with_columns({"advantages": mine.advantages * float("nan")})
    with pytest.raises(RunError, match="the loss is nan, the gradient's norm nan.*; the weights were left alone"):
        engine.update(bad, rl.ppo_clip())
    assert engine.digest() == before
    assert engine.update(mine, rl.ppo_clip())["steps"] == 1 and engine.digest() != before
    weights = {shard.name: shard.tensor for shard in engine.shards()}
    kept = weights["model.norm.weight"].clone()
    if engine.team.place == 1:
        weights["model.norm.weight"].fill_(float("nan"))
    engine.weights_written()
    with pytest.raises(NotFinite, match="optimizer step 1: .*the gradient.s norm nan") as stopped:
        engine.update(mine, rl.ppo_clip())
    assert stopped.value.names == (("model.norm.weight",) if engine.team.place == 1 else ())
    weights["model.norm.weight"].copy_(kept)
    engine.weights_written()
    copies = open_engine("hf", build({"dp": 2}, optim=None))
    assert {s.main for s in copies.shards()} == {torch.distributed.get_rank() == 0}
    assert copies.digest() == open_engine("hf", build({}, optim=None)).digest()
    return True


def test_one_process_needs_no_group():
    one, engine = opened({"fsdp": 1})
    assert engine.update(rollouts(), rl.ppo_clip()) == one.update(rollouts(), rl.ppo_clip())


def alone():
    one, engine = opened({}, "qwen3")
    assert not engine.net.generates
    assert apart(one.update(rollouts(), rl.ppo_clip()), engine.update(rollouts(), rl.ppo_clip())) < EXACT


def test_a_group_may_be_one_rank():
    run(alone, 1)


def test_what_cannot_be_says_so():
    with pytest.raises(ProgramError, match="in no process group"):
        open_engine("fsdp2", build({"fsdp": 2}))
    run(refused, 2)
