"""algorithms/grpo.py with `engine: sglang` in its plan: the rows of `engine: hf`, in this process and on ranks.

It needs `make sglang`, and runs by `make sglang-test`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_runs import FSDP2, SPLIT, WHOLE, hold_equal, local, ran, ranks

from flowrl.cli import load_script
from flowrl.errors import PlanError

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SGLANG_PYTHON") or ROOT / ".venv-sglang/bin/python")
real = [
    pytest.mark.sglang,
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="SGLang is not installed: make sglang"),
]


@pytest.fixture
def flow(drivers_path):
    return load_script(str(ROOT / "algorithms" / "grpo.py"))


@pytest.mark.parametrize(
    ("plan", "runtime"),
    [
        pytest.param(local, "local", id="local", marks=real),
        pytest.param(lambda engine: ranks(FSDP2, engine, WHOLE), "ray", id="ranks", marks=real),
    ],
)
def test_grpo_makes_the_rows_of_the_reference_engine(flow, tmp_path, plan, runtime):
    engine = f"sglang, rows: 64, kv_cache: 0.25, python: {PYTHON}"
    mine = ran(flow, tmp_path / "sglang", plan(engine), runtime)
    hold_equal(mine, ran(flow, tmp_path / "hf", plan("hf"), runtime))


def test_what_no_run_has_is_refused_before_it_starts(flow, tmp_path):
    with pytest.raises(PlanError, match="actor.generate: sglang has tp=2 in no run yet"):
        ran(flow, tmp_path / "sglang", ranks(FSDP2, "sglang", SPLIT), "ray")
    for said, wrong in (
        ("patience: soon", "patience is a number from 1 up, not soon"),
        ("url: 30000", "url is a text, not 30000"),
        ("kv_tokens: 8", "kv_tokens"),
    ):
        with pytest.raises(PlanError, match=wrong):
            ran(flow, tmp_path / "sglang", local(f"sglang, {said}"), "local")
