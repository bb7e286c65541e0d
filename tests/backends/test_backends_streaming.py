"""What each engine does whose rows leave one by one: the same tests for all of them.

An engine joins with a function that opens it and one that gives it other weights. vLLM needs `make vllm-test`; SGLang is
here over its protocol, and tests/backends/test_sglang_server.py has its real server.
"""

import asyncio
import math
import os
import re
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import tiny as T
import torch

from flowrl.backends.stream import generate_streamed, stream_of
from flowrl.batch import Column
from flowrl.errors import DataError, NotFinite, RunError
from flowrl.testing import FakeEngine
from flowrl.workers.decode_passes import tells_passes
from flowrl.workers.model_options import Build, Model, Sampling
from flowrl.workers.streaming import FailedCall, SampledRow, SampleRequest, streams, tells_tokens
from flowrl.workers.tokens import row_support

PROMPTS = [[2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 14], [15, 16, 17, 18, 19], [20]]
CLOSE = 1e-4
OTHER = Sampling(max_tokens=14, temperature=1.3, top_k=9, top_p=0.9, repetition_penalty=1.2, min_p=0.01, stop=(3, 21))


class OfNet:
    """The reference engine, and how a test looks into it."""

    def __init__(self, kind="llama"):
        self.engine = T.engine(kind)
        self.alone = T.engine(kind)

    def other_weights(self, seed):
        """The weights of another version, which :meth:`write` writes."""
        generator = torch.Generator().manual_seed(seed)
        weights = {n: w.clone() for n, w in self.alone.plain_weights().items()}
        return {n: w + 0.05 * torch.randn(w.shape, generator=generator) for n, w in weights.items()}

    def write(self, weights):
        self.engine.take_weights(weights)

    def logprobs(self, prompt, ids, weights=None, temperature=1.0):
        """Of each token of a response, by whole sequences under the weights."""
        if weights is not None:
            self.alone.take_weights(weights)
        logits = T.whole_logits(self.alone, prompt + list(ids))[len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).tolist()

    def distributions(self, prompt, ids, temperature):
        """Log-probabilities of all tokens at each place of a response."""
        logits = T.whole_logits(self.alone, prompt + list(ids))[len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).tolist()

    def spoil(self, token):
        with torch.no_grad():
            self.engine.net.model.get_input_embeddings().weight[token] = torch.nan

    def held(self):
        """Bytes of the memory in which its weights are."""
        storages = [weight.untyped_storage() for weight in self.engine.net.model.parameters()]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def close(self):
        pass


class OfTable:
    """The fake engine; its log-probabilities are computed from the table in plain Python."""

    def __init__(self):
        self.engine = FakeEngine(vocab=T.VOCAB, stop=(T.EOS,), positions=64)

    def other_weights(self, seed):
        return {"table": torch.randn(T.VOCAB, T.VOCAB, generator=torch.Generator().manual_seed(seed)).double()}

    def write(self, weights):
        self.engine.table.copy_(weights["table"])

    def logprobs(self, prompt, ids, weights=None, temperature=1.0):
        def logit(v, u):
            return (2 * math.sin(1 + 3 * v + 5 * u) if weights is None else float(weights["table"][v, u])) / temperature

        tokens = [prompt[-1], *ids]
        sums = [math.log(sum(math.exp(logit(v, u)) for u in range(T.VOCAB))) for v in tokens]
        return [logit(v, u) - sums[t] for t, (v, u) in enumerate(zip(tokens, ids, strict=False))]

    def distributions(self, prompt, ids, temperature):
        return [
            [self.logprobs([token], [u], temperature=temperature)[0] for u in range(T.VOCAB)]
            for token in [prompt[-1], *ids[:-1]]
        ]

    def spoil(self, token):
        self.engine.table[token] = torch.nan

    def held(self):
        return self.engine.table.untyped_storage().nbytes()

    def close(self):
        pass


class OfVLLM(OfNet):
    """vLLM in its process, which all tests share, and the reference engine beside it."""

    engine: Any = None

    def __init__(self, opened=None, fault: Any = None):
        own = type(self)
        if opened is not None:
            own.engine, self.like = self.both(opened)
            own.fault = staticmethod(fault)
        self.alone = T.open_engine("hf", replace(own.engine.build, axes={}, device="cpu"))

    def both(self, opened):
        """The engine, and the reference engine of its model."""
        return opened("qwen2")

    def begin(self):
        """Begin a test: no rows, and the weights of version 0."""
        for call in dict.fromkeys(call for call, _ in self.engine.running()):
            self.engine.abort(call)
        vars(self.engine).pop("_stream", None)
        self.engine.take_weights(self.alone.plain_weights())
        self.engine.resume(0)

    def held(self):
        """Bytes of the memory in which its weights are, and which its process reads."""
        _, file, _, size = self.engine._memory.told["memory"]
        return size if os.fstat(file).st_blocks else 0

    def spoil(self, token):
        self.fault(f"spoiled {token}")


class OfSplitVLLM(OfVLLM):
    """vLLM split over two ranks, which are asked alike."""

    def both(self, opened):
        return opened()

    def held(self):
        """Bytes of the memory of the first rank."""
        return self.engine.held()


class OfSGLang(OfNet):
    """SGLang, with a server that speaks its protocol and makes a token of each row when a step is made here."""

    server: Any = None
    engine: Any = None

    def __init__(self, folder=None):
        self.alone = T.engine("llama")
        if folder is not None:
            from sglang_scripted import Scripted

            config = self.alone.net.model.config
            config.architectures = ["LlamaForCausalLM"]
            config.save_pretrained(folder)
            OfSGLang.server = Scripted(folder, auto=False, enable_memory_saver=True)
            build = Build(Model(config=T.CONFIGS["llama"]), device="cpu", options={"url": OfSGLang.server.url})
            OfSGLang.engine = engine = T.open_engine("sglang", build)
            engine.step, engine.generate = partial(self.step, engine.step), partial(self.whole, engine.generate)
            engine.take_weights(self.alone.plain_weights())

    def step(self, take):
        """A token of each row on the server, and what has ended by it here."""
        if self.engine._paused or self.engine.offloaded is not None:
            return take()
        if self.engine._emptied:
            take()  # it brings the server back
        while len(self.server.requests) < len(self.engine.running()):
            time.sleep(0.001)  # rows are on their way there
        ended, found = self.server.step(), []
        while (len(found) < ended and self.engine.running()) or self.waits():
            found += take()
        return found

    def waits(self):
        """Whether something that the server has told is on its way here."""
        rows = {row.rid: row for row in self.engine.calls.rows.values()}
        return any(r.rid in rows and len(rows[r.rid].ids) < r.told for r in list(self.server.requests))

    def whole(self, generate, *said):
        """A whole call: the server goes on by itself."""
        self.server.auto = True
        try:
            return generate(*said)
        finally:
            self.server.auto = False

    def held(self):
        """Bytes of the memory in which its weights are, and which its server reads."""
        _, file, _, size = self.engine._file._memory.tell(self.engine._file._bytes)
        return size if os.fstat(file).st_blocks else 0

    def spoil(self, token):
        with torch.no_grad():
            self.server.model.get_input_embeddings().weight[token] = torch.nan

    def close(self):
        self.engine.close()
        self.server.close()


WITH_VLLM = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]
VLLM = [
    pytest.param("vllm", marks=WITH_VLLM),
    pytest.param("split", marks=[*WITH_VLLM, pytest.mark.nightly]),  # three minutes; test_vllm_split.py has some of it
]


@pytest.fixture(params=["hf", "fake", "sglang", *VLLM])
def it(request, tmp_path):
    if request.param in ("vllm", "split"):
        kind, opened = (OfVLLM, "opened") if request.param == "vllm" else (OfSplitVLLM, "split")
        found = kind(request.getfixturevalue(opened), request.getfixturevalue("fault"))
        found.begin()
    else:
        found = OfSGLang(tmp_path) if request.param == "sglang" else {"hf": OfNet, "fake": OfTable}[request.param]()
    yield found
    found.close()


def prompts(rows=PROMPTS):
    return Column.of(rows, dim="prompt", dtype="i32")


def seeds(count, first=0):
    return torch.arange(first, first + count) * 7919 - 3


def finish(engine):
    """All that comes until nothing runs."""
    found = []
    while engine.running():
        found += engine.step()
    return found


def by_call(rows):
    return {(row.call, row.row): row for row in rows}


def test_it_streams(it):
    assert streams(it.engine) and set(it.engine.publish_modes) <= {"drain", "interrupt", "continue"}


@pytest.mark.parametrize("sampling", [Sampling(12), Sampling(12, temperature=0.6), OTHER, Sampling(9, greedy=True)])
def test_rows_are_those_of_a_whole_call(it, sampling):
    whole = it.engine.generate(prompts(), 3, seeds(12), sampling, torch.arange(12) % 3)
    found = generate_streamed(it.engine, prompts(), 3, seeds(12), sampling, torch.arange(12) % 3)
    assert found.ids.equal(whole.ids) and torch.equal(found.finished, whole.finished)
    for name in ("rollout_logprobs", "sampling_logprobs"):
        assert torch.allclose(getattr(found, name).values, getattr(whole, name).values, atol=CLOSE)
    assert found.temperature == whole.temperature and found.ids.type == "i32[*response]"
    same = whole.sampling_logprobs is whole.rollout_logprobs
    assert (found.sampling_logprobs is found.rollout_logprobs) == same


def test_passes_are_told_by_how_many_rows_they_had(it):
    """Every token is of a pass, but those that were made as rows began; a pass is told once."""
    if not tells_passes(it.engine):
        pytest.skip("it does not tell how long they take")
    it.engine.take_passes()
    call = it.engine.submit(SampleRequest(prompts(), 3, seeds(12), Sampling(12)))
    rows = []
    for _ in range(4):
        rows += it.engine.step()
    later = it.engine.submit(SampleRequest(prompts(PROMPTS[:1]), 2, seeds(2), Sampling(4)))
    began = {row.row for row in by_call(rows).values()}
    rows += finish(it.engine)
    assert {row.call for row in rows} == {call, later} and len(rows) == 14
    passes = it.engine.take_passes()
    made = Counter()  # tokens of each step of the engine
    for row in rows:
        made.update(range(4 * (row.call == later), 4 * (row.call == later) + len(row.ids)))
    alone = {step: count for step, count in made.items() if step not in (0, 4)}  # where no row begins
    assert sum(each.rows for each in passes) == sum(alone.values()) and len(began) < 12
    assert sum(each.count for each in passes) == len(alone) and all(each.seconds >= 0 for each in passes)
    lengths = [len(prompt) for prompt in PROMPTS for _ in range(3)]
    context = sum(lengths[row.row] + at for row in rows if row.call == call for at in range(1, len(row.ids)) if at != 4)
    context += sum(len(PROMPTS[0]) + at for row in rows if row.call == later for at in range(1, len(row.ids)))
    assert sum(each.context for each in passes) == context
    whole = it.engine.generate(prompts(), 3, seeds(12), Sampling(12))
    assert 0 < sum(each.rows for each in it.engine.take_passes()) <= len(whole.ids.values) - 12
    assert it.engine.take_passes() == ()


CUT = Sampling(max_tokens=9, temperature=1.3, top_k=9, top_p=0.8, support=True)


def cut(distribution, sampling=CUT):
    """The ids that top-k and top-p leave, and the probability that they have together, by plain loops."""
    ordered = sorted(range(len(distribution)), key=lambda v: -distribution[v])[: sampling.top_k]
    whole = sum(math.exp(distribution[v]) for v in ordered)
    found, share = [], 0.0
    for v in ordered:
        if share < sampling.top_p * whole:
            found.append(v)
            share += math.exp(distribution[v])
    return sorted(found), share


def places(support):
    """The ids of each place."""
    ends = [sum(support.sizes[:t]) for t in range(len(support.sizes) + 1)]
    return [list(support.ids[a:b]) for a, b in pairwise(ends)]


def test_which_tokens_could_be_drawn_is_recorded(it):
    if isinstance(it, OfSGLang):
        with pytest.raises(RunError, match="SGLang does not record which tokens could be drawn"):
            it.engine.submit(SampleRequest(prompts(), 1, seeds(4), CUT))
        return
    assert generate_streamed(it.engine, prompts(), 1, seeds(4), replace(CUT, support=False)).support is None
    call, found = it.engine.submit(SampleRequest(prompts(), 3, seeds(12), CUT)), []
    for _ in range(3):
        found += it.engine.step()
    found += it.engine.abort(call, [1, 4]) + finish(it.engine)
    rows = by_call(found)
    assert len(rows) == 12 and {row.reason for row in found} >= {"aborted", "length"}
    for (_, number), row in rows.items():
        assert row.support is not None and len(row.support.sizes) == len(row.ids)
        told = it.distributions(PROMPTS[number // 3], row.ids, CUT.temperature)
        for ids, distribution, token, own in zip(
            places(row.support), told, row.ids, row.sampling_logprobs, strict=True
        ):
            wanted, share = cut(distribution)
            assert ids == wanted and token in ids and 0 < len(ids) < T.VOCAB
            assert own == pytest.approx(distribution[token] - math.log(share), abs=CLOSE)


@pytest.mark.parametrize("sampling", [CUT, replace(CUT, greedy=True), Sampling(5, support=True)])
def test_columns_of_what_could_be_drawn_are_those_of_a_whole_call(it, sampling):
    if isinstance(it, OfSGLang):
        pytest.skip("SGLang records no support")
    found = generate_streamed(it.engine, prompts(), 2, seeds(8), sampling)
    whole = it.engine.generate(prompts(), 2, seeds(8), sampling)
    assert found.support is not None and whole.support is not None
    for name, one, other in zip(("support", "response"), found.support, whole.support, strict=True):
        assert one.equal(other) and one.type == f"i32[*{name}]"
    ids, sizes = found.support
    assert torch.equal(sizes.lengths, found.ids.lengths) and int(sizes.values.sum()) == len(ids.values)
    if sampling.greedy:
        assert ids.to_list() == found.ids.to_list()
    if sampling.is_policy:
        assert not sizes.values.any(), "all could be drawn"


def test_a_call_that_records_too_much_fails_and_others_go_on(it, monkeypatch):
    if isinstance(it, (OfSGLang, OfVLLM)):
        pytest.skip("it records nothing, or in a process of its own")
    monkeypatch.setattr(row_support, "MOST_IDS", 100)
    call = it.engine.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(9, top_k=20, support=True)))
    other = it.engine.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(9, top_k=2, support=True)))
    found = finish(it.engine)
    failed = [each for each in found if isinstance(each, FailedCall)]
    assert [each.call for each in failed] == [call]
    assert re.search(r"the first \d tokens of 4 rows have a support of \d+ ids, and at most 100", failed[0].error.what)
    assert sorted(row.row for row in found if row.call == other) == [0, 1, 2, 3]


def test_rows_come_when_they_end_and_say_how(it):
    sampling = Sampling(max_tokens=14, stop=(3, 21, 30))
    call, left, when = it.engine.submit(SampleRequest(prompts(), 4, seeds(16), sampling)), [], []
    assert it.engine.running() == [(call, row) for row in range(16)]
    for step in range(100):
        ended = it.engine.step()
        left += ended
        when += [step] * len(ended)
        if not it.engine.running():
            break
    assert sorted(row.row for row in left) == list(range(16)) and {row.call for row in left} == {call}
    lengths = [len(row.ids) for row in left]
    assert lengths == sorted(lengths) and len(set(when)) > 2, "short rows come first"
    for row in left:
        assert (row.reason == "stop") == (row.ids[-1] in (T.EOS, 3, 21, 30)) and row.reason in ("stop", "length")
        assert row.reason == "stop" or len(row.ids) == 14
        assert len(row.rollout_logprobs) == len(row.sampling_logprobs) == len(row.ids) == len(row.token_versions)
        assert row.versions == ((0, len(row.ids)),)
        wanted = it.logprobs(PROMPTS[row.row // 4], row.ids)
        assert row.rollout_logprobs == pytest.approx(wanted, abs=CLOSE)
    assert it.engine.step() == []


def test_calls_share_a_batch_and_do_not_change_each_others_rows(it):
    calls = [(Sampling(20), 0), (OTHER, 100), (Sampling(6, greedy=True), 200), (Sampling(20, temperature=0.5), 300)]
    alone = [it.engine.generate(prompts(), 2, seeds(8, first), how).ids.to_list() for how, first in calls]
    numbers, found = [], []
    for how, first in calls:  # each joins while those before it run
        numbers.append(it.engine.submit(SampleRequest(prompts(), 2, seeds(8, first), how)))
        found += it.engine.step() + it.engine.step()
    assert len(set(numbers)) == len({call for call, _ in it.engine.running()} | {row.call for row in found}) == 4
    rows = by_call(found + finish(it.engine))
    assert [[list(rows[call, i].ids) for i in range(8)] for call in numbers] == alone


def test_what_is_aborted_keeps_its_tokens_and_goes_on_from_them(it):
    sampling = Sampling(max_tokens=12)
    whole = it.engine.generate(prompts(), 2, seeds(8), sampling).ids.to_list()
    call = it.engine.submit(SampleRequest(prompts(), 2, seeds(8), sampling))
    early = [row for _ in range(5) for row in it.engine.step()]
    parts = it.engine.abort(call)
    assert {row.reason for row in parts} == {"aborted"} and not it.engine.running()
    assert sorted(row.row for row in early + parts) == list(range(8))
    for row in parts:
        assert 0 < len(row.ids) <= 5 and list(row.ids) == whole[row.row][: len(row.ids)]
        assert row.rollout_logprobs == pytest.approx(it.logprobs(PROMPTS[row.row // 2], row.ids), abs=CLOSE)
        assert row.versions == ((0, len(row.ids)),)
    for row in parts:
        longer, rest = prompts([PROMPTS[row.row // 2] + list(row.ids)]), Sampling(max_tokens=12 - len(row.ids))
        more = it.engine.generate(longer, 1, seeds(8)[row.row :][:1], rest, torch.tensor([len(row.ids)]))
        assert list(row.ids) + more.ids.to_list()[0] == whole[row.row]
    assert it.engine.abort(call) == []


KEPT = [Sampling(12), OTHER, Sampling(9, greedy=True), CUT]


def told_after(it, call, steps):
    """What an engine tells of rows in so many steps: its parts by row, and those rows that have ended."""
    parts, ended, known = {}, [], {}
    for _ in range(steps):
        if isinstance(it, OfVLLM):
            time.sleep(0.06)  # it tells now and then
        ended += it.engine.step()
        for part in it.engine.tokens_since({call: known}):
            assert part.call == call and part.reason == "aborted" and part.ids, "what is new is told alone"
            known[part.row] = known.get(part.row, 0) + len(part.ids)
            parts.setdefault(part.row, []).append(part)
    return parts, ended


@pytest.mark.parametrize("sampling", KEPT)
def test_rows_go_on_from_the_tokens_that_another_engine_had(it, sampling):
    """They keep these as they are, have no others than if nothing had happened, and end where they would have."""
    if not tells_tokens(it.engine):
        pytest.skip("it does not tell them")
    sampling = replace(sampling, support=sampling.support and not isinstance(it, OfSGLang))
    starts = torch.arange(8) % 3
    it.engine.submit(SampleRequest(prompts(), 2, seeds(8), sampling, starts))
    whole = {row.row: row for row in finish(it.engine)}
    call = it.engine.submit(SampleRequest(prompts(), 2, seeds(8), sampling, starts))
    parts, ended = told_after(it, call, 5)
    assert it.engine.tokens_since({}) == [], "rows of other calls are passed over"
    it.engine.abort(call)
    kept = [row for part in parts.values() for row in [joined(part)] if row.row not in {e.row for e in ended}] + ended
    assert any(row.reason == "aborted" for row in kept)
    again = it.engine.submit(SampleRequest(prompts(), 2, seeds(8), sampling, starts, kept=kept))
    left = sorted(set(range(8)) - {row.row for row in ended})
    assert it.engine.running() == [(again, row) for row in left], "those that have ended are not begun"
    assert it.engine.tokens_since({again: {row.row: len(row.ids) for row in kept}}) == []
    found = {row.row: row for row in finish(it.engine)}
    assert sorted(found) == left
    for row in kept:
        if row.reason == "aborted":
            tokens, now = len(row.ids), found[row.row]
            assert now.ids[:tokens] == row.ids and now.rollout_logprobs[:tokens] == row.rollout_logprobs
            assert now.sampling_logprobs[:tokens] == row.sampling_logprobs
    for number, now in found.items():
        before = whole[number]
        assert (now.ids, now.reason, now.versions) == (before.ids, before.reason, before.versions)
        assert now.rollout_logprobs == pytest.approx(before.rollout_logprobs, abs=CLOSE)
        assert now.sampling_logprobs == pytest.approx(before.sampling_logprobs, abs=CLOSE)
        assert now.support == before.support


def joined(parts):
    """The parts of a row as one."""
    plain, sampled, ids, spans = (), (), (), []
    support = None if parts[0].support is None else row_support.RowSupport()
    for part in parts:
        ids, plain = ids + part.ids, plain + part.rollout_logprobs
        sampled, spans = sampled + part.sampling_logprobs, [*spans, *part.versions]
        if support is not None:
            support.ids.extend(part.support.ids)
            support.sizes.extend(part.support.sizes)
    return replace(
        parts[0],
        ids=ids,
        rollout_logprobs=plain,
        sampling_logprobs=sampled,
        versions=((spans[0][0], len(ids)),),
        support=support,
    )


def test_kept_tokens_keep_their_version_and_later_ones_are_of_the_weights_there(it):
    if not tells_tokens(it.engine):
        pytest.skip("it does not tell them")
    sampling, new = Sampling(max_tokens=16, temperature=0.9), it.other_weights(5)
    call = it.engine.submit(SampleRequest(prompts(), 2, seeds(8), sampling))
    parts, _ = told_after(it, call, 4)
    it.engine.abort(call)
    kept = [joined(part) for part in parts.values()]
    it.engine.pause()
    it.write(new)
    it.engine.resume(7)
    it.engine.submit(SampleRequest(prompts(), 2, seeds(8), sampling, kept=kept))
    found = {row.row: row for row in finish(it.engine)}
    later = 0
    for row in kept:
        now, tokens = found[row.row], len(row.ids)
        assert now.versions[0] == (0, tokens) and [version for version, _ in now.versions[1:]] in ([], [7])
        assert now.ids[:tokens] == row.ids and now.rollout_logprobs[:tokens] == row.rollout_logprobs
        wanted = it.logprobs(PROMPTS[row.row // 2], now.ids, new, 0.9)[tokens:]
        assert now.rollout_logprobs[tokens:] == pytest.approx(wanted, abs=CLOSE)
        later += len(wanted)
    assert later > 20


def test_rows_that_a_call_cannot_go_on_from_are_named_and_nothing_is_submitted(it):
    if not tells_tokens(it.engine):
        pytest.skip("it does not take them")
    good = SampledRow(1, 1, (5, 7), (-0.5, -1.0), (-0.5, -1.0), ((0, 2),), "aborted")
    wrong = {
        "Row 9 .* is not among the 8 rows": [replace(good, row=9)],
        "Row 1 .* is there twice": [good, good],
        "Row 1 .* has 3 tokens, and log-probabilities and versions of": [replace(good, ids=(5, 7, 8))],
        "Row 1 .* has 2 tokens and has not ended; it has 2 at most": [good],
    }
    for what, kept in wrong.items():
        with pytest.raises(DataError, match=what):
            most = 2 if "at most" in what else 12
            it.engine.submit(SampleRequest(prompts(), 2, seeds(8), Sampling(most), kept=kept))
    if not isinstance(it, OfSGLang):
        with pytest.raises(DataError, match="Row 1 .* does not say which tokens could be drawn"):
            it.engine.submit(SampleRequest(prompts(), 2, seeds(8), CUT, kept=[good]))
    assert not it.engine.running()


def test_some_rows_are_aborted_and_the_others_go_on(it):
    sampling = Sampling(max_tokens=12)
    whole = it.engine.generate(prompts(), 2, seeds(8), sampling).ids.to_list()
    waiting = it.engine.submit(SampleRequest(prompts(), 2, seeds(8), sampling))
    (first,) = it.engine.abort(waiting, [1])  # before it has a token
    assert (first.row, first.ids, first.versions) == (1, (), ())
    it.engine.step()
    going = [row for _, row in it.engine.running()]
    ended = it.engine.abort(waiting, going[::2])
    assert [row.row for row in ended] == going[::2]
    rest = {row.row: list(row.ids) for row in finish(it.engine)}
    assert set(rest) == set(going[1::2]) and all(ids == whole[row] for row, ids in rest.items())


def test_a_pause_stops_between_two_tokens(it):
    whole = it.engine.generate(prompts(), 1, seeds(4), Sampling(10)).ids.to_list()
    it.engine.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(10)))
    found = it.engine.step()
    it.engine.pause()
    assert it.engine.step() == it.engine.step() == []
    it.engine.resume()
    found += finish(it.engine)
    assert [list(row.ids) for row in sorted(found, key=lambda row: row.row)] == whole


def test_asleep_it_holds_no_memory_and_awake_rows_go_on(it):
    if not hasattr(it.engine, "sleep"):
        pytest.skip("it does not sleep")
    whole = it.engine.generate(prompts(), 1, seeds(4), Sampling(10)).ids.to_list()
    it.engine.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(10)))
    found, held = [*it.engine.step(), *it.engine.step()], it.held()
    freed = it.engine.sleep()
    assert held > it.held() == 0 and freed >= held and it.engine.sleep() == 0
    waiting = it.engine.running()
    assert it.engine.step() == [] and it.engine.running() == waiting
    with pytest.raises(RunError, match="is asleep"):
        it.engine.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(10)))
    with pytest.raises(RunError, match="is asleep"):
        it.engine.generate(prompts(), 1, seeds(4), Sampling(10))
    assert held == it.engine.wake() == it.held() and it.engine.wake() == 0
    found += finish(it.engine)
    rows = sorted(found, key=lambda row: row.row)
    assert [list(row.ids) for row in rows] == whole
    assert {version for row in rows for version, _ in row.versions} == {0}
    assert it.engine.generate(prompts(), 1, seeds(4), Sampling(10)).ids.to_list() == whole


def test_it_counts_the_tokens_that_rows_bring(it):
    if not hasattr(it.engine, "prefix_tokens"):
        pytest.skip("it does not count")
    brought, before = sum(len(prompt) for prompt in PROMPTS), it.engine.prefix_tokens()
    it.engine.generate(prompts(), 3, seeds(12), Sampling(4))
    whole = it.engine.prefix_tokens()
    assert whole.asked - before.asked == 3 * brought and before.found <= whole.found <= whole.asked
    it.engine.submit(SampleRequest(prompts(), 3, seeds(12), Sampling(4, stop=())))
    it.engine.step()
    going = len(it.engine.running())
    it.engine.pause()
    it.engine.resume(1)
    finish(it.engine)
    after = it.engine.prefix_tokens()
    assert after.asked - whole.asked >= 3 * brought + going, "what is computed again is brought again"
    assert 0 <= after.found - whole.found <= after.asked - whole.asked and 0 <= after.share <= 1


def test_new_weights_in_the_middle_of_rows(it):
    """Interrupt: later tokens are those of a fresh pass under the new weights, earlier ones are as they were."""
    sampling, new = Sampling(max_tokens=16, temperature=0.9), it.other_weights(5)
    before = it.engine.generate(prompts(), 2, seeds(8), sampling).ids.to_list()
    it.engine.submit(SampleRequest(prompts(), 2, seeds(8), sampling))
    early = [row for _ in range(4) for row in it.engine.step()]
    it.engine.pause()
    it.write(new)
    it.engine.resume(7)
    late = finish(it.engine)
    assert late and all(row.versions == ((0, len(row.ids)),) for row in early)
    crossed = 0
    for row in late:
        assert row.versions[0] == (0, 4) and [v for v, _ in row.versions] == [0, 7][: len(row.versions)]
        assert list(row.ids[:4]) == before[row.row][:4]
        prompt = PROMPTS[row.row // 2]
        now = it.logprobs(prompt, row.ids, new, 0.9)
        crossed += len(now) - 4
        assert row.rollout_logprobs[4:] == pytest.approx(now[4:], abs=CLOSE)
        assert row.token_versions == (0,) * 4 + (7,) * (len(row.ids) - 4)
    fresh = type(it)()
    for row in late:
        old = fresh.logprobs(PROMPTS[row.row // 2], row.ids, None, 0.9)
        assert row.rollout_logprobs[:4] == pytest.approx(old[:4], abs=CLOSE)
    assert crossed > 20
    after = it.engine.generate(prompts(), 2, seeds(8), sampling).ids.to_list()
    assert after != before, "the new weights give other rows"
    again = {row.row: row for row in stream_of(it.engine).submit(SampleRequest(prompts(), 2, seeds(8), sampling))}
    assert [list(again[row].ids) for row in range(8)] == after
    assert {version for row in again.values() for version, _ in row.versions} == {7}


def test_publishes_by_the_stream(it, record_property):
    record_property("modes", ", ".join(f"`{mode}`" for mode in it.engine.publish_modes))
    stream, sampling = stream_of(it.engine), Sampling(max_tokens=16)
    call = stream.submit(SampleRequest(prompts(), 2, seeds(8), sampling))
    rows = iter(call)
    next(rows)
    stream.publish(lambda: it.write(it.other_weights(1)), 1, "drain")
    assert not it.engine.running(), "rows are ended under the weights that they began with"
    assert {version for row in [*rows, *call.rows] for version, _ in row.versions} == {0}
    call = stream.submit(SampleRequest(prompts(), 2, seeds(8, 50), sampling))
    rows = iter(call)
    next(rows)
    stream.publish(lambda: it.write(it.other_weights(2)), 2, "interrupt")
    assert {row.versions[-1][0] for row in rows} == {2} and {row.versions[0][0] for row in call.rows} == {1}
    if "continue" in it.engine.publish_modes:
        call = stream.submit(SampleRequest(prompts(), 2, seeds(8, 90), sampling))
        rows = iter(call)
        next(rows)
        stream.publish(lambda: it.write(it.other_weights(3)), 3, "continue")
        assert {row.versions[-1][0] for row in rows} == {3}
    with pytest.raises(RunError, match="does not publish with 'sometimes'"):
        stream.publish(lambda: None, 4, "sometimes")


def test_a_prompt_that_cannot_be_answered_is_named_and_nothing_is_submitted(it):
    for rows, said in (
        ([[3], []], "The prompt of row 1 is empty"),
        ([[3] * it.engine.positions], f"row 0 has {it.engine.positions} tokens"),
    ):
        with pytest.raises(DataError, match=said):
            it.engine.submit(SampleRequest(prompts(rows), 1, seeds(len(rows)), Sampling(4)))
    assert it.engine.running() == []


def test_a_row_that_fails_is_named_and_other_calls_go_on(it):
    good = it.engine.generate(prompts([[20]]), 1, seeds(1), Sampling(3)).ids.to_list()
    wrong = next(token for token in range(2, 20) if token not in good[0])
    it.spoil(wrong)
    bad = it.engine.submit(SampleRequest(prompts([[20], [wrong]]), 1, seeds(2), Sampling(4)))
    other = it.engine.submit(SampleRequest(prompts([[20]]), 1, seeds(1), Sampling(3)))
    found = it.engine.step()
    (failure,) = [each for each in found if isinstance(each, FailedCall)]
    assert failure.call == bad and f"row 1 of call {bad}, token 0" in str(failure.error)
    assert isinstance(failure.error, NotFinite) and all(call == other for call, _ in it.engine.running())
    rows = [each for each in found if not isinstance(each, FailedCall)] + finish(it.engine)
    assert [(row.call, list(row.ids)) for row in rows] == [(other, good[0])]
    call = stream_of(it.engine).submit(SampleRequest(prompts([[wrong]]), 1, seeds(1), Sampling(4)))
    with pytest.raises(NotFinite, match="row 0 of call"):
        call.sampled()


def test_no_prompts_give_no_rows(it):
    made = generate_streamed(it.engine, prompts([]), 2, seeds(0), Sampling(4))
    assert len(made.ids) == len(made.finished) == 0 and not it.engine.running()


def test_threads_and_tasks_each_get_the_rows_of_their_calls(it):
    stream, sampling = stream_of(it.engine), Sampling(max_tokens=10)
    wanted = [it.engine.generate(prompts(), 1, seeds(4, 10 * i), sampling).ids.to_list() for i in range(6)]
    found = {}

    def one(i):
        found[i] = stream.submit(SampleRequest(prompts(), 1, seeds(4, 10 * i), sampling)).sampled().ids.to_list()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()

    async def task(i):
        rows = [row async for row in stream.submit(SampleRequest(prompts(), 1, seeds(4, 10 * i), sampling))]
        found[i] = [list(row.ids) for row in sorted(rows, key=lambda row: row.row)]

    async def tasks():
        await asyncio.gather(*(task(i) for i in range(3, 6)))

    asyncio.run(tasks())
    for thread in threads:
        thread.join(timeout=60)
    assert [found[i] for i in range(6)] == wanted
