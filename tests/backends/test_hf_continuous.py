"""Rows of a transformers model that join and leave between two tokens; test_backends_streaming.py has what all engines do."""

import random

import pytest
import tiny as T
import torch

from flowrl import rl
from flowrl.backends.hf.generation.continuous import NetBatch, Ragged, _of_like_length
from flowrl.backends.stream import stream_of
from flowrl.batch import Column
from flowrl.errors import ProgramError, RunError
from flowrl.workers.model_options import Build, Model, Sampling
from flowrl.workers.streaming import PrefixTokens, SampleRequest

CLOSE = 1e-4
#: With the engine's own cache; with windows, for which short rows have it and long ones do not; with the model's own
#: cache; with none.
KINDS = ["qwen2", "gemma2", "mixtral", "gpt2", "gemma2-window", "mistral-window", "bloom", "mamba"]


def finish(batch):
    found = []
    while batch.running():
        found += batch.step()
    return {(row.call, row.row): row for row in found}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_gives_the_rows_of_whole_calls_and_goes_on_under_new_weights(kind):
    opened, other = T.engine(kind), T.engine(kind)
    column, batch = T.prompts(n=2)
    seeds, sampling = batch.row_seeds(), Sampling(max_tokens=9, temperature=0.8)
    whole, late = (opened.generate(column, 2, s, sampling).ids.to_list() for s in (seeds, seeds + 1))
    first = opened.submit(SampleRequest(column, 2, seeds, sampling))
    opened.step(), opened.step()
    second = opened.submit(SampleRequest(column, 2, seeds + 1, sampling))
    rows = finish(opened)
    assert [list(rows[second, i].ids) for i in range(8)] == late
    assert all(list(rows[first, i].ids) == whole[i] for i in range(8) if (first, i) in rows)

    third = opened.submit(SampleRequest(column, 2, seeds, sampling))
    opened.step(), opened.step(), opened.step()
    opened.pause()
    with torch.no_grad():
        for engine in (opened, other):
            for weight in engine.net.model.parameters():
                weight.mul_(1.1)
    opened.resume(1)
    crossed = [row for row in finish(opened).values() if len(row.versions) == 2]
    assert crossed and all(row.versions[0] == (0, 3) and row.call == third for row in crossed)
    for row in crossed:
        prompt = T.PROMPTS[row.row // 2]
        logits = T.whole_logits(other, prompt + list(row.ids))[len(prompt) + 2 : -1] / 0.8
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(row.ids[3:])[:, None]).squeeze(-1).tolist()
        assert row.rollout_logprobs[3:] == pytest.approx(wanted, abs=CLOSE)


@pytest.fixture(scope="module")
def opened():
    return T.engine("qwen2")


@pytest.mark.parametrize("kind", ["qwen2", "bloom"])
def test_rows_that_find_no_memory_wait_and_are_the_same(kind):
    opened = T.engine(kind)
    column, batch = T.prompts(n=3)
    seeds, sampling, shapes = batch.row_seeds(), Sampling(max_tokens=8), []
    whole = opened.generate(column, 3, seeds, sampling)
    memory = opened.net.cache_bytes_per_token() * 40
    small = NetBatch(opened.net, opened.parameters, (T.EOS,), cache_bytes=memory)
    call = small.submit(SampleRequest(column, 3, seeds, sampling))
    hook = opened.net.body.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    rows = finish(small)
    hook.remove()
    assert max(rows for rows, _ in shapes) * (5 + 8) <= 40 + 13, "at most 40 tokens have keys and values"
    assert [list(rows[call, i].ids) for i in range(12)] == whole.ids.to_list()
    one = NetBatch(opened.net, opened.parameters, (T.EOS,), cache_bytes=1)  # a row goes on in any case
    call = one.submit(SampleRequest(column, 1, seeds[::3], sampling))
    assert [list(row.ids) for _, row in sorted(finish(one).items())] == whole.ids.to_list()[::3]


def test_the_memory_of_rows_that_have_left_is_not_kept_beside_that_of_longer_ones(opened):
    """Many short rows and then one long one: the room that each of them is given is not that of many long ones."""
    each = opened.net.cache_bytes_per_token()
    small = NetBatch(opened.net, opened.parameters, (), cache_bytes=each * 120)

    def submit(prompts, seeds, most):
        rows = Column.of(prompts, dim="prompt", dtype="i32")
        wanted = opened.generate(rows, 1, seeds, Sampling(max_tokens=most))
        call = small.submit(SampleRequest(rows, 1, seeds, Sampling(max_tokens=most)))
        return call, wanted.ids.to_list()

    def step():
        ended = {(row.call, row.row): list(row.ids) for row in small.step()}
        assert small.cache_bytes() <= each * 120
        return ended

    first, many = submit([[2, 3 + i] for i in range(10)], torch.arange(10), 8)
    found = step()
    small.abort(first, range(1, 10))
    second, one = submit([list(range(2, 32))], torch.arange(1) + 99, 10)
    found |= step()
    assert small.cache_bytes() >= each * 80 and small.running() == [(first, 0), (second, 0)], "both have a place"
    while small.running():
        found |= step()
    third, again = submit([[2, 3 + i] for i in range(12)], torch.arange(12), 8)
    while small.running():
        found |= step()
    wanted = {(first, 0): many[0], (second, 0): one[0], **{(third, i): ids for i, ids in enumerate(again)}}
    for at, ids in found.items():  # a whole call ends at a stop token
        assert ids[: len(wanted[at])] == wanted[at]
    assert found.keys() == wanted.keys()


def test_a_prompt_is_computed_once_and_rows_that_have_left_are_not_computed(opened):
    shapes = []
    hook = opened.net.body.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    column, batch = T.prompts(n=8)
    opened.submit(SampleRequest(column, 8, batch.row_seeds(), Sampling(max_tokens=30, stop=(3, 7, 21, 30))))
    running = []
    while opened.running():
        opened.step()
        running.append(len(opened.running()))
    hook.remove()
    assert shapes[0] == (4, 9) and all(width == 1 for _, width in shapes[1:])
    assert [rows for rows, _ in shapes[1:]] == running[:-1] and len(set(running)) > 5


def test_rows_that_come_one_by_one_share_the_passes(opened):
    """As agents do it: each row is a call of its own, of another length."""
    prompts = [list(range(2, 3 + i)) for i in range(12)]
    seeds, sampling = torch.arange(12) * 31, Sampling(max_tokens=12)
    wanted = [
        opened.generate(Column.of([p], dim="prompt", dtype="i32"), 1, seeds[i : i + 1], sampling).ids.to_list()[0]
        for i, p in enumerate(prompts)
    ]
    passes = []
    hook = opened.net.body.register_forward_pre_hook(
        lambda _, __, given: passes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    found, calls = [], []
    for i, prompt in enumerate(prompts):
        calls.append(
            opened.submit(SampleRequest(Column.of([prompt], dim="prompt", dtype="i32"), 1, seeds[i : i + 1], sampling))
        )
        found += opened.step()
    found += finish(opened).values()
    hook.remove()
    rows = {row.call: list(row.ids) for row in found}
    assert [rows[call] for call in calls] == wanted
    assert max(rows for rows, _ in passes) > 4 and len(passes) < 12 + 12 + 12


@pytest.mark.parametrize("how", ["taken over", "trained"])
def test_weights_that_are_written_while_rows_run_are_noticed(how):
    opened = T.engine("qwen2", optim=T.OPTIM)
    batch = T.rollouts(opened)
    column, rows = T.prompts()
    opened.submit(SampleRequest(column, 1, rows.row_seeds(), Sampling(max_tokens=9)))
    opened.step()
    if how == "trained":
        opened.update(batch, rl.ppo_clip())
    else:
        opened.take_weights({name: weight.clone() for name, weight in opened.plain_weights().items()})
    with pytest.raises(RunError, match="The weights were written while 4 rows were being sampled"):
        opened.step()


def test_weights_that_are_wider_than_the_computation():
    opened = T.engine("qwen2", optim=T.OPTIM, dtype="bf16")
    column, rows = T.prompts(n=4)
    call = stream_of(opened).submit(SampleRequest(column, 4, rows.row_seeds(), Sampling(max_tokens=8)))
    next(iter(call))
    stream_of(opened).publish(lambda: opened.update(T.rollouts(opened), rl.ppo_clip()), 1, "interrupt")
    second = stream_of(opened).submit(SampleRequest(column, 4, rows.row_seeds(), Sampling(max_tokens=8)))
    list(call)
    made = second.sampled()
    read = batch_of(rows, made)
    assert float(abs(opened.logprobs(read) - made.rollout_logprobs).mean()) < 0.05
    assert opened.batch._head is None, "the copy of its weights is freed with the last row"


def batch_of(rows, made):
    pairs = zip(rows.prompt_ids.to_list(), made.ids.to_list(), strict=True)
    tokens = Column.of([a + b for a, b in pairs], dim="token", dtype="i32")
    mask = made.ids.with_values(torch.ones(len(made.ids.values), dtype=torch.bool))
    return rows.with_columns({"tokens": tokens, "response_mask": mask})


@pytest.mark.parametrize("keep", [False, True])
def test_keys_and_values_are_computed_again_or_kept(keep):
    opened, other = T.engine("qwen2"), T.engine("qwen2")
    column, batch = T.prompts()
    opened.submit(SampleRequest(column, 1, batch.row_seeds(), Sampling(max_tokens=9)))
    assert not opened.step()
    opened.pause()
    with torch.no_grad():
        for engine in (opened, other):
            for weight in engine.net.model.parameters():
                weight.mul_(1.2)
    opened.resume(1, keep_cache=keep)
    shapes = []
    hook = opened.net.body.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    rows = finish(opened).values()
    hook.remove()
    assert [width for _, width in shapes] == ([1] * 8 if keep else [10] + [1] * 7)
    gaps = []
    for row in rows:
        prompt = T.PROMPTS[row.row]
        logprobs = T.whole_logits(other, prompt + list(row.ids))[len(prompt) : -1].log_softmax(-1)
        fresh = logprobs.gather(-1, torch.tensor(row.ids[1:])[:, None]).squeeze(-1)
        gaps.append(float((fresh - torch.tensor(row.rollout_logprobs[1:])).abs().max()))
        assert row.versions == ((0, 1), (1, len(row.ids) - 1))
    assert (min(gaps) > 1e-2) if keep else (max(gaps) < CLOSE)


def test_a_model_that_does_not_generate_is_refused():
    scalar = T.engine("qwen2", head="scalar")
    column, batch = T.prompts()
    with pytest.raises(ProgramError, match="has the head 'scalar'; generate needs 'lm'"):
        scalar.submit(SampleRequest(column, 1, batch.row_seeds(), Sampling()))


def test_memory_that_nobody_has_written_is_never_read(opened, monkeypatch):
    """Prompts of a call may be computed in several passes of different widths; what lies between must be finite."""
    monkeypatch.setattr("flowrl.backends.hf.generation.decode.prefill_tokens", lambda device: 9)
    column, batch = T.prompts(n=2)
    seeds, sampling = batch.row_seeds(), Sampling(max_tokens=6)
    wanted = opened.generate(column, 2, seeds, sampling).ids.to_list()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with nan
    try:
        assert opened.generate(column, 2, seeds, sampling).ids.to_list() == wanted
        rows = stream_of(opened).submit(SampleRequest(column, 2, seeds, sampling)).sampled().ids.to_list()
    finally:
        torch.use_deterministic_algorithms(False)
    assert rows == wanted


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls_aborts_and_publishes_gives_each_token_the_log_probability_of_its_weights(
    seed, apart, monkeypatch
):
    """``apart``: the longest rows have a pass of their own, however little it saves."""
    if apart:
        monkeypatch.setattr(Ragged, "_worth", 0)
    chance, base = random.Random(seed), T.engine("llama")
    memory = chance.choice([None, base.net.cache_bytes_per_token() * 120])
    small = NetBatch(base.net, base.parameters, (T.EOS,), cache_bytes=memory)
    first = {name: weight.clone() for name, weight in base.plain_weights().items()}
    versions, asked, found = [first], {}, []
    for _ in range(100):
        do = chance.choice(["submit", "abort", "publish", *["step"] * 7])
        if do == "submit":
            prompt = [chance.randrange(2, 12) for _ in range(chance.randrange(1, 12))]
            sampling = Sampling(chance.randrange(2, 16), temperature=chance.choice([0.7, 1.0]))
            call = small.submit(
                SampleRequest(
                    Column.of([prompt], dim="prompt", dtype="i32"), 3, torch.arange(3) + 7 * len(asked), sampling
                )
            )
            asked[call] = prompt, sampling
        elif do == "abort" and small.running():
            call, row = chance.choice(small.running())
            found += small.abort(call, [row])
        elif do == "publish":
            small.pause()
            scale = 1 + 0.1 * len(versions)
            versions.append({name: weight * scale for name, weight in first.items()})
            base.take_weights(versions[-1])
            small.resume(len(versions) - 1)
        else:
            found += small.step()
        assert memory is None or small.cache_bytes() <= memory
    found += finish(small).values()
    assert sorted((row.call, row.row) for row in found) == [(call, i) for call in asked for i in range(3)]
    crossed = 0
    for version, weights in enumerate(versions):
        base.take_weights(weights)
        for row in found:
            (prompt, sampling), at = asked[row.call], [v == version for v in row.token_versions]
            if any(at):
                crossed += not all(at)
                logits = T.whole_logits(base, prompt + list(row.ids))[len(prompt) - 1 : -1] / sampling.temperature
                fresh = logits.log_softmax(-1).gather(-1, torch.tensor(row.ids)[:, None]).squeeze(-1)[at]
                assert torch.allclose(torch.tensor(row.rollout_logprobs).double()[at], fresh, atol=CLOSE)
    assert crossed


def test_prompts_that_are_computed_once_count_as_found():
    opened = T.engine("qwen2")
    column, batch = T.prompts(n=3)
    tokens = int(column.lengths.sum())
    opened.generate(column, 3, batch.row_seeds(), Sampling(max_tokens=4))
    assert opened.prefix_tokens() == PrefixTokens(asked=3 * tokens, found=2 * tokens)
    opened.submit(SampleRequest(column, 3, batch.row_seeds(), Sampling(max_tokens=4)))
    finish(opened)
    assert opened.prefix_tokens() == PrefixTokens(asked=6 * tokens, found=4 * tokens)


@pytest.mark.parametrize("kind", ["qwen2", "bloom"])
def test_passes_are_told_of_whole_calls_and_of_rows_that_leave_one_by_one(kind):
    """Each token but the first of a row is of a pass, and has come after all of the row before it."""
    opened = T.engine(kind)
    column, batch = T.prompts(n=3)
    seeds, sampling = batch.row_seeds(), Sampling(max_tokens=12)
    made = opened.generate(column, 3, seeds, sampling)
    whole = opened.take_passes()
    lengths = made.ids.lengths.tolist()
    ended = [n - 1 if n < 12 else n - 2 for n in lengths]  # whole calls do not look behind the last token
    assert sum(passes.rows for passes in whole) == sum(ended)
    opened.submit(SampleRequest(column, 3, seeds, sampling))
    finish(opened)
    told = opened.take_passes()
    assert sum(passes.rows for passes in told) == sum(n - 1 for n in lengths)
    assert sum(passes.count for passes in told) == max(lengths) - 1
    prompts = column.lengths.repeat_interleave(3).tolist()
    assert sum(p.context for p in told) == sum(
        p + t for p, n in zip(prompts, lengths, strict=True) for t in range(1, n)
    )
    assert all(passes.seconds > 0 for passes in (*whole, *told)) and opened.take_passes() == ()


def test_memory_of_keys_and_values_is_freed_with_that_of_weights():
    opened = T.engine("qwen2", optim=T.OPTIM)
    column, batch = T.prompts(n=3)
    weights = sum(w.nbytes for w in opened.net.model.parameters())
    assert opened.sleep() == weights == opened.wake()
    opened.submit(SampleRequest(column, 3, batch.row_seeds(), Sampling(max_tokens=4)))
    opened.step()
    cached = opened.batch.cache_bytes()
    assert cached > 0 and opened.sleep() == weights + cached and opened.batch.cache_bytes() == 0
    for call in (opened.logprobs, lambda rows: opened.update(rows, rl.ppo_clip())):
        with pytest.raises(RunError, match="asleep"):
            call(batch)
    opened.wake()
    finish(opened)
    opened.update(T.rollouts(opened), rl.ppo_clip())
    assert opened.sleep() == 3 * weights == opened.wake(), "with both moments"


def test_a_device_gets_back_what_its_allocator_has(monkeypatch):
    """What is freed is free for others only once torch has let go of it: after everything has left."""
    opened, told = T.engine("qwen2", optim=T.OPTIM), []
    column, batch = T.prompts()
    opened.submit(SampleRequest(column, 1, batch.row_seeds(), Sampling(max_tokens=4)))
    opened.step()
    monkeypatch.setattr(
        torch.cuda,
        "empty_cache",
        lambda: told.append(
            opened.batch.cache_bytes() + sum(w.untyped_storage().nbytes() for w in opened.net.model.parameters())
        ),
    )
    opened.sleep(), opened.wake()
    assert not told, "a CPU has no such allocator"
    opened.device = torch.device("cuda")
    opened.sleep(), opened.sleep()
    assert told == [0]


def test_weights_from_files_leave_memory_too(tmp_path):
    made = T.engine("llama")
    made.save(str(tmp_path))
    opened = T.open_engine("hf", Build(Model(str(tmp_path)), device="cpu"))
    digest, size = opened.digest(), sum(weight.nbytes for weight in opened.net.model.parameters())
    assert opened.sleep() == size == opened.wake() and opened.digest() == digest == made.digest()


def shapes_of(batch, opened):
    """What the passes of a batch are given until its rows have ended: how many rows, and tokens of each."""
    found = []
    hook = opened.net.body.register_forward_pre_hook(
        lambda _, __, given: found.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    rows = finish(batch)
    hook.remove()
    return rows, found


def test_a_long_row_that_was_left_over_does_not_slow_short_ones(opened, monkeypatch):
    """It has a pass of its own, as soon as that saves more than reading the weights; and all rows stay the same."""
    late, early = Column.of([[2, 3, 4]], dim="prompt", dtype="i32"), Column.of([[5, 6]], dim="prompt", dtype="i32")
    found = {}
    for worth in (10**9, 40):
        monkeypatch.setattr(Ragged, "_worth", worth)
        batch = NetBatch(opened.net, opened.parameters, ())
        batch.submit(SampleRequest(early, 1, torch.arange(1), Sampling(max_tokens=50)))
        for _ in range(30):
            batch.step()
        batch.submit(SampleRequest(late, 6, torch.arange(6) + 9, Sampling(max_tokens=9)))
        rows, shapes = shapes_of(batch, opened)
        found[worth] = {at: row.ids for at, row in rows.items()}, shapes
        together = {rows for rows, tokens in shapes if tokens == 1}
        assert together == ({7, 1} if worth > 40 else {1, 6}), "7 rows at once, or the long one and six short ones"
    assert found[40][0] == found[10**9][0]


def test_short_rows_are_never_set_apart_where_it_saves_nothing(opened, monkeypatch):
    """Rows of one length, or one row alone, are one pass even where a further one costs nothing."""
    monkeypatch.setattr(Ragged, "_worth", 0)
    batch = NetBatch(opened.net, opened.parameters, ())
    batch.submit(
        SampleRequest(Column.of([[2, 3, 4]], dim="prompt", dtype="i32"), 4, torch.arange(4), Sampling(max_tokens=6))
    )
    _, shapes = shapes_of(batch, opened)
    assert {rows for rows, _ in shapes[1:]} == {4}
    batch.submit(SampleRequest(Column.of([[2]], dim="prompt", dtype="i32"), 1, torch.arange(1), Sampling(max_tokens=4)))
    _, shapes = shapes_of(batch, opened)
    assert {rows for rows, _ in shapes} == {1}


def test_what_goes_on_after_a_publish_does_not_pad_what_begins(opened):
    """A row of 40 tokens is computed again without padding six rows of three tokens to its length."""
    batch = NetBatch(opened.net, opened.parameters, ())
    batch.submit(
        SampleRequest(Column.of([[5, 6]], dim="prompt", dtype="i32"), 1, torch.arange(1), Sampling(max_tokens=50))
    )
    for _ in range(38):
        batch.step()
    batch.submit(
        SampleRequest(
            Column.of([[2, 3, n] for n in range(4, 10)], dim="prompt", dtype="i32"),
            1,
            torch.arange(6),
            Sampling(max_tokens=2),
        )
    )
    batch.pause()
    batch.resume(1)
    _, shapes = shapes_of(batch, opened)
    assert shapes[:2] == [(1, 40), (6, 3)]


@pytest.mark.parametrize("most", [1, 30, 64, 8192])
def test_texts_that_are_computed_together_are_of_like_length(most):
    chance = random.Random(most)
    for _ in range(50):
        texts = sorted(((7,) * chance.randrange(1, 60) for _ in range(chance.randrange(20))), key=len, reverse=True)
        parts = list(_of_like_length(texts, most))
        assert [text for part in parts for text in part] == texts and all(parts)
        left = len(texts)
        for part in parts:
            padding = len(part[0]) - len(part[-1])
            assert len(part) == 1 or len(part) * len(part[0]) <= most
            assert 2 * padding <= len(part[0]) or (left - len(part) + 1) * padding <= 128
            left -= len(part)
    assert list(_of_like_length([(7,) * 9, (7,) * 3], most)) == [[(7,) * 9, (7,) * 3]] or most < 18
