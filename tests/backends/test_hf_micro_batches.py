"""Both layouts of micro-batches give what each row gives alone; the cheaper one is chosen."""

import random

import pytest
import tiny as T
import torch

from flowrl.backends.hf.logits import token_logprobs
from flowrl.backends.hf.micro_batches import Rows, micro_batches
from flowrl.batch import Batch, Column
from flowrl.errors import DataError


def some_rows(shapes, seed=0, same_prompt=True):
    """A batch from ``[(prompt length, [response lengths])]``, a group for each."""
    draw = random.Random(seed)
    keys, tokens, masks = [], [], []
    for uid, (length, responses) in enumerate(shapes):
        prompt = [draw.randrange(2, T.VOCAB) for _ in range(length)]
        for i, response in enumerate(responses):
            if not same_prompt:
                prompt = [draw.randrange(2, T.VOCAB) for _ in range(length)]
            keys.append((uid, i))
            tokens.append(prompt + [draw.randrange(2, T.VOCAB) for _ in range(response)])
            masks.append([draw.random() < 0.8 for _ in range(response)])
    return Batch.of(
        keys,
        tokens=Column.of(tokens, dim="token", dtype="i32"),
        response_mask=Column.of(masks, dim="response", dtype="bool"),
    )


def logprobs(opened, batch, budget=10**6, layout=None):
    """Log-probabilities of all response tokens through one layout, and the micro-batches."""
    rows = Rows.of(batch)
    micros = micro_batches(opened.net, rows, torch.arange(len(rows)), budget, layout)
    found = torch.full((len(rows.targets),), torch.nan, dtype=torch.promote_types(opened.net.compute, torch.float32))
    for micro in micros:
        with torch.no_grad():
            logits = opened.net.head.logits(micro.hidden(opened.net))
        found[micro.at] = logits.log_softmax(-1).gather(-1, rows.targets[micro.at, None]).squeeze(-1)
    return found, micros


def fed(micros):
    """How many tokens are fed, without padding."""
    return sum(int((micro.until >= 0).sum()) for micro in micros)


def beginnings(batch):
    """How many different beginnings the rows have, of what is fed of them: the nodes of the trees of all groups."""
    rows = zip(batch.keys, batch.tokens.to_list(), strict=True)
    return len({(key[0], *ids[: n + 1]) for key, ids in rows for n in range(len(ids) - 1)})


def alone(opened, batch):
    """The same from whole sequences, one row at a time."""
    found = []
    for ids, mask in zip(batch.tokens.to_list(), batch.response_mask.to_list(), strict=True):
        every = T.whole_logits(opened, ids).log_softmax(-1)
        first = len(ids) - len(mask)
        found += [float(every[t - 1, ids[t]]) for t in range(first, len(ids))]
    return torch.tensor(found)


SHAPES = [(3, [4, 1, 6]), (9, [2, 2]), (1, [5]), (4, [3, 0, 7, 1])]


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gpt2", "mixtral"])
@pytest.mark.parametrize("layout", ["rows", None])
@pytest.mark.parametrize("budget", [1, 25, 10**6])
def test_both_layouts_give_what_each_row_gives_alone(kind, layout, budget):
    opened, batch = T.engine(kind), some_rows(SHAPES)
    if layout is None:
        opened.net.__dict__["flops"] = (1.0, 0.0)  # attention for nothing: the shared layout is cheaper
    found, micros = logprobs(opened, batch, budget, layout)
    assert (micros[0].until is None) == (layout == "rows" or budget == 1)
    assert torch.allclose(found, alone(opened, batch), atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2-window", "mistral-window", "mamba", "bloom"])
def test_models_without_full_attention_take_rows_alone(kind):
    opened, batch = T.engine(kind), some_rows(SHAPES)
    found, micros = logprobs(opened, batch)
    assert all(micro.until is None for micro in micros)
    assert torch.allclose(found, alone(opened, batch), atol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_random_groups(seed):
    draw = random.Random(seed)
    shapes = [
        (draw.randint(1, 12), [draw.randint(0, 9) for _ in range(draw.randint(1, 6))])
        for _ in range(draw.randint(1, 7))
    ]
    opened = T.engine("qwen2", sharpen=2.0)
    opened.net.__dict__["flops"] = (draw.random(), 0.0)
    batch = some_rows(shapes, seed)
    found, _ = logprobs(opened, batch, budget=draw.randint(20, 200))
    assert torch.allclose(found, alone(opened, batch), atol=1e-4)


def test_a_prompt_is_fed_once_where_that_is_cheaper():
    opened = T.engine("qwen2")
    batch = some_rows([(20, [3, 3, 3, 3]), (12, [2, 4, 2, 5])])
    _, long_prompts = logprobs(opened, batch)
    assert fed(long_prompts) == beginnings(batch) <= 20 + 4 * 2 + 12 + 1 + 3 + 1 + 4
    _, long_responses = logprobs(opened, some_rows([(1, [60, 60, 60, 60])]))
    assert all(m.until is None for m in long_responses)


def test_small_groups_share_a_sequence():
    opened = T.engine("qwen2")
    opened.net.__dict__["flops"] = (1.0, 0.0)
    _, micros = logprobs(opened, some_rows([(10, [5] * 8)] + [(3, [2, 2])] * 8))
    assert sum(m.ids.numel() for m in micros) < 1.1 * fed(micros)


def test_rows_of_a_uid_with_other_prompts_are_not_taken_for_a_group():
    opened, batch = T.engine("qwen2"), some_rows([(5, [3, 3, 3])], same_prompt=False)
    opened.net.__dict__["flops"] = (1.0, 0.0)
    assert torch.allclose(logprobs(opened, batch)[0], alone(opened, batch), atol=1e-4)


def branching(seed, groups=3, branches=7):
    """Groups of rows that each go on from a random place of another one, or are the same; whole prompts may differ."""
    draw = random.Random(seed)
    keys, tokens, masks = [], [], []
    for uid in range(groups):
        rows = [[draw.randrange(2, T.VOCAB) for _ in range(draw.randint(2, 12))]]
        while len(rows) < branches:
            before = draw.choice(rows)
            more = [draw.randrange(2, T.VOCAB) for _ in range(draw.randint(0, 8))]
            rows.append((before[: draw.randint(0, len(before))] + more + [2, 3])[:60])
        for i, row in enumerate(draw.sample(rows, len(rows))):
            keys.append((uid, i // 3, i % 3))
            tokens.append(row)
            masks.append([draw.random() < 0.5 for _ in range(draw.randint(0, len(row) - 1))])
    return Batch.of(
        keys,
        tokens=Column.of(tokens, dim="token", dtype="i32"),
        response_mask=Column.of(masks, dim="response", dtype="bool"),
    )


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gpt2"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [40, 10**6])
def test_branches_share_what_they_begin_with(kind, seed, budget):
    opened, batch = T.engine(kind), branching(seed)
    opened.net.__dict__["flops"] = (1.0, 0.0)
    found, micros = logprobs(opened, batch, budget)
    assert torch.allclose(found, alone(opened, batch), atol=2e-5)
    chosen = batch.take([i for i, mask in enumerate(batch.response_mask.to_list()) if mask])
    if budget > 40:
        assert fed(micros) == beginnings(chosen)
    else:
        assert fed(micros) >= beginnings(chosen) and max(m.ids.numel() for m in micros) <= budget


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
def test_branches_have_the_gradient_of_rows_alone(kind):
    batch, found = branching(1), []
    weight = torch.linspace(-1, 1, len(batch.response_mask.values))
    for layout in (None, "rows"):
        opened = T.engine(kind, optim=T.OPTIM)
        opened.net.__dict__["flops"] = (1.0, 0.0)
        rows = Rows.of(batch)
        micros = micro_batches(opened.net, rows, torch.arange(len(rows)), 10**6, layout)
        assert (micros[0].until is None) == (layout == "rows")
        for micro in micros:
            said, _ = token_logprobs(micro.hidden(opened.net), opened.net.head, rows.targets[micro.at])
            (said * weight[micro.at]).sum().backward()
        found.append({name: p.grad for name, p in opened.net.model.named_parameters() if p.grad is not None})
    shared, plain = found
    assert shared.keys() == plain.keys() and shared
    scale = max(float(grad.abs().max()) for grad in plain.values())
    assert max(float((shared[name] - plain[name]).abs().max()) for name in plain) < 1e-6 * max(1.0, scale)


def test_a_token_sees_the_beginning_of_its_row_and_nothing_else():
    opened = T.engine()
    batch = branching(5, groups=2)
    opened.net.__dict__["flops"] = (1.0, 0.0)
    for micro in logprobs(opened, batch)[1]:
        mask, until, positions = micro.mask(torch.float32), micro.until, micro.positions
        assert mask is not None and until is not None and positions is not None
        seen = mask[:, 0] == 0
        ids = {
            (int(sequence), int(i)): micro.ids[sequence][seen[sequence, i]].tolist()
            for sequence, i, _ in seen.nonzero()
        }
        wanted = {tuple(row[: n + 1]) for row in batch.tokens.to_list() for n in range(len(row))}
        for (sequence, i), beginning in ids.items():
            if until[sequence, i] < 0:
                assert len(beginning) == 1  # padding sees itself
            else:
                assert tuple(beginning) in wanted and len(beginning) == int(positions[sequence, i]) + 1


def test_rows_that_begin_alike_only_for_a_word_lie_apart_where_attention_costs_more():
    opened = T.engine("qwen2")
    word = some_rows([(1, [40, 40, 40])])
    for flops, apart in (((1.0, 0.0), False), ((1.0, 10.0), True)):
        opened.net.__dict__["flops"] = flops
        _, micros = logprobs(opened, word)
        assert all(m.until is None for m in micros) == apart


@pytest.mark.parametrize("budget", [30, 64, 200])
def test_micro_batches_stay_within_their_budget(budget):
    opened, batch = T.engine("qwen2"), some_rows([(5, [4, 8, 2, 9])] * 9)
    for layout in ("rows", None):
        _, micros = logprobs(opened, batch, budget, layout)
        assert max(m.ids.numel() for m in micros) <= budget
        assert len(micros) > 1
        assert sorted(int(i) for m in micros for i in m.at) == list(range(len(batch.response_mask.values)))


def test_a_row_needs_a_token_before_its_response():
    batch = Batch.of(
        [(4, 0)],
        tokens=Column.of([[1, 2]], dim="token", dtype="i32"),
        response_mask=Column.of([[True, True]], dim="response"),
    )
    with pytest.raises(DataError, match=r"Row \(4, 0\) has 2 tokens and a response of 2"):
        Rows.of(batch)


@pytest.mark.parametrize("kind", ("qwen2", "llama", "gpt2"))
def test_float64_shares_prompts_and_gives_what_rows_alone_give(kind):
    opened = T.engine(kind, dtype="fp64")
    assert opened.net.compute == torch.float64 and opened.net.grouped
    batch = some_rows([(9, [2, 3, 1, 2]), (6, [4, 1])])
    shared, micros = logprobs(opened, batch)
    assert all(micro.until is not None for micro in micros)
    plain, others = logprobs(opened, batch, layout="rows")
    assert all(micro.until is None for micro in others)
    assert torch.allclose(shared, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_a_mask_hides_by_the_least_number_of_its_dtype(dtype):
    opened = T.engine()
    _, [micro] = logprobs(opened, some_rows([(9, [2, 3])]), layout="shared")
    mask = micro.mask(dtype)
    assert mask is not None and mask.dtype == dtype
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}


def test_a_mistake_of_ours_in_a_trial_is_not_taken_for_a_model_that_cannot(monkeypatch):
    opened = T.engine()

    def broken(self, dtype):
        raise RuntimeError("value cannot be converted without overflow")

    monkeypatch.setattr(
        type(micro_batches(opened.net, Rows.of(some_rows(SHAPES)), torch.arange(10), 100)[0]), "mask", broken
    )
    with pytest.raises(RuntimeError, match="without overflow"):
        opened.net.probe()


def test_a_model_that_refuses_a_mask_takes_rows_alone(monkeypatch):
    opened = T.engine()
    whole = opened.net.body.forward

    def refusing(*args, attention_mask=None, **given):
        if attention_mask is not None:
            raise ValueError("no mask of four dimensions")
        return whole(*args, **given)

    monkeypatch.setattr(opened.net.body, "forward", refusing)
    opened.net.probe()
    assert not opened.net.grouped and not opened.net.tries
