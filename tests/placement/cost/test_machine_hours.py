"""Device-hours, money and failures of a step, held against figures that can be followed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.errors import PlanError, UsageError
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cost.machine_hours import Failures, Prices, machine_hours

ALGORITHMS = Path(__file__).parents[3] / "algorithms"


def test_hours_and_money_of_several_kinds():
    found = machine_hours(Cluster.of("h100-80:1x8+l40s:2x4"), 90.0, Prices({"h100-80": 2.0, "l40s": 1.0}))
    assert found.devices == {"h100-80": 8, "l40s": 8}
    assert found.device_hours == pytest.approx(16 * 90 / 3600)
    assert found.price == pytest.approx((8 * 2 + 8 * 1) * 90 / 3600)
    assert (found.lost, found.checkpoint_steps, found.step_seconds) == (0.0, None, 90.0)
    assert any("8 h100-80 and 8 l40s" in word for word in found.words)
    json.dumps(found.to_json())


def test_failures_take_checkpoints_half_an_interval_and_a_restart():
    """1,000 devices, one fails every 10 hours; 50 s a checkpoint: sqrt(2 * 50 * 36,000) is 1,897 s, 19 steps of 100 s."""
    failures = Failures(hours=10_000, checkpoint=50, restart=360)
    assert failures.every(1000) == 36_000
    assert failures.interval(devices=1000, step=100.0) == (1900.0, 19)
    lost = 50 / 1900 + (950 + 360) / 36_000
    assert failures.lost(devices=1000, step=100.0) == pytest.approx(lost)
    found = machine_hours(Cluster.of("h100-80:125x8"), 100.0, failures=failures)
    assert found.step_seconds == pytest.approx(100 * (1 + lost)) and found.checkpoint_steps == 19
    assert found.device_hours == pytest.approx(1000 * found.step_seconds / 3600) and found.price is None


@pytest.mark.parametrize("devices", (8, 64, 1024, 16384))
def test_no_other_interval_loses_less(devices):
    failures, step = Failures(hours=5_000, checkpoint=40, restart=100), 20.0
    best = failures.lost(devices=devices, step=step)
    others = (failures.checkpoint / (n * step) + (n * step / 2 + 100) / failures.every(devices) for n in range(1, 2000))
    assert best <= min(others) * 1.01


def test_odd_figures():
    assert Failures(1.0, 0.0, 0.0).interval(devices=8, step=10.0) == (10.0, 1)
    assert machine_hours(Cluster.of("h100-80:1x1"), 0.0, Prices({"h100-80": 0.0}), Failures(1, 0, 0)).price == 0.0


@pytest.mark.parametrize("text", ("", "1,2", "1,2,3,4", "0,1,1", "-1,1,1", "10,-1,0", "nan,1,1", "inf,1,1", "a,b,c"))
def test_failures_that_are_no_three_numbers(text):
    with pytest.raises(UsageError, match="no three numbers"):
        Failures.read(text)


@pytest.mark.parametrize(
    ("text", "said"),
    (
        ("h100: 2.5\n", "no kind of device"),
        ("h100-80: cheap\n", "'cheap' is no price"),
        ("h100-80: -1\n", "no price"),
        ("h100-80: .nan\n", "no price"),
        ("h100-80: .inf\n", "no price"),
        ("- h100-80\n", "mapping"),
    ),
)
def test_mistakes_in_a_file_of_prices(tmp_path, text, said):
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(PlanError, match=said) as told:
        Prices.load(file)
    assert "prices.yaml:1" in str(told.value)


def test_a_kind_without_a_price():
    with pytest.raises(PlanError, match="none for 'l40s', of which the cluster has 4"):
        machine_hours(Cluster.of("l40s:1x4"), 1.0, Prices({"h100-80": 1.0}))


def test_simulate_and_plan_say_what_a_step_costs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prices.yaml").write_text("h100-80: 3.0\n")
    Path("costs.yaml").write_text("actor.generate: 6.0\nactor.update: 3.0\n")
    driver, plan = str(ALGORITHMS / "grpo.py"), str(ALGORITHMS / "plans" / "colocated_8.yaml")
    words = ["--costs", "costs.yaml", "--steps", "6", "--prices", "prices.yaml"]
    assert main(["simulate", driver, "--plan", plan, *words, "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["machines"]["price"] == pytest.approx(8 * 3 * record["step_s"] / 3600)
    assert main(["simulate", driver, "--plan", plan, *words, "--failures", "4000,60,300"]) == 0
    told = capsys.readouterr().out
    assert "machines" in told and "a device fails every 4000 hours" in told and "prices of prices.yaml" in told
    assert main(["simulate", driver, "--plan", plan, *words, "--format", "html", "-o", "page.html"]) == 0
    capsys.readouterr()
    assert "device-hours" in Path("page.html").read_text()
    assert main(["plan", driver, "--cluster", "h100-80:1x2", *words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machines"]["price"] == pytest.approx(2 * 3 * found["step_s"] / 3600)
    assert main(["simulate", driver, *words]) == 2
    assert "--prices is for the devices of a cluster" in capsys.readouterr().err
