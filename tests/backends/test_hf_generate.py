"""Generation against a slow oracle: the whole sequence computed again for each token, one row at a time."""

import pytest
import tiny as T
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from flowrl.backends.draw import uniforms
from flowrl.backends.hf import products
from flowrl.backends.hf.generation import generate as generation
from flowrl.batch import Column
from flowrl.errors import DataError
from flowrl.workers.model_options import Sampling


def oracle(opened, prompt, seed, sampling, start=0, stops=(T.EOS,)):
    """One row by the definition: ids, log-probabilities, whether a stop ended it."""
    ids, logprobs = [], []
    for t in range(sampling.max_tokens):
        logits = T.whole_logits(opened, prompt + ids)[-1]
        if sampling.greedy:
            token = int(logits.argmax())
        else:
            shares = (logits / sampling.temperature).softmax(-1)
            u = uniforms(torch.tensor([seed]), torch.tensor([start + t]))
            token = int(torch.searchsorted(shares.cumsum(0), u, right=True))
        ids.append(token)
        heat = 1.0 if sampling.greedy else sampling.temperature
        logprobs.append(float((logits / heat).log_softmax(-1)[token]))
        if token in stops:
            return ids, logprobs, True
    return ids, logprobs, False


def check(opened, sampled, prompts, seeds, sampling, n, **how):
    rows = zip(sampled.ids.to_list(), sampled.rollout_logprobs.to_list(), sampled.finished.tolist(), strict=True)
    for i, (ids, logprobs, finished) in enumerate(rows):
        wanted = oracle(opened, prompts[i // n], int(seeds[i]), sampling, **how)
        assert (ids, finished) == (wanted[0], wanted[2])
        assert logprobs == pytest.approx(wanted[1], abs=1e-4)


OWN_CACHE = ["qwen2", "llama", "qwen3", "gemma2", "mixtral", "qwen3-moe", "cohere", "gpt2"]
OTHERS = ["gemma2-window", "mistral-window", "bloom", "mamba"]


@pytest.mark.parametrize("kind", OWN_CACHE + OTHERS)
def test_every_kind_of_model_samples_what_the_oracle_does(kind):
    opened = T.engine(kind)
    assert opened.net.own_cache == (kind in OWN_CACHE)
    column, batch = T.prompts(n=2)
    seeds, sampling = batch.row_seeds(), Sampling(max_tokens=9, temperature=0.8)
    check(opened, opened.generate(column, 2, seeds, sampling), T.PROMPTS, seeds, sampling, 2)


@pytest.mark.parametrize("kind", ["qwen2", "bloom"])
def test_greedy(kind):
    opened, sampling = T.engine(kind), Sampling(max_tokens=6, greedy=True)
    column, batch = T.prompts()
    check(opened, opened.generate(column, 1, batch.row_seeds(), sampling), T.PROMPTS, [0] * 4, sampling, 1)


@pytest.fixture(scope="module")
def opened():
    return T.engine("qwen2")


def test_log_probabilities_are_those_that_a_forward_pass_gives(opened):
    batch = T.rollouts(opened, n=3)
    assert float(abs(opened.logprobs(batch) - batch.rollout_logprobs).max()) < 1e-5


def test_the_log_probability_of_the_sampling_distribution(opened):
    column, batch = T.prompts(n=3)
    sampling = Sampling(max_tokens=5, temperature=0.6, top_k=5)
    made = opened.generate(column, 3, batch.row_seeds(), sampling)
    for i, (ids, sampled) in enumerate(zip(made.ids.to_list(), made.sampling_logprobs.to_list(), strict=True)):
        for t, token in enumerate(ids):
            logits = T.whole_logits(opened, T.PROMPTS[i // 3] + ids[:t])[-1] / 0.6
            kept = logits.masked_fill(logits < logits.topk(5).values[-1], -torch.inf).log_softmax(-1)
            assert sampled[t] == pytest.approx(float(kept[token]), abs=1e-4)


def penalised_oracle(opened, prompt, seed, sampling):
    """One row with transformers' own processors, the whole row computed again for each token."""
    ids, logprobs = [], []
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    if not sampling.greedy:
        processors += [TemperatureLogitsWarper(sampling.temperature), MinPLogitsWarper(sampling.min_p)]
    for t in range(sampling.max_tokens):
        had = prompt + ids
        scores = processors(torch.tensor([had]), T.whole_logits(opened, had)[-1:])[0]
        u = uniforms(torch.tensor([seed]), torch.tensor([t]))
        shares = scores.softmax(-1).double().cumsum(0)
        token = int(scores.argmax() if sampling.greedy else torch.searchsorted(shares, u, right=True))
        ids.append(token)
        logprobs.append(0.0 if sampling.greedy else float(scores.log_softmax(-1)[token]))
        if token == T.EOS:
            break
    return ids, logprobs


@pytest.mark.parametrize("kind", ["qwen2", "bloom"])  # with the engine's own cache, and without
@pytest.mark.parametrize("greedy", [False, True])
def test_what_a_row_has_is_penalised_with_its_prompt_and_nobody_elses(kind, greedy):
    opened = T.engine(kind)
    prompts = [[4, 4, 4], *T.PROMPTS, [9]]
    column, batch = T.prompts(prompts, n=3)
    sampling = Sampling(max_tokens=9, temperature=0.9, repetition_penalty=4.0, min_p=0.02, greedy=greedy)
    made = opened.generate(column, 3, batch.row_seeds(), sampling)
    for i, (ids, sampled) in enumerate(zip(made.ids.to_list(), made.sampling_logprobs.to_list(), strict=True)):
        wanted = penalised_oracle(opened, prompts[i // 3], int(batch.row_seeds()[i]), sampling)
        assert ids == wanted[0]
        assert sampled == pytest.approx(wanted[1], abs=1e-4)
    plain = Sampling(max_tokens=9, temperature=0.9, greedy=greedy)
    assert opened.generate(column, 3, batch.row_seeds(), plain).ids.to_list() != made.ids.to_list()


PENALISED = {"repetition_penalty": 1.5, "min_p": 0.05, "temperature": 1.2}


def test_a_penalised_row_goes_on_as_if_it_had_not_been_cut(opened):
    column, batch = T.prompts()
    seeds = batch.row_seeds()
    whole = opened.generate(column, 1, seeds, Sampling(max_tokens=8, **PENALISED)).ids.to_list()
    first = opened.generate(column, 1, seeds, Sampling(max_tokens=3, **PENALISED)).ids.to_list()
    going = [i for i, ids in enumerate(first) if ids[-1] != T.EOS]
    assert going
    longer = Column.of([T.PROMPTS[i] + first[i] for i in going], dim="prompt", dtype="i32")
    rest = opened.generate(
        longer, 1, seeds[going], Sampling(max_tokens=5, **PENALISED), starts=torch.full((len(going),), 3)
    )
    assert [first[i] + more for i, more in zip(going, rest.ids.to_list(), strict=True)] == [whole[i] for i in going]


@pytest.mark.parametrize("said", [{}, PENALISED])
def test_a_row_does_not_depend_on_the_others(opened, said):
    column, batch = T.prompts(n=4)
    seeds, sampling = batch.row_seeds(), Sampling(max_tokens=10, **said)
    whole = opened.generate(column, 4, seeds, sampling)
    again = opened.generate(column, 4, seeds, sampling)
    assert again.ids.equal(whole.ids) and again.rollout_logprobs.equal(whole.rollout_logprobs)  # bit for bit
    alone = [opened.generate(column.take([i]), 4, seeds[4 * i : 4 * i + 4], sampling) for i in range(4)]
    assert [r for part in alone for r in part.ids.to_list()] == whole.ids.to_list()
    single = opened.generate(column.take([i // 4 for i in range(16)]), 1, seeds, sampling)
    assert single.ids.equal(whole.ids)
    assert torch.allclose(single.rollout_logprobs.values, whole.rollout_logprobs.values, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "mistral-window"])
def test_little_memory_makes_many_buckets_and_the_same_rows(kind):
    opened = T.engine(kind)
    column, batch = T.prompts(n=3)
    seeds, sampling, shapes = batch.row_seeds(), Sampling(max_tokens=8, repetition_penalty=1.4), []
    whole = opened.generate(column, 3, seeds, sampling)
    hook = opened.net.body.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    small = generation.generate(
        opened.net, column, 3, seeds, sampling, (T.EOS,), cache_bytes=opened.net.cache_bytes_per_token() * 40
    )
    hook.remove()
    assert max(rows * (9 + 8) for rows, _ in shapes) <= 40 + 17
    assert small.ids.equal(whole.ids) and torch.equal(small.finished, whole.finished)


def test_a_prompt_is_computed_once_and_finished_rows_leave(opened):
    shapes = []
    hook = opened.net.body.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    column, batch = T.prompts(n=8)
    made = opened.generate(column, 8, batch.row_seeds(), Sampling(max_tokens=30, stop=(3, 7, 21, 30)))
    hook.remove()
    assert shapes[0] == (4, 9)  # not 32 rows
    sizes = [rows for rows, _ in shapes[1:]]
    assert sizes[0] <= 32 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 16
    alive = [int((made.ids.lengths > t + 1).sum()) for t in range(len(sizes))]
    assert all(live >= 0.8 * rows - 1 for live, rows in zip(alive, sizes, strict=True))
    assert len(sizes) == int(made.ids.lengths.max()) - 1  # nothing is computed after the last token


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_as_many_rows_stay_as_products_are_prepared_for(opened, monkeypatch):
    column, batch = T.prompts(n=32)
    given = column, 32, batch.row_seeds(), Sampling(max_tokens=30, stop=(3, 7, 21, 30))
    monkeypatch.setattr(products, "_torch_is_slow", lambda: False)
    wanted, sizes = opened.generate(*given), []
    monkeypatch.setattr(products, "_torch_is_slow", lambda: True)
    with opened.net.body.register_forward_pre_hook(
        lambda _, __, given: sizes.append(given["input_ids"].shape[0]), with_kwargs=True
    ):
        made = opened.generate(*given)
    assert made.ids.equal(wanted.ids) and made.finished.equal(wanted.finished)
    assert torch.allclose(made.rollout_logprobs.values, wanted.rollout_logprobs.values, atol=1e-5)
    assert len(set(sizes)) > 3 and all(products.prepared(size) == size for size in sizes[1:])


def test_a_second_turn_goes_on_in_the_same_random_sequence(opened):
    column, batch = T.prompts()
    seeds = batch.row_seeds()
    whole = opened.generate(column, 1, seeds, Sampling(max_tokens=6)).ids.to_list()
    first = opened.generate(column, 1, seeds, Sampling(max_tokens=3)).ids.to_list()
    going = [i for i, ids in enumerate(first) if ids[-1] != T.EOS]
    longer = Column.of([T.PROMPTS[i] + first[i] for i in going], dim="prompt", dtype="i32")
    second = opened.generate(
        longer, 1, seeds[going], Sampling(max_tokens=3), starts=torch.full((len(going),), 3)
    ).ids.to_list()
    assert [first[i] + ids for i, ids in zip(going, second, strict=True)] == [whole[i] for i in going]


def test_stops_end_a_row_and_belong_to_it(opened):
    column, batch = T.prompts(n=6)
    seeds, sampling = batch.row_seeds(), Sampling(max_tokens=12, stop=(7, 30))
    made = opened.generate(column, 6, seeds, sampling)
    check(opened, made, T.PROMPTS, seeds, sampling, 6, stops=(T.EOS, 7, 30))
    assert any(ids[-1] in (7, 30) for ids in made.ids.to_list())


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "bloom"])
def test_most_rows_may_end_at_their_first_token(kind):
    opened = T.engine(kind)
    column, batch = T.prompts(n=6)
    seeds, first = batch.row_seeds(), opened.generate(column, 6, batch.row_seeds(), Sampling(max_tokens=1))
    ends = tuple(dict.fromkeys(first.ids.values.tolist()))[:-2]  # all but two of the first tokens
    sampling = Sampling(max_tokens=6, stop=ends)
    made = opened.generate(column, 6, seeds, sampling)
    assert 0 < int((made.ids.lengths > 1).sum()) < 12
    check(opened, made, T.PROMPTS, seeds, sampling, 6, stops=(T.EOS, *ends))


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_a_row_ends_where_the_positions_end(kind):
    opened = T.engine(kind)
    prompts = [[2, 3], list(range(2, 40)) + list(range(15, 35))]  # 58 of 64
    column, batch = T.prompts(prompts, n=8)
    made = opened.generate(column, 8, batch.row_seeds(), Sampling(max_tokens=20))
    lengths = made.ids.lengths.tolist()
    assert max(lengths[8:]) <= 6
    assert max(lengths[:8]) > 6
    for ids, finished in zip(made.ids.to_list(), made.finished.tolist(), strict=True):
        assert finished == (ids[-1] == T.EOS)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "bloom"])
def test_rows_that_go_on_until_the_next_look_are_cut_where_they_ended(kind, monkeypatch):
    opened = T.engine(kind)
    prompts = [*T.PROMPTS, list(range(2, 40)) + list(range(15, 35))]
    column, batch = T.prompts(prompts, n=4)
    seeds, sampling = batch.row_seeds(), Sampling(max_tokens=14)
    wanted = opened.generate(column, 4, seeds, sampling)
    monkeypatch.setitem(generation.LOOK_EVERY, "cpu", 5)
    found = opened.generate(column, 4, seeds, sampling)
    assert found.ids.equal(wanted.ids) and torch.equal(found.finished, wanted.finished)
    assert torch.allclose(found.rollout_logprobs.values, wanted.rollout_logprobs.values, atol=1e-4)


def test_prompts_that_cannot_be_answered_are_refused(opened):
    seeds = torch.tensor([1, 2])
    with pytest.raises(DataError, match="The prompt of row 1 is empty"):
        opened.generate(Column.of([[1], []], dim="prompt", dtype="i32"), 1, seeds, Sampling())
    with pytest.raises(DataError, match="row 0 has 64 tokens; the model has 64 positions"):
        opened.generate(Column.of([[1] * 64, [1]], dim="prompt", dtype="i32"), 1, seeds, Sampling())


def test_no_prompts_give_no_rows(opened):
    none = Column.packed(torch.zeros(0, dtype=torch.int32), [], "prompt")
    made = opened.generate(none, 4, torch.zeros(0, dtype=torch.int64), Sampling())
    assert len(made.ids) == 0 and made.ids.type == "i32[*response]" and len(made.finished) == 0


def test_generation_leaves_torchs_generators_alone(opened):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    T.rollouts(opened)
    assert torch.equal(torch.get_rng_state(), before)
