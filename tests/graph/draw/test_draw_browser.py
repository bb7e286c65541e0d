"""The page of a graph in a real browser: the script runs, cards open, keys work, hostile names do nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from draw_samples import PLACED, SAMPLES

from flowrl.analysis.placed_graph import placed_graph
from flowrl.cli.arguments.script import load_script
from flowrl.graph.draw import render
from flowrl.graph.draw.picture import draw
from flowrl.graph.record import Edge, Graph, Node, PoolInfo, WorkerInfo

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the page of a graph was not opened"),
]

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1440,1000",
]

_TRY = """
const node = (id) => [...document.querySelectorAll(".taken .node")].find((g) => g.dataset.id === id);
const typed = (key) => new KeyboardEvent("keydown", { key, bubbles: true });
const press = (key) => document.activeElement.dispatchEvent(typed(key));
const card = document.getElementById("card"), svg = document.querySelector(".view svg.taken");
const lit = () => [...document.querySelectorAll(".edge.on")].map((g) => `${g.dataset.src} ${g.dataset.dst}`);
const found = {};
node("rl.gae").dispatchEvent(new PointerEvent("pointerenter"));
found.hovered = { hidden: card.hidden, text: card.textContent, lit: lit() };
node("rl.gae").dispatchEvent(new PointerEvent("pointerleave"));
found.left = { hidden: card.hidden, lit: lit() };
node("rl.gae").focus();
press("ArrowRight");
found.right = { focus: document.activeElement.dataset.id, hidden: card.hidden };
press("ArrowUp");
found.up = document.activeElement.dataset.id;
press("Escape");
found.escaped = card.hidden;
const before = svg.getAttribute("viewBox");
press("+");
found.zoomed = svg.getAttribute("viewBox") !== before;
press("0");
found.fits = svg.getAttribute("viewBox") === before;
document.querySelector('[data-show="actor.update"]').click();
found.shown = { hidden: card.hidden, kept: card.classList.contains("kept"), text: card.textContent };
document.body.dataset.found = JSON.stringify(found);
"""

_TRY_PLACED = """
const all = (selector) => [...document.querySelectorAll(selector)].filter((found) => !found.closest("[hidden]"));
const node = (id) => all(".node").find((g) => g.dataset.id === id);
const card = document.getElementById("card");
const inside = (id) => {
  const pool = all(".group").find((g) => g.dataset.id === id).getBoundingClientRect();
  const within = (r) => pool.left < r.left && r.right < pool.right && pool.top < r.top && r.bottom < pool.bottom;
  return all(".node").filter((g) => within(g.getBoundingClientRect())).map((g) => g.dataset.id);
};
const found = { pools: Object.fromEntries(all(".group").map((g) => [g.dataset.id, inside(g.dataset.id)])) };
node("actor.update").dispatchEvent(new PointerEvent("pointerenter"));
found.node = card.textContent;
found.lit = all(".group.on").map((g) => g.dataset.id);
node("actor.update").dispatchEvent(new PointerEvent("pointerleave"));
const edge = all(".edge").find((g) => g.dataset.src === "actor.update" && g.dataset.dst === "actor.publish");
edge.dispatchEvent(new PointerEvent("pointermove", { clientX: 200, clientY: 200 }));
found.edge = { hidden: card.hidden, text: card.textContent };
edge.dispatchEvent(new PointerEvent("pointerleave"));
document.querySelector('[data-show="actor.publish"]').click();
found.clicked = { kept: card.classList.contains("kept"), text: card.textContent };
found.chosen = getComputedStyle(node("actor.publish").querySelector(".frame")).strokeWidth;
found.rows = all("[data-pool]").map((row) => row.textContent);
document.body.dataset.found = JSON.stringify(found);
"""


def opened(page: str, folder: Path, script: str = "") -> tuple[str, str]:
    """The body tag and the whole page after its scripts have run. Nothing may be written to the console."""
    assert CHROMIUM is not None
    file = folder / "graph.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>") if script else page, encoding="utf-8")
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body, done.stderr
    return body[0], done.stdout


def test_the_script_runs_and_the_page_answers(tmp_path: Path) -> None:
    graph = SAMPLES["ppo"]
    body, _ = opened(render(graph, "html"), tmp_path, _TRY)
    assert 'data-ready="1"' in body
    assert f'data-nodes="{len(draw(graph).boxes)}"' in body and f'data-edges="{len(draw(graph).lines)}"' in body
    said = re.search(r'data-found="([^"]*)"', body)
    assert said, body
    found: dict[str, Any] = json.loads(unescape(said[1]))
    hovered = found["hovered"]
    assert not hovered["hidden"] and "algorithms/ppo.py:21" in hovered["text"]
    assert "batch = rl.gae(batch, gamma=1.0, lam=0.95)" in hovered["text"] and "token_rewards" in hovered["text"]
    touching = [f"{e.src} {e.dst}" for e in graph.edges if "rl.gae" in (e.src, e.dst)]
    assert sorted(hovered["lit"]) == sorted(touching)
    assert found["left"] == {"hidden": True, "lit": []}
    assert found["right"] == {"focus": "critic.update", "hidden": False}
    assert found["up"] == "actor.generate"
    assert found["escaped"] and found["zoomed"] and found["fits"]
    assert not found["shown"]["hidden"] and found["shown"]["kept"] and "updates weights" in found["shown"]["text"]


def test_a_placed_page_shows_pools_bytes_and_times(tmp_path: Path) -> None:
    body, _ = opened(render(PLACED["ppo apart"], "html"), tmp_path, _TRY_PLACED)
    said = re.search(r'data-found="([^"]*)"', body)
    assert said, body
    found: dict[str, Any] = json.loads(unescape(said[1]))
    assert {pool: sorted(ids) for pool, ids in found["pools"].items()} == {
        "pool rollout": ["actor.generate"],
        "pool train": ["actor.update", "critic.update", "critic.values", "ref.logprobs"],
        "pool cpu": ["reward.score"],
    }
    assert (
        "pool train, mesh fsdp=4, tp=2" in found["node"] and "rows over fsdp; weights over fsdp x tp" in found["node"]
    )
    assert "2.6 s per call, 36 % of the time of its pool" in found["node"]
    assert "pool train" in found["lit"]
    assert not found["edge"]["hidden"] and "16 GB in a step, network" in found["edge"]["text"]
    assert found["clicked"]["kept"] and "weights sent to another pool" in found["clicked"]["text"]
    assert found["chosen"] == "3px"
    assert [row.split()[0] for row in found["rows"]] == ["rolloutdevices", "traindevices", "cpu4"]
    assert "91 %" in found["rows"][0]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=\"document.title='pwned'\">'&`${1}`"
    node = Node(f"{evil}.go", evil, evil, evil, 3, evil, (evil,), (evil,), {evil: evil}, branch=evil, signature=evil)
    graph = Graph(evil, (node,), (Edge(evil, node.id, "serves"),), (WorkerInfo(evil, evil, describes=evil),), (evil,))
    placed = replace(node, pool=evil, mesh=evil, layout=evil)
    pools = (PoolInfo(evil, evil, evil, evil, 1, 0.5),)
    script = 'document.querySelector("[data-show]").click();'
    for number, drawn in enumerate((graph, replace(graph, nodes=(placed,), pools=pools, plan=evil))):
        folder = tmp_path / str(number)
        folder.mkdir()
        body, text = opened(render(drawn, "html"), folder, script)
        assert 'data-ready="1"' in body and f'data-nodes="{len(draw(drawn).boxes)}"' in body
        assert "<img" not in text.replace("&lt;img", "") and "<title>pwned" not in text


_FRAMES = """
const pages = JSON.parse(document.getElementById("pages").textContent), found = [];
const measure = (frame, name, width) => {
  const page = frame.contentDocument, taken = page.querySelector(".view svg.taken");
  const scale = taken.getScreenCTM().a;
  const sizes = [...taken.querySelectorAll("text")].map((t) => parseFloat(getComputedStyle(t).fontSize) * scale);
  const texts = [...page.querySelectorAll("h1, header p, .legend li, td, th, .help")];
  return {
    name, width, least: Math.min(...sizes), column: taken.classList.contains("column"),
    shown: [...page.querySelectorAll(".view svg")].filter((s) => s.getBoundingClientRect().width).length,
    inside: taken.getBoundingClientRect().right <= width && page.documentElement.scrollWidth <= width,
    page: Math.min(...texts.map((t) => parseFloat(page.defaultView.getComputedStyle(t).fontSize))),
  };
};
for (const [name, html] of pages) {
  for (const width of [1440, 390]) {
    const frame = document.createElement("iframe");
    Object.assign(frame.style, { width: `${width}px`, height: "800px", border: 0 });
    frame.addEventListener("load", () => {
      found.push(measure(frame, name, width));
      if (found.length === 2 * pages.length) document.body.dataset.found = JSON.stringify(found);
    });
    frame.srcdoc = html;
    document.body.append(frame);
  }
}
"""


def test_words_can_be_read_on_a_desk_and_on_a_phone(tmp_path: Path) -> None:
    """Every shipped driver, and PPO under plans: the smallest word on the screen, measured where it is rendered."""
    root = Path(__file__).parents[3]
    pages: list[tuple[str, str]] = []
    for driver in sorted((root / "algorithms").glob("*.py")):
        pages.append((driver.stem, render(load_script(str(driver)).graph(), "html")))
    for plan in ("ppo_disaggregated_16", "ppo_colocated_8"):
        flow = load_script(str(root / "algorithms" / "ppo.py"))
        study = flow.study(root / "algorithms" / "plans" / f"{plan}.yaml")
        pages.append((plan, render(placed_graph(study, flow.graph(), study.simulate(2)), "html")))
    listed = json.dumps(pages).replace("<", "\\u003c")
    outer = f'<!doctype html><body style="margin:0"><script type="application/json" id="pages">{listed}</script></body>'
    body, _ = opened(outer, tmp_path, _FRAMES)
    said = re.search(r'data-found="([^"]*)"', body)
    assert said, body[:300]
    found: list[dict[str, Any]] = json.loads(unescape(said[1]))
    assert len(found) == 2 * len(pages)
    for seen in found:
        assert seen["least"] >= 11 and seen["page"] >= 11, seen
        assert seen["shown"] == 1 and seen["inside"], seen
    assert {s["name"] for s in found if s["width"] == 1440 and s["column"]} == set(), "all fit on a desk"
