"""Prompts that are read once, beside decode, and tokens that are drafted: closed forms, and a loop over steps."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from flowrl.errors import PlanError
from flowrl.placement.backends import BACKENDS
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.device_specs import kind_named
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.continuous_batch import ContinuousBatch, Engine, seconds_of
from flowrl.placement.cost.decoding import Decoding
from flowrl.placement.cost.efficiency import Efficiency
from flowrl.placement.cost.length_distribution import Lengths
from flowrl.placement.cost.per_device_counts import decode_operations, prefill_operations
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.cost.work import Role, Work, Workload
from flowrl.placement.cost.worker_memory import usage_of
from flowrl.placement.model.model_shape import shape_named
from flowrl.placement.plan.plan import Place, Plan, Pool

IDEAL = Roofline(Cluster.of("h100-80:1x8"), Efficiency.ideal())
MODEL = shape_named("qwen3-8b")
ACTOR = Role("actor", MODEL, trains=True, generates=True)


def generate(engine: str = "vllm", load: Workload | None = None, **said: float | bool) -> Work:
    load, device = load or Workload(64, 512, 1024, group=8), (0,)
    return Work("g", "g", "generate", ACTOR, load, Mesh(), device, backend=engine, said=tuple(said.items()))


# prompts of a group


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
def test_rows_to_one_prompt_read_it_once(engine):
    in_groups = generate(engine, prefill_chunk=0) if engine != "hf" else generate(engine)
    each = replace(in_groups, load=replace(in_groups.load, group=1))
    eighth = replace(in_groups, load=Workload(8, 512, 1024))
    found = [IDEAL.terms(work)["prefill"] for work in (in_groups, each, eighth)]
    assert found[0] == pytest.approx(found[2]) and found[1] == pytest.approx(8 * found[0])


def test_a_replica_with_a_part_of_a_group_reads_its_prompt_too():
    part = generate("hf", Workload(12, 512, 1024, group=8))
    two = generate("hf", Workload(2, 512, 1024))
    assert IDEAL.terms(part)["prefill"] == pytest.approx(IDEAL.terms(two)["prefill"])


def test_without_a_prefix_cache_every_row_reads_its_prompt():
    plain = generate(prefix_cache=False, prefill_chunk=0)
    each = generate(load=Workload(64, 512, 1024), prefill_chunk=0)
    assert IDEAL.terms(plain)["prefill"] == pytest.approx(IDEAL.terms(each)["prefill"])
    assert IDEAL.rows_at_once(plain) == IDEAL.rows_at_once(each)


def test_engines_that_keep_a_prompt_once_have_room_for_more_rows_in_price_and_memory_alike():
    load = Workload(4096, 1024, 1024, group=8)
    rows = {engine: IDEAL.rows_at_once(generate(engine, load)) for engine in ("hf", "vllm", "sglang")}
    assert rows["vllm"] == rows["sglang"] == pytest.approx(rows["hf"] * 2048 / (1024 + 128), abs=2)
    usage = {e: usage_of(ACTOR, "generate", Place("p", Mesh(), e), None, load) for e in ("hf", "vllm")}
    assert usage["vllm"].row == pytest.approx(usage["hf"].row * (1024 + 128) / 2048)
    assert usage["vllm"].least == usage["hf"].least, "one row has all of its prompt"


def test_the_engine_that_the_simulator_flies_reads_as_many_tokens_of_prompts():
    lengths = Lengths(512, 4096, "lognormal", (800.0, 0.5))
    load = Workload(64, 512, lengths.mean, lengths.longest(64), lengths, 8)
    for work in (generate("hf", load), generate("sglang", load)):
        engine = IDEAL.engine(work)
        assert 64 * engine.prefill * engine.prompt == pytest.approx(IDEAL.terms(work)["prefill"])


# chunks of prompts beside decode


def test_a_chunk_is_hidden_as_far_as_a_step_waits_for_memory():
    """Reading takes ``r``, computing ``c``, a chunk ``p``: a step with one takes ``max(r, c + p)`` and not ``r + p``."""
    kind, load = kind_named("h100-80"), Workload(32, 512, 1024)
    plain, mixed = generate("sglang", load), generate("sglang", load, prefill_chunk=64)
    engine = IDEAL.engine(mixed)
    assert IDEAL.engine(plain).beside is None and engine.beside is not None
    per_token = prefill_operations(ACTOR, 32, load) / kind.flops["bf16"] / (32 * 512)
    p, r = 64 * per_token, engine.step(16)
    c = decode_operations(ACTOR, 16, load) / load.response / kind.flops["bf16"]
    assert engine.beside(0) == 0.0 and 0 < engine.beside(16) <= 1
    assert r + p - p * engine.beside(16) == pytest.approx(max(r, c + p))
    whole = generate("sglang", load, prefill_chunk=1 << 20)
    slower, faster = IDEAL.seconds(plain), IDEAL.seconds(mixed)
    assert faster < IDEAL.seconds(whole) < slower
    assert faster == pytest.approx(slower - IDEAL.terms(plain)["prefill"]), "with small chunks all of it is hidden"


def test_a_batch_stands_still_for_what_is_not_hidden():
    engine = Engine(8, lambda rows: 1.0, prefill=0.5, prompt=4, beside=lambda rows: 0.25 * rows)
    assert seconds_of(engine, [10, 10, 10]) == pytest.approx(2 + 1.5 + 1 + 10)
    batch = ContinuousBatch(engine)
    batch.submit("a", [4])
    batch.advance(4.0)
    batch.submit("b", [4])
    assert [m.time for m in batch.advance(100.0) if m.left] == pytest.approx([2 + 4 + 1.5, 4 + 1.5 + 4])


def test_rows_that_vary_hide_as_much_in_a_price_as_in_the_engine_and_bounds_stay_below():
    lengths = Lengths(2048, 4096, "lognormal", (800.0, 0.8))
    load = Workload(128, 2048, lengths.mean, lengths.longest(128), lengths)
    plain, mixed = (generate("sglang", load, prefill_chunk=chunk) for chunk in (0, 128))
    saved = IDEAL.seconds(plain) - IDEAL.seconds(mixed)
    assert 0 < saved <= IDEAL.terms(plain)["prefill"]
    order = list(lengths.spread(128))
    flown = [seconds_of(IDEAL.engine(work), order) for work in (plain, mixed)]
    assert flown[0] - flown[1] == pytest.approx(saved, rel=0.15)
    full = replace(IDEAL, steady=True)
    assert 0 < full.seconds(mixed) < full.seconds(plain) and full.seconds(mixed) < IDEAL.seconds(mixed)


# drafted tokens


@pytest.mark.parametrize(("drafted", "accepted"), [(1, 0.5), (3, 0.7), (5, 0.9)])
def test_a_step_keeps_the_tokens_up_to_the_first_that_is_refused(drafted, accepted):
    chance = random.Random(1)

    def kept() -> int:
        count = 0
        while count < drafted and chance.random() < accepted:
            count += 1
        return count + 1

    expected = Decoding(speculative=drafted, accepted=accepted).kept
    assert expected == pytest.approx((1 - accepted ** (drafted + 1)) / (1 - accepted))
    assert fmean(kept() for _ in range(60_000)) == pytest.approx(expected, rel=0.01)


def test_drafts_gain_where_decode_reads_memory_and_lose_where_it_computes():
    few, many = Workload(4, 16, 512), Workload(1000, 16, 512)
    plain, drafted = {"prefill_chunk": 0}, {"prefill_chunk": 0, "speculative": 3, "accepted": 0.7, "draft": 0.0}
    gain = IDEAL.terms(generate(load=few, **plain))["decode"] / IDEAL.terms(generate(load=few, **drafted))["decode"]
    assert gain == pytest.approx(Decoding(speculative=3, accepted=0.7).kept, rel=0.01), "the same bytes are read"
    loss = IDEAL.terms(generate(load=many, **drafted))["decode"] / IDEAL.terms(generate(load=many, **plain))["decode"]
    assert 1 < loss <= 4 / Decoding(speculative=3, accepted=0.7).kept, "four tokens are computed for those kept"


def test_a_draft_takes_its_part_of_a_step_and_none_is_what_it_was():
    load = Workload(4, 16, 512)
    one = sum(IDEAL.terms(generate(load=load, speculative=2, accepted=1.0, draft=0.0)).values())
    other = sum(IDEAL.terms(generate(load=load, speculative=2, accepted=1.0, draft=0.5)).values())
    plain = generate(load=load, speculative=0)
    prefill = IDEAL.terms(plain)["prefill"]
    step = IDEAL.seconds(plain) - prefill
    assert other - one == pytest.approx(2 * 0.5 * step / 3, rel=1e-3)
    assert IDEAL.terms(plain) == IDEAL.terms(generate(load=load))


# what a plan may say


def test_traits_are_those_of_the_table_and_a_plan_changes_them():
    assert Decoding.of("hf") == Decoding(reads_once=True)
    for name in ("vllm", "sglang"):
        default = {option.name: option.default for option in BACKENDS[name].options}["prefill_chunk"]
        said = (("prefix_cache", False), ("speculative", 2))
        found = Decoding.of(name, said)
        assert (found.reads_once, found.keeps_once, found.chunk, found.speculative) == (False, False, default, 2)
    assert Decoding.of("fsdp2") == Decoding()


@pytest.mark.parametrize(
    ("option", "value", "form"),
    [("accepted", 1.5, "a number from 0 to 1, not 1.5"), ("speculative", -1, "a whole number from 0 up, not -1")],
)
def test_a_plan_says_no_other_values(option, value, form):
    place = Place("gpu", Mesh.of("dp=1"), "vllm", options={option: value})
    with pytest.raises(PlanError, match=form):
        Plan({"gpu": Pool("gpu", devices=(0,))}, {"actor": {"generate": place}}, Cluster.of("h100-80:1x1"))


def test_a_run_has_no_drafts_and_says_so():
    assert [what for what, _ in BACKENDS["vllm"].unrun({}, {"speculative": 2})] == [
        "vllm has speculative in no run yet."
    ]
