"""An engine without a model: its table, its clock, its lengths; tests/backends/test_backends_streaming.py has the contract."""

import math
import random
import runpy
from pathlib import Path

import pytest
import torch

import flowrl as fl
from flowrl.errors import DataError, ModelError
from flowrl.testing import FakeEngine, RealClock, SampleRequest, Sampling


def prompts(*rows):
    return fl.Column.of(list(rows), dim="prompt", dtype="i32")


def test_tokens_come_as_often_as_the_table_says():
    engine = FakeEngine(vocab=5, stop=())
    made = engine.generate(prompts([2]), 4000, torch.arange(4000), Sampling(max_tokens=1))
    sizes = [math.exp(2 * math.sin(1 + 3 * 2 + 5 * u)) for u in range(5)]
    counts = torch.bincount(made.ids.values, minlength=5).tolist()
    for count, size in zip(counts, sizes, strict=True):
        share = size / sum(sizes)
        assert abs(count / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)
    logprobs = {int(u): float(p) for u, p in zip(made.ids.values, made.rollout_logprobs.values, strict=True)}
    assert logprobs == pytest.approx({u: math.log(size / sum(sizes)) for u, size in enumerate(sizes)}, abs=1e-6)


def test_a_table_of_ones_own_and_both_log_probabilities():
    table = [[0.0, 1.0, 2.0], [5.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]
    engine = FakeEngine(table=table, stop=())
    made = engine.generate(prompts([0]), 50, torch.arange(50), Sampling(max_tokens=1, temperature=0.5, top_k=2))
    assert set(made.ids.values.tolist()) == {1, 2}, "top-k"
    whole, kept = (math.log(sum(math.exp(x / 0.5) for x in xs)) for xs in (table[0], table[0][1:]))
    for token, plain, sampled in zip(
        made.ids.values.tolist(), made.rollout_logprobs.values, made.sampling_logprobs.values, strict=True
    ):
        assert float(plain) == pytest.approx(table[0][token] / 0.5 - whole, abs=1e-6)
        assert float(sampled) == pytest.approx(table[0][token] / 0.5 - kept, abs=1e-6)


def test_time_passes_on_its_clock():
    engine = FakeEngine(stop=(), token_seconds=0.5, prompt_seconds=0.01)
    engine.generate(prompts([1, 2, 3], [4]), 2, torch.arange(4), Sampling(max_tokens=10))
    assert engine.clock.now() == pytest.approx(10 * 0.5 + 0.01 * 8) and (engine.steps, engine.brought) == (10, 8)
    call = engine.stream.submit(SampleRequest(prompts([1, 2, 3]), 1, torch.arange(1), Sampling(max_tokens=10)))
    for _ in range(4):
        engine.step()
    engine.stream.publish(lambda: None, 1, "interrupt")
    assert len(list(call)) == 1 and engine.brought == 8 + 3 + (3 + 4), "an interrupt computes tokens again"
    engine.stream.publish(lambda: None, 2, "continue")
    assert engine.brought == 18


def test_an_hour_of_generation_is_at_once_and_seconds_are_seconds_on_a_real_clock():
    slow = FakeEngine(stop=(), token_seconds=60.0)
    slow.generate(prompts([1]), 1, torch.arange(1), Sampling(max_tokens=60))
    assert slow.clock.now() == 3600
    clock = RealClock()
    before = clock.now()
    real = FakeEngine(stop=(), token_seconds=0.01, clock=clock)
    real.generate(prompts([1]), 1, torch.arange(1), Sampling(max_tokens=5))
    assert clock.now() - before >= 0.05


def test_lengths_by_seed_and_places_for_some_rows():
    wanted = [max(1, round(random.Random(seed).lognormvariate(2, 1))) for seed in range(16)]
    engine = FakeEngine(rows=4, token_seconds=1.0, lengths=lambda seed: wanted[seed])
    made = engine.generate(prompts([1], [2]), 8, torch.arange(16), Sampling(max_tokens=20))
    assert made.ids.lengths.tolist() == [min(20, length) for length in wanted]
    assert made.finished.tolist() == [length <= 20 for length in wanted]
    total = int(made.ids.lengths.sum())
    assert total / 4 <= engine.clock.now() < total / 4 + 20, (
        "four rows at a time, and no place is left empty before the end"
    )


def test_what_it_is_given_is_checked():
    with pytest.raises(ModelError, match=r"The table has the shape \(2, 3\)"):
        FakeEngine(table=[[0.0] * 3] * 2)
    with pytest.raises(DataError, match="The prompt of row 1 has the token 16; the table has 16"):
        FakeEngine().submit(SampleRequest(prompts([1], [16]), 1, torch.arange(2), Sampling()))
    with pytest.raises(DataError, match="2 seeds for 3 rows"):
        FakeEngine().submit(SampleRequest(prompts([1]), 3, torch.arange(2), Sampling()))
    with pytest.raises(ModelError, match="has no tokenizer"):
        _ = FakeEngine().tokenizer


def test_an_actor_opened_by_hand_samples_from_it():
    tiny = runpy.run_path(str(Path(__file__).parents[1] / "backends" / "tiny.py"))
    engine = FakeEngine(vocab=tiny["VOCAB"], token_seconds=0.1, tokenizer=tiny["build_tokenizer"]())
    actor = fl.open(fl.Actor("no/model", max_tokens=6, temperature=0.7, stop="w7"), engine=engine)
    made = actor.generate(fl.Batch.of(2, prompt_ids=prompts([3], [5, 1])), n=3)
    assert len(made) == 6 and engine.clock.now() == pytest.approx(0.1 * engine.steps)
    rows = zip(made.prompt_ids.to_list(), made.response_ids.to_list(), made.rollout_logprobs.to_list(), strict=True)
    for prompt, ids, logprobs in rows:
        read = (engine.table[[prompt[-1], *ids[:-1]]] / 0.7).log_softmax(-1)
        assert logprobs == pytest.approx([float(read[t, token]) for t, token in enumerate(ids)], abs=1e-6)
        assert 7 not in ids[:-1]
    assert made.versions.values.unique().tolist() == [0]


def test_a_cache_of_prefixes_saves_time_until_the_weights_are_others():
    engine = FakeEngine(stop=(), prompt_seconds=1.0, prefix_cache=True)
    engine.generate(prompts([1, 2, 3], [1, 2, 4]), 2, torch.arange(4), Sampling(max_tokens=3))
    assert engine.prefix_tokens() == fl.testing.PrefixTokens(asked=12, found=2 + 2 + 2), "the last one is computed"
    assert engine.clock.now() == engine.brought == 6
    first = engine.generate(prompts([1, 2, 3]), 1, torch.arange(1), Sampling(max_tokens=3)).ids.to_list()[0]
    assert engine.brought == 7
    engine.generate(prompts([1, 2, 3, *first, 5]), 1, torch.arange(1), Sampling(max_tokens=3))
    assert engine.brought == 7 + 2, "a turn that follows brings the last token and its own"
    engine.pause()
    engine.resume(1)
    engine.generate(prompts([1, 2, 3]), 1, torch.arange(1), Sampling(max_tokens=3))
    assert engine.brought == 9 + 3
