"""Drawing tokens: the uniforms, the distribution that they make, and what top-k and top-p leave of it."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flowrl.backends.draw import uniforms
from flowrl.backends.hf.generation.sample import draw
from flowrl.backends.hf.logits import Head
from flowrl.workers.model_options import Sampling

torch.set_num_threads(1)
MASK = (1 << 64) - 1


def splitmix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_a_uniform_is_splitmix_of_its_seed_and_counter():
    seeds = torch.tensor([0, 1, 2**62 + 12345, 2**63 - 1])
    for counter in (0, 1, 1000):
        found = uniforms(seeds, torch.tensor(counter))
        for seed, u in zip(seeds.tolist(), found.tolist(), strict=True):
            bits = splitmix((splitmix(seed) + (counter + 1) * 0x9E3779B97F4A7C15) & MASK)
            assert u == (bits >> 11) * 2.0**-53


def test_uniforms_are_uniform_along_seeds_and_along_counters():
    for seeds, counters in ((torch.arange(20000), torch.tensor(5)), (torch.tensor(5), torch.arange(20000))):
        found = uniforms(seeds, counters)
        assert float(found.min()) >= 0 and float(found.max()) < 1
        counts = torch.histc(found.float(), 20, 0, 1)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 60  # chi-squared, 19 degrees of freedom
        assert abs(float(torch.corrcoef(torch.stack([found[1:], found[:-1]]))[0, 1])) < 0.03


def head(logits):
    """A head that gives these logits for the hidden states 1, 0, 0 .. / 0, 1, 0 .. and so on."""
    return Head(logits.T.contiguous()), torch.eye(len(logits))


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -torch.inf]])
    layer, hidden = head(logits.nan_to_num(neginf=-60.0))
    u = uniforms(torch.arange(30000), torch.tensor(0))
    tokens, plain, sampled = draw(hidden.expand(30000, -1), layer, u, Sampling(temperature=0.7))
    wanted = (logits[0] / 0.7).softmax(-1)
    counts = torch.bincount(tokens, minlength=5)
    assert counts[4] == 0
    assert float(((counts[:4] - 30000 * wanted[:4]) ** 2 / (30000 * wanted[:4])).sum()) < 20
    assert torch.allclose(plain, wanted.log()[tokens], atol=1e-6)
    assert torch.equal(sampled, plain)


def slow(logits, temperature, top_k, top_p):
    """The distribution sampled from, as a dict: by sorting, cutting and normalising in Python."""
    weights = {i: math.exp(x / temperature) for i, x in enumerate(logits)}
    ordered = sorted(weights, key=lambda i: -weights[i])[: top_k or None]
    total, kept, before = sum(weights[i] for i in ordered), [], 0.0
    for i in ordered:
        if before >= top_p:
            break
        kept.append(i)
        before += weights[i] / total
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (3, 1.0), (4, 0.7), (1, 1.0), (0, 1e-9), (100, 0.99)])
def test_top_k_and_top_p_keep_what_a_sort_would(top_k, top_p):
    torch.manual_seed(0)
    logits = torch.randn(6, 12) * 2
    layer, hidden = head(logits)
    sampling = Sampling(temperature=1.3, top_k=top_k, top_p=top_p)
    for u in (0.0, 0.3, 0.77, 1 - 2**-53):
        tokens, plain, sampled = draw(hidden, layer, torch.full((6,), u, dtype=torch.float64), sampling)
        for row, token, p, s in zip(logits.tolist(), tokens.tolist(), plain.tolist(), sampled.tolist(), strict=True):
            kept = slow(row, 1.3, top_k, top_p)
            assert s == pytest.approx(math.log(kept[token]), abs=1e-5)
            assert p == pytest.approx(math.log(slow(row, 1.3, 0, 1.0)[token]), abs=1e-5)  # of the whole vocabulary
            ordered, below = sorted(kept), 0.0
            for i in ordered:  # the inverse of the sum over ids
                below += kept[i]
                if below > u + 1e-9:
                    break
            assert token == i


def test_greedy_takes_the_most_likely_and_is_sure_of_it():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    layer, hidden = head(logits)
    tokens, plain, sampled = draw(hidden, layer, None, Sampling(greedy=True))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(plain, logits.log_softmax(-1).amax(-1))
    assert sampled.tolist() == [0.0, 0.0]


def test_a_large_vocabulary_is_drawn_from_some_rows_at_a_time(monkeypatch):
    torch.manual_seed(1)
    layer, hidden = Head(torch.randn(500, 16)), torch.randn(50, 16)
    u = uniforms(torch.arange(50), torch.tensor(3))
    whole = draw(hidden, layer, u, Sampling())
    monkeypatch.setattr("flowrl.backends.hf.generation.sample.DRAW_BYTES", 7 * 500 * 8)
    parts = draw(hidden, layer, u, Sampling())
    assert torch.equal(whole[0], parts[0])
    assert torch.allclose(whole[1], parts[1], atol=1e-6)


@pytest.mark.parametrize("spread", [0.1, 5.0])  # nearly all tokens are needed; a few are enough
def test_top_p_of_a_large_vocabulary(spread):
    torch.manual_seed(2)
    logits = torch.randn(3, 3000) * spread
    layer, hidden = head(logits)
    u = torch.tensor([0.1, 0.5, 0.99], dtype=torch.float64)
    tokens, _, sampled = draw(hidden, layer, u, Sampling(top_p=0.8))
    for row, token, s in zip(logits.tolist(), tokens.tolist(), sampled.tolist(), strict=True):
        assert s == pytest.approx(math.log(slow(row, 1.0, 0, 0.8)[token]), abs=1e-4)


def theirs(sampling):
    """What transformers makes of logits for the same words, in its order."""
    found = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found


@pytest.mark.parametrize(
    "said",
    [
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"min_p": 0.3, "temperature": 2.0},  # of what the temperature made
        {"min_p": 0.2, "top_k": 5, "top_p": 0.8},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"repetition_penalty": 1.8, "temperature": 0.6, "top_k": 7, "top_p": 0.9, "min_p": 0.15},
    ],
)
def test_the_distribution_is_that_of_the_processors_of_transformers(said):
    sampling, vocab = Sampling(**said), 20
    torch.manual_seed(3)
    logits = torch.randn(5, vocab, dtype=torch.float64) * 2
    layer, hidden = Head(logits.T.contiguous(), compute=torch.float64), torch.eye(5, dtype=torch.float64)
    had = torch.randint(0, vocab, (5, 6))
    seen = torch.zeros(5, vocab, dtype=torch.bool).scatter(1, had, True)
    wanted = theirs(sampling)(had, logits).log_softmax(-1)
    if "min_p" in said:
        assert (wanted.exp() == 0).any()
    found: list[dict[int, float]] = [{} for _ in logits]
    for u in torch.linspace(0, 1 - 2**-53, 4000, dtype=torch.float64):
        given = seen if sampling.repetition_penalty != 1 else None
        tokens, plain, sampled = draw(hidden, layer, u.expand(5), sampling, given)
        assert torch.allclose(
            plain, (logits / sampling.temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-12
        )
        for row, token, s in zip(found, tokens.tolist(), sampled.tolist(), strict=True):
            row[token] = s
    for row, distribution in zip(found, wanted.tolist(), strict=True):
        allowed = {i: p for i, p in enumerate(distribution) if p > math.log(1 / 2000)}
        assert allowed.keys() <= row.keys()
        for token, s in row.items():
            assert s == pytest.approx(distribution[token], abs=1e-6)


def test_a_greedy_token_knows_of_the_penalty_alone():
    logits = torch.tensor([[2.0, 3.0, -4.0], [-1.0, -1.5, -9.0]])
    layer, hidden = head(logits)
    sampling = Sampling(greedy=True, repetition_penalty=2.0, min_p=0.9)
    seen = torch.tensor([[False, True, False], [True, False, False]])
    tokens, plain, sampled = draw(hidden, layer, None, sampling, seen)
    assert tokens.tolist() == [0, 1]  # 3 / 2 lies below 2, and -1 * 2 below -1.5
    assert torch.allclose(plain, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    assert sampled.tolist() == [0.0, 0.0]


def test_seen_tokens_of_a_large_vocabulary_some_rows_at_a_time(monkeypatch):
    torch.manual_seed(4)
    layer, hidden, seen = Head(torch.randn(500, 16)), torch.randn(50, 16), torch.rand(50, 500) < 0.3
    u, sampling = uniforms(torch.arange(50), torch.tensor(3)), Sampling(repetition_penalty=1.5, min_p=0.05)
    whole = draw(hidden, layer, u, sampling, seen)
    monkeypatch.setattr("flowrl.backends.hf.generation.sample.DRAW_BYTES", 7 * 500 * 8)
    parts = draw(hidden, layer, u, sampling, seen)
    assert torch.equal(whole[0], parts[0])
    assert torch.allclose(whole[2], parts[2], atol=1e-6)
