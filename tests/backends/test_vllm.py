"""vLLM in a process of its own: its rows and log-probabilities are those of the reference engine, after every publish.

They need vLLM: `make vllm-test`.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from vllm_tiny import CONFIGS, DEVICE, EOS, MANY, POSITIONS, PROMPTS, published, train, whole

from flowrl.backends import open_engine
from flowrl.backends.probe import TOLERANCE
from flowrl.batch import Batch, Column
from flowrl.errors import DataError, ModelError, NotFinite, RunError
from flowrl.workers.model_options import Build, Lora, Model, Optim, Sampling
from flowrl.workers.streaming import FailedCall, SampleRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]
torch.set_num_threads(1)
packs = pytest.mark.skipif(DEVICE != "cpu", reason="weights are packed, or lie in place, on a CPU alone")


def gaps(made, prompts, engine):
    """How far log-probabilities of sampled tokens are from those that a training engine reads."""
    tokens = [a + b for a, b in zip(prompts, made.ids.to_list(), strict=True)]
    mask = Column.of([[True] * len(row) for row in made.ids.to_list()], "response", "bool")
    read = engine.logprobs(Batch.of(tokens=Column.of(tokens, "token", "i32"), response_mask=mask))
    return (made.rollout_logprobs.values - read.values).abs()


SAMPLED = [
    pytest.param(kind, marks=[] if kind in ("qwen2", "qwen3_moe") else pytest.mark.nightly)
    for kind in CONFIGS
    if kind != "gemma"
]


@pytest.mark.parametrize("kind", SAMPLED)
def test_greedy_rows_are_those_of_transformers_after_each_publish(opened, kind):
    seen = set()
    for publish in range(5):
        ours, theirs = published(opened, kind, seed=publish)
        made = ours.generate(Column.of(MANY, "prompt", "i32"), 1, torch.arange(64), Sampling(16, greedy=True))
        rows = made.ids.to_list()
        assert rows == [whole(theirs, prompt, 16) for prompt in MANY]
        assert made.finished.tolist() == [row[-1] == EOS for row in rows]
        assert ours.digest() == theirs.digest() and ours.published.gap < 2e-4
        seen.add(str(rows))
    assert len(seen) == 5, "each publish gives other rows"


@packs
@pytest.mark.parametrize("kind", ["qwen2", pytest.param("llama", marks=pytest.mark.nightly)])
def test_matrices_are_computed_with_where_they_lie_if_the_plan_says_so(opened, fault, kind):
    prompts = Column.of(MANY, "prompt", "i32")
    for publish in range(3):
        ours, theirs = published(opened, kind, seed=publish, packed=False)
        made = ours.generate(prompts, 1, torch.arange(64), Sampling(16, greedy=True))
        assert made.ids.to_list() == [whole(theirs, prompt, 16) for prompt in MANY]
        assert ours.digest() == theirs.digest() and ours.published.gap < 2e-4
    next(shard.tensor for shard in ours.shards() if "0.mlp.down_proj" in shard.name).zero_()
    others = ours.generate(prompts, 1, torch.arange(64), Sampling(16, greedy=True))
    assert others.ids.to_list() != made.ids.to_list(), "they lie there alone"
    train(theirs, 9)
    fault("old norm")
    with pytest.raises(RunError, match="as before this publish: model.layers.1.input_layernorm.weight"):
        ours.take_weights(theirs.plain_weights())


HOW = [
    Sampling(12),
    Sampling(12, temperature=0.6),
    Sampling(12, temperature=1.4, top_k=7),
    Sampling(12, top_p=0.8, min_p=0.02, stop=(33, 34)),
    Sampling(12, temperature=1.2, top_p=0.9, repetition_penalty=1.3),
    Sampling(12, greedy=True, repetition_penalty=1.1),
]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
def test_rows_of_a_mixture_of_experts_are_those_of_the_reference_engine(opened, kind):
    ours, theirs = published(opened, kind)
    prompts, seeds = Column.of(PROMPTS, "prompt", "i32"), torch.arange(2 * len(PROMPTS))
    here, there = (e.generate(prompts, 2, seeds, Sampling(20, top_p=0.9)) for e in (ours, theirs))
    assert here.ids.to_list() == there.ids.to_list()
    assert torch.allclose(here.rollout_logprobs.values, there.rollout_logprobs.values, atol=1e-4)
    assert float(gaps(here, [p for p in PROMPTS for _ in range(2)], theirs).max()) < 1e-4


@pytest.mark.parametrize("sampling", HOW, ids=lambda s: f"{s.temperature}-{s.top_k}-{s.top_p}-{s.greedy}")
def test_sampled_rows_are_those_of_the_reference_engine(opened, sampling):
    ours, theirs = published(opened, "qwen2")
    prompts, seeds = Column.of(PROMPTS, "prompt", "i32"), torch.arange(2 * len(PROMPTS)) * 7919 - 3
    starts = torch.arange(2 * len(PROMPTS)) % 3
    here, there = (e.generate(prompts, 2, seeds, sampling, starts) for e in (ours, theirs))
    assert here.ids.to_list() == there.ids.to_list()
    assert here.finished.tolist() == there.finished.tolist()
    assert torch.allclose(here.rollout_logprobs.values, there.rollout_logprobs.values, atol=1e-4)
    assert torch.allclose(here.sampling_logprobs.values, there.sampling_logprobs.values, atol=1e-4)
    same = there.sampling_logprobs is there.rollout_logprobs
    assert (here.sampling_logprobs is here.rollout_logprobs) == same and here.temperature == there.temperature


CUT = [
    Sampling(8, temperature=1.4, top_k=7, support=True),
    Sampling(8, temperature=0.8, top_p=0.7, min_p=0.05, support=True),
    Sampling(8, greedy=True, support=True),
    Sampling(8, support=True),
]


@pytest.mark.parametrize("sampling", CUT, ids=lambda s: f"{s.top_k}-{s.top_p}-{s.greedy}")
def test_the_tokens_that_could_be_drawn_are_those_of_the_reference_engine(opened, sampling):
    ours, theirs = published(opened, "qwen2")
    prompts, seeds = Column.of(PROMPTS, "prompt", "i32"), torch.arange(2 * len(PROMPTS)) * 31
    here, there = (e.generate(prompts, 2, seeds, sampling) for e in (ours, theirs))
    assert here.ids.to_list() == there.ids.to_list() and here.support is not None
    assert all(one.equal(other) for one, other in zip(here.support, there.support, strict=True))
    assert ours.generate(prompts, 2, seeds, replace(sampling, support=False)).support is None
    none = ours.generate(Column.of([], "prompt", "i32"), 2, torch.zeros(0, dtype=torch.int64), sampling)
    assert [len(column) for column in none.support] == [0, 0]


def test_a_ratio_of_what_vllm_sampled_is_one_among_the_tokens_that_could_be_drawn(opened):
    ours, theirs = published(opened, "qwen2", seed=5)
    made = ours.generate(Column.of(MANY, "prompt", "i32"), 1, torch.arange(64), Sampling(8, top_p=0.6, support=True))
    ids = made.ids.to_list()
    told = {"support_ids": made.support[0], "support_sizes": made.support[1]}
    tokens = Column.of([prompt + row for prompt, row in zip(MANY, ids, strict=True)], "token", "i32")
    rows = Batch.of(tokens=tokens, response_mask=Column.of([[True] * len(r) for r in ids], "response", "bool"))
    among, whole = (theirs.logprobs(r).values for r in (rows.with_columns(told), rows))
    assert float((made.sampling_logprobs.values - among).abs().max()) < 1e-4
    assert float((made.sampling_logprobs.values - whole).abs().max()) > 0.1


def test_a_call_that_records_too_much_is_refused_and_others_go_on(opened, fault):
    ours, _ = published(opened, "qwen2")
    prompts = Column.of(PROMPTS, "prompt", "i32")
    fault("little room")
    with pytest.raises(DataError, match=r"tokens of 16 rows have a support of \d+ ids, and at most 500 are") as info:
        ours.generate(prompts, 1, torch.arange(16), Sampling(8, top_k=40, support=True))
    assert "top_k=" in str(info.value.fix)
    seeds = torch.arange(16)
    failed = ours.submit(SampleRequest(prompts, 1, seeds, Sampling(8, top_k=40, support=True)))
    other = ours.submit(SampleRequest(prompts, 1, seeds, Sampling(8, top_k=2, support=True)))
    found = []
    while ours.running():
        found += ours.step()
    wrong = [each for each in found if isinstance(each, FailedCall)]
    assert [each.call for each in wrong] == [failed] and isinstance(wrong[0].error, DataError)
    assert sorted(row.row for row in found if row.call == other) == list(range(16))
    fault("")


def test_a_row_ends_where_the_positions_end(opened):
    ours, theirs = published(opened, "qwen2")
    prompts = Column.of([[3 + i % 60 for i in range(n)] for n in (POSITIONS - 5, POSITIONS - 1, 2)], "prompt", "i32")
    here, there = (e.generate(prompts, 1, torch.arange(3), Sampling(9)) for e in (ours, theirs))
    assert here.ids.to_list() == there.ids.to_list() and [len(row) <= 5 for row in here.ids.to_list()][:2] == [True] * 2
    assert len(here.ids.to_list()[1]) == 1


def test_log_probabilities_are_those_of_the_trainer(opened):
    ours, theirs = published(opened, "qwen2", seed=9)
    made = ours.generate(Column.of(PROMPTS, "prompt", "i32"), 1, torch.arange(len(PROMPTS)), Sampling(20))
    assert float(gaps(made, PROMPTS, theirs).max()) < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_in_bf16_rows_are_those_of_the_trainer_but_for_rounding(opened, kind):
    for seed in range(5):
        ours, theirs = published(opened, kind, seed, "bf16")
        made = ours.generate(Column.of(MANY, "prompt", "i32"), 1, torch.arange(64), Sampling(16))
        found = gaps(made, MANY, theirs)
        assert float(found.mean()) < 0.05 and float(found.max()) < TOLERANCE["bfloat16"]
        assert ours.published.gap < TOLERANCE["bfloat16"] and ours.digest() == theirs.digest()


def test_a_row_does_not_depend_on_those_beside_it(opened):
    ours, _ = published(opened, "qwen2")
    alone = ours.generate(Column.of(PROMPTS[1:2], "prompt", "i32"), 1, torch.tensor([11]), Sampling(12))
    among = ours.generate(Column.of(PROMPTS, "prompt", "i32"), 1, torch.arange(10, 10 + len(PROMPTS)), Sampling(12))
    assert among.ids.to_list()[1] == alone.ids.to_list()[0]


def test_no_rows_and_wrong_prompts(opened):
    ours, _ = published(opened, "qwen2")
    none = ours.generate(Column.of([], "prompt", "i32"), 2, torch.zeros(0, dtype=torch.int64), Sampling(4))
    assert len(none.ids) == len(none.rollout_logprobs) == len(none.finished) == 0
    for prompts, what in (
        ([[3], []], "The prompt of row 1 is empty"),
        ([[3] * POSITIONS], f"row 0 has {POSITIONS} tokens"),
    ):
        with pytest.raises(DataError, match=what):
            ours.generate(Column.of(prompts, "prompt", "i32"), 1, torch.arange(len(prompts)), Sampling(4))


BEFORE, OTHERS, OTHER = (
    "as before this publish",
    "the weights came whole, and vLLM computes with others in",
    "other numbers",
)
#: On a device a tied head is the embedding itself, and blocks of the cache have 16 tokens in place of 128.
TIED, BLOCKS = ("", 1) if DEVICE == "cpu" else (", lm_head.weight", 13)
FOUND = {
    "stale head": (OTHERS, f"{BEFORE}: lm_head.weight."),
    "nothing loaded": (OTHERS, f"in 27 of 27 that were looked at. {BEFORE}: "),
    "half written": ("came to vLLM with other numbers in model.embed_tokens.weight, ", " and 23 more"),
    "one written": ("came to vLLM with other numbers in model.layers.1.mlp.up_proj.weight.",),
    "k not given": (OTHERS, "model.layers.0.self_attn.k_proj.weight"),
    "down not given": ("has weights that were not among those published: model.layers.0.mlp.down_proj.weight.",),
    "q and k swapped": (
        OTHERS,
        "those of model.layers.0.self_attn.k_proj.weight: model.layers.0.self_attn.q_proj.weight",
    ),
    "gate and up swapped": (OTHERS, "those of model.layers.0.mlp.up_proj.weight: model.layers.0.mlp.gate_proj.weight"),
    "layers swapped": (
        OTHERS,
        "those of model.layers.1.self_attn.q_proj.weight: model.layers.0.self_attn.q_proj.weight",
    ),
    "heads in another order": (OTHERS, "in another order: model.layers.1.self_attn.q_proj.weight."),
    "o transposed": (OTHERS, f"{OTHER}: model.layers.1.self_attn.o_proj.weight."),
    "rounded": (OTHERS, "rounded to bfloat16: "),
    "one number off": (OTHERS, f"in 1 of 27 that were looked at. {OTHER}: model.layers.1.mlp.up_proj.weight."),
    "zeros": (OTHERS, "zeros: model.layers.0.self_attn.v_proj.weight."),
    "bias lost": (OTHERS, "zeros: model.layers.0.self_attn.q_proj.bias."),
    "scaled": (OTHERS, f"{OTHER}: model.layers.0.mlp.down_proj.weight."),
    "not a number": (OTHERS, "not finite: model.layers.0.mlp.down_proj.weight."),
    "old norm": (OTHERS, f"{BEFORE}: model.layers.1.input_layernorm.weight."),
    "old embedding": (OTHERS, f"{BEFORE}: model.embed_tokens.weight{TIED}."),
    "old half of q, k and v": (OTHERS, f"{BEFORE} in a part: model.layers.0.self_attn.q_proj.weight"),
    "other positions": ("each weight that was looked at is as it was published, and vLLM computes something else",),
    "cache kept": ("the prefix cache could not be emptied",),
    "cache said to be empty": (f"the prefix cache still has {BLOCKS} blocks of keys and values of the weights before",),
}


EXPERTS = "model.layers.1.mlp.experts"
FOUND_OF_EXPERTS = {
    "experts as they are given": (OTHERS, f"{OTHER}: model.layers.0.mlp.experts.gate_up_proj"),
    "old expert": (OTHERS, f"{BEFORE} in a part: {EXPERTS}.gate_up_proj."),
    "experts in another order": (OTHERS, f"{OTHER}: {EXPERTS}.down_proj."),
    "gate and up of experts swapped": (OTHERS, f"{OTHER}: model.layers.0.mlp.experts.gate_up_proj."),
    "one number of an expert off": (OTHERS, f"{OTHER}: {EXPERTS}.gate_up_proj."),
    "router lost": (OTHERS, "zeros: model.layers.0.mlp.gate.weight."),
}
OF_PACKING = ("stale head", "old half of q, k and v", "experts as they are given")
ALL_FOUND = [
    pytest.param(kind, what, said, id=what, marks=packs if what in OF_PACKING else [])
    for kind, causes in (("qwen2", FOUND), ("qwen3_moe", FOUND_OF_EXPERTS))
    for what, said in causes.items()
]


@pytest.mark.parametrize(("kind", "what", "found"), ALL_FOUND)
def test_a_publish_that_does_not_arrive_is_an_error_that_says_what(opened, fault, kind, what, found):
    ours, theirs = published(opened, kind, seed=20)
    ours.generate(Column.of([[5] * (POSITIONS - 10)], "prompt", "i32"), 1, torch.arange(1), Sampling(1))
    train(theirs, 21)
    fault(what)
    with pytest.raises(RunError, match=f"publish {ours.publishes + 1} of random {kind}.*") as info:
        ours.take_weights(theirs.plain_weights())
    assert all(said in info.value.what for said in found), info.value.what
    fault("")
    ours.take_weights(theirs.plain_weights())  # and nothing is left of it
    assert ours.published.gap < 2e-4


def test_adapters_that_are_trained_and_not_delivered_are_found(opened, fault):
    """vLLM has the weights under the adapters, which came before: those that the adapters change are named."""
    pytest.importorskip("peft", reason="adapters need peft (extra 'lora')")
    ours, base = published(opened, "qwen2", seed=40)
    lora = Lora(r=4, targets=("q_proj", "v_proj"))
    theirs = open_engine(
        "hf", Build(Model(config=CONFIGS["qwen2"]), dtype="fp32", device="cpu", lora=lora, optim=Optim())
    )
    given = base.plain_weights()
    with torch.no_grad():
        for name, weight in theirs.net.model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.2)
            else:
                weight.copy_(given[name.replace(".base_layer", "")])
    merged = theirs.plain_weights()
    changed = {name for name in given if not torch.equal(merged[name], given[name])}
    assert changed == {f"model.layers.{i}.self_attn.{n}_proj.weight" for i in range(2) for n in "qv"}
    fault("adapter not delivered")
    with pytest.raises(RunError, match=f"in 4 of 27 that were looked at. {BEFORE}: ") as info:
        ours.take_weights(merged)
    assert "self_attn.q_proj.weight" in info.value.what and "and 1 more" in info.value.what
    fault("")
    ours.take_weights(merged)
    prompts = Column.of(MANY, "prompt", "i32")
    made = ours.generate(prompts, 1, torch.arange(64), Sampling(8))
    assert ours.published.gap < 2e-4 and float(gaps(made, MANY, theirs).max()) < 1e-4


WRITTEN = {
    "in a view": lambda ours, given: ours.shards()[1].tensor.mul_(1.5),
    "in all views": lambda ours, given: [shard.tensor.copy_(given[shard.name]) for shard in ours.shards()],
    "published": lambda ours, given: ours.take_weights(given),
    "views published": lambda ours, given: (ours.shards()[0].tensor.mul_(1.5), ours.weights_written()),
    "written as rows were to go on": lambda ours, given: (ours.pause(), ours.shards()[0].tensor.mul_(2), ours.resume()),
}


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("how", WRITTEN)
def test_weights_that_are_written_while_rows_run_are_found(opened, how, packed):
    """vLLM's process reads them in place: a row would have some of both."""
    ours, theirs = published(opened, "qwen2", seed=50, **({} if packed else {"packed": False}))
    train(theirs, 51)
    given = theirs.plain_weights()
    call = ours.submit(SampleRequest(Column.of(PROMPTS[:4], "prompt", "i32"), 1, torch.arange(4), Sampling(12)))
    assert ours.step() == []
    with pytest.raises(RunError, match="The weights were written while 4 rows were being sampled with them") as info:
        WRITTEN[how](ours, given)
        ours.step()
    assert "pause()" in str(info.value.fix)
    assert [row.reason for row in ours.abort(call)] == ["aborted"] * 4
    ours.take_weights(given)
    rows = ours.generate(Column.of(PROMPTS, "prompt", "i32"), 1, torch.arange(16), Sampling(8, greedy=True))
    assert rows.ids.to_list() == [whole(theirs, prompt, 8) for prompt in PROMPTS]


def test_rows_that_would_be_in_a_forward_pass_of_two_weights_are_found(opened, fault):
    ours, theirs = published(opened, "qwen2", seed=60)
    train(theirs, 61)
    call = ours.submit(SampleRequest(Column.of(PROMPTS[:4], "prompt", "i32"), 1, torch.arange(4), Sampling(12)))
    assert ours.step() == []
    ours.pause()
    fault("rows kept")
    with pytest.raises(
        RunError, match="failed. vLLM: .*: 4 rows are still being sampled: a forward pass would be of two"
    ):
        ours.take_weights(theirs.plain_weights())
    fault("")
    ours.take_weights(theirs.plain_weights())
    ours.resume(1)
    assert len(ours.abort(call)) == 4


def test_the_whole_probe_may_come_with_every_third_publish(opened, monkeypatch):
    ours, theirs = published(opened, "qwen2")
    monkeypatch.setitem(ours.options, "probe", 3)
    rows = []
    for seed in range(6):
        train(theirs, seed)
        ours.take_weights(theirs.plain_weights())
        rows.append((ours.publishes % 3, ours.published.rows))
    assert sorted(set(rows)) == [(0, 1), (1, 4), (2, 1)]


def test_weights_that_are_not_finite_are_named(opened):
    ours, theirs = published(opened, "qwen2")
    weights = {n: w.clone() for n, w in theirs.plain_weights().items()}
    weights["model.norm.weight"][3] = torch.nan
    with pytest.raises(NotFinite, match="model.norm.weight"):
        ours.take_weights(weights)


def test_a_row_that_fails_there_is_named_and_the_others_are_ended(opened, fault):
    ours, _ = published(opened, "qwen2")
    fault("a row fails")
    prompts = Column.of(PROMPTS[:4], "prompt", "i32")
    with pytest.raises(RunError, match="row 2: no room"):
        ours.generate(prompts, 1, torch.arange(4), Sampling(4))
    fault("")
    assert len(ours.generate(prompts, 1, torch.arange(4), Sampling(4)).ids) == 4


def test_views_are_published_when_they_are_written(opened):
    ours, theirs = published(opened, "qwen2", seed=30)
    train(theirs, 31)
    given = theirs.plain_weights()
    for shard in ours.shards():
        shard.tensor.copy_(given[shard.name])
    ours.weights_written()
    seeds = torch.arange(4)
    prompts = Column.of(PROMPTS[:4], "prompt", "i32")
    here, there = (e.generate(prompts, 1, seeds, Sampling(8)) for e in (ours, theirs))
    assert here.ids.to_list() == there.ids.to_list() and ours.digest() == theirs.digest()


def test_what_it_does_not_do_is_refused():
    build = Build(Model(config=CONFIGS["llama"]), dtype="fp32", device=DEVICE)
    cases = [
        (Build(build.model, head="scalar"), "scalar head"),
        (Build(build.model, lora=Lora(r=2)), "adapters"),
        (Build(Model(config=CONFIGS["gemma"])), "the kind 'gemma'"),
        (Build(Model(config=CONFIGS["qwen3_moe"]), dtype="bf16"), "Rounded to bfloat16, tokens .* other experts"),
    ]
    for wrong, said in cases:
        with pytest.raises(ModelError, match=said):
            open_engine("vllm", wrong)


def resident(pid):
    """Bytes of memory that a process has, those that it shares included."""
    said = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in said if line.startswith("VmRSS:"))


def own(pid):
    """Bytes of memory that are a process's alone, or its part of those that others have too."""
    said = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in said if line.startswith("Pss:"))


@pytest.mark.parametrize("how", [{}, {"packed": False}], ids=["packed", "where-they-lie"])
@pytest.mark.parametrize("kind", ["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.nightly)])
def test_after_sleep_it_computes_with_the_weights_that_it_had_and_with_new_ones(opened, kind, how):
    ours, theirs = published(opened, kind, **how)
    asked = Column.of(PROMPTS, "prompt", "i32"), 2, torch.arange(2 * len(PROMPTS)), Sampling(8)
    whole, digest, publishes = ours.generate(*asked), ours.digest(), ours.publishes
    assert ours.sleep() > ours.wake() > 0 and ours.digest() == digest
    assert ours.sleep() == ours.wake() > 0, "what vLLM has comes back with a publish alone"
    assert ours.publishes == publishes, "what it has not been asked for it does not need"
    assert ours.generate(*asked).ids.equal(whole.ids) and ours.publishes == publishes + 1
    ours.sleep()
    with pytest.raises(RunError, match="is asleep"):
        ours.weights_written()
    found = ours.offloaded.finder()
    assert all(torch.equal(found(there.tensor), here.tensor) for there, here in zip(
        ours.offloaded.state[0], theirs.shards(), strict=True))  # fmt: skip
    train(theirs, 5)
    ours.wake()
    ours.take_weights(theirs.plain_weights())
    assert ours.generate(*asked).ids.equal(theirs.generate(*asked).ids)


def test_rows_may_be_ended_while_it_sleeps(opened):
    ours, _ = published(opened, "qwen2")
    asked = Column.of(PROMPTS, "prompt", "i32"), 1, torch.arange(len(PROMPTS)), Sampling(6, stop=())
    whole = ours.generate(*asked).ids.to_list()
    calls = [ours.submit(SampleRequest(*asked)) for _ in range(3)]
    ours.step()
    ours.sleep()
    gone = [*ours.abort(calls[0]), *ours.abort(calls[1], [0])]
    assert [(row.call, row.row, len(row.ids)) for row in gone] == [
        *((calls[0], row, 1) for row in range(len(PROMPTS))), (calls[1], 0, 1)]  # fmt: skip
    ours.wake(), ours.sleep(), ours.wake()  # and none comes between
    left = []
    while ours.running():
        left += ours.step()
    assert {(row.call, row.row): list(row.ids) for row in left} == {
        (call, row): ids for call in calls[1:] for row, ids in enumerate(whole) if (call, row) != (calls[1], 0)
    }


@packs
@pytest.mark.parametrize("how", [{}, {"packed": False}], ids=["packed", "where-they-lie"])
def test_asleep_the_system_has_the_memory(how):
    """A model of 38 MB, packed by vLLM or not, and 256 MiB of keys and values."""
    sizes = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
    build = Build(Model(config={**CONFIGS["qwen2-untied"], **sizes}), dtype="fp32", device=DEVICE)
    ours = open_engine("vllm", replace(build, options={"kv_cache": 0.25, **how}))
    weights = sum(shard.tensor.nbytes for shard in ours.shards())
    copies = 2 if ours.options["packed"] else 1
    asked = Column.of(MANY, "prompt", "i32"), 1, torch.arange(64), Sampling(8)
    whole = ours.generate(*asked)
    awake = own(os.getpid()) + own(ours.child.pid)
    freed = ours.sleep()
    asleep = own(os.getpid()) + own(ours.child.pid)
    assert freed >= copies * weights + (1 << 28)
    assert awake - asleep > 0.9 * copies * weights, "of keys and values only what was written is there"
    ours.wake()
    assert ours.generate(*asked).ids.equal(whole.ids)
    assert own(os.getpid()) + own(ours.child.pid) < awake + weights / 2
    ours.close()


@pytest.mark.nightly
def test_after_five_publishes_no_memory_has_grown():
    """A model of 38 MB: what kept a copy of it at each publish would have 190 MB more."""
    sizes = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
    build = Build(Model(config={**CONFIGS["qwen2-untied"], **sizes}), dtype="fp32", device=DEVICE)
    ours, theirs = (open_engine(name, build) for name in ("vllm", "hf"))
    prompts, size = Column.of(MANY, "prompt", "i32"), sum(shard.tensor.nbytes for shard in ours.shards())
    held = []
    for publish in range(8):
        train(theirs, publish)
        ours.take_weights(theirs.plain_weights())
        ours.generate(prompts, 1, torch.arange(64), Sampling(8))
        held.append((resident(os.getpid()), resident(ours.child.pid)))
    ours.close()
    for before, after in zip(held[2], held[-1], strict=True):  # the first ones fill caches
        assert after - before < size / 2, (size, held)


def shared_memory():
    """What lies in shared memory, but for what other programs of this machine put there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "."))}


def gone(pid, seconds=20):
    end = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.2)
    return not Path(f"/proc/{pid}").exists()


def test_a_process_that_is_gone_is_said_and_closing_leaves_nothing():
    shared = shared_memory()
    config = {**CONFIGS["qwen2"], "num_hidden_layers": 1}
    ours = open_engine("vllm", Build(Model(config=config), dtype="fp32", device=DEVICE, options={"context": 32}))
    assert ours.positions == 32
    prompts = Column.of([[3] * 31], "prompt", "i32")
    assert len(ours.generate(prompts, 1, torch.arange(1), Sampling(9, greedy=True)).ids.to_list()[0]) == 1
    os.kill(ours.child.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="the process of vLLM is gone, with exit status -9"):
        ours.generate(prompts, 1, torch.arange(1), Sampling(1))
    ours.close()
    assert shared_memory() <= shared


HOLDER = """
import os, sys, torch
sys.path.insert(0, {folder!r})
from vllm_tiny import CONFIGS, DEVICE
from flowrl.backends import open_engine
from flowrl.workers.model_options import Build, Model
engine = open_engine("vllm", Build(Model(config=CONFIGS["llama"]), dtype="fp32", device=DEVICE))
print(engine.child.pid, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_it_ends_with_the_process_that_began_it(how):
    shared = shared_memory()
    script = HOLDER.format(folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, timeout=300)
    assert done.returncode == (-9 if how == "killed" else 0), done.stderr
    assert gone(int(done.stdout.split()[-1]))
    assert shared_memory() <= shared
