"""The megatron engine on CPU and gloo gives what the hf engine gives in one process: layouts, models, losses, state."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from ranks import PRELOAD, run
from sharded import apart_by_token
from tiny import CONFIGS, engine, rollouts

from flowrl import rl
from flowrl.backends import open_engine
from flowrl.batch import CallInfo
from flowrl.errors import ModelError, PlanError, ProgramError, RunError
from flowrl.workers.model_options import Build, Lora, Model, Optim

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
if "flowrl.backends.megatron.engine" not in PRELOAD:
    PRELOAD.append("flowrl.backends.megatron.engine")

CONFIGS["llama-3"] = {**CONFIGS["llama"], "num_hidden_layers": 3}  # which pp=2 does not divide
CONFIGS["mistral"] = {**CONFIGS["mistral-window"], "sliding_window": None}
CONFIGS["moe-renormalised"] = {**CONFIGS["qwen3-moe"], "norm_topk_prob": True}
CONFIGS["llama-rope"] = {
    **CONFIGS["llama"],
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
CONFIGS["llama-41"] = {**CONFIGS["llama"], "vocab_size": 41}  # which tp does not divide
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIM = Optim(lr=1e-3, weight_decay=0.1, grad_clip=0.4, schedule="cosine", total=10, warmup=2)


def sharpened(opened):
    """The weights scaled up as those of ``tiny.engine``, wherever they lie."""
    for shard in opened.shards():
        if len(shard.shape) > 1:
            shard.tensor.mul_(3.0)
    opened.weights_written()
    return opened


def both(kind, axes, **build):
    """The engine on this rank and the reference, with the same weights."""
    mesh = sharpened(open_engine("megatron", Build(Model(config=CONFIGS[kind]), axes=axes, **build)))
    return mesh, engine(kind, **build)


def mine(opened, batch, places=None):
    """This rank's rows: those of whole groups, dealt out by ``places``: for each group the place that has it."""
    places = places or list(range(opened.team.data)) * 4
    index = [i for g, rows in enumerate(batch.groups()) for i in rows if places[g] == opened.team.place]
    return batch.take(torch.tensor(index, dtype=torch.int64))


def gap(found, wanted):
    """The largest difference of two columns or tensors."""
    a, b = (x if isinstance(x, torch.Tensor) else x.values for x in (found, wanted))
    assert a.shape == b.shape
    return float((a - b).abs().max()) if a.numel() else 0.0


def weights_gap(opened, reference, kind="weights."):
    """The largest difference between the boxes of this rank and the reference's tensors, as a share of their size.

    That of biases is small: keys' have no gradient save rounding, of which AdamW makes steps.
    """
    whole = {s.name: s.tensor for s in reference.state_shards()[0]}
    worst = 0.0
    for shard in opened.state_shards()[0]:
        if shard.name.startswith(kind):
            least = 0.05 if kind == "weights." else 1e-8
            at = tuple(slice(a, b) for a, b in shard.box)
            wanted = whole[shard.name][at]
            scale = float(whole[shard.name].abs().max().clamp(min=least))
            worst = max(worst, gap(shard.tensor, wanted) / scale)
    return worst


def check_layout(kind, axes, places=None):
    """Everything at one layout; the largest differences, by what."""
    opened, reference = both(kind, axes, optim=OPTIM)
    batch = rollouts(reference)
    batch = batch.with_call(replace(batch.call or CallInfo(), recorded=(0, 2)))
    here = mine(opened, batch, places)
    found = {}
    check_boxes(opened, reference)
    lp, spread = opened.logprobs(here, entropy=True, micro_tokens=40)
    wanted = [reference.logprobs(here, entropy=True)[i] for i in range(2)] if len(here) else [lp, spread]
    found["logprobs"], found["entropy"] = gap(lp, wanted[0]), gap(spread, wanted[1])
    losses = [rl.ppo_clip(clip=0.2, entropy=0.01), rl.sft(), rl.ppo_clip(clip=0.2, aggregate="seq-mean-token-mean")]
    losses.insert(1, rl.reinforce(correction=rl.correct(high=1.01), entropy=0.01))
    for loss in losses:
        how = {"minibatch": 8, "micro_tokens": 40}
        a, b = opened.update(here, loss, **how), reference.update(batch, loss, **how)
        assert a.keys() == b.keys() and a["tokens"] == b["tokens"] and a["steps"] == b["steps"] == 2
        found["seen"] = max(found.get("seen", 0.0), apart_by_token(b.rows_seen, a.rows_seen))
        assert a.rows_seen, "of the first of two steps"
        found["loss"] = max(found.get("loss", 0.0), abs(a["loss"] - b["loss"]))
        found["norm"] = max(found.get("norm", 0.0), abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"])
        found["metrics"] = max(abs(a[n] - b[n]) for n in a if n not in ("loss", "grad_norm"))
    found["weights"] = weights_gap(opened, reference)
    found["moments"] = max(weights_gap(opened, reference, "exp_avg."), weights_gap(opened, reference, "exp_avg_sq."))
    found["after"] = (
        gap(opened.logprobs(here), reference.logprobs(here)) if len(here) else gap(opened.logprobs(here), lp)
    )
    assert found["logprobs"] < 1e-5 and found["entropy"] < 2e-5, found
    assert found["loss"] < 1e-5 and found["norm"] < 1e-4 and found["metrics"] < 1e-4, found
    assert found["seen"] < 1e-3, found
    assert found["weights"] < 1e-4 and found["moments"] < 1e-3 and found["after"] < 1e-3, found
    return found


def check_boxes(opened, reference):
    """What the ranks hold is bit-equal to the reference, and every number counts once."""
    whole = reference.weights()
    counted = {name: torch.zeros(w.shape, dtype=torch.int64) for name, w in whole.items()}
    for shard in opened.shards():
        at = tuple(slice(a, b) for a, b in shard.box)
        assert shard.shape == tuple(whole[shard.name].shape)
        assert torch.equal(shard.tensor, whole[shard.name][at]), shard
        counted[shard.name][at] += int(shard.main)
    for name in sorted(counted):
        torch.distributed.all_reduce(counted[name])
        assert bool((counted[name] == 1).all()), name
    assert opened.digest() == reference.digest()


def whole_state(opened):
    """The state of all ranks put together: tensors by name, and JSON."""
    shards, meta = opened.state_shards()
    mine = [(s.name, s.shape, s.box, s.tensor.clone()) for s in shards if s.main]
    said = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(said, mine)
    found, counted = {}, {}
    for name, shape, box, tensor in (entry for entries in said for entry in entries):
        at = tuple(slice(a, b) for a, b in box)
        found.setdefault(name, torch.full(shape, float("nan")))[at] = tensor
        counted.setdefault(name, torch.zeros(shape))[at] += 1
    assert all(bool((c == 1).all()) for c in counted.values()), "every number once"
    return found, meta


def load(opened, state, meta):
    def read(shard):
        if shard.name in state:
            shard.tensor.copy_(state[shard.name][tuple(slice(a, b) for a, b in shard.box)])
        return shard.name in state

    opened.load_state_shards(read, meta)


def check_state(kind, axes, others):
    """A state goes from layout to layout, and to the hf engine and back, bit for bit; training goes on from it."""
    first, reference = both(kind, axes, optim=OPTIM)
    batch = rollouts(reference)
    before = whole_state(first)
    assert not any(n.startswith("exp_avg") for n in before[0])
    for _ in range(2):
        first.update(mine(first, batch), rl.sft(), minibatch=8)
    state, meta = whole_state(first)
    assert meta == {"steps": 4} and {n.partition(".")[0] for n in state} == {"weights", "exp_avg", "exp_avg_sq"}
    reference.load_state(state, meta)
    after = first.update(mine(first, batch), rl.sft())
    wanted = reference.update(batch, rl.sft())
    assert after == pytest.approx(wanted, abs=1e-5)
    for other in others:
        second = open_engine("megatron", Build(Model(config=CONFIGS[kind]), axes=other, optim=OPTIM))
        load(second, state, meta)
        again, meta_again = whole_state(second)
        assert meta_again == meta and again.keys() == state.keys()
        assert all(torch.equal(again[n], state[n]) for n in state), other
        assert second.update(mine(second, batch), rl.sft()) == pytest.approx(wanted, abs=1e-5)
        load(second, *before)  # a state without moments: the optimizer begins anew
        assert not any(n.startswith("exp_avg") for n in whole_state(second)[0])
        assert first.digest() != second.digest()
        load(second, *whole_state(first))
        assert first.digest() == second.digest()
    return {"state": 0.0}


def check_scalar(axes):
    """Values and scores of a scalar head, and losses on them."""
    opened, reference = both("llama", axes, head="scalar", optim=OPTIM)
    batch = rollouts(engine("llama"))
    here = mine(opened, batch)
    assert gap(opened.values(here), reference.values(here)) < 1e-5
    assert gap(opened.scores(here, micro_tokens=40), reference.scores(here)) < 1e-5
    values = reference.values(batch)
    told = batch.with_columns({"values": values, "returns": values.with_values(values.values + 0.5)})
    for loss, rows in ((rl.value_clip(clip=0.2), told), (rl.bradley_terry(), rl.pairs(batch))):
        found = opened.update(mine(opened, rows), loss, micro_tokens=40)
        assert found == pytest.approx(reference.update(rows, loss), abs=1e-5)
    return {"weights": weights_gap(opened, reference)}


def check_rest(folder):
    """What needs no layout of its own: other losses, idle ranks, errors, two meshes in a process, saving."""
    opened, reference = both("qwen2", {"pp": 2}, optim=OPTIM)
    batch = rollouts(reference)
    assert torch.cuda.current_device is not None and torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    how = {"pretraining": batch, "pretraining_weight": 0.5}
    more = opened.update(batch, rl.ppo_clip(clip=0.2), **how)
    assert more == pytest.approx(reference.update(batch, rl.ppo_clip(clip=0.2), **how), abs=1e-5)
    assert gap(opened.distribution(batch), reference.distribution(batch)) < 1e-4
    with pytest.raises(ProgramError, match="does not generate"):
        opened.generate(None, 1, None, None)
    kept = opened.digest()
    broken = batch.advantages.with_values(batch.advantages.values * float("nan"))
    bad = batch.drop("advantages").with_columns({"advantages": broken})
    with pytest.raises(RunError, match="left alone"):
        opened.update(bad, rl.ppo_clip(clip=0.2))
    assert opened.digest() == kept
    assert opened.update(batch, rl.sft()) == pytest.approx(reference.update(batch, rl.sft()), abs=1e-5)

    other = open_engine("megatron", Build(Model(config=CONFIGS["qwen2"]), axes={"dp": 2}, dtype="fp64", optim=OPTIM))
    wide = engine("qwen2", dtype="fp64", optim=OPTIM)
    sharpened(other)
    here = mine(other, batch, [0, 0, 0, 1])
    assert gap(other.logprobs(here), wide.logprobs(here)) < 1e-6
    assert other.update(here, rl.sft()) == pytest.approx(wide.update(batch, rl.sft()), abs=1e-6)
    with pytest.raises(ModelError, match="cut differently"):
        other.copy_weights_from(opened)
    frozen = open_engine("megatron", Build(Model(config=CONFIGS["qwen2"]), axes={"pp": 2}))
    assert frozen.blend(opened, 0.5) > 0 and frozen.digest() != opened.digest()
    frozen.copy_weights_from(opened)
    assert frozen.digest() == opened.digest()
    assert gap(frozen.logprobs(batch), opened.logprobs(batch)) == 0
    with pytest.raises(ProgramError, match="without an optimizer"):
        frozen.update(batch, rl.sft())
    frozen.take_weights(reference.weights())
    assert frozen.digest() == reference.digest()

    opened.save(folder)
    torch.distributed.barrier()
    saved = open_engine("hf", Build(Model(folder)))
    assert saved.digest() == opened.digest()
    return {}


def check_saved(kind, axes, head, folder):
    """A saved folder opens in the hf engine with the same weights, and here again on another mesh."""
    opened, reference = both(kind, axes, head=head, optim=OPTIM)
    opened.save(folder)
    torch.distributed.barrier()
    saved = open_engine("hf", Build(Model(folder), head=head))
    assert saved.digest() == opened.digest() == reference.digest()
    again = open_engine("megatron", Build(Model(folder), head=head, axes={"dp": 2}))
    assert again.digest() == opened.digest()
    return {}


def check_alone():
    """A mesh of one rank: a process that needs no group, whose weights are whole."""
    opened, reference = both("qwen3", {}, optim=OPTIM)
    batch = rollouts(reference)
    assert opened.update(batch, rl.sft()) == pytest.approx(reference.update(batch, rl.sft()), abs=1e-5)
    state, meta = opened.state()
    reference.load_state(state, meta)
    assert reference.digest() == opened.digest()
    opened.update(batch, rl.sft())
    opened.load_state(*reference.state())
    assert reference.digest() == opened.digest()
    opened.take_weights(engine("qwen3").weights())
    assert opened.digest() == engine("qwen3").digest()
    opened.restart_optimizer()
    assert opened.state()[1] == {"steps": 0} and not any(n.startswith("exp_avg") for n in opened.state()[0])
    return {}


def check_asleep(kind, axes):
    """Gradients leave memory too, with as many bytes as come back; training goes on as where nobody slept."""
    opened, awake = (both(kind, axes, optim=OPTIM)[0] for _ in range(2))
    batch = rollouts(engine(kind))
    here, module = mine(opened, batch), opened.trainer.optimizer.module
    buffers = [buffer.grad_data.untyped_storage() for buffer in (*module.buffers, *module.expert_parallel_buffers)]
    sizes = [storage.nbytes() for storage in buffers]
    for _ in range(2):
        found, wanted = opened.update(here, rl.sft(), minibatch=8), awake.update(here, rl.sft(), minibatch=8)
        assert found == wanted and opened.digest() == awake.digest()
        held = {s.tensor.untyped_storage().data_ptr(): s.tensor.untyped_storage().nbytes()
                for s in (*opened.shards(), *opened.state_shards()[0])}  # fmt: skip
        assert min(sizes) > 0 and opened.sleep() == sum(held.values()) + sum(sizes)
        assert [storage.nbytes() for storage in buffers] == [0] * len(sizes)
        assert opened.sleep() == 0 and opened.wake() == sum(held.values()) + sum(sizes) and opened.wake() == 0
        assert [storage.nbytes() for storage in buffers] == sizes
    return {}


def check_low(axes, others):
    """In bfloat16 the weights that are trained are float32; they and the moments go to other layouts bit for bit."""
    low = Build(Model(config=CONFIGS["qwen2"]), axes=axes, dtype="bf16", optim=OPTIM)
    opened = sharpened(open_engine("megatron", low))
    reference = engine("qwen2", optim=OPTIM)
    batch = rollouts(reference)
    for _ in range(3):
        a, b = opened.update(mine(opened, batch), rl.sft()), reference.update(batch, rl.sft())
        assert a == pytest.approx(b, rel=0.02)
    state, meta = whole_state(opened)
    assert {str(s.tensor.dtype) for s in opened.shards()} == {"torch.bfloat16"}
    assert {t.dtype for t in state.values()} == {torch.float32}
    for other in others:
        second = open_engine("megatron", replace(low, axes=other))
        load(second, state, meta)
        again, _ = whole_state(second)
        assert all(torch.equal(again[n], state[n]) for n in state) and second.digest() == opened.digest()
    opened.take_weights(reference.weights())  # what is trained follows what is written
    assert gap(whole_state(opened)[0]["weights.model.norm.weight"], reference.weights()["model.norm.weight"]) < 1e-2
    return {}


def check_errors():
    """What a mesh or a model cannot do is said before anything is loaded."""

    def build(kind="llama", axes=None, **more):
        return Build(Model(config={**CONFIGS[kind], **more.pop("config", {})}), axes=axes or {"tp": 2}, **more)

    for error, words, wrong in (
        (PlanError, "has no axis fsdp", build(axes={"fsdp": 2})),
        (PlanError, "needs 4 ranks", build(axes={"tp": 4})),
        (ModelError, "no adapters", build(lora=Lora())),
        (ModelError, "trains all weights", build(freeze=("embeddings",))),
        (ModelError, "in a window", build("mistral-window")),
        (ModelError, "the kind 'gpt2'", build("gpt2")),
        (ModelError, "a bias outside", build(config={"attention_bias": True})),
        (ModelError, "do not divide by tp=2", build(config={"num_attention_heads": 1, "num_key_value_heads": 1})),
        (ModelError, "none", build(axes={"ep": 2})),
        (ModelError, "tp > 1", build("qwen3-moe")),
        (ModelError, "cp=2", build(axes={"cp": 2})),
        (ModelError, "too few for pp", build(axes={"pp": 2}, config={"num_hidden_layers": 1})),
    ):
        with pytest.raises(error, match=words) as told:
            open_engine("megatron", wrong)
        assert told.value.fix
    return {}


class Fused(torch.optim.Optimizer):
    """Adam as Transformer Engine and apex have it: the count of steps is the group's, and begins with the first one."""

    def __init__(self, weights):
        super().__init__(weights, {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state |= {kind: torch.zeros_like(weight) for kind in ("exp_avg", "exp_avg_sq")}
                corrected = []
                for kind, beta, seen in zip(state, group["betas"], (weight.grad, weight.grad**2), strict=False):
                    state[kind].lerp_(seen, 1 - beta)
                    corrected.append(state[kind] / (1 - beta ** group["step"]))
                weight -= group["lr"] * corrected[0] / (corrected[1].sqrt() + group["eps"])


def test_optimizers_that_count_steps_by_group_go_on_where_they_were():
    """Neither Transformer Engine nor apex is here; theirs begin to count in the first step, which a resume is before."""
    from flowrl.backends.megatron.optimizer import Optimizer

    def made():
        weight = torch.nn.Parameter(torch.ones(2, 3))
        fused, optimizer = Fused([weight]), Optimizer.__new__(Optimizer)
        optimizer.distributed = False
        optimizer.parts = [SimpleNamespace(
            optimizer=fused, param_groups=fused.param_groups, get_parameters=lambda: [weight])]  # fmt: skip
        return weight, fused, optimizer

    def train(weight, fused, steps):
        for number in steps:
            weight.grad = torch.arange(6.0).view(2, 3) - number
            fused.step()
        return weight.detach().clone()

    weight, fused, optimizer = made()
    whole = train(weight, fused, range(6))
    weight, fused, optimizer = made()
    kept = train(weight, fused, range(4)), {kind: fused.state[weight][kind].view(-1).clone() for kind in MOMENTS}
    resumed, fused, optimizer = made()
    with torch.no_grad():
        resumed.copy_(kept[0])
    optimizer.take(resumed, kept[1], 4)
    assert torch.equal(train(resumed, fused, range(4, 6)), whole)
    first = train(*made()[:2], [0])
    for begin in (optimizer.restart, lambda: optimizer.take(resumed, None, 4)):
        begin()
        with torch.no_grad():
            resumed.fill_(1.0)
        assert torch.equal(train(resumed, fused, [0]), first), "from none they begin anew"


def report(found):
    """The worst over the ranks, for a reader of ``pytest -s``."""
    names = found[0].keys()
    print({n: f"{max(f[n] for f in found):.1e}" for n in names}, file=sys.stderr)


def test_core():
    """The layout of every CI run: a Llama of tp=2 x pp=2."""
    report(run(check_layout, 4, "llama", {"pp": 2, "tp": 2}, timeout=200))


NIGHTLY = [
    ("llama", {"tp": 2}, None),
    ("llama", {"pp": 2}, None),
    ("llama", {"dp": 2, "tp": 2}, [1, 0, 1, 1]),
    ("llama", {"dp": 2, "tp": 2}, [1, 1, 1, 1]),  # a rank without rows
    ("llama-3", {"pp": 2, "dp": 2}, None),
    ("llama-41", {"tp": 2}, None),
    ("llama-rope", {"tp": 2}, None),
    ("mistral", {"pp": 2}, None),
    ("moe-renormalised", {"ep": 2}, None),
    ("qwen2", {"pp": 2, "tp": 2}, None),  # tied over stages
    ("qwen2", {"pp": 2, "dp": 2}, [0, 1, 0, 0]),
    ("qwen3", {"tp": 4}, None),  # more ranks than heads of keys
    ("qwen3-moe", {"ep": 2}, None),
    ("qwen3-moe", {"ep": 2}, [0, 0, 0, 0]),
    ("mixtral", {"pp": 2, "ep": 2}, None),
    ("mixtral", {"dp": 2, "ep": 2}, [3, 0, 1, 1]),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "axes", "places"), NIGHTLY, ids=str)
def test_layouts(kind, axes, places):
    count = 1
    for size in axes.values():
        count *= size
    report(run(check_layout, count, kind, axes, places, timeout=200))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "axes", "others"),
    [
        ("qwen2", {"pp": 2, "tp": 2}, [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}]),
        ("mixtral", {"dp": 2, "ep": 2}, [{"pp": 2, "ep": 2}, {"ep": 4}]),
    ],
    ids=str,
)
def test_state_goes_from_layout_to_layout(kind, axes, others):
    run(check_state, 4, kind, axes, others, timeout=300)


@pytest.mark.nightly
@pytest.mark.parametrize("axes", [{"pp": 2}, {"dp": 2}, {"tp": 2}], ids=str)
def test_scalar_head(axes):
    report(run(check_scalar, 2, axes, timeout=200))


@pytest.mark.nightly
def test_the_rest(tmp_path):
    run(check_rest, 2, str(tmp_path / "saved"), timeout=300)


@pytest.mark.nightly
@pytest.mark.parametrize(("axes", "others"), [({"dp": 2, "tp": 2}, [{"pp": 2, "dp": 2}])], ids=str)
def test_half_precision(axes, others):
    run(check_low, 4, axes, others, timeout=200)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "axes", "head"),
    [
        ("qwen3-moe", {"ep": 2}, "lm"),
        ("mixtral", {"pp": 2}, "lm"),
        ("llama", {"tp": 2}, "lm"),
        ("qwen2", {"pp": 2}, "scalar"),
    ],
    ids=str,
)
def test_saved(kind, axes, head, tmp_path):
    run(check_saved, 2, kind, axes, head, str(tmp_path / "saved"), timeout=200)


@pytest.mark.nightly
def test_alone():
    run(check_alone, 1, timeout=200)


@pytest.mark.parametrize(
    ("kind", "axes"),
    [("qwen2", {}), pytest.param("qwen3-moe", {"ep": 2}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_asleep_it_holds_no_gradients_and_awake_it_trains_on(kind, axes):
    run(check_asleep, 2 if axes else 1, kind, axes, timeout=200)


@pytest.mark.nightly
def test_errors():
    run(check_errors, 2, timeout=200)
