"""The page of a simulation in a real browser: bars are drawn and found, keys and clicks work, strange names do nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from report_samples import EVIL, hostile, many, nothing, overlapping, ppo, tiny, turns

from flowrl.schedule.report import render
from flowrl.schedule.report.figures import duration, looks, printable
from flowrl.schedule.simulation import Bar, Simulation, pool_times

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the page of a simulation was not opened"),
]

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1280,1000",
]

_BEFORE = """
const canvas = document.getElementById("canvas"), view = document.getElementById("view"), card = document.getElementById("card");
const said = () => Object.fromEntries([...card.querySelectorAll("dt")].map((t) => [t.textContent, t.nextSibling.textContent]));
const pointer = (what, at, more) => canvas.dispatchEvent(
  new PointerEvent(what, { clientX: at.x, clientY: at.y, button: 0, bubbles: true, ...more }));
const click = (at) => { pointer("pointerdown", at); pointer("pointerup", at); };
const press = (key, more) => view.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more }));
const inked = () => { // colours on the canvas
  gantt.draw();
  const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const dots = pen.getImageData(0, 0, copy.width, copy.height).data, found = {};
  for (let i = 0; i < dots.length; i += 4) {
    const colour = "#" + [0, 1, 2].map((n) => dots[i + n].toString(16).padStart(2, "0")).join("");
    found[colour] = (found[colour] || 0) + 1;
  }
  return found;
};
const found = {};
"""
_AFTER = "\ndocument.body.dataset.found = JSON.stringify(found);"


def opened(simulation: Simulation, folder: Path, script: str = "") -> tuple[str, dict[str, Any]]:
    """The page after its scripts have run, and what the script has found. Nothing may be written to the console."""
    assert CHROMIUM is not None
    file = folder / "simulation.html"
    page = render(simulation, "html").replace("</body>", f"<script>{_BEFORE}{script}{_AFTER}</script></body>")
    file.write_text(page, encoding="utf-8")
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body and 'data-ready="1"' in body[0], done.stderr
    found = re.search(r'data-found="([^"]*)"', body[0])
    assert found, body[0]
    return done.stdout, json.loads(unescape(found[1]))


def test_lanes_and_bars_are_there_and_drawn(tmp_path: Path) -> None:
    simulation = ppo(5, staleness=1)
    script = """
    found.inked = inked();
    found.lanes = gantt.lanes; found.bars = gantt.bars; found.drawn = gantt.drawn().bars; found.seen = gantt.seen();
    found.names = [...document.querySelectorAll(".names b")].map((b) => b.textContent);
    """
    _, found = opened(simulation, tmp_path, script)
    assert found["lanes"] == 3 and found["bars"] == found["drawn"] == len(simulation.bars)
    assert found["names"] == ["train", "rollout", "cpu"] and found["seen"] == pytest.approx([0, simulation.makespan])
    for colour in ("#7fb0e0", "#e3ab62", "#7cc39b", "#b39adb"):  # a worker each
        assert found["inked"].get(colour, 0) > 200, (colour, found["inked"])


def test_a_bar_under_the_pointer_tells_its_times_and_a_click_marks_its_step(tmp_path: Path) -> None:
    simulation = ppo(5, staleness=1)
    number = next(n for n, bar in enumerate(simulation.bars) if (bar.node, bar.step) == ("ref.logprobs", 2))
    bar = simulation.bars[number]
    script = f"""
    const at = gantt.place({number});
    pointer("pointermove", at);
    found.hovered = {{ hidden: card.hidden, title: card.querySelector("h2").textContent, ...said() }};
    found.cause = gantt.at(gantt.causeOf({number}));
    click(at);
    found.step = gantt.step();
    found.marked = view.dataset.step;
    const light = inked()["#7fb0e0"];
    click(at);
    found.unmarked = gantt.step();
    found.dimmed = light < inked()["#7fb0e0"] / 2;
    pointer("pointermove", {{ x: at.x, y: at.y - 26 }});
    found.left = card.hidden;
    click(at);
    press("Escape");
    found.escaped = gantt.step();
    """
    _, found = opened(simulation, tmp_path, script)
    hovered = found["hovered"]
    assert not hovered["hidden"] and hovered["title"] == "ref.logprobs"
    assert (hovered["step"], hovered["pool"], hovered["takes"]) == ("2", "train", "1.2 s")
    assert float(hovered["from"].removesuffix(" s")) == pytest.approx(bar.start)
    assert float(hovered["to"].removesuffix(" s")) == pytest.approx(bar.end)
    assert hovered["waited for"].startswith("actor.generate, the pool idle for") and found["cause"] == "actor.generate"
    assert found["step"] == 2 and found["marked"] == "2" and found["unmarked"] is None and found["dimmed"]
    assert found["left"] and found["escaped"] is None


def test_wheel_drag_buttons_and_the_range_of_steps(tmp_path: Path) -> None:
    simulation = overlapping(30)
    script = """
    const width = () => gantt.seen()[1] - gantt.seen()[0];
    const area = canvas.getBoundingClientRect();
    const wheel = (deltaY) => {
      const event = new WheelEvent("wheel", { deltaY, clientX: area.left + area.width / 2, clientY: area.top + 60, bubbles: true, cancelable: true });
      canvas.dispatchEvent(event);
      return event.defaultPrevented;
    };
    found.first = gantt.seen();
    document.querySelector('[data-do="fit"]').click();
    found.whole = gantt.seen();
    found.scrolls = !wheel(100);
    found.zooms = wheel(-100) && width() < found.whole[1];
    const before = gantt.seen();
    pointer("pointerdown", { x: area.left + 300, y: area.top + 60 });
    pointer("pointermove", { x: area.left + 200, y: area.top + 60 });
    pointer("pointerup", { x: area.left + 200, y: area.top + 60 });
    found.moved = gantt.seen()[0] > before[0] && Math.abs(width() - (before[1] - before[0])) < 1e-6;
    document.querySelector('[data-do="fit"]').click();
    pointer("pointerdown", { x: area.left + 100, y: area.top + 60 }, { shiftKey: true });
    pointer("pointermove", { x: area.left + 200, y: area.top + 60 });
    pointer("pointerup", { x: area.left + 200, y: area.top + 60 });
    found.chosen = gantt.seen().map((t) => t / found.whole[1] * area.width);
    document.getElementById("from").value = 10;
    document.getElementById("to").value = 12;
    document.querySelector("#range button").click();
    found.range = gantt.seen();
    document.querySelector('.legend [data-node="0"]').click();
    found.node = gantt.node();
    document.querySelector('.legend [data-node="0"]').click();
    found.none = gantt.node();
    """
    _, found = opened(simulation, tmp_path, script)
    bars = simulation.bars
    assert found["first"][0] == 0 and found["first"][1] < simulation.makespan / 2  # the first steps of many
    assert found["whole"] == pytest.approx([0, simulation.makespan])
    assert found["scrolls"] and found["zooms"] and found["moved"]
    assert found["chosen"] == pytest.approx([100, 200], abs=2)
    mine = [bar for bar in bars if 10 <= bar.step <= 12]
    start, end = min(bar.start for bar in mine), max(bar.end for bar in mine)
    assert found["range"] == pytest.approx([start - 0.02 * (end - start), end + 0.02 * (end - start)])
    assert found["node"] == 0 and found["none"] is None


def test_the_keyboard_reaches_every_bar(tmp_path: Path) -> None:
    script = """
    view.focus();
    const walked = [];
    for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp"]) {
      press(key);
      walked.push(`${card.querySelector("h2").textContent} ${said().pool} ${said().step}`);
    }
    found.walked = walked;
    press("Enter");
    found.step = gantt.step();
    press("PageDown");
    found.next = gantt.step();
    press("PageUp"); press("PageUp"); press("PageUp");
    found.least = gantt.step();
    press("+");
    found.zoomed = gantt.seen()[1] - gantt.seen()[0];
    press("ArrowRight", { shiftKey: true });
    found.panned = gantt.seen()[0];
    press("0");
    found.whole = gantt.seen();
    """
    simulation = turns(4)
    _, found = opened(simulation, tmp_path, script)
    assert found["walked"] == [
        "actor.generate.onload gpu 0",
        "actor.generate gpu 0",
        "reward.score cpu 0",
        "reward.score cpu 1",
        "actor.generate.offload gpu 1",
    ]
    assert (found["step"], found["next"], found["least"]) == (1, 2, 0)
    assert found["zoomed"] == pytest.approx(simulation.makespan / 1.5) and found["panned"] > 0
    assert found["whole"] == pytest.approx([0, simulation.makespan])


def test_memory_under_the_lane_tells_what_is_there(tmp_path: Path) -> None:
    script = """
    const area = canvas.getBoundingClientRect();
    pointer("pointermove", { x: area.left + area.width - 3, y: area.top + 44 + 80 });
    found.card = { title: card.querySelector("h2").textContent, ...said() };
    found.peak = document.querySelector(".names .memory").textContent;
    """
    _, found = opened(turns(3), tmp_path, script)
    assert found["card"]["title"] == "memory of gpu" and found["card"]["on a device"] == "60 GB"
    assert found["peak"] == "peak 60 GB of 80 GB"


def test_the_script_writes_durations_as_the_tables_do(tmp_path: Path) -> None:
    values = [0, 5e-10, 1e-6, 3.5e-4, 0.99949, 0.9996, 6.5, 999.4, 1000, 7199.6, 9960, 1e6]
    _, found = opened(tiny(), tmp_path, f"found.said = {values}.map(gantt.duration);")
    assert found["said"] == [duration(value) for value in values]


def test_tiny_and_long_times_and_bars_without_length_are_found(tmp_path: Path) -> None:
    script = """
    gantt.hover(1); found.first = { title: card.querySelector("h2").textContent, ...said() };
    gantt.look(1.5e-6, 2e-6); found.narrow = gantt.seen();
    """
    _, found = opened(tiny(), tmp_path, script)
    assert (
        found["first"]["title"] == "b.go" and found["first"]["from"] == "1.5 µs" and found["first"]["takes"] == "500 ns"
    )
    text, found = opened(
        hostile(),
        tmp_path,
        """
        const at = gantt.place(3);
        found.hit = gantt.at(gantt.hit(at.x - canvas.getBoundingClientRect().left, at.y - canvas.getBoundingClientRect().top));
        pointer("pointermove", at);
        found.card = said();
        gantt.hover(0); found.outside = said().step; found.evil = card.querySelector("h2").textContent;
        gantt.choose(-1); found.step = gantt.step();
        found.title = document.title;
        """,
    )
    assert found["hit"] == "a.c" and found["card"]["takes"] == "0 s" and found["card"]["step"] == "3"
    assert found["outside"] == "outside of steps" and found["step"] is None
    assert found["evil"] == printable(EVIL) and found["title"].startswith("</script>")
    assert "<img" not in text.replace("&lt;img", "")


def test_nothing_to_show_is_shown_as_that(tmp_path: Path) -> None:
    text, found = opened(
        nothing(), tmp_path, "press('ArrowRight'); press('PageDown'); press('+'); found.bars = gantt.bars;"
    )
    assert found["bars"] == 0 and "Nothing ran." in text and "No rows were trained on." in text


def test_a_hundred_thousand_bars_are_drawn_and_found_in_time(tmp_path: Path) -> None:
    script = """
    gantt.look(0, 1e12);
    gantt.draw();
    gantt.draw();
    found.whole = gantt.drawn();
    const at = gantt.place(50000);
    const began = performance.now();
    for (let i = 0; i < 100; i++) gantt.hit(at.x - i, at.y - canvas.getBoundingClientRect().top);
    found.hits = performance.now() - began;
    """
    _, found = opened(many(100_000), tmp_path, script)
    assert found["whole"]["bars"] < 8000  # columns, no longer bars
    assert found["whole"]["ms"] < 250 and found["hits"] < 100  # a few ms of each, on a machine that is not busy


@pytest.mark.parametrize(("busy", "bars"), [(0.54, 20_000), (0.54, 2_000), (0.05, 20_000), (1.0, 20_000)])
def test_a_pool_seen_from_afar_is_as_strong_as_it_is_busy(tmp_path: Path, busy: float, bars: int) -> None:
    """Bars too thin to be seen one by one: what is painted is their part of the time, not more."""
    each = tuple(Bar("a.go", n, "p", n, n + busy, call=n) for n in range(bars))
    simulation = Simulation("far", 1, float(bars), 1.0, each, pool_times({"p": ""}, each, float(bars)), {}, "")
    script = """
    gantt.look(0, 1e12);
    gantt.draw();
    const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
    const pen = copy.getContext("2d", { willReadFrequently: true });
    pen.drawImage(canvas, 0, 0);
    const from = Math.floor(copy.width * 0.2), wide = Math.floor(copy.width * 0.6);
    const middle = Math.round((gantt.place(0).y - canvas.getBoundingClientRect().top) * copy.height / canvas.clientHeight);
    const reds = (y) => [...pen.getImageData(from, y, wide, 1).data].filter((_, i) => i % 4 === 0);
    const plain = reds(middle - 20); // of the lane, above the bars
    const ink = reds(middle).map((red, i) => (plain[i] - red) / (plain[i] - FILL));
    found.lane = ink.reduce((sum, part) => sum + part, 0) / wide;
    """.replace("FILL", str(int(looks(simulation)["a.go"].fill[1:3], 16)))
    _, found = opened(simulation, tmp_path, script)
    assert found["lane"] == pytest.approx(busy, abs=0.03)
