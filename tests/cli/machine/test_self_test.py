"""The self test of flowrl doctor: a runtime passes where a tiny model learns on it, and what goes wrong is told."""

import json

import pytest

from flowrl.cli import main
from flowrl.cli.machine import self_test
from flowrl.cli.machine.self_test import Trial, _judge, try_runtime


def steps(losses, rewards=(0.0, 0.5)):
    lines = [{"program": "warmup", "loss": loss} for loss in losses]
    return lines + [{"program": "grpo", "reward": reward, "loss": 0.0} for reward in rewards]


FALLING = [2.8 - 0.1 * i for i in range(12)]


def test_a_run_that_learns_passes():
    said = "the loss of 12 supervised steps goes from 2.80 to 1.70, 2 steps of GRPO run."
    assert _judge(steps(FALLING)) == (True, said)
    assert Trial("local", True, 9.6, said).line() == f"local     passed in 10 s: {said}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (steps(FALLING[::-1]), "goes from 1.70 to 2.80: it does not fall."),
        (steps(FALLING[:-1]), "11 steps of the warm-up and 2 of GRPO are recorded, and 12 and 2 were to be."),
        (steps(FALLING, (0.0, float("nan"))), "a loss or a reward is not finite"),
        (steps([]), "0 steps of the warm-up"),
    ],
)
def test_a_run_that_does_not_fails(wrong, said):
    passed, told = _judge(wrong)
    assert not passed and said in told


def test_what_a_process_says_as_it_fails_is_passed_on(monkeypatch, capsys):
    monkeypatch.setitem(self_test.PLANS, "local", ("local", "split_16"))
    tested = try_runtime("local")
    assert not tested.passed and "PlanError" in tested.said and tested.line().startswith("local     FAILED in ")


@pytest.mark.nightly
def test_each_runtime_passes(capsys):
    assert main(["doctor", "--test", "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(test["runtime"], test["passed"]) for test in record["tested"]] == [
        ("local", True),
        ("ray", True),
        ("megatron", True),
    ]
