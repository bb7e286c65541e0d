"""What a notebook shows of flows, graphs, plans, studies, batches and runs; hostile text is text there."""

import html.parser
import re
import xml.dom.minidom

import pytest
from small_flow import Numbers

import flowrl as fl
from flowrl.html_tables import cell, table

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202egnol\x00" + "x" * 1000


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = set()

    def handle_starttag(self, tag, attrs):
        self.found.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]


def tags(text):
    reader = Tags()
    reader.feed(text)
    return reader.found


class Judge(fl.Worker):
    def __init__(self, word=""):
        self.word = word

    @fl.op(reads="x", adds="rewards: f32[]")
    def judge(self, batch):
        return {"rewards": [4.0] * len(batch)}


@pytest.fixture
def flow():
    flow = fl.Flow(HOSTILE[:25])
    judge = flow.worker(Judge, HOSTILE)

    @flow.program
    def example(steps: int = 2, word: str = "<b>"):
        for step, batch in flow.steps(Numbers(), steps):
            flow.log(step, reward=judge.judge(batch).rewards.mean())

    return flow


def test_hostile_text_is_shown_as_text():
    shown = table([HOSTILE], [[HOSTILE], [3], [0.123456]], title=HOSTILE, note=HOSTILE)
    assert tags(shown) == {"table", "tr", "th", "td", "p", "strong"}
    assert "&lt;script&gt;" in shown and "\\u202e" in shown and "\\x1b[31m" in shown and "\\x00" in shown
    assert len(cell(HOSTILE)) < 300 and "<td>0.1235</td>" in shown


def test_a_batch_shows_its_first_rows():
    batch = fl.Batch.of(12, prompt=[HOSTILE] * 12, **{f"f{i}": [float(i)] * 12 for i in range(13)})
    shown = batch._repr_html_()
    assert shown.count("<tr>") == 11 and "2 more rows" in shown and "more fields: f11, f12" in shown
    assert tags(shown) <= {"table", "tr", "th", "td", "p", "strong"}
    assert "<th>key</th>" in fl.Batch.of([(0,)], x=[1.0])._repr_html_() and fl.Batch.of(0, x=[])._repr_html_()


def test_a_flow_its_graph_and_a_study_show_themselves(flow):
    shown = flow._repr_html_()
    assert "&lt;script&gt;" in shown and "<td>judge</td><td>Judge</td>" in shown and "steps: int = 2" in shown
    assert tags(shown) <= {"table", "tr", "th", "td", "p", "strong"}
    picture = flow.graph()._repr_svg_()
    assert picture.startswith("<svg") and xml.dom.minidom.parseString(picture) and "judge.judge" in picture
    shown = flow.study()._repr_html_()
    assert "judge.judge</td><td>" in shown and "test_html_tables.py:" in shown and "word=&#x27;&lt;b&gt;&#x27;" in shown
    assert "<script" not in shown and "<svg" in shown


def test_a_plan_shows_its_picture():
    plan = fl.Plan(
        {"main": fl.Pool("main", devices=(0, 1))}, {HOSTILE[:25]: fl.Place("main")}, cluster=fl.Cluster.of("cpu:1x2")
    )
    picture = plan._repr_svg_()
    assert xml.dom.minidom.parseString(picture) and "<script" not in picture


def test_a_graph_without_graphviz_shows_its_name(flow, monkeypatch):
    import sys

    graph = flow.graph()
    for name in [n for n in sys.modules if n.startswith("pygraphviz") or "graphviz_positions" in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    assert graph._repr_svg_() is None


def test_a_run_shows_its_last_metrics_and_its_curve(flow, tmp_path):
    run = flow.run(out=tmp_path / "run", quiet=True)
    shown = run._repr_html_()
    assert re.search(r"<td>reward</td><td>4</td>", shown) and "done: " in shown
    assert 'src="data:image/png;base64,' in shown and tags(shown) <= {"table", "tr", "th", "td", "p", "strong", "img"}
