"""A name means a tracker of flowrl's, one that a package offers, or a class of one's own; others are refused early."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path

import pytest

from flowrl.errors import UsageError
from flowrl.trackers.open_tracker import find_tracker, find_trackers
from flowrl.trackers.tracker import TrackedRun

RUN = TrackedRun("first", "grpo", "0c5e", Path("first"))


class Mine:
    def __init__(self, run):
        self.run = run


def test_a_class_of_ones_own_is_found_by_its_module():
    assert vars(find_tracker(f"{__name__}:Mine")(RUN)) == {"run": RUN}


def test_each_tracker_is_opened_once():
    assert list(find_trackers([f"{__name__}:Mine"] * 2)) == [f"{__name__}:Mine"]
    assert find_trackers(()) == {}


def test_a_package_may_offer_one(monkeypatch):
    point = metadata.EntryPoint("house", f"{__name__}:Mine", "flowrl.trackers")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == "flowrl.trackers" else [])
    assert vars(find_tracker("house")(RUN)) == {"run": RUN}


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("wandbb", "--track wandbb: there is no such tracker.", "Did you mean 'wandb'?"),
        ("csv", "--track csv: there is no such tracker.", "Name your own as module:Class."),
        ("no.such:Class", "--track no.such:Class cannot be loaded: No module named 'no'.", None),
        (f"{__name__}:Yours", f"--track {__name__}:Yours cannot be loaded: ", None),
    ],
)
def test_what_means_nothing_is_refused_with_a_fix(name, what, fix):
    with pytest.raises(UsageError) as raised:
        find_tracker(name)
    assert raised.value.what.startswith(what)
    assert fix is None or raised.value.fix == fix


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as raised:
        find_tracker("mlflow")
    assert raised.value.what == "--track mlflow needs mlflow-skinny, which is not installed."
    assert raised.value.fix == "pip install mlflow-skinny"
