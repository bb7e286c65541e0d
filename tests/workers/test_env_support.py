"""A rollout of several turns records which tokens could be drawn in each, and ratios among them are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from answers_run import journalled
from echo_env import LETTERS, Echo, prompts
from plain_support import at_targets, logits_of, processed, recorded

import flowrl as fl
from flowrl import rl
from flowrl.analysis.check_plan import plan_findings
from flowrl.batch import CallInfo
from flowrl.errors import CheckError, DataError, FieldError, ModelError, ProgramError, RewardError
from flowrl.placement.plan.plan import Place, Plan
from flowrl.runtime.storage.answers import external_answers
from flowrl.runtime.storage.journal import Journal
from flowrl.workers.tokens import row_support

VOCAB = 10
CLOSE = 5e-5  # log-probabilities of single precision, down to -10
SETTINGS = [
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.8},
    {"greedy": True},
]


def opened(cls=fl.Actor, seed=0, **how):
    """An actor of weights that tell tokens apart."""
    config = {**LETTERS.config, "initializer_range": 0.5}
    return fl.open(
        cls(fl.Model(config=config, tokenizer=LETTERS.tokenizer, seed=seed), max_tokens=4, **how), name="actor"
    )


@pytest.fixture(scope="module")
def actor():
    return opened()


@pytest.fixture(scope="module")
def other():
    """The policy of other weights."""
    return opened(seed=7)


class Whole(fl.Actor):
    """Is asked in whole calls."""

    def respond(self, prompts, seeds, starts, said):
        return super().respond(prompts, seeds, starts, said)


def play(actor, env=None, n=2, **how):
    return fl.open(env or Echo(), name="echo").rollout(prompts(4), policy=actor, n=n, **how)


def with_advantages(batch):
    numbers = torch.linspace(-1, 1, len(batch.response_mask.values))
    return batch.with_columns({"advantages": batch.response_mask.with_values(numbers)})


@pytest.mark.parametrize("how", SETTINGS, ids=lambda how: ",".join(how))
def test_a_ratio_among_the_tokens_that_could_be_drawn_is_that_of_plain_code(actor, other, how):
    batch = play(actor, support=True, **how)
    mask = batch.response_mask.values
    assert (batch.turns.values > 1).all() and not mask.all(), "turns, with observations between them"
    old, temperature = processed(logits_of(actor, batch), how), how.get("temperature", 1.0)
    inside = old > -torch.inf
    assert torch.equal(recorded(batch, VOCAB)[mask], inside[mask])
    assert not batch.support_sizes.values[~mask].any(), "nobody drew what was observed"
    assert how == {"temperature": 0.8} or not inside[mask].all()
    new = (logits_of(other, batch) / temperature).masked_fill(~inside, -torch.inf)
    before, after = at_targets(old, batch)[mask], at_targets(new, batch)[mask]
    torch.testing.assert_close(batch.sampling_logprobs.values[mask].double(), before, atol=CLOSE, rtol=0)
    found = other.logprobs(batch, support=True).old_logprobs
    torch.testing.assert_close(found.values[mask].double(), after, atol=CLOSE, rtol=0)
    ratio = (found - batch.sampling_logprobs).values[mask].double().exp()
    torch.testing.assert_close(ratio, (after - before).exp(), atol=CLOSE, rtol=CLOSE)


def test_an_update_trains_the_ratio_among_the_tokens_that_could_be_drawn(actor, other):
    batch = with_advantages(play(actor, support=True, temperature=0.8, top_k=4, top_p=0.9))
    loss = rl.ppo_clip(anchor="sampling")
    same = actor.update(batch, loss=loss, support=True, lr=0.0)
    assert same["ratio"] == pytest.approx(1.0, abs=CLOSE) and same["gap_max"] < CLOSE
    mask = batch.response_mask.values
    there = other.logprobs(batch, support=True).old_logprobs - batch.sampling_logprobs
    found = other.update(batch, loss=loss, support=True, lr=0.0)
    assert found["ratio"] == pytest.approx(float(there.values[mask].double().exp().mean()), rel=1e-4)
    with pytest.raises(FieldError, match="different kinds"):
        actor.update(batch, loss=loss)


def test_it_changes_no_token_and_whole_calls_record_the_same(actor):
    how = {"top_k": 4, "top_p": 0.8, "temperature": 1.3}
    plain, made, whole = play(actor, **how), play(actor, support=True, **how), play(opened(Whole), support=True, **how)
    assert set(made.fields) - set(plain.fields) == {"support_ids", "support_sizes"}
    assert all(made[name].equal(plain[name]) for name in plain.fields)
    for name in ("tokens", "support_ids", "support_sizes"):
        assert made[name].equal(whole[name]), name
    assert (made.support_ids.type, made.support_sizes.type) == ("i32[*support]", "i32[*response]")


def test_an_episode_that_is_played_anew_has_what_could_be_drawn_in_its_own_tokens(actor):
    class Fails(Echo):
        failed = False

        def step(self, state, action):
            if state[0] == "row 1" and len(state) == 4 and not self.failed:
                type(self).failed = True
                raise ValueError("once")
            return super().step(state, action)

    whole = play(actor, support=True, top_k=3)
    made = play(actor, Fails(), support=True, top_k=3, retries=1, backoff=0.0)
    assert Fails.failed and sum(made.retries.to_list()) == 1
    for name in ("tokens", "response_mask", "support_ids", "support_sizes"):
        assert made[name].equal(whole[name]), name


def test_what_was_recorded_is_kept_with_episodes_that_have_ended(actor, tmp_path):
    """A call that ends early is made again: rows that were over have the support of then."""

    class Down(Echo):
        def step(self, state, action):
            if state[0] == "row 3" and self.ends != 12:
                raise OSError("down")
            return super().step(state, action)

    op, journal = fl.Env.__dict__["rollout"], Journal(tmp_path / "journal.jsonl", beside="journal*.jsonl")
    arguments = op.bind((prompts(4),), {"policy": actor, "n": 2, "support": True, "top_p": 0.8})

    def call(env):
        info = CallInfo(seed=4, op="echo.rollout")
        return external_answers.once(journal, (0, 0), op, fl.open(env, name="echo"), arguments, {}, info, [].append)

    with pytest.raises(RewardError, match="down"):
        call(Down(ends=2))
    assert journalled(tmp_path)
    made = call(Down())
    again = play(actor, Down(), support=True, top_p=0.8)
    ended = [i for i, key in enumerate(made.keys) if key in journalled(tmp_path) and made.turns.to_list()[i] < 3]
    assert torch.equal(made.support_sizes.lengths, made.response_ids.lengths) and ended
    rest = [i for i in range(len(made)) if made.response_ids.to_list()[i] == again.response_ids.to_list()[i]]
    assert rest and made.take(rest).support_ids.equal(again.take(rest).support_ids)
    ratio = actor.logprobs(made, support=True).old_logprobs - made.sampling_logprobs
    assert float(ratio.values[made.response_mask.values].abs().max()) < CLOSE


# -- what is refused ------------------------------------------------------------------------------------------------


def test_a_penalty_has_no_support(actor):
    with pytest.raises(ProgramError, match="support=True with repetition_penalty=1.2"):
        play(actor, support=True, repetition_penalty=1.2)
    with pytest.raises(ProgramError, match="support=True with repetition_penalty=1.2"):
        play(opened(repetition_penalty=1.2), support=True)


def test_a_rollout_that_records_too_much_is_refused(actor, monkeypatch):
    monkeypatch.setattr(row_support, "MOST_IDS", 300)
    with pytest.raises(DataError, match=r"have a support of \d+ ids, and at most 300 are kept"):
        play(actor, support=True, top_k=9)
    assert len(play(actor, support=True, top_k=1).support_ids.values) < 300


@pytest.mark.parametrize("kind", [fl.Actor, Whole])
def test_an_engine_that_does_not_record_is_told_of(kind, monkeypatch):
    worker = opened(kind)
    batch = type(worker.engine.batch)
    submit, generate = batch.submit, worker.engine.generate
    monkeypatch.setattr(
        batch, "submit", lambda self, r: submit(self, replace(r, sampling=replace(r.sampling, support=False)))
    )
    monkeypatch.setattr(worker.engine, "generate", lambda *a: replace(generate(*a), support=None))
    with pytest.raises(ModelError, match="does not record which tokens could be drawn"):
        play(worker, support=True, top_k=3)


def flow_of(**how):
    flow = fl.Flow("turns")
    policy = flow.worker(fl.Actor, LETTERS, max_tokens=4, lr=1e-2, name="policy")
    echo = flow.worker(Named, name="echo")
    source = fl.data.rows([{"prompt": "ab", "name": "a"}, {"prompt": "c", "name": "b"}], batch=2, repeat=True)

    @flow.program
    def train(steps: int = 2) -> None:
        for step, batch in flow.steps(source, steps):
            batch = echo.rollout(batch, policy=policy, n=2, top_k=4, temperature=1.2, **how)
            batch = rl.group_advantages(batch)
            flow.log(step, policy.update(batch, loss=rl.ppo_clip(anchor="sampling"), support=True))

    return flow


class Named(Echo):
    def __init__(self):
        super().__init__()


def test_a_run_trains_what_was_sampled_from_and_check_asks_for_what_it_reads(tmp_path):
    for runtime in ("eager", "local"):
        flow_of(support=True).run(out=tmp_path / runtime, runtime=runtime, quiet=True, save_models=False)
    lines = [(tmp_path / runtime / "metrics.jsonl").read_text() for runtime in ("eager", "local")]
    assert '"ratio": ' in lines[0]
    with pytest.raises(CheckError, match="no op before it adds 'support_ids'"):
        flow_of().run(out=tmp_path / "refused", quiet=True)
    (error,) = flow_of(support=True, repetition_penalty=1.5).check().errors
    assert "support=True with repetition_penalty=1.5" in str(error)


def test_a_plan_whose_engine_records_nothing_is_refused():
    flow = flow_of(support=True)
    plan = Plan(
        {"one": "cpu", "two": "cpu"},
        {"policy": {"train": Place("one"), "generate": Place("two", backend="sglang")}, "echo": Place("one")},
    )
    errors, _ = plan_findings(flow.study(plan, runtime="local"))
    said = [str(error) for error in errors]
    assert any(
        "sglang does not record which tokens could be drawn, which echo.rollout asks for" in each for each in said
    )
