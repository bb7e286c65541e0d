"""The self test of flowrl doctor: a runtime passes where a tiny model learns on it, and what goes wrong is told."""

import json
import sys
import time
from importlib.util import find_spec

import pytest

from flowrl.cli import main
from flowrl.cli.machine import self_test
from flowrl.cli.machine.self_test import ENGINES, Trial, _judge, _said_by, engine_plan, try_runtime
from flowrl.placement.backends import BACKENDS
from flowrl.placement.plan.plan_file import read


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
        (steps([*FALLING[:-1], None]), "a loss or a reward is not finite"),  # as NaN is recorded
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


def gap(largest, tokens=40.0):
    return [{**step, "gap_max": largest, "gap_bound": 1e-3, "gap_tokens": tokens} for step in steps(FALLING)]


def test_an_engine_passes_whose_log_probabilities_are_those_of_the_trainer():
    passed, told = _judge(gap(4.8e-7), engine=True)
    assert passed
    assert told.endswith(
        "it has sampled 80 tokens, and its log-probabilities and the trainer's are 4.8e-07 apart at most."
    )


@pytest.mark.parametrize("wrong", [gap(0.25), gap(None, tokens=0.0), gap(float("nan")), steps(FALLING)])
def test_an_engine_does_not_whose_are_others_or_were_not_compared(wrong):
    passed, told = _judge(wrong, engine=True)
    assert not passed and "apart at most" in told


def test_each_backend_that_only_generates_has_a_plan_that_check_takes():
    assert ENGINES == tuple(row.name for row in BACKENDS.values() if row.generates and not row.trains) != ()
    for engine in ENGINES:
        said = read(engine_plan(engine)).to_json()
        place, devices = said["place"]["actor"], {pool["device"] for pool in said["pools"].values()}
        assert devices == {"cpu" if BACKENDS[engine].cpu_alone else "auto"}
        assert place["generate"]["engine"] == engine and "engine" not in place["train"]


def test_a_process_that_does_not_end_is_ended_with_those_that_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(self_test, "SECONDS", 3)
    child = "import time, pathlib\nwhile True: pathlib.Path('alive').write_text('x'); time.sleep(0.02)"
    program = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    assert _said_by([sys.executable, "-c", program], tmp_path) == (None, ["begun"])
    (tmp_path / "alive").unlink()
    time.sleep(0.5)
    assert not (tmp_path / "alive").exists()


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")
@pytest.mark.nightly
def test_the_engine_passes():
    tested = try_runtime("vllm")
    assert tested.passed, tested.said
    assert "it has sampled" in tested.said
