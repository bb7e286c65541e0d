"""The graph says how a call differs from the default: in text, Mermaid, DOT, JSON, SVG and on the page."""

from __future__ import annotations

import json
import re

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.graph.draw import render
from flowrl.graph.record import Graph

rows = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
flow = fl.Flow("settings")
actor = flow.worker(fl.Actor, model="a/model", lr=None, max_tokens=16)
tuned = flow.worker(fl.Actor, model="a/model", lora=fl.Lora(8))
frozen = flow.worker(fl.Actor, model="a/model", freeze=("embed",))
reward = flow.worker(fl.FunctionReward, lambda prompt, response: 1.0)
ref = flow.worker(fl.Reference, of=actor)


@flow.program
def settings(heat: float = 0.6):
    for step, batch in flow.steps(rows, 10):
        n = 8
        if step % 50 == 0:
            n = 16
        batch = reward.score(actor.generate(batch, n=n, temperature=heat))
        batch = rl.group_advantages(ref.logprobs(batch))
        greedy = reward.score(tuned.generate(batch.select("prompt", "prompt_ids"), greedy=True))
        decay = 0.5 * float(greedy.rewards.mean())
        frozen.update(batch, loss=rl.ppo_clip(), foreign=True)
        metrics = tuned.update(batch, loss=rl.ppo_clip(kl=0.1), epochs=2, foreign=True, lr=decay)
        flow.log(step, metrics)


GRAPH = flow.graph("settings")


def test_a_node_has_what_is_not_the_default():
    assert GRAPH.node("actor.generate").settings == {"n": "8 or 16", "temperature": "0.6"}
    assert GRAPH.node("tuned.generate").settings == {"greedy": "True"}
    assert GRAPH.node("tuned.update").settings == {
        "lr": "0.5 * rewards.mean()",
        "epochs": "2",
        "foreign": "True",
    }
    assert GRAPH.node("ref.logprobs").settings == {} and GRAPH.node("batch.mean").settings == {}


def test_a_worker_has_what_it_was_declared_with():
    found = {w.name: dict(w.settings) for w in GRAPH.workers}
    assert found["actor"] == {"model": "'a/model'", "lr": "None", "max_tokens": "16"}
    assert found["frozen"]["freeze"] == "('embed',)"
    assert found["tuned"]["lora"].startswith("Lora(")
    assert found["ref"] == {"of": "actor"} and list(found["reward"]) == ["fn"]


@pytest.mark.parametrize("format", ["text", "mermaid", "dot", "json"])
def test_every_format_has_them(format):
    said = render(GRAPH, format)
    if format == "json":
        assert Graph.from_json(json.loads(said)) == GRAPH
    words = ["n=8 or 16", "temperature=0.6", "greedy=True", "epochs=2"]
    flat = " ".join(said.replace("<br/>", " ").replace("\\n", " ").split())
    for word in words if format != "json" else ['"n": "8 or 16"', '"greedy": "True"']:
        assert word in flat


@pytest.mark.parametrize("narrow", [False, True])
def test_the_picture_has_them_in_the_box_of_their_call(narrow):
    svg = render(GRAPH, "svg", narrow=narrow)
    boxes = re.findall(r'<g class="node[^>]*data-id="([^"]+)".*?</title>(.*?)</g>', svg, re.S)
    [said] = [" ".join(re.findall(r">([^<>]+)<", drawn)) for id, drawn in boxes if id == "actor.generate"]
    assert "n=8 or 16, temperature=0.6" in said and "expands rows" in said


def test_the_table_of_the_page_has_them_and_what_arithmetic_computes():
    cells = re.findall(r'</button><code class="said">([^<]+)</code>', render(GRAPH, "html"))
    assert "n=8 or 16, temperature=0.6" in cells and "rewards.mean()" in cells


def test_the_text_writes_them_as_a_call_does():
    lines = render(GRAPH, "text").splitlines()
    assert any("actor.generate(prompt_ids, prompt; n=8 or 16, temperature=0.6) ->" in line for line in lines)
    assert any(line.startswith("  worker ref: Reference(of=actor) ") for line in lines)


def test_records_without_settings_are_read():
    record = GRAPH.to_json()
    for part in ("nodes", "workers"):
        for thing in record[part]:
            del thing["settings"]
    assert Graph.from_json(record).node("actor.generate").settings == {}
