"""What a plan foretold stands beside what the run has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from show_runs import run_folder

from flowrl.show.forecasts import compare_forecast
from flowrl.show.index_run import Indexer
from flowrl.show.store import Store

FORECAST: dict[str, Any] = {
    "step_seconds": 1.0,
    "lag": 0.25,
    "source": "roofline",
    "calls": {"actor.generate": 0.3, "ref.logprobs": 0.1},
    "pools": {"main": {"busy": 0.9, "memory": 6e8}, "cpu": {"busy": 0.1, "memory": None}},
}


def compared(run: Path, cache: Path, forecast: Any) -> dict[str, tuple[float | None, float | None]]:
    cache.mkdir()
    store = Store(run, "test", cache)
    indexer = Indexer(store)
    while indexer.small():
        pass
    with store.reading() as connection:
        lines = compare_forecast(connection, "grpo", forecast)
    return {line["what"]: (line["foretold"], line["measured"]) for line in lines}


def test_each_thing_that_was_foretold_stands_beside_what_happened(tmp_path: Path) -> None:
    found = compared(run_folder(tmp_path / "run"), tmp_path / "cache", FORECAST)
    assert found["A step"] == (1.0, 2.0) and found["Lag of what is trained on"] == (0.25, 0.5)
    assert found["actor.generate"] == (0.3, pytest.approx(0.9)) and found["ref.logprobs"] == (0.1, None)
    assert found["Pool main is busy"] == (0.9, pytest.approx(3 * 0.9 / 5.9))
    assert found["Memory of a process of main"] == (6e8, 1e8), "of rank 0, the resident: it has no peak on its device"
    assert "Memory of a process of cpu" not in found, "nobody knows either"


@pytest.mark.parametrize("forecast", [None, [], {}, "fast"])
def test_a_run_without_a_forecast_has_no_lines(tmp_path: Path, forecast: Any) -> None:
    assert compared(run_folder(tmp_path / "run"), tmp_path / "cache", forecast) == {}


def test_a_strange_forecast_is_left_out(tmp_path: Path) -> None:
    strange = {"step_seconds": "soon", "lag": float("nan"), "calls": {"actor.generate": None}, "pools": {"main": 3}}
    found = compared(run_folder(tmp_path / "run"), tmp_path / "cache", strange)
    assert found["A step"] == (None, 2.0) and found["Pool main is busy"][0] is None
