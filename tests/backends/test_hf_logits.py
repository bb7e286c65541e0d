"""Log-probabilities and entropy in chunks: equal to the dense ones, with gradients, in bounded memory."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flowrl.backends.hf.logits import Head, token_logprobs

torch.set_num_threads(1)


def dense(hidden, head, targets, temperature=None):
    """All logits at once, by autograd."""
    raw = hidden @ head.weight.T
    if head.bias is not None:
        raw = raw + head.bias
    logits = raw * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    every = (logits if temperature is None else logits / temperature[:, None]).log_softmax(-1)
    return every.gather(-1, targets[:, None]).squeeze(-1), -(every.exp() * every).sum(-1)


def case(tokens=37, width=16, vocab=50, dtype=torch.float32, bias=False, scale=1.0, softcap=None):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    given = torch.randn(vocab, dtype=dtype, requires_grad=True) if bias else None
    head = Head(weight, given, scale, softcap, compute=dtype)
    return hidden, head, torch.randint(0, vocab, (tokens,))


SHAPES = [{}, {"bias": True}, {"scale": 0.25}, {"softcap": 5.0}, {"bias": True, "scale": 0.5, "softcap": 3.0}]


def temperatures(tokens, dtype):
    """From 0.3 to 2, another one for each token."""
    return torch.linspace(0.3, 2.0, tokens, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("hot", [False, True])
def test_numbers_and_gradients_are_the_dense_ones(shape, chunk, hot):
    hidden, head, targets = case(**shape)
    temperature = temperatures(len(targets), torch.float32) if hot else None
    leaves = [t for t in (hidden, head.weight, head.bias) if t is not None]
    upstream = torch.randn(2, len(targets))
    wanted = dense(hidden, head, targets, temperature)
    slopes = torch.autograd.grad((torch.stack(wanted) * upstream).sum(), leaves)
    found = token_logprobs(hidden, head, targets, temperature=temperature, entropy=True, budget=chunk * 50 * 4)
    given = torch.autograd.grad((torch.stack(found) * upstream).sum(), leaves)
    for a, b in zip((*found, *given), (*wanted, *slopes), strict=True):
        a, b = a.detach(), b.detach()
        assert float((a - b).abs().max()) < 1e-5 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("hot", [False, True])
def test_gradients_are_those_of_the_numbers(shape, entropy, hot):
    hidden, head, targets = case(tokens=5, width=4, vocab=7, dtype=torch.float64, **shape)
    temperature = temperatures(5, torch.float64) if hot else None

    def run(h, w, *b):
        layer = Head(w, b[0] if b else None, head.scale, head.softcap, torch.float64)
        found = token_logprobs(h, layer, targets, temperature=temperature, entropy=entropy, budget=3 * 7 * 8)
        return found if entropy else found[0]

    assert torch.autograd.gradcheck(run, [t for t in (hidden, head.weight, head.bias) if t is not None])


def test_a_frozen_head_gets_no_gradient():
    hidden, head, targets = case()
    head.weight.requires_grad_(False)
    token_logprobs(hidden, head, targets)[0].sum().backward()
    assert hidden.grad is not None and head.weight.grad is None


def test_nothing_to_predict_is_fine():
    hidden, head, _ = case()
    found, _ = token_logprobs(hidden[:0], head, torch.zeros(0, dtype=torch.int64))
    found.sum().backward()
    assert len(found) == 0 and not head.weight.grad.any()


def test_bfloat16_products_have_float32_sums():
    hidden, head, targets = case(vocab=3000)
    low = Head(head.weight, compute=torch.bfloat16)
    found, _ = token_logprobs(hidden, low, targets)
    exact = dense(hidden.bfloat16().double(), Head(head.weight.bfloat16().double()), targets)[0]
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), exact, atol=1e-4)
    found.sum().backward()
    wanted = torch.autograd.grad(dense(hidden, head, targets)[0].sum(), hidden)[0]
    assert float((hidden.grad - wanted).norm() / wanted.norm()) < 0.02


def peak_bytes(run):
    """Most memory that tensors made inside ``run`` take at a time, from the allocator's own records."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    records = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(records, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("entropy", [False, True])
def test_the_peak_of_memory_is_some_chunks_of_logits_not_all(entropy):
    tokens, width, vocab = 2048, 8, 4096
    hidden, head, targets = case(tokens, width, vocab)
    whole = tokens * vocab * 4  # 32 MiB
    budget = whole // 32

    def run():
        found = token_logprobs(hidden, head, targets, entropy=entropy, budget=budget)
        sum(f.sum() for f in found if f is not None).backward()

    def run_dense():
        sum(f.sum() for f in dense(hidden, head, targets)[: 1 + entropy]).backward()

    chunked, all_at_once = peak_bytes(run), peak_bytes(run_dense)
    assert all_at_once > 2 * whole  # the measure sees what it should
    assert chunked < 5 * budget + 8 * tokens * width * 4 + 8 * vocab * width * 4
    assert math.isfinite(float(hidden.grad.sum()))
