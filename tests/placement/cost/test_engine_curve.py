"""The curve of an engine: fitted to calls whose times are known, it is what they were made from."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.batch import Column
from flowrl.placement.cost.continuous_batch import Engine, seconds_of
from flowrl.placement.cost.engine_curve import EngineCurve, SampledCall, SampledPasses, fit_curve
from flowrl.placement.cost.length_distribution import Lengths
from flowrl.testing import FakeEngine
from flowrl.workers.decode_passes import DecodePasses, PassMeter


def drawn(chance: random.Random, rows: int) -> list[int]:
    return [max(1, round(chance.lognormvariate(3.0, 0.8))) for _ in range(rows)]


def sampled(step: int, seconds: float, prompt: int, lengths: list[int]) -> SampledCall:
    context = sum(n * prompt + n * (n - 1) / 2 for n in lengths)
    return SampledCall(step, seconds, prompt * len(lengths), max(lengths), sum(lengths), context)


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.sampled_from([0.0, 1e-5, 2e-4]),
    step=st.sampled_from([5e-3, 1e-2]),
    row=st.sampled_from([0.0, 1e-5, 1e-3]),
    seed=st.integers(0, 10**6),
)
def test_a_curve_is_what_the_calls_were_made_from(prompt, step, row, seed):
    chance = random.Random(seed)
    truth = Engine(1 << 20, lambda rows: step + row * rows, prompt, 16)
    calls: list[SampledCall] = []
    for number in range(14):
        lengths = drawn(chance, (8, 24)[number % 2])
        calls.append(sampled(number, seconds_of(truth, lengths), 16, lengths))
    curve = fit_curve(calls)
    assert curve is not None and curve.calls == 14
    assert curve.error == pytest.approx(0.0, abs=1e-6) and curve.predicted == pytest.approx(curve.measured)
    more = drawn(chance, 48)  # of a batch that no call had
    predicted = curve.of_call(sampled(0, 1.0, 16, more))
    assert predicted == pytest.approx(seconds_of(truth, more), rel=1e-6)


def test_a_fake_engine_is_found_by_its_clock():
    """Prompts of 3 to 40 tokens cost 1 ms a token, and each step 20 ms, whatever runs."""
    calls: list[SampledCall] = []
    for number in range(10):
        chance = random.Random(number)
        engine = FakeEngine(token_seconds=0.02, prompt_seconds=1e-3, lengths=lambda seed: 1 + seed % 60)
        rows, long = 4 + number % 3, 3 + 4 * number
        prompts = Column.of([[1] * long] * rows, dim="prompt", dtype="i32")
        seeds = torch.tensor([chance.randrange(1000) for _ in range(rows)])
        made = engine.generate(prompts, 1, seeds, fl.testing.Sampling(max_tokens=100))
        calls.append(sampled(number, engine.clock.now(), long, made.ids.lengths.tolist()))
    curve = fit_curve(calls)
    assert curve is not None
    assert (curve.prompt, curve.step) == (pytest.approx(1e-3), pytest.approx(0.02))
    assert (curve.row, curve.context) == (0.0, 0.0)


def test_tokens_of_long_rows_are_found_to_take_longer():
    """A token takes 1 ms and 2 us for each token of the rows that run."""
    chance, calls = random.Random(5), list[SampledCall]()
    for number in range(16):
        lengths = drawn(chance, 16)
        each = sampled(number, 1.0, 10, lengths)
        calls.append(replace(each, seconds=1e-3 * each.longest + 2e-6 * each.context))
    curve = fit_curve(calls)
    assert curve is not None
    assert (curve.step, curve.context) == (pytest.approx(1e-3), pytest.approx(2e-6))


def test_noise_is_in_the_error():
    chance, calls = random.Random(1), list[SampledCall]()
    for number in range(60):
        lengths = drawn(chance, 16)
        truth = 1e-2 * max(lengths) + 1e-4 * sum(lengths)
        calls.append(sampled(number, truth * math.exp(chance.gauss(0, 0.05)), 10, lengths))
    curve = fit_curve(calls)
    assert curve is not None and curve.error is not None and 0.01 < curve.error < 0.08
    assert curve.step == pytest.approx(1e-2, rel=0.25)


@pytest.mark.parametrize("seed", range(8))
def test_calls_of_several_sizes_tell_what_larger_ones_take(seed):
    """Steps that differ in rows and lengths: noise does not make one part of another."""
    chance, calls = random.Random(seed), list[SampledCall]()
    for number in range(18):
        rows, longest = (16, 32, 48)[number % 3], (40, 80, 120)[number // 3 % 3]
        truth = longest * (5e-3 + 1e-4 * rows)
        calls.append(sampled(number, truth * math.exp(chance.gauss(0, 0.02)), 24, [longest] * rows))
    curve = fit_curve(calls)
    assert curve is not None and curve.step == pytest.approx(5e-3, rel=0.1)
    more = sampled(0, 160 * (5e-3 + 1e-4 * 64), 24, [160] * 64)  # longer than all of them, and of more rows
    assert curve.of_call(more) == pytest.approx(more.seconds, rel=0.15)


def test_calls_that_are_alike_have_no_curve():
    assert fit_curve([sampled(n, 1.0, 10, [64] * 16) for n in range(20)]) is None, "a step and a row are one there"
    assert fit_curve([sampled(n, 1.0, 10, [n + 1, 60]) for n in range(5)]) is None, "too few"


def test_replicas_share_rows():
    """Two replicas were measured; four take half as long for the rows, and as long for the steps."""
    chance, calls = random.Random(2), list[SampledCall]()
    for number in range(12):
        lengths = drawn(chance, 16)
        calls.append(sampled(number, 1e-2 * max(lengths) + 1e-3 * sum(lengths) / 2, 10, lengths))
    curve = fit_curve(calls, replicas=2)
    assert curve is not None
    lengths = Lengths(10, 64)
    assert curve.seconds(16, lengths, 2) == pytest.approx(64 * (1e-2 + 8e-3))
    assert curve.seconds(16, lengths, 4) == pytest.approx(64 * (1e-2 + 4e-3))
    assert EngineCurve(step=1.0).seconds(3, lengths, 1) == 64.0


def test_what_a_call_takes_whatever_it_asks_for_is_not_taken_for_prompts():
    """Prompts of 63 to 65 tokens: 0.5 s of each call would be 8 ms for each token of them, which a step does not take."""
    chance, calls = random.Random(5), list[SampledCall]()
    for number in range(16):
        each = sampled(number, 1.0, 1, drawn(chance, 16))
        seconds = 0.5 + 2e-3 * each.longest + 1e-4 * each.tokens
        calls.append(replace(each, prompt=63 + number % 3, seconds=seconds * math.exp(chance.gauss(0, 1e-3))))
    curve = fit_curve(calls)
    assert curve is not None and curve.call == pytest.approx(0.5, rel=0.05) and not curve.prompt
    lengths = Lengths(4, 32)
    alone = replace(curve, call=0.0)
    assert curve.seconds(16, lengths, 1) == pytest.approx(curve.call + alone.seconds(16, lengths, 1))


def test_a_call_of_the_curve_takes_its_time_in_a_batch_with_others_too():
    curve = EngineCurve(call=2.0, step=1.0)
    assert seconds_of(curve.engine(Lengths(1, 5), 2), [5.0, 3.0]) == pytest.approx(7.0)


@pytest.mark.parametrize(("prompt", "again"), [(0.0, 2e-5), (1e-5, 5e-6)])
def test_a_token_that_is_computed_again_is_never_free(prompt, again):
    """Where prompts did not tell what a token of them takes, it is what a row takes in a step; here of two replicas."""
    curve = EngineCurve(prompt=prompt, step=1e-3, row=4e-5)
    engine = curve.engine(Lengths(6, 40), 2)
    assert engine.again == pytest.approx(again) and engine.prefill == prompt / 2


def test_what_calls_do_not_tell_apart_is_a_step():
    """All have a row that is cut off at 160 tokens: what they take besides rows may be of the call or of its steps."""
    chance, calls = random.Random(3), list[SampledCall]()
    for number in range(14):
        lengths = [160, *(chance.randint(20, 160) for _ in range(15))]
        calls.append(sampled(number, 1e-2 * 160 + 1e-4 * sum(lengths), 24, lengths))
    curve = fit_curve(calls)
    assert curve is not None and (curve.call, curve.prompt) == (0.0, 0.0)
    assert curve.step == pytest.approx(1e-2) and curve.row == pytest.approx(1e-4)


def passes_of(step, lengths, prompt, *, token, row, context=0.0):
    """Those of a call with these responses, by the octave of their rows, at so many seconds each."""
    meter = PassMeter()
    for t in range(1, max(lengths)):
        alive = [n for n in lengths if n > t]
        had = len(alive) * (prompt + t)
        meter.add(DecodePasses(1, len(alive), had, token + row * len(alive) + context * had))
    return [SampledPasses(step, p.count, p.rows, p.context, p.seconds) for p in meter.take()]


@pytest.mark.parametrize("replicas", [1, 2])
def test_passes_tell_a_row_from_a_step_where_calls_are_alike(replicas):
    """Calls of the same lengths, which take longer or shorter by chance: nothing can be fitted to them alone."""
    chance, calls, passes = random.Random(1), list[SampledCall](), list[SampledPasses]()
    lengths = [2, 5, 9, 9, 14, 20, 33, 60]
    for step in range(12):
        told = passes_of(step, lengths, 6, token=2e-3, row=1e-4)
        passes += told
        first = 0.05 + 1e-3 * chance.random()  # all that is no pass
        seconds = first + sum(each.seconds for each in told) + 2e-3 + 1e-4 * 8
        calls.append(sampled(step, seconds, 6, lengths * replicas))
    assert fit_curve(calls, replicas) is None
    curve = fit_curve(calls, replicas, passes)
    assert curve is not None and curve.calls == 12
    assert (curve.step, curve.row, curve.context) == (pytest.approx(2e-3), pytest.approx(1e-4), 0.0)
    assert (curve.prompt, curve.call) == (0.0, pytest.approx(0.0505, rel=0.01)), "prompts of one length tell nothing"
    assert curve.error == pytest.approx(0.0, abs=0.01)
    more = sampled(0, 1.0, 6, [40] * 32 * replicas)  # wider than any
    assert curve.of_call(more) == pytest.approx(0.0505 + 40 * 2e-3 + 40 * 32 * 1e-4, rel=1e-3)


def test_a_pass_that_took_far_too_long_changes_nothing():
    lengths, calls, passes = [3, 3, 8, 20, 40], list[SampledCall](), list[SampledPasses]()
    for step in range(9):
        told = passes_of(step, lengths, 4, token=1e-3, row=5e-4, context=2e-6)
        if step == 4:
            told = [replace(each, seconds=each.seconds + 3.0) for each in told]
        passes += told
        calls.append(sampled(step, 0.1, 4, lengths))
    curve = fit_curve(calls, 1, passes)
    assert curve is not None
    found = (curve.step, curve.row, curve.context)
    assert found == (pytest.approx(1e-3), pytest.approx(5e-4), pytest.approx(2e-6))


def test_calls_that_follow_no_rule_still_take_time():
    """A curve that says nothing would have a simulation sample at once."""
    chance, calls = random.Random(2), list[SampledCall]()
    for step in range(8):
        lengths = drawn(chance, 8)
        calls.append(sampled(step, 10.0 ** (2 * (step % 2) - step % 3), 4, lengths))
    curve = fit_curve(calls)
    assert curve is not None and curve.of_call(calls[0]) > 0


def test_passes_that_take_no_time_tell_nothing():
    """Those of a fake engine without latencies."""
    calls, passes = list[SampledCall](), list[SampledPasses]()
    for step in range(8):
        lengths = [1 + step, 20, 30]
        passes += passes_of(step, lengths, 4, token=0.0, row=0.0)
        calls.append(sampled(step, 1e-3 * max(lengths) + 2e-4 * sum(lengths), 4, lengths))
    assert fit_curve(calls, 1, passes) == fit_curve(calls)


def test_passes_that_are_alike_tell_nothing():
    """All rows have one length: passes are of one width, so calls have to tell."""
    calls, passes = list[SampledCall](), list[SampledPasses]()
    for step in range(8):
        lengths = [10 + step] * (4 + 4 * (step % 2))
        passes += passes_of(step, lengths, 4, token=1e-3, row=1e-4)
        calls.append(sampled(step, 1e-3 * max(lengths) + 2e-4 * sum(lengths), 4, lengths))
    curve = fit_curve(calls, 1, passes)
    assert curve is not None and (curve.step, curve.row) == (pytest.approx(1e-3), pytest.approx(2e-4))


def test_an_engine_tells_its_passes():
    """20 ms each, and 1 ms for each token of prompts: what a pass in which rows begin took is not told."""
    engine = FakeEngine(token_seconds=0.02, prompt_seconds=1e-3, lengths=lambda seed: (2, 5, 9)[seed % 3])
    prompts = Column.of([[1] * 4], dim="prompt", dtype="i32")
    request = fl.testing.SampleRequest(prompts, 3, torch.arange(3), fl.testing.Sampling(max_tokens=100))
    engine.submit(request)
    while engine.running():
        engine.step()
    one, two = engine.take_passes()  # in one pass three rows run, in three two, and one in four
    assert (one.count, one.rows, one.context) == (4, 4, sum(4 + t for t in range(5, 9)))
    assert (two.count, two.rows, two.context) == (4, 9, 3 * 5 + 2 * (6 + 7 + 8))
    assert (one.seconds, two.seconds) == (pytest.approx(0.08), pytest.approx(0.08))
    assert engine.take_passes() == ()


@pytest.mark.parametrize("keep", [True, False])
def test_time_in_which_an_engine_stands_still_is_no_pass(keep):
    engine = FakeEngine(token_seconds=0.02, prompt_seconds=1e-3, stop=())
    prompts = Column.of([[1] * 4], dim="prompt", dtype="i32")
    request = fl.testing.SampleRequest(prompts, 2, torch.arange(2), fl.testing.Sampling(max_tokens=6))
    engine.submit(request)
    engine.step()
    engine.step()
    engine.pause()
    engine.clock.sleep(5.0)
    engine.resume(1, keep_cache=keep)
    while engine.running():
        engine.step()
    engine.clock.sleep(5.0)  # nothing runs
    engine.submit(request)
    engine.step()
    (told,) = engine.take_passes()
    assert told.count == 1 + 3 and told.seconds == pytest.approx(0.08), "the first after a pause is not told"
