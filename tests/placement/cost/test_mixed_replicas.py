"""One generate over two kinds of devices: rows dealt by speed, against every way to deal them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.analysis.check_plan import plan_findings
from flowrl.analysis.row_lengths import Tokens
from flowrl.cli.arguments.script import load_script
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.continuous_batch import Engine, seconds_of
from flowrl.placement.cost.length_distribution import Lengths
from flowrl.placement.cost.mixed_replicas import deal_rows, replicas_by_kind, together
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.cost.work import Role, Work, Workload
from flowrl.placement.model.model_shape import shape_named
from flowrl.placement.plan.plan import Place, Plan, Pool

CLUSTER = Cluster.of("h100-80:1x4+l40s:1x4")
ACTOR = Role("actor", shape_named("qwen3-0.6b"), trains=True, generates=True)
GRPO = Path(__file__).parents[3] / "algorithms" / "grpo.py"


def generate(mesh: str, devices: tuple[int, ...], load: Workload | None = None) -> Work:
    load = load or Workload(96, 128, 512, group=4)
    return Work("g", "g", "generate", ACTOR, load, Mesh.of(mesh), devices, backend="vllm", pool="rollout")


def test_replicas_are_told_apart_by_their_kind():
    mixed = generate("dp=4,tp=2", tuple(range(8)))
    parts = replicas_by_kind(mixed, CLUSTER)
    assert [(str(part.mesh), part.devices) for part in parts] == [
        ("dp=2,tp=2", (0, 1, 2, 3)),
        ("dp=2,tp=2", (4, 5, 6, 7)),
    ]
    three = replicas_by_kind(generate("dp=4,tp=2", (0, 1, 2, 4, 3, 5, 6, 7)), CLUSTER)
    assert [part.devices for part in three] == [(0, 1), (2, 4, 3, 5), (6, 7)], "two have both kinds, as slow as either"
    for plain in (generate("dp=4", (0, 1, 2, 3)), generate("tp=8", tuple(range(8))), generate("dp=4", ())):
        assert replicas_by_kind(plain, CLUSTER) == [plain]
    assert replicas_by_kind(mixed, None) == [mixed]


@pytest.mark.parametrize("rows", [4, 40, 96, 1000])
def test_no_other_way_to_deal_whole_prompts_is_through_sooner(rows):
    costs = Roofline(CLUSTER)
    work = generate("dp=8", tuple(range(8)), Workload(rows, 128, 512, group=4))
    one, other = replicas_by_kind(work, CLUSTER)

    def takes(part: Work, count: int) -> float:
        return costs.seconds(replace(part, load=replace(part.load, rows=count))) if count else 0.0

    best = min(max(takes(one, n), takes(other, rows - n)) for n in range(0, rows + 1, 4))
    dealt = deal_rows([one, other], costs.seconds)
    assert sum(part.load.rows for part in dealt) == rows
    assert all(part.load.rows % 4 == 0 for part in dealt)
    assert max(map(costs.seconds, dealt)) == pytest.approx(best, rel=1e-6)
    assert costs.seconds(work) == pytest.approx(best, rel=1e-6)


def test_more_devices_of_a_slower_kind_help_and_never_decide_alone():
    costs = Roofline(CLUSTER)
    load = Workload(4000, 128, 512)
    fast = costs.seconds(generate("dp=4", (0, 1, 2, 3), load))
    slow = costs.seconds(generate("dp=4", (4, 5, 6, 7), load))
    both = costs.seconds(generate("dp=8", tuple(range(8)), load))
    assert both < fast < slow
    assert both == pytest.approx(1 / (1 / fast + 1 / slow), rel=0.05), "as much faster as its devices are together"


def test_the_engines_of_both_make_as_many_tokens_as_they_do_alone():
    quick, slow = (Engine(8, lambda n, s=s: s * n, prefill=p, prompt=4) for s, p in ((0.25, 0.5), (1.0, 1.0)))
    both = together([quick, slow], [8, 2])
    assert both.slots == 16 and both.prefill == pytest.approx(1 / 3)
    assert 10 / both.step(10) == pytest.approx(8 / quick.step(8) + 2 / slow.step(2))
    assert seconds_of(replace(both, prefill=0.0), [10] * 10) == pytest.approx(10 * both.step(10))


def test_the_engine_that_the_simulator_flies_takes_about_what_is_priced():
    lengths = Lengths(128, 2048, "lognormal", (400.0, 0.6))
    load = Workload(2000, 128, lengths.mean, lengths.longest(2000), lengths)
    costs, work = Roofline(CLUSTER), generate("dp=8", tuple(range(8)), load)
    order = list(lengths.draw(2000, "a"))
    assert seconds_of(costs.engine(work), order) == pytest.approx(costs.seconds(work), rel=0.15)


PLAN = Plan(
    {
        "train": Pool("train", devices=(0, 1)),
        "rollout": Pool("rollout", devices=(2, 3)),
        "cpu": Pool("cpu", processes=4),
    },
    {
        "actor": {
            "train": Place("train", Mesh.of("fsdp=2"), "fsdp2"),
            "generate": Place("rollout", Mesh.of("dp=2"), "vllm"),
        },
        "ref": Place("train", Mesh.of("fsdp=2"), "fsdp2"),
        "reward": Place("cpu"),
    },
    CLUSTER,
)


def test_check_says_who_deals_rows_and_settings_try_free_devices_of_another_kind():
    from flowrl.analysis.plan_settings import refined

    flow = load_script(str(GRPO))
    flow.use_model("actor", "Qwen/Qwen3-0.6B")
    study = flow.study(PLAN, "grpo", tokens=Tokens(128.0, "fixed", (2000.0,)), steps=6, prompts_per_step=256)
    seconds = study.simulate().step_seconds
    better = refined(study, PLAN, seconds, (0,), lambda plan: study.under(plan).simulate().step_seconds)
    assert "actor also on 4 x l40s" in better.settings and better.step_seconds < seconds
    wide = better.plan.place_of("actor", "generate")
    assert wide.mesh["dp"] == 6 and better.plan.pools["rollout"].devices == (2, 3, 4, 5, 6, 7)
    assert better.step_seconds == pytest.approx(study.under(better.plan).simulate().step_seconds)
    errors, lints = plan_findings(study.under(better.plan))
    said = [lint.what for lint in lints if lint.kind == "kinds"]
    assert not errors and len(said) == 1 and said[0].endswith("by their speed; a run deals them evenly.")
