"""The tokens that could be drawn: recorded as plain code finds them, and ratios among them are exact."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_support import at_targets, logits_of, processed, recorded
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import flowrl as fl
from flowrl import rl
from flowrl.backends.hf.generation.continuous import NetBatch
from flowrl.backends.hf.generation.support import Support
from flowrl.backends.hf.logits import Head, token_logprobs
from flowrl.batch import Batch, CallInfo, Column
from flowrl.errors import CheckError, DataError, FieldError, ModelError, ProgramError
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.workers.tokens import row_support

WORDS = ["<pad>", ";", *"abcdefghijklmnopqrst"]
SETTINGS = [
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.95, "min_p": 0.1},
    {"top_k": 1},
    {"temperature": 0.8},
    {"greedy": True},
]


def build_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";")


def model(seed=0, **more):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "vocab_size": len(WORDS)}
    config = {"model_type": "qwen2", **sizes, **ids, "num_hidden_layers": 2, "initializer_range": 0.4, **more}
    return fl.Model(config={**config, "max_position_embeddings": 64}, tokenizer=build_tokenizer, seed=seed)


@pytest.fixture(scope="module")
def actor():
    return fl.open(fl.Actor(model(), max_tokens=6, lr=1e-3), name="actor")


@pytest.fixture(scope="module")
def other():
    """The policy of other weights."""
    return fl.open(fl.Actor(model(seed=7), max_tokens=6, lr=1e-3), name="actor")


def rows(actor, n=3, **how):
    ids = Column.of([[2, 3], [4], [5, 6, 7]], dim="prompt", dtype="i32")
    made = actor.generate(Batch.of(3, prompt_ids=ids).with_call(CallInfo(seed=5)), n=n, **how)
    numbers = torch.linspace(-1, 1, len(made.response_mask.values))
    return made.with_columns({"advantages": made.response_mask.with_values(numbers)})


@pytest.mark.parametrize("how", SETTINGS, ids=lambda how: ",".join(how))
def test_a_ratio_among_the_tokens_that_could_be_drawn_is_that_of_plain_code(actor, other, how):
    batch = rows(actor, support=True, **how)
    old, temperature = processed(logits_of(actor, batch), how), how.get("temperature", 1.0)
    inside = old > -torch.inf
    assert torch.equal(recorded(batch, len(WORDS)), inside)
    assert how == {"temperature": 0.8} or not inside.all()
    new = (logits_of(other, batch) / temperature).masked_fill(~inside, -torch.inf)
    before, after = at_targets(old, batch), at_targets(new, batch)
    found = other.logprobs(batch, support=True).old_logprobs
    assert torch.allclose(batch.sampling_logprobs.values.double(), before, atol=1e-5, rtol=0)
    assert torch.allclose(found.values.double(), after, atol=1e-5, rtol=0)
    ratio = (found - batch.sampling_logprobs).values.double().exp()
    assert torch.allclose(ratio, (after - before).exp(), atol=1e-5, rtol=1e-5)
    shares = (new.log_softmax(-1).exp() * new.log_softmax(-1).masked_fill(~inside, 0)).sum(-1)
    spread = other.entropies(batch, support=True).entropies
    assert torch.allclose(spread.values.double(), -shares, atol=1e-5, rtol=0)


def test_an_update_trains_the_ratio_among_the_tokens_that_could_be_drawn(actor, other):
    """The ratio of the weights that sampled is 1, and that of others is theirs; the reference is of the same kind."""
    batch = rows(actor, support=True, temperature=0.7, top_k=4, top_p=0.9)
    ref = fl.open(fl.Reference(model(seed=7)), name="ref")
    loss = rl.ppo_clip(anchor="sampling", kl=0.1, entropy=0.01)
    batch = ref.logprobs(batch, support=True)
    same = actor.update(batch, loss=loss, support=True, lr=0.0)
    assert same["ratio"] == pytest.approx(1.0, abs=1e-5) and same["kl"] > 0
    assert same["gap_tokens"] == same["tokens"] and same["gap_max"] < 1e-5  # engine and trainer, of one kind
    there = other.logprobs(batch, support=True).old_logprobs - batch.sampling_logprobs
    found = other.update(batch, loss=loss, support=True, lr=0.0)
    assert found["ratio"] == pytest.approx(float(there.values.double().exp().mean()), rel=1e-4)
    assert found["kl"] == pytest.approx(0.0, abs=1e-5)


def test_without_a_cut_everything_is_as_without_a_support():
    """Bit for bit, metrics and weights, and the rows are those of a call that records nothing."""
    ends = []
    for support_ in (False, True):
        worker = fl.open(fl.Actor(model(), max_tokens=6, lr=1e-2), name="actor")
        batch = rows(worker, support=support_)
        loss = rl.ppo_clip(anchor="sampling" if support_ else "rollout", entropy=0.1)
        ends.append((worker.update(batch, loss=loss, support=support_), worker.engine.digest(), batch))
    assert ends[0][:2] == ends[1][:2]
    assert all(ends[1][2][name].equal(column) for name, column in ends[0][2].columns.items())
    assert not ends[1][2].support_sizes.values.any() and not len(ends[1][2].support_ids.values)


def test_a_recorded_support_changes_no_token(actor):
    how = {"top_k": 4, "top_p": 0.8, "temperature": 1.3}
    plain, made = rows(actor, **how), rows(actor, support=True, **how)
    assert all(made[name].equal(plain[name]) for name in plain.fields)


def test_the_support_goes_with_its_rows(actor):
    batch = rows(actor, support=True, top_p=0.8)
    whole = actor.logprobs(batch, support=True).old_logprobs
    some = [4, 0, 7]
    record = Batch.from_record(json.loads(json.dumps(batch.to_record())))
    halves = batch.take([0, 1, 2]).concat(batch.take(list(range(3, 9))))
    for other, wanted in (
        (batch.take(some), whole.take(some)),
        (batch.filter([i in some for i in range(9)]), whole.take(sorted(some))),
        (record, whole),
        (halves, whole),
    ):
        found = actor.logprobs(other, support=True).old_logprobs
        assert torch.allclose(found.values, wanted.values, atol=1e-6) and found.marks == whole.marks


def test_rows_are_the_same_however_many_are_sampled_at_once(actor, monkeypatch):
    how = {"support": True, "top_p": 0.8, "temperature": 1.2}
    whole = rows(actor, **how)
    monkeypatch.setattr("flowrl.backends.hf.generation.generate.default_cache_bytes", lambda net: 1)
    for name, column in rows(actor, **how).columns.items():
        if "logprobs" not in name:
            assert column.equal(whole[name]), name


def test_no_rows_have_no_support(actor):
    ids = Column.of([], dim="prompt", dtype="i32")
    made = actor.generate(Batch.of(0, prompt_ids=ids), support=True, top_k=2)
    assert (len(made), made.support_ids.type, made.support_sizes.type) == (0, "i32[*support]", "i32[*response]")
    assert len(actor.logprobs(made, support=True)) == 0


# -- its mathematics ------------------------------------------------------------------------------------------------


def of_sizes(sizes, vocab, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(vocab, generator=drawn)[:n] for n in sizes]
    sizes = torch.tensor(sizes)
    return Support(torch.cat(ids).int(), sizes, sizes.cumsum(0) - sizes), ids


@pytest.mark.parametrize("budget", [1, 10**9])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_are_those_of_a_masked_softmax(budget, softcap):
    """Log-probabilities, entropies and gradients in float64, against autograd; one token's budget and all at once."""
    torch.manual_seed(0)
    tokens, width, vocab = 6, 5, 11
    hidden, weight = torch.randn(tokens, width).double(), torch.randn(vocab, width).double()
    found, ids = of_sizes([3, 0, 11, 1, 5, 2], vocab)
    targets = torch.tensor([int(i[0]) if len(i) else 4 for i in ids])
    temperature = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.7, 1.3]).double()
    outside = torch.tensor([[bool(len(i)) and v not in i for v in range(vocab)] for i in ids])
    pulls, results = torch.randn(2, tokens).double(), []
    for plain in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if plain:
            logits = h @ w.T if softcap is None else softcap * (h @ w.T / softcap).tanh()
            logs = (logits / temperature[:, None]).masked_fill(outside, -torch.inf).log_softmax(-1)
            a = logs.gather(-1, targets[:, None]).squeeze(-1)
            b = -(logs.exp() * logs.masked_fill(outside, 0)).sum(-1)
        else:
            head = Head(w, softcap=softcap, compute=torch.float64)
            more = {"temperature": temperature, "support": found, "entropy": True, "budget": budget}
            a, b = token_logprobs(h, head, targets, **more)
        (a * pulls[0] + b * pulls[1]).sum().backward()
        results.append((a.detach(), b.detach(), h.grad, w.grad))
    for plain, quick in zip(*results, strict=True):
        assert torch.allclose(plain, quick, atol=1e-10)


def test_the_parts_of_a_vocabulary_are_those_of_the_whole():
    """As ranks see it that have a part of the vocabulary each, one of them none."""
    found, _ = of_sizes([3, 0, 7, 1], 7)
    whole = found.inside(slice(0, 4), 7)
    parts = [found.inside(slice(0, 4), width, first) for first, width in ((0, 3), (3, 0), (3, 4))]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(found.at(torch.tensor([2, 0])).inside(slice(0, 2), 7), whole[[2, 0]])
    assert whole.sum(-1).tolist() == [3, 7, 7, 1]


# -- what is refused ------------------------------------------------------------------------------------------------


def test_kinds_that_differ_are_refused(actor):
    batch = rows(actor, support=True, top_p=0.6)
    sampling, plain = rl.ppo_clip(anchor="sampling"), rl.ppo_clip()
    for loss, how in ((sampling, {}), (plain, {"support": True})):
        with pytest.raises(FieldError, match=r"different kinds.*cut by top_p=0.6"):
            actor.update(batch, loss=loss, **how)
    with pytest.raises(FieldError, match="different kinds"):
        actor.update(actor.logprobs(batch), loss=rl.ppo_clip(anchor="old"), support=True)
    with pytest.raises(FieldError, match="generate\\(support=True\\)") as said:
        batch.sampling_logprobs - actor.logprobs(batch).old_logprobs
    assert 'anchor="sampling"' in str(said.value.fix)
    penalised = rows(actor, repetition_penalty=1.3)
    with pytest.raises(FieldError) as said:
        penalised.sampling_logprobs - penalised.rollout_logprobs
    assert "support" not in str(said.value.fix)


def programs(how, **told):
    """What check says of an update with each anchor, with and without the support, after sampling as ``how`` says."""
    found = {}
    for anchor, kept in product(("rollout", "sampling", "old"), (False, True)):
        flow = fl.Flow("mine")
        policy = flow.worker(fl.Actor, model=model(), name="policy", **told)
        prompts = fl.data.rows([{"prompt": "ab"}], batch=1)

        @flow.program
        def mine(steps: int = 1, flow=flow, policy=policy, prompts=prompts, anchor=anchor, kept=kept) -> None:
            for step, batch in flow.steps(prompts, steps):
                batch = policy.logprobs(policy.generate(batch, n=2, support=True, **how), support=kept)
                batch = batch.with_columns({"advantages": batch.old_logprobs * 0.0})
                flow.log(step, policy.update(batch, loss=rl.ppo_clip(anchor=anchor), support=kept))

        found[anchor, kept] = [type(error) for error in flow.check().errors]
    return found


@settings(max_examples=15, deadline=None)
@given(
    how=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.5, 1.0]),
            "top_k": st.sampled_from([0, 5]),
            "top_p": st.sampled_from([0.9, 1.0]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "greedy": st.booleans(),
        },
    ),
    told=st.fixed_dictionaries({}, optional={"top_k": st.sampled_from([0, 5]), "top_p": st.sampled_from([0.9, 1.0])}),
)
def test_check_takes_a_ratio_exactly_where_both_sides_are_of_one_kind(how, told):
    """An anchor is of the whole vocabulary, of what was sampled from, or of what the call before says."""
    said = {**told, **how}
    cut = bool(said.get("greedy") or said.get("top_k") or said.get("top_p", 1) != 1 or said.get("min_p"))
    for (anchor, kept), errors in programs(how, **told).items():
        alike = not cut or anchor == "old" or (anchor == "sampling") is kept
        assert errors == ([] if alike else [FieldError]), (anchor, kept, said)


def test_a_support_that_was_not_recorded_is_missing(actor):
    with pytest.raises(FieldError, match="no op before it adds 'support_ids'"):
        actor.logprobs(rows(actor, top_k=3), support=True)


def test_a_penalty_has_no_support(actor):
    with pytest.raises(ProgramError, match="support=True with repetition_penalty=1.2"):
        rows(actor, support=True, repetition_penalty=1.2)
    declared = fl.open(fl.Actor(model(), max_tokens=2, repetition_penalty=1.2))
    with pytest.raises(ProgramError, match="support=True with repetition_penalty=1.2"):
        rows(declared, support=True)
    assert "support_ids" in rows(declared, support=True, repetition_penalty=1.0)


def test_a_loss_over_the_whole_vocabulary_takes_no_support(actor):
    batch = rows(actor, support=True, top_k=3)
    ref = fl.open(fl.Reference(of=actor), name="ref")
    with pytest.raises(ProgramError, match="full_kl compares distributions over the whole vocabulary"):
        actor.update(ref.distribution(batch), loss=rl.full_kl(), support=True)


@pytest.mark.parametrize("flag", [1, "yes", None])
def test_support_is_true_or_false(actor, flag):
    with pytest.raises(ProgramError, match="support="):
        rows(actor, support=flag)


def changed(batch, **columns):
    return batch.drop(*columns).with_columns(columns)


def test_a_support_that_does_not_fit_is_named(actor):
    batch = rows(actor, support=True, top_k=3)
    sizes, ids = batch.support_sizes, batch.support_ids
    foreign = ids.with_values((ids.values + 1) % len(WORDS))
    for other, said in (
        (changed(batch, support_ids=foreign), r"Row \(0, 0\) has the token \d+, which its support lacks"),
        (changed(batch, support_sizes=sizes.with_values(sizes.values * 2)), r"Row \(0, 0\) has \d+ 'support_ids', and"),
        (changed(batch, support_sizes=sizes.with_values(-sizes.values)), "'support_sizes' has not one number"),
        (changed(batch, support_sizes=Column.of([[3]] * 9, "response", "i32")), "'support_sizes' has not one number"),
    ):
        with pytest.raises(DataError, match=said):
            actor.logprobs(other, support=True)


def test_a_support_that_is_too_large_is_refused(actor, monkeypatch):
    monkeypatch.setattr(row_support, "MOST_IDS", 30)
    with pytest.raises(DataError, match=r"have a support of \d+ ids, and at most 30 are kept") as said:
        rows(actor, support=True, top_k=15)
    assert "top_k=" in str(said.value.fix)
    assert len(rows(actor, support=True, top_k=1, max_tokens=3).support_ids.values) <= 27


def test_an_engine_that_does_not_record_is_told_of(actor, monkeypatch):
    generate = actor.engine.generate
    monkeypatch.setattr(actor.engine, "generate", lambda *a, **k: replace(generate(*a, **k), support=None))
    with pytest.raises(ModelError, match="does not record which tokens could be drawn"):
        rows(actor, support=True, top_k=3)


# -- in a run -------------------------------------------------------------------------------------------------------


def short(response: str) -> float:
    return float(len(response) < 4)


def a_run(out, runtime, plan=None, **told):
    flow = fl.Flow("cut")
    policy = flow.worker(fl.Actor, model=model(), max_tokens=6, lr=1e-2, name="policy")
    ref = flow.worker(fl.Reference, of=policy, name="ref")
    reward = flow.worker(fl.FunctionReward, short, name="reward")
    prompts = fl.data.rows([{"prompt": "a b"}, {"prompt": "c"}], batch=2, repeat=True)

    @flow.program
    def cut(steps: int = 2) -> None:
        for step, batch in flow.steps(prompts, steps):
            batch = policy.generate(batch, n=4, temperature=1.3, top_k=6, top_p=0.9, support=True)
            batch = rl.group_advantages(ref.logprobs(reward.score(batch), support=True))
            loss = rl.ppo_clip(anchor="sampling", kl=0.1)
            flow.log(step, policy.update(batch, loss=loss, minibatch=4, **told))

    flow.run("cut", out=out, runtime=runtime, plan=plan, quiet=True, save_models=False)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in ("step", "loss", "ratio", "kl", "grad_norm")} for line in lines]


def test_a_run_trains_what_was_sampled_from_on_every_runtime(tmp_path):
    eager, local = (a_run(tmp_path / runtime, runtime, support=True) for runtime in ("eager", "local"))
    assert eager == local and [line["step"] for line in eager] == [0, 1]
    assert all(line["grad_norm"] > 0 for line in eager)
    with pytest.raises(CheckError, match="different kinds"):
        a_run(tmp_path / "refused", "local")


def test_what_could_be_drawn_is_recorded_of_rows_that_a_publish_interrupts(tmp_path, monkeypatch):
    """They leave the engine one by one; an update refuses a token that its support lacks."""
    asked = []
    submit = NetBatch.submit
    monkeypatch.setattr(NetBatch, "submit", lambda self, r: asked.append(r.sampling) or submit(self, r))
    places = {"policy": {"train": Place("train"), "generate": Place("rollout")}}
    places |= {"ref": Place("train"), "reward": Place("rest")}
    pools = {"train": "cpu", "rollout": "cpu", "rest": "cpu"}
    plan = Plan(pools, places, pipeline=Pipeline(staleness=1, publish="interrupt"))
    lines = a_run(tmp_path / "run", "local", plan, support=True)
    assert [line["step"] for line in lines] == [0, 1] and all(line["grad_norm"] > 0 for line in lines)
    assert asked and all(sampling.support for sampling in asked)
