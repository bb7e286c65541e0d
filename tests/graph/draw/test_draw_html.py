"""The page of a graph: complete, and nothing is fetched; test_draw_browser.py opens it."""

from __future__ import annotations

import json
import re

from draw_samples import PLACED, SAMPLES, WILD, once

from flowrl.graph.record import Graph


@WILD
def test_html_fetches_nothing(graph: Graph) -> None:
    page = once(graph, "html")
    assert set(re.findall(r"https?://[^\s\"']*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:img|iframe|object|embed|audio|video|base)\b|<script[^>]*\ssrc|@import|url\(", page)
    assert re.findall(r"<link [^>]*>", page) == ['<link rel="icon" href="data:,">']
    assert "default-src 'none'" in page


@WILD
def test_html_has_a_card_and_a_row_for_every_call(graph: Graph) -> None:
    page = once(graph, "html")
    found = re.search(r'<script type="application/json" id="cards">(.*?)</script>', page, re.DOTALL)
    assert found
    record = json.loads(found[1])
    for node in graph.nodes:
        assert record["cards"][node.id]["source"] == node.source and node.id in record["order"]
    assert page.count("<tr data-row=") == len(graph.nodes)
    assert page.count("</script>") == 2 == page.count("<script")


def test_html_has_a_row_for_every_pool_and_columns_for_places_and_times() -> None:
    page = once(PLACED["ppo apart"], "html")
    assert re.findall(r'<tr data-pool="(\w+)">', page) == ["rollout", "train", "cpu"]
    assert '<th scope="col">where</th><th scope="col">time</th>' in page and "2.6\u00a0s\u00a0·\u00a036\u00a0%" in page
    assert '<th scope="col">time</th>' not in once(PLACED["grpo split"], "html")
    assert "data-pool" not in once(SAMPLES["ppo"], "html") and "where</th>" not in once(SAMPLES["ppo"], "html")
