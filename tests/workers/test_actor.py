"""The actor and the other workers around a model: what their ops add, that results belong to rows, and what an update does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ten_letters import EOS, MODEL, fresh, prompts, trained_rows

import flowrl as fl
from flowrl import rl
from flowrl.batch import CallInfo
from flowrl.errors import DataError, ModelError, ProgramError, RunError, WorkerError

pytestmark = pytest.mark.usefixtures("one_thread")

GENERATED = {
    "response_ids": "i32[*response]",
    "tokens": "i32[*token]",
    "response_mask": "bool[*response]",
    "rollout_logprobs": "f32[*response]",
    "sampling_logprobs": "f32[*response]",
    "versions": "i32[*response]",
    "temperature": "f32[]",
    "finished": "bool[]",
    "finish_reason": "any",
}


@pytest.fixture(scope="module")
def actor():
    """Shared by the tests that only read."""
    return fl.open(fl.Actor(MODEL, max_tokens=12), name="actor")


def by_key(batch, *names):
    """Rows of some fields by key, as lists."""
    return {key: [batch[n][i].tolist() for n in names] for i, key in enumerate(batch.keys)}


# -- generate --------------------------------------------------------------------------------------


def test_generate_adds_its_fields_to_n_rows_of_each_prompt(actor):
    batch = prompts(5)
    made = actor.generate(batch, n=3)
    assert made.keys == tuple((i, k) for i in range(5) for k in range(3))
    assert {n: made[n].type for n in made.fields} == {"prompt_ids": "i32[*prompt]", "name": "any", **GENERATED}
    assert made.name.to_list() == [f"row {i}" for i in range(5) for _ in range(3)]
    responses = made.response_ids.to_list()
    assert made.tokens.to_list() == [p + r for p, r in zip(made.prompt_ids.to_list(), responses, strict=True)]
    for name in ("response_mask", "rollout_logprobs", "sampling_logprobs", "versions"):
        assert made[name].lengths.tolist() == [len(r) for r in responses]
    assert made.response_mask.values.all()
    assert len({tuple(r) for r in responses}) > 10, "samples of a prompt differ"
    for response in responses:
        assert 1 <= len(response) <= 12
        assert EOS not in response[:-1], "nothing is sampled after the end"
        assert len(response) == 12 or response[-1] == EOS


def test_n_is_at_least_one(actor):
    with pytest.raises(ProgramError, match="n=0"):
        actor.generate(prompts(), n=0)


def test_no_rows_give_no_rows(actor):
    made = actor.generate(prompts(3).filter([False, False, False]), n=2)
    assert len(made) == 0
    assert {n: made[n].type for n in GENERATED} == GENERATED


def test_greedy_takes_the_likeliest_token_and_needs_no_seed(actor):
    made = actor.generate(prompts(), greedy=True)
    again = actor.generate(prompts(call=CallInfo(seed=77)), greedy=True, n=2)
    assert by_key(made, "response_ids") == {(*k[:1], 0): v for k, v in by_key(again, "response_ids").items()}
    assert made.sampling_logprobs.values.abs().max() == 0
    for distribution, token, said in zip(*oracle(actor, made), strict=True):
        assert token == distribution.argmax()
        assert said == pytest.approx(float(distribution[token]), abs=1e-4)


def test_max_tokens_of_the_worker_of_the_call_and_of_the_model(actor):
    assert max(actor.generate(prompts(), greedy=True).response_ids.lengths) <= 12
    assert set(actor.generate(prompts(), max_tokens=1).response_ids.lengths.tolist()) == {1}
    long = actor.generate(prompts(5), max_tokens=100, n=4)
    assert max(long.tokens.lengths) <= 48, "a response ends where the model's positions end"
    assert len(long) == 20
    with pytest.raises(ProgramError, match="max_tokens=0 is not a whole number of at least 1"):
        actor.generate(prompts(), max_tokens=0)


def test_prompts_that_are_empty_or_fill_the_model_are_refused(actor):
    for ids in ([[1], []], [[1], [2] * 48]):
        with pytest.raises(DataError, match="prompt of row 1"):
            actor.generate(fl.Batch.of(2, prompt_ids=fl.Column.of(ids, dim="prompt", dtype="i32")))


@pytest.mark.parametrize("stop", [(2,), ("b",), "b", 2])
def test_stop_is_a_token_id_or_a_text_of_one_token(actor, stop):
    made = actor.generate(prompts(), n=8, stop=stop)
    responses = made.response_ids.to_list()
    assert all(not {2, EOS} & set(r[:-1]) for r in responses)
    assert {r[-1] for r in responses} >= {2, EOS}
    plain = actor.generate(prompts(), n=8).response_ids.to_list()
    for cut, whole in zip(responses, plain, strict=True):
        assert cut == whole[: len(cut)], "a stop changes no token before it"


def test_a_stop_of_the_worker_is_replaced_by_that_of_a_call():
    stopping = fl.open(fl.Actor(MODEL, max_tokens=12, stop=("a", "b")))
    assert all(not {1, 2, EOS} & set(r[:-1]) for r in stopping.generate(prompts(), n=4).response_ids.to_list())
    assert any({1, 2} & set(r[:-1]) for r in stopping.generate(prompts(), n=4, stop=()).response_ids.to_list())


def test_a_stop_text_of_several_tokens_is_refused(actor):
    with pytest.raises(ModelError, match="stop='ab' is 2 tokens") as caught:
        actor.generate(prompts(), stop="ab")
    assert "one token" in caught.value.fix


def test_a_stop_text_that_the_tokenizer_does_not_know_is_refused(actor):
    with pytest.raises(ModelError, match="stop='z' is no token of this tokenizer, which reads it as"):
        actor.generate(prompts(), stop="z")


@pytest.mark.parametrize("stops", [(1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8, 9), tuple(range(13))])
def test_rows_that_end_at_once_leave_the_others_as_they_are(actor, stops):
    made = actor.generate(prompts(15), n=4, stop=stops)
    found = actor.logprobs(made).old_logprobs
    torch.testing.assert_close(made.rollout_logprobs.values, found.values, atol=1e-4, rtol=0)
    ended = made.response_ids.lengths == 1
    assert ended.float().mean() > 0.2 and (ended.all() or len(stops) < 13)


# -- seeds: a result belongs to its row ------------------------------------------------------------


def same_rows(found, wanted):
    """The same tokens for every key of ``found``, log-probabilities to 1e-4."""
    a, b = by_key(found, "response_ids"), by_key(wanted, "response_ids")
    assert {k: b[k] for k in a} == a
    for name in ("rollout_logprobs", "sampling_logprobs"):
        rows = wanted.take_keys(found.keys)[name]
        torch.testing.assert_close(found[name].values, rows.values, atol=1e-4, rtol=0)


HOT = {"n": 3, "temperature": 1.3, "top_p": 0.9, "top_k": 8, "min_p": 0.02, "repetition_penalty": 1.2}


def test_the_same_call_gives_the_same_bits(actor):
    one, two = actor.generate(prompts(), **HOT), actor.generate(prompts(), **HOT)
    assert one.digest() == two.digest()


def test_another_order_of_rows_changes_nothing(actor):
    whole = actor.generate(prompts(9), **HOT)
    same_rows(actor.generate(prompts(9).take([4, 0, 8, 2, 7, 1, 3, 6, 5]), **HOT), whole)


def test_split_rows_give_the_same(actor):
    whole = actor.generate(prompts(9), **HOT)
    for parts in (2, 4, 9):
        same_rows(fl.Batch.concat(*(actor.generate(b, **HOT) for b in prompts(9).split(parts))), whole)


def test_other_rows_beside_change_nothing(actor):
    same_rows(actor.generate(prompts(4), **HOT), actor.generate(prompts(40), **HOT))


def test_fewer_samples_are_the_first_ones(actor):
    same_rows(actor.generate(prompts(4), n=2), actor.generate(prompts(4), n=5))


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"program": "q"}, {"step": 3}, {"op": "judge.generate"}, {"occurrence": 1}]
)
def test_the_seed_is_that_of_run_program_step_op_and_occurrence(actor, other):
    batch = prompts()
    one = by_key(actor.generate(batch, n=2), "response_ids")
    two = by_key(actor.generate(batch.with_call(replace(batch.call, **other)), n=2), "response_ids")
    assert sum(one[k] != two[k] for k in one) > len(one) / 2


def test_rows_of_a_prompt_that_is_there_twice_differ_by_key(actor):
    batch = fl.Batch.of(12, prompt_ids=fl.Column.of([[1, 2]] * 12, dim="prompt", dtype="i32")).with_call(CallInfo())
    assert len({tuple(r) for r in actor.generate(batch).response_ids.to_list()}) > 8


# -- the distribution sampled from -----------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_model(actor, tmp_path_factory):
    """The actor's model as transformers loads it: nothing of this package computes its logits."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("model")
    actor.save(str(folder))
    return AutoModelForCausalLM.from_pretrained(folder).double()


def oracle(actor, batch):
    """Log-probabilities [vocab] before each response token, one forward pass per row; the tokens; what the batch says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(actor.engine.net.model.config)
    model.load_state_dict(actor.engine.net.model.state_dict())
    return slow_logprobs(model.double().eval(), batch)


def slow_logprobs(model, batch):
    distributions, tokens = [], []
    with torch.no_grad():
        for row, response in zip(batch.tokens, batch.response_ids, strict=True):
            logits = model(row.long()[None]).logits[0]
            before = logits[len(row) - len(response) - 1 : -1]
            distributions += list(torch.log_softmax(before, -1))
            tokens += response.tolist()
    return distributions, tokens, batch.rollout_logprobs.values.tolist()


def shaped(logprobs, temperature, top_k, top_p):
    """By the book, on lists: temperature, then the k likeliest, then the fewest whose sum reaches p."""
    weights = [math.exp(x / temperature) for x in logprobs]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[:top_k] if top_k else order
    total, sum_, chosen = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if sum_ >= top_p:
            break
        chosen.append(i)
        sum_ += weights[i] / total
    total = sum(weights[i] for i in chosen)
    return {i: math.log(weights[i] / total) for i in chosen}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.6, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.6), (1.4, 5, 0.8), (0.5, 1, 0.1)],
)
def test_logprobs_of_the_policy_and_of_what_was_sampled_from(actor, plain_model, temperature, top_k, top_p):
    made = actor.generate(prompts(), n=4, temperature=temperature, top_k=top_k, top_p=top_p)
    sampling = made.sampling_logprobs.values.tolist()
    for distribution, token, rollout, sampled in zip(*slow_logprobs(plain_model, made), sampling, strict=True):
        whole = shaped(distribution.tolist(), temperature, 0, 1.0)
        assert rollout == pytest.approx(whole[token], abs=1e-4)
        allowed = shaped(distribution.tolist(), temperature, top_k, top_p)
        assert token in allowed
        assert sampled == pytest.approx(allowed[token], abs=1e-4)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (2.0, 6, 0.9)])
def test_tokens_come_as_often_as_they_are_likely(actor, plain_model, temperature, top_k, top_p):
    batch = prompts(5).take([4])
    made = actor.generate(batch, n=4000, max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
    with torch.no_grad():
        logits = plain_model(batch.prompt_ids[0].long()[None]).logits[0, -1]
    expected = shaped(torch.log_softmax(logits, -1).tolist(), temperature, top_k, top_p)
    counts = torch.bincount(made.response_ids.values.long(), minlength=13) / 4000
    for token in range(13):
        share = math.exp(expected[token]) if token in expected else 0.0
        assert float(counts[token]) == pytest.approx(share, abs=4.5 * math.sqrt(share * (1 - share) / 4000) + 1e-9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": math.nan},
    ],
)
def test_sampling_that_makes_no_sense_is_refused(actor, wrong):
    with pytest.raises(ProgramError, match=next(iter(wrong))):
        actor.generate(prompts(), **wrong)
    with pytest.raises(WorkerError, match=next(iter(wrong))):
        fl.Flow("f").worker(fl.Actor, MODEL, **wrong)


def test_a_way_of_sampling_is_the_workers_unless_a_call_says_otherwise(actor):
    how = {"min_p": 0.2, "repetition_penalty": 1.7}
    own = fresh(**how).generate(prompts(), n=3)
    assert own.digest() == actor.generate(prompts(), n=3, **how).digest()
    assert own.digest() != actor.generate(prompts(), n=3).digest()
    plain = fresh(**how).generate(prompts(), n=3, min_p=0.0, repetition_penalty=1.0)
    assert plain.digest() == actor.generate(prompts(), n=3).digest()


# -- log-probabilities and versions ----------------------------------------------------------------


def test_logprobs_of_own_generations_are_those_of_the_rollout(actor):
    made = actor.generate(prompts(20), n=4, temperature=1.5)
    found = actor.logprobs(made).old_logprobs
    assert found.type == "f32[*response]"
    torch.testing.assert_close(found.values, made.rollout_logprobs.values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_entropies_are_those_of_the_whole_distribution(actor, temperature):
    made = actor.generate(prompts(5), n=2, temperature=temperature)
    found = actor.entropies(made).entropies
    assert found.type == "f32[*response]"
    every = fl.open(fl.Reference(of=actor)).distribution(made).ref_distribution.values
    torch.testing.assert_close(found.values, -(every.exp() * every).sum(-1), atol=1e-5, rtol=0)


def test_versions_count_publishes():
    actor = fresh()
    assert set(actor.generate(prompts()).versions.values.tolist()) == {0}
    rows = trained_rows(actor)
    actor.update(rows, loss=rl.ppo_clip())
    actor.update(rows, loss=rl.ppo_clip())
    assert set(actor.generate(prompts()).versions.values.tolist()) == {1}
    assert set(actor.generate(prompts()).versions.values.tolist()) == {1}
    actor.update(rows, loss=rl.ppo_clip())
    assert set(actor.generate(prompts()).versions.values.tolist()) == {2}


# -- update ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(actor):
    return trained_rows(actor)


def weights(worker):
    return {n: w.clone() for n, w in worker.engine.weights().items()}


def distance(a, b):
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


@pytest.mark.parametrize(
    "loss",
    [
        rl.ppo_clip(),
        rl.ppo_clip(kl=0.1, entropy=0.01),
        rl.ppo_clip(aggregate="seq-mean-token-mean"),
        rl.sft(aggregate="seq-mean-token-sum"),
    ],
    ids=["clip", "kl and entropy", "by row", "sft"],
)
def test_the_step_does_not_depend_on_micro_batches(rows, loss):
    given = rows.with_columns({"ref_logprobs": rows.rollout_logprobs - 0.1})
    found, metrics = [], []
    for micro_tokens in (None, 1, 20, 64):
        # AdamW's first step divides every gradient by its size and eps; with the usual one it tells of rounding only.
        actor = fresh(eps=1e-4, grad_clip=None)
        metrics.append(actor.update(given, loss=loss, micro_tokens=micro_tokens))
        found.append({n: t.clone() for n, t in actor.state()[0].items()})
    for other, said in zip(found[1:], metrics[1:], strict=True):
        assert distance(other, found[0]) < 1e-5, "weights and moments, the first a tenth of the gradient"
        assert dict(said) == pytest.approx(dict(metrics[0]), abs=1e-5, rel=1e-5)
    moments = torch.cat([t.flatten() for n, t in found[0].items() if n.startswith("exp_avg.")])
    assert moments.abs().max() > 1e-3 and distance(weights(actor), weights(fresh())) > 5e-4


def test_gradient_checkpointing_changes_memory_only(rows):
    one, two = fresh(), fresh(gradient_checkpointing=True)
    for actor in (one, two):
        actor.update(rows, loss=rl.ppo_clip())
    assert distance(weights(one), weights(two)) < 1e-5


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ({}, 1),
        ({"epochs": 3}, 3),
        ({"minibatch": 24}, 1),
        ({"minibatch": 10}, 3),
        ({"minibatch": 1}, 24),
        ({"minibatch": 10, "epochs": 2}, 6),
        ({"minibatch_tokens": 10**6, "epochs": 2}, 2),
        ({"minibatch_tokens": 1}, 24),
    ],
)
def test_optimizer_steps_of_minibatches_and_epochs(rows, how, steps):
    metrics = fresh().update(rows, loss=rl.sft(), **how)
    assert metrics["steps"] == steps
    epochs = how.get("epochs", 1)
    assert metrics["rows"] == 24 * epochs, "every row is trained once an epoch"
    assert metrics["tokens"] == int(rows.response_mask.lengths.sum()) * epochs


def test_minibatches_by_tokens_stay_below_their_limit(rows):
    total = int(rows.response_mask.lengths.sum())
    steps = fresh().update(rows, loss=rl.sft(), minibatch_tokens=40)["steps"]
    assert total / 40 <= steps <= total / (40 - 12) + 1


def test_the_order_of_rows_does_not_matter_to_an_update(rows):
    one, two = fresh(), fresh()
    turned = rows.take(list(reversed(range(len(rows)))))
    for actor, batch in ((one, rows), (two, turned)):
        actor.update(batch.with_call(CallInfo(seed=3)), loss=rl.ppo_clip(), minibatch=7, epochs=2)
    assert distance(weights(one), weights(two)) < 1e-5


def test_the_learning_rate_of_a_call_stands_in_for_the_schedules(rows):
    one, two, none = fresh(lr=1e-3), fresh(lr=1e-9), fresh()
    assert one.update(rows, loss=rl.sft())["lr"] == 1e-3
    assert two.update(rows, loss=rl.sft(), lr=1e-3)["lr"] == 1e-3
    assert one.digest() == two.digest()
    before = none.digest()
    assert none.update(rows, loss=rl.sft(), lr=0.0)["lr"] == 0
    assert none.digest() == before


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"schedule": "constant", "warmup": 2}, [0.5, 1, 1, 1, 1, 1]),
        ({"schedule": "linear", "total": 4}, [1, 0.75, 0.5, 0.25, 0, 0]),
        ({"schedule": "linear", "warmup": 2, "total": 4, "min_lr": 0.1}, [0.5, 1, 1, 0.55, 0.1, 0.1]),
        ({"schedule": "cosine", "total": 4}, [1, 0.853553, 0.5, 0.146447, 0, 0]),
    ],
)
def test_schedules(rows, schedule, expected):
    actor = fresh(lr=2e-4, **schedule)
    some = rows.take([0, 1])
    rates = [actor.update(some, loss=rl.sft())["lr"] for _ in range(6)]
    assert rates == pytest.approx([2e-4 * x for x in expected], abs=1e-9)


def test_advantages_that_are_all_zero_give_no_gradient(rows):
    silent = rows.drop("advantages").with_columns({"advantages": rows.rollout_logprobs * 0.0})
    actor = fresh()
    before = actor.digest()
    metrics = actor.update(silent, loss=rl.ppo_clip())
    assert metrics["grad_norm"] == 0 and metrics["loss"] == 0
    assert actor.digest() == before


def test_rows_without_advantage_do_not_change_the_gradient(rows):
    """They are not computed, but count in the mean over tokens."""
    mask = torch.tensor([i % 3 == 0 for i in range(len(rows))]).repeat_interleave(rows.response_mask.lengths)
    some = rows.drop("advantages").with_columns({"advantages": rows.advantages * rows.advantages.with_values(mask)})
    skipping, computing = fresh(), fresh()
    told = skipping.update(some, loss=rl.ppo_clip())
    all_told = computing.update(some, loss=replace(rl.ppo_clip(), zero_advantage_is_zero=False))
    assert told["rows"] == 8 and all_told["rows"] == 24
    assert told["loss"] == pytest.approx(all_told["loss"], abs=1e-6)
    assert told["grad_norm"] == pytest.approx(all_told["grad_norm"], rel=1e-5)
    assert distance(weights(skipping), weights(computing)) < 1e-5


def test_the_gradient_is_clipped(rows):
    free, held = fresh(grad_clip=None), fresh(grad_clip=1e-3)
    big = free.update(rows, loss=rl.sft())["grad_norm"]
    assert held.update(rows, loss=rl.sft())["grad_norm"] == pytest.approx(big), "told as it was before"
    assert big > 1e-2


def test_training_lowers_the_loss(rows):
    actor = fresh(lr=1e-2)
    losses = [actor.update(rows, loss=rl.sft())["loss"] for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_loss_that_is_no_number_leaves_the_weights_alone(rows):
    broken = rows.drop("advantages").with_columns({"advantages": rows.advantages * float("nan")})
    actor = fresh()
    before = actor.digest()
    with pytest.raises(RunError, match="the weights were left alone"):
        actor.update(broken, loss=rl.ppo_clip())
    assert actor.digest() == before


def test_a_loss_of_ones_own(rows):
    @rl.loss(reads="advantages, response_mask")
    def reinforce(x, *, scale: float = 1.0):
        return -scale * x["advantages"] * x.predicted

    one, two = fresh(), fresh()
    one.update(rows, loss=reinforce(scale=1.0))
    two.update(rows, loss=rl.ppo_clip())  # at ratio 1 the same gradient
    assert distance(weights(one), weights(two)) < 1e-5


def test_the_optimizer_begins_anew_with_each_program(rows):
    actor = fresh(schedule="linear", total=4)
    rates = [actor.update(rows, loss=rl.sft())["lr"] for _ in range(3)]
    tensors, record = actor.state()
    assert record["engine"]["steps"] == 3 and any(n.startswith("exp_avg.") for n in tensors)

    actor.program_starts()
    other = fresh(schedule="linear", total=4)
    other.engine.copy_weights_from(actor.engine)
    assert [actor.update(rows, loss=rl.sft())["lr"] for _ in range(3)] == rates
    for _ in range(3):
        other.update(rows, loss=rl.sft())
    assert actor.digest() == other.digest(), "nothing of the moments before is left"


def test_state_is_all_that_training_needs(rows):
    actor, other = fresh(schedule="cosine", total=9), fresh(schedule="cosine", total=9)
    for _ in range(3):
        actor.update(rows, loss=rl.sft(), minibatch=9)
    tensors, record = actor.state()
    other.load_state({n: t.clone() for n, t in tensors.items()}, record)
    for worker in (actor, other):
        worker.update(rows, loss=rl.sft(), minibatch=9)
    assert actor.digest() == other.digest()
    assert actor.generate(prompts()).digest() == other.generate(prompts()).digest()


# -- saving and loading ----------------------------------------------------------------------------


def test_a_saved_model_is_loaded_by_transformers_with_equal_logits(rows, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    actor = fresh()
    actor.update(rows, loss=rl.sft())
    actor.save(str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, actor.engine.net.model(ids).logits)
    torch.testing.assert_close(
        torch.tensor([float(d[t]) for d, t, _ in zip(*slow_logprobs(model, rows), strict=True)]),
        actor.logprobs(rows).old_logprobs.values,
        atol=1e-5,
        rtol=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.encode("abc;") == [1, 2, 3, EOS] and tokenizer.eos_token_id == EOS
    assert model.generation_config.eos_token_id == EOS


def test_an_actor_is_loaded_from_a_local_folder(rows, tmp_path):
    actor = fresh()
    actor.update(rows, loss=rl.sft())
    actor.save(str(tmp_path / "model"))
    other = fl.open(fl.Actor(str(tmp_path / "model"), max_tokens=12))
    assert other.digest() == actor.digest()
    made = other.generate(prompts(), n=2)
    assert made.drop("versions").digest() == actor.generate(prompts(), n=2).drop("versions").digest()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    (tmp_path / "modle").mkdir()
    with pytest.raises(ModelError, match="no folder") as caught:
        fl.open(fl.Actor(str(tmp_path / "model")))
    assert "modle" in caught.value.fix


# -- adapters --------------------------------------------------------------------------------------


@pytest.fixture
def adapted():
    pytest.importorskip("peft", reason="adapters need peft (extra 'lora')")
    return fresh(lora=fl.Lora(r=4, alpha=8), lr=1e-2)


def test_adapters_alone_are_trained(adapted, rows, actor):
    torch.testing.assert_close(
        adapted.logprobs(rows).old_logprobs.values, actor.logprobs(rows).old_logprobs.values, atol=1e-5, rtol=0
    )
    before = weights(adapted)
    adapted.update(rows, loss=rl.sft())
    moved = {n for n, w in weights(adapted).items() if not torch.equal(w, before[n])}
    assert moved and all("lora_" in n for n in moved)
    assert sum(before[n].numel() for n in moved) < 0.3 * sum(w.numel() for w in before.values())


def test_a_model_with_adapters_is_saved_merged(adapted, rows, tmp_path):
    from transformers import AutoModelForCausalLM

    for _ in range(3):
        adapted.update(rows, loss=rl.sft())
    adapted.save(str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = torch.tensor([float(d[t]) for d, t, _ in zip(*slow_logprobs(model, rows), strict=True)])
    torch.testing.assert_close(found, adapted.logprobs(rows).old_logprobs.values, atol=1e-5, rtol=0)
    assert fl.open(fl.Actor(str(tmp_path / "model"))).generate(prompts()).keys == tuple((i, 0) for i in range(7))


def test_a_reference_of_a_model_with_adapters(adapted, rows):
    adapted.update(rows, loss=rl.sft())
    with pytest.warns(UserWarning, match="its adapters have been trained already"):
        ref = fl.open(fl.Reference(of=adapted))
    start = adapted.logprobs(rows).old_logprobs
    torch.testing.assert_close(ref.logprobs(rows).ref_logprobs.values, start.values, atol=1e-5, rtol=0)
    adapted.update(rows, loss=rl.sft())
    assert (adapted.logprobs(rows).old_logprobs - ref.logprobs(rows).ref_logprobs).values.abs().max() > 1e-3


def test_state_of_a_model_with_adapters_holds_no_base(adapted, rows):
    adapted.update(rows, loss=rl.sft())
    tensors, record = adapted.state()
    assert tensors and all("lora_" in n for n in tensors)
    other = fresh(lora=fl.Lora(r=4, alpha=8), lr=1e-2)
    other.load_state({n: t.clone() for n, t in tensors.items()}, record)
    assert other.digest() == adapted.digest()


# -- the reference, the critic, the reward model ---------------------------------------------------


def test_a_reference_stays_as_the_actor_was(rows):
    actor = fresh()
    ref = fl.open(fl.Reference(of=actor))
    start = actor.logprobs(rows).old_logprobs
    assert ref.logprobs(rows).ref_logprobs.equal(start)
    actor.update(rows, loss=rl.sft())
    assert ref.logprobs(rows).ref_logprobs.equal(start)
    assert not actor.logprobs(rows).old_logprobs.equal(start)

    ref.program_starts()
    assert ref.logprobs(rows).ref_logprobs.equal(actor.logprobs(rows).old_logprobs)


def test_a_reference_of_its_own_model(rows, actor):
    assert fl.open(fl.Reference(MODEL)).logprobs(rows).ref_logprobs.equal(actor.logprobs(rows).old_logprobs)
    other = fl.open(fl.Reference(replace(MODEL, seed=5)))
    assert not other.logprobs(rows).ref_logprobs.equal(actor.logprobs(rows).old_logprobs)
    for wrong in ({}, {"model": MODEL, "of": actor}):
        with pytest.raises(ModelError, match="of its own, or of another"):
            fl.Reference(**wrong)


def test_a_reference_takes_a_dtype_of_its_own(rows):
    actor = fresh()
    assert fl.open(fl.Reference(of=actor)).engine.net.compute == torch.float32
    assert fl.open(fl.Reference(of=actor, dtype="bf16")).engine.net.compute == torch.bfloat16


def test_a_critic_has_a_value_for_each_response_token(rows):
    critic = fl.open(fl.Critic(MODEL, lr=1e-2))
    valued = critic.values(rows)
    assert valued["values"].type == "f32[*response]"
    assert torch.equal(valued["values"].lengths, rows.response_ids.lengths)
    given = valued.with_columns({"returns": rows.advantages})
    losses = [critic.update(given, loss=rl.value_clip(clip=None))["loss"] for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]
    assert not critic.values(rows)["values"].equal(valued["values"])


def test_a_value_is_that_of_the_state_before_its_token(rows):
    """The last token of a response has not been seen by any value."""
    critic = fl.open(fl.Critic(MODEL))
    tokens, lengths = rows.tokens.values.clone(), rows.tokens.lengths
    tokens[lengths.cumsum(0) - 1] = 5
    other = rows.select("response_mask").with_columns({"tokens": rows.tokens.with_values(tokens)})
    assert critic.values(rows)["values"].equal(critic.values(other)["values"])


def test_a_reward_model_has_a_score_for_each_row(rows):
    judge = fl.open(fl.RewardModel(MODEL, seed=3))
    scored = judge.score(rows)
    assert scored.rewards.type == "f32[]" and len(scored.rewards) == len(rows)
    assert scored.rewards.std() > 1e-3
    turned = judge.score(rows.take(list(reversed(range(len(rows))))))
    torch.testing.assert_close(turned.take_keys(rows.keys).rewards.values, scored.rewards.values, atol=1e-5, rtol=0)
    assert judge.score(rows.select("tokens")).rewards.equal(scored.rewards)


def test_a_worker_that_is_not_open_says_so(rows):
    with pytest.raises(fl.FlowError, match=r"is not open.*\n.*\n.*fl.open"):
        fl.Actor(MODEL).logprobs(rows)


def test_losses_go_to_the_worker_that_they_are_for(rows):
    with pytest.raises(ProgramError, match="loss value_clip is one of values"):
        fresh().update(rows, loss=rl.value_clip())
    with pytest.raises(ProgramError, match="loss sft is one of logprobs"):
        fl.open(fl.Critic(MODEL)).update(rows, loss=rl.sft())
