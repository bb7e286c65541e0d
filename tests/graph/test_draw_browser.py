"""The page of a graph in a real browser: the script runs, cards open, keys work, hostile names do nothing."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from flowrl.graph.draw import render
from flowrl.graph.draw.picture import draw
from flowrl.graph.record import Edge, Graph, Node, WorkerInfo

SAMPLES: dict[str, Graph] = runpy.run_path(str(Path(__file__).with_name("draw_samples.py")))["SAMPLES"]
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
    "--window-size=1280,1000",
]

_TRY = """
const node = (id) => [...document.querySelectorAll(".node")].find((g) => g.dataset.id === id);
const typed = (key) => new KeyboardEvent("keydown", { key, bubbles: true });
const press = (key) => document.activeElement.dispatchEvent(typed(key));
const card = document.getElementById("card"), svg = document.querySelector(".view svg");
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


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=\"document.title='pwned'\">'&`${1}`"
    node = Node(f"{evil}.go", evil, evil, evil, 3, evil, (evil,), (evil,), {evil: evil}, branch=evil, signature=evil)
    graph = Graph(evil, (node,), (Edge(evil, node.id, "serves"),), (WorkerInfo(evil, evil, describes=evil),), (evil,))
    script = 'document.querySelector("[data-show]").click();'
    body, text = opened(render(graph, "html"), tmp_path, script)
    assert 'data-ready="1"' in body and 'data-nodes="2"' in body
    assert "<img" not in text.replace("&lt;img", "") and "<title>pwned" not in text
