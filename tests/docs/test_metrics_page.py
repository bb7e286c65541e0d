"""The page on metrics has every one that updates of a policy measure, and every rule of health."""

from __future__ import annotations

import re
from pathlib import Path

from flowrl.graph.tracing.reported_metrics import OF_POLICY
from flowrl.runtime.driver.monitoring.health_rules import RULES

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_the_page_defines_every_measure():
    rows = [name for line in re.findall(r"^\| (`.*?) \|", PAGE, re.M) for name in re.findall(r"`(\w+)`", line)]
    assert set(OF_POLICY) <= set(rows)


def test_the_page_has_the_rules_in_their_order():
    told = re.findall(r"^\| `(\w+)` \| .* \| (alarm|hint) \|$", PAGE, re.M)
    assert told == [(rule.metric, "alarm" if rule.alarm else "hint") for rule in RULES]
