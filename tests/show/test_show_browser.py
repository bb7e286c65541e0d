"""The page of a run in a real browser: views are drawn, clicks and searches work, hostile texts are only texts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from show_runs import graph_of, hostile_folder, lines, run_folder

from flowrl.show import server
from flowrl.show.answers import Answers
from flowrl.show.follow_runs import Follower

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the page of a run was not opened"),
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
    "--virtual-time-budget=20000",  # waits of the page take no real time; answers of the server do
]

_HELP = """
const found = {};
const one = (selector) => document.querySelector(selector), all = (selector) => [...document.querySelectorAll(selector)];
const until = async (what) => {
  for (let turn = 0; turn < 500; turn++) {
    const seen = what();
    if (seen) return seen;
    await new Promise((go) => setTimeout(go, 20));
  }
  throw new Error(`never: ${what}`);
};
const go = async (view) => { (await until(() => all("nav a").find((a) => a.textContent.startsWith(view)))).click(); };
const type = (input, text) => { input.value = text; input.dispatchEvent(new Event("input", { bubbles: true })); };
const texts = (selector) => all(selector).map((element) => element.textContent);
"""


def clicked(
    folders: list[Path], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, looks: int = 1 << 30
) -> dict[str, Any]:
    """What a script in the page has found. Nothing may be written to the console, so no policy was broken either.

    ``looks``: how many portions of the files are taken in before the page is opened, and none after that.
    """
    assert CHROMIUM is not None
    files, cache = tmp_path / "page", tmp_path / "cache"
    shutil.copytree(server.PAGE, files)
    cache.mkdir()
    index = (files / "index.html").read_text()
    (files / "index.html").write_text(
        index.replace("</body>", '<script type="module" src="/page/try.js"></script></body>')
    )
    end = "document.body.dataset.found = JSON.stringify(found);"
    (files / "try.js").write_text(
        f"{_HELP}\ntry {{ {script} }} catch (error) {{ found.error = String(error); }}\n{end}"
    )
    monkeypatch.setattr(server, "PAGE", files)
    follower = Follower(folders, cache)
    while looks > 0 and follower.look():
        looks -= 1
    page = server.open_server(Answers(follower), 0)
    thread = threading.Thread(target=page.serve_forever, args=(0.01,))
    thread.start()
    try:
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    finally:
        page.shutdown()
        thread.join()
        page.server_close()
        follower.stop()
    assert "CONSOLE" not in done.stderr, done.stderr
    said = re.search(r'<body[^>]*data-found="([^"]*)"', done.stdout)
    assert said, done.stdout[:3000] + done.stderr
    found = json.loads(unescape(said[1]))
    assert "error" not in found, found["error"]
    return found


_THROUGH = """
await until(() => all(".chart canvas").length >= 2);
found.title = document.title;
found.address = location.href;
found.charts = all(".chart").map((chart) => chart.dataset.metric);
found.points = (await until(() => one('[data-metric="reward"]').dataset.points));
found.runs = texts("#runs bdi");
type(one('[type="search"]'), "entr");
await until(() => all(".chart").length === 1);
found.filtered = all(".chart").map((chart) => chart.dataset.metric);
all("#runs input")[0].click();
all("#runs button").at(-1).click();
await until(() => document.title.startsWith("second"));

await go("Rows");
await until(() => all("[data-row]").length === 12);
found.detail = (await until(() => one(".detail h2"))).textContent;
found.messages = texts(".message .text");
type(one('[type="search"]'), "\\"says 1\\"");
await until(() => all("[data-row]").length === 6);
found.told = one(".found").textContent;
type(one('[aria-label="Order"]'), "oldest");
await until(() => one("[data-row] .head").textContent.startsWith("step 0"));
one("[data-row]").click();
await until(() => one(".detail h2").textContent.startsWith("Step 0"));
one('[data-tab="tokens"]').click();
await until(() => all(".strip span").length === 7);
found.by = texts('[aria-label="Colour by"] option');
found.lacking = one(".lacking").textContent;
found.shades = all(".strip span").map((span) => span.style.getPropertyValue("--shade") !== "");
all(".strip span")[5].dispatchEvent(new PointerEvent("pointerenter", { clientX: 300, clientY: 300 }));
found.card = one("#card").textContent;
all(".siblings .button")[0].click();
await until(() => all(".columns article").length === 2);
found.columns = texts(".columns .message .text");
type(one('[aria-label="What is listed"]'), "silent");
await until(() => one(".empty") && !one("[data-row]"));
found.silent = one(".list .empty").textContent;

await go("Graph");
await until(() => one(".stage svg .node"));
all(".stage .node").find((node) => node.dataset.id === "reward.score").dispatchEvent(new MouseEvent("click"));
found.call = await until(() => one(".graphs .detail h2")?.textContent === "reward.score" && one(".graphs .detail dl").textContent);
found.calls = texts(".table tbody tr td:first-child");

await go("Time");
await until(() => one("canvas.lanes")?.dataset.bars === "6");
found.drawn = { ...one("canvas.lanes").dataset };
found.lanes = texts(".table > table tbody tr td:first-child");
found.waits = texts(".waits tbody tr");
found.memory = texts(".memory tbody tr");
const at = (left, top) => { const box = one("canvas.lanes").getBoundingClientRect(); return { clientX: box.left + left, clientY: box.top + top, bubbles: true, pointerId: 1 }; };
const wide = one("canvas.lanes").clientWidth - 160, when = (time) => 150 + (time / 5.9) * wide;
one("canvas.lanes").dispatchEvent(new PointerEvent("pointermove", at(when(4.3), 23)));
found.call_card = one("#card").textContent;
one("canvas.lanes").dispatchEvent(new PointerEvent("pointermove", at(when(4.3), 46 + 22 + 11)));
found.rank_card = one("#card").textContent;
one("canvas.lanes").dispatchEvent(new PointerEvent("pointermove", at(when(3.5), 23)));
found.gap_card = one("#card").textContent;
one("canvas.lanes").setPointerCapture = () => {};
one("canvas.lanes").dispatchEvent(new PointerEvent("pointerdown", at(when(5.3), 46 + 44 + 23)));
one("canvas.lanes").dispatchEvent(new PointerEvent("pointerup", at(when(5.3), 46 + 44 + 23)));
await until(() => all(".chain li").length === 6);
found.chain = texts(".chain li").slice(0, 2);
found.link = location.hash;
type(one('[aria-label="Step"]'), "1");
await until(() => one("canvas.lanes").dataset.bars === "2");
one('[aria-label="The step after"]').click();
await until(() => one('[aria-label="Step"]').value === "2" && location.hash.includes("step=2"));
texts(".bar .button").includes("All of it") && all(".bar .button").find((one) => one.textContent === "All of it").click();
await until(() => one("canvas.lanes").dataset.bars === "6");
one("canvas.lanes").dispatchEvent(new WheelEvent("wheel", { deltaY: -2000, clientX: 500, clientY: 200, cancelable: true }));
found.fewer = Number(await until(() => one("canvas.lanes").dataset.bars !== "6" && one("canvas.lanes").dataset.bars));

await go("Ledger");
await until(() => one(".histogram"));
found.ledger = texts(".account")[0];
found.lags = texts(".histogram span");

await go("Events");
found.events = await until(() => one(".events .bad .said") && texts(".events .bad .said"));
await go("Run");
found.about = await until(() => one(".about dl.fields") && one(".about dl.fields").textContent);
found.forecast = texts(".forecast tbody tr");
"""


def test_one_can_click_through_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foretold = {"grpo": {"step_seconds": 1.0, "source": "roofline", "notes": ["not calibrated"], "pools": {}}}
    first = run_folder(tmp_path / "first")
    second = run_folder(tmp_path / "second", **graph_of("grpo"), forecasts=foretold)
    lines(first, "metrics", {"program": "grpo", "step": 3, "only_here": 1.0})
    found = clicked([first, second], _THROUGH, tmp_path, monkeypatch)
    assert found["title"] == "first · flowrl" and "token" not in found["address"]
    assert {"reward", "entropy", "seconds", "only_here"} == set(found["charts"])
    assert found["points"] == "6" and found["runs"] == ["first", "second"], "three steps of each of the two runs"
    assert found["filtered"] == ["entropy"]
    assert found["detail"] == "Step 2, prompt 5" and found["messages"] == ["5+1=", "says 1"]
    assert found["told"] == "6 rows"
    assert found["by"] == [
        "Advantage",
        "Entropy",
        "Version of the weights",
        "Log-probability when sampled",
        "Trained or not",
    ]
    assert found["lacking"].startswith("This row has no ratio and no gap") and "actor.logprobs" in found["lacking"]
    assert "actor.entropies" not in found["lacking"], "the rows have them"
    assert found["shades"] == [False] * 4 + [True] * 3
    assert "number 2, place 5" in found["card"] and "-1" in found["card"]
    assert found["columns"] == ["says 0", "says 1"]
    assert found["silent"] == "Nothing fits these filters."
    assert "900 ms" in found["call"] and "grpo.py:7" in found["call"], "what the run has measured of this call"
    assert sorted(found["calls"]) == ["actor.generate", "reward.score"]
    assert found["drawn"]["lanes"] == "main, rank 0, rank 1, cpu" and found["drawn"]["memory"] == "2"
    assert "actor.generate" in found["call_card"] and "reward.score of step 1 was over" in found["call_card"]
    assert "Brings its rows100 ms" in found["rank_card"] and "Then waits for other ranks250 ms" in found["rank_card"]
    assert "Nothing ran here" in found["gap_card"] and "1.1 s" in found["gap_card"]
    assert "at=" in found["link"], "the place in the address opens it again"
    assert found["chain"][0].startswith("reward.score, step 2") and "whose rows it reads" in found["chain"][0]
    assert found["chain"][1].startswith("actor.generate, step 2") and "gives or takes weights" in found["chain"][1]
    assert any("main" in one and "reward.score" in one and "weights" in one for one in found["waits"])
    assert "driver1 GB" in found["memory"][0] and "700 MB" in found["memory"][1]
    assert sorted(found["lanes"]) == ["actor.generate", "reward.score"] and 0 < found["fewer"] < 6
    assert (
        "Trained on8" in found["ledger"] and "Left out: no signal2" in found["ledger"] and found["lags"] == ["0", "1"]
    )
    assert found["forecast"] == ["A step1 s2 s2 x", "Lag of what is trained on–0.5"]
    assert found["events"] == ["entropy fell"] and "grpo.py" in found["about"]


_FILTERS = """
await go("Rows");
await until(() => all("[data-row]").length === 12);
found.labels = texts(".labels label").map((text) => text.trim());
found.first = one(".found").textContent;
found.clear = one(".bar .button").hidden;
type(one('[data-label="finish_reason"]'), "length");
await until(() => all("[data-row]").length === 3);
found.told = one(".found").textContent;
found.tags = texts("[data-row] .tag");
found.address = location.hash;
type(one('[aria-label="From step"]'), "1");
await until(() => all("[data-row]").length === 2);
type(one('[aria-label="Search the texts of rows"]'), '"3 1"');
await until(() => all("[data-row]").length === 1);
found.one = one("[data-row] .head").textContent;
type(one('[aria-label="What is listed"]'), "prompts");
await until(() => one(".list li button") && !one("[data-row]"));
found.prompts = texts(".list .line").filter((text) => text.includes("+1="));
found.orders = all('[aria-label="Order"] option').filter((option) => !option.disabled).map((option) => option.value);
type(one('[aria-label="What is listed"]'), "");
await until(() => all("[data-row]").length === 1);
one(".bar .button").click();
await until(() => all("[data-row]").length === 12);
found.cleared = location.hash;
type(one('[data-label="source"]'), "code");
type(one('[aria-label="Order"]'), "worst");
await until(() => all("[data-row]").length === 6 && one("[data-row] .reward").textContent === "0");
found.rewards = texts("[data-row] .reward");
type(one('[aria-label="Tokens from"]'), "9");
await until(() => one(".list .empty"));
found.none = one(".list .empty").textContent;
type(one('[aria-label="Tokens to"]'), "3");
await until(() => one(".found .warn"));
found.wrong = one(".found .warn").textContent;
type(one('[aria-label="Tokens from"]'), "");
await until(() => all("[data-row]").length === 6);
location.hash = location.hash.replace("is.source=code", "is.source=poems");
await until(() => one(".found .warn"));
found.unknown = one(".found .warn").textContent;
one(".bar .button").click();
await until(() => all("[data-row]").length === 12);
"""


def test_rows_are_filtered_by_clicking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = clicked([run_folder(tmp_path / "run", labels=True)], _FILTERS, tmp_path, monkeypatch)
    assert found["labels"][0].startswith("finish reason anystop (9)length (3)")
    assert found["labels"][1] == "source anycode (6)math (6)"
    assert found["first"] == "12 rows in all" and found["clear"] is True
    assert found["told"] == "3 rows" and found["tags"] == ["length"] * 3
    assert "is.finish_reason=length" in found["address"], "the address opens it again"
    assert found["one"].startswith("step 1") and found["prompts"] == ["3+1="]
    assert found["orders"] == ["newest", "oldest", "best", "worst"], "prompts have no length"
    assert "is." not in found["cleared"] and "first" not in found["cleared"] and "text" not in found["cleared"]
    assert found["rewards"] == ["0"] * 3 + ["1"] * 3
    assert found["none"] == "Nothing fits these filters."
    assert found["wrong"] == "No numbers of tokens are from 9 to 3: min_tokens is above max_tokens."
    assert found["unknown"] == "No row has 'poems' as its source; there are code, math."


_GROWS = """
await go("Rows");
await until(() => one(".found .indexed"));
found.told = one(".found .indexed").textContent;
found.newest = one("[data-row] .head").textContent;
type(one('[aria-label="Search the texts of rows"]'), '"says 1"');
await until(() => all("[data-row]").length && texts("[data-row] .said").every((text) => text === "says 1"));
found.searched = all("[data-row]").length;
"""


def test_rows_that_are_indexed_are_searched_while_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.show.index_run.PORTION_BYTES", 4000)
    run = run_folder(tmp_path / "run", steps=20)
    found = clicked([run], _GROWS, tmp_path, monkeypatch, looks=12)
    told = re.fullmatch(r"(\d+) of about (\d+) rows are indexed so far, and are searched", found["told"])
    assert told and 0 < int(told[1]) < 80 and 72 <= int(told[2]) <= 88, found["told"]
    assert found["newest"].startswith("step 19") and 0 < found["searched"] < 40


_HOSTILE = """
await until(() => all("#state .pill").length);
const strange = [];
for (const view of texts("nav a").map((text) => text.match(/^[A-Z][a-z]+/)[0])) {
  await go(view);
  await until(() => one("nav a[aria-current]").textContent.startsWith(view) && one("#view").children.length);
  const programs = one('main [aria-label="Program"]');
  if (programs) {
    await until(() => [...programs.options].some((option) => option.value.startsWith("</script>")));
    programs.value = [...programs.options].find((option) => option.value.startsWith("</script>")).value;
    programs.dispatchEvent(new Event("change"));
  }
  for (let turn = 0; turn < 30; turn++) await new Promise((go) => setTimeout(go, 20));
  if (view === "Rows") {
    await until(() => all("[data-row]").length === 2);
    all("[data-row]").at(-1).click();
    await until(() => one(".detail h2").textContent.includes("prompt 9"));
    found.response = texts(".message .text").at(-1);
    one('[data-tab="fields"]').click();
    await until(() => one("dl.fields"));
    all("[data-row]")[0].click();
    one('[data-tab="conversation"]').click();
    await until(() => one(".cut"));
    found.cut = one(".cut").textContent;
    found.label = texts("[data-label] option").find((text) => text.includes("img"));
    found.whole = one(".cut a").getAttribute("href").split("?")[0];
  }
  if (view === "Time") {
    await until(() => one("canvas.lanes")?.dataset.bars > 0);
    const box = one("canvas.lanes").getBoundingClientRect();
    one("canvas.lanes").setPointerCapture = () => {};
    for (let top = 10; top < 200; top += 20) for (let left = 160; left < 1200; left += 90) for (const what of ["pointermove", "pointerdown", "pointerup"]) {
      one("canvas.lanes").dispatchEvent(new PointerEvent(what, { clientX: box.left + left, clientY: box.top + top, pointerId: 1 }));
    }
    await until(() => all(".chain li").length > 0);
    found.waits = texts(".waits tbody td").join(" ");
    found.memory = texts(".memory tbody td").join(" ");
  }
  if (view === "Run") found.forecast = await until(() => one(".forecast")?.textContent);
  strange.push(...all("main img, main script, main iframe").map((element) => element.outerHTML));
  found[view] = one("#view").textContent.length;
}
found.strange = strange;
found.title = document.title;
"""


def test_hostile_texts_are_only_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = clicked([hostile_folder(tmp_path / "run")], _HOSTILE, tmp_path, monkeypatch)
    assert found["strange"] == [] and found["title"] == "run · flowrl"
    shown = "</script><img src=x onerror=\"document.title='pwned'\">⟨U+202E⟩txt.exe␀␛[31m"
    assert found["response"].startswith(shown), "control characters and marks of direction are shown as signs"
    assert found["cut"] == "The first 20,000 of 10,200,000 characters. Open all of it"
    assert found["whole"] == "/api/field"
    assert found["label"] == '"><img src=x onerror=alert(1)>⟨U+202E⟩␀ (1)'
    assert all(shown in found[view] for view in ("waits", "memory", "forecast"))
