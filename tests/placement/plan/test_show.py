"""Plans as people see them: the table, the picture in letters, and the picture as SVG."""

import json
import time
import xml.etree.ElementTree as ET

import pytest

from flowrl.errors import UsageError
from flowrl.graph.draw.palette import HUES
from flowrl.placement.plan.plan import Plan
from flowrl.placement.plan.plan_file import read
from flowrl.placement.plan.show import FORMATS, picture, render, table

SPLIT = """\
cluster: {device: h100-80, nodes: 2, devices_per_node: 8}
pools:
  train:   {devices: "0-7"}
  rollout: {devices: "8-15"}
  cpu:     {processes: 4}
place:
  actor:
    train:    {pool: train, mesh: {fsdp: 4, tp: 2}, backend: fsdp2}
    generate: {pool: rollout, mesh: {dp: 4, tp: 2}, engine: vllm}
  ref: {pool: train, mesh: {fsdp: 8}}
  reward: {pool: cpu}
pipeline: {staleness: 1, chunks: 4}
"""
LARGE = """\
cluster: h100-80:96x8+l40s:64x4
pools: {train: {devices: 0-511}, rollout: {devices: 512-767}, judges: {devices: 768-893}}
place:
  actor: {train: {mesh: {fsdp: 64, tp: 8}, backend: megatron}, generate: {pool: rollout, engine: vllm}}
  judge: {generate: {pool: judges, engine: sglang}}
"""


def test_the_table_says_who_sits_where():
    assert table(read(SPLIT)) == (
        "cluster: h100-80:2x8, 16 devices in 2 nodes\n"
        "worker  use       pool     devices       mesh         backend  nodes\n"
        "actor   train     train    0-7 h100-80   fsdp=4 tp=2  fsdp2    0\n"
        "actor   generate  rollout  8-15 h100-80  dp=4 tp=2    vllm     1\n"
        "ref     all       train    0-7 h100-80   fsdp=8       hf       0\n"
        "reward  all       cpu      4 processes   -            -        -\n"
        "pipeline: staleness 1, order fifo, publish drain, chunks 4\n"
    )


def test_the_table_lists_workers_of_the_flow_that_have_no_place():
    kinds = {"critic": "Critic", "actor": "CausalLM", "ref": "CausalLM", "reward": "Reward"}
    lines = table(read(SPLIT), kinds).splitlines()
    assert lines[1] == "worker  kind      use       pool     devices       mesh         backend  nodes"
    assert lines[2] == "critic  Critic    all       train    0-7 h100-80   dp=8         hf       0"
    assert [line.split()[0] for line in lines[2:-1]] == ["critic", "actor", "actor", "ref", "reward"]


def test_the_picture_has_devices_as_cells_and_roles_as_letters():
    assert picture(read(SPLIT)) == (
        "                  0   1   2   3   4   5   6   7\n"
        "node 0  h100-80   AC  AC  AC  AC  AC  AC  AC  AC\n"
        "                  8   9   10  11  12  13  14  15\n"
        "node 1  h100-80   B   B   B   B   B   B   B   B\n"
        "cpu  4 processes  D\n"
        "\n"
        "A  actor.train\n"
        "B  actor.generate\n"
        "C  ref\n"
        "D  reward\n"
    )


def test_nodes_that_look_alike_are_drawn_once():
    assert picture(read(LARGE)) == (
        "nodes 0-63 alike  h100-80   A    A    A    A    A    A    A    A\n"
        "nodes 64-95 alike  h100-80  B    B    B    B    B    B    B    B\n"
        "nodes 96-126 alike  l40s    C    C    C    C\n"
        "                            892  893  894  895\n"
        "node 127  l40s              C    C    ·    ·\n"
        "nodes 128-159 alike  l40s   ·    ·    ·    ·\n"
        "\n"
        "A  actor.train\n"
        "B  actor.generate\n"
        "C  judge.generate\n"
        "·  nobody\n"
    )


def test_a_node_with_many_devices_takes_several_lines():
    lines = picture(read("cluster: cpu:1x40\nplace: {w: {}}")).splitlines()
    assert [len(line.split()) for line in lines[:6]] == [16, 3 + 16, 16, 16, 8, 8]


def test_no_plan_is_shown_too():
    assert table(Plan.one_process()).splitlines()[1] == "everybody  all  main  auto     -     hf       -"
    assert picture(Plan.one_process()) == "main  auto  A\n\nA  everybody\n"


def test_colours_are_those_of_the_graph_and_nothing_is_read_from_them_alone():
    plain, painted = picture(read(SPLIT)), picture(read(SPLIT), colour=True)
    codes = [tuple(int(h.edge[i : i + 2], 16) for i in (1, 3, 5)) for h in HUES]
    for hue, letters in enumerate(("AB", "C", "D")):
        code = f"\x1b[30;48;2;{codes[hue][0]};{codes[hue][1]};{codes[hue][2]}m"
        assert all(f"{code}{letter}\x1b[0m" in painted for letter in letters)
        painted = painted.replace(code, "")
    assert painted.replace("\x1b[0m", "") == plain


def test_the_formats():
    plan = read(SPLIT)
    assert render(plan) == f"{table(plan)}\n{picture(plan)}"
    assert json.loads(render(plan, "json")) == plan.to_json()
    with pytest.raises(UsageError) as found:
        render(plan, "svgg")
    assert str(found.value) == ("there is no plan format 'svgg'.\n  have json, svg, text\n  fix  Use --format svg.")


SVG = "{http://www.w3.org/2000/svg}"


def drawn(plan, kinds=None):
    """The SVG, parsed, with its cells as (tip, number of stripes)."""
    root = ET.fromstring(render(plan, "svg", kinds))
    cells = [g for g in root.iter(f"{SVG}g") if g.get("class") == "device"]
    return root, cells


def test_the_svg_has_a_stripe_for_each_role_of_a_device():
    root, cells = drawn(read(SPLIT))
    assert len(cells) == 17, "16 devices, and a wide cell for the processes"
    tips = [c.find(f"{SVG}title").text for c in cells]
    assert (
        tips[3]
        == "device 3: h100-80\nA actor.train · pool train · fsdp=4 tp=2 · fsdp2\nC ref · pool train · fsdp=8 · hf"
    )
    fills = [[r.get("fill") for r in c.iter(f"{SVG}rect")][1:] for c in cells]
    assert fills[0] == [HUES[0].edge, HUES[1].edge]
    assert fills[8] == [HUES[0].edge, "url(#generates)"], "the copy that generates has the worker's colour, hatched"
    assert fills[16] == [HUES[2].edge]
    words = [t.text for t in root.iter(f"{SVG}text")]
    assert {"node 0", "h100-80", "15", "4 processes", "h100-80:2x8, 16 devices"} <= set(words)
    assert "pipeline: staleness 1, order fifo, publish drain, chunks 4" in words


def test_the_svg_stands_alone_and_everything_is_inside():
    for plan in (read(SPLIT), read(LARGE), Plan.one_process(), read("cluster: cpu:2x40")):
        text = render(plan, "svg")
        assert "href" not in text and "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        root = ET.fromstring(text)
        wide, high = float(root.get("width")), float(root.get("height"))
        for r in root.iter(f"{SVG}rect"):
            if r.get("x"):
                assert float(r.get("x")) + float(r.get("width")) <= wide
                assert float(r.get("y")) + float(r.get("height")) <= high
        assert all(float(t.get("y")) < high for t in root.iter(f"{SVG}text"))


def test_the_svg_stays_small_with_a_thousand_devices():
    start = time.perf_counter()
    root, cells = drawn(read(LARGE))
    assert time.perf_counter() - start < 0.5
    assert len(cells) == 8 + 8 + 4 + 4 + 4 and float(root.get("height")) < 700
    assert "devices 0-511" in [t.text for t in root.iter(f"{SVG}text")]


def test_odd_names_do_not_break_it():
    plan = read("pools: {main: {}}\nplace:\n  'w\"<': {pool: main}\n" + "".join(f"  w{i}: {{}}\n" for i in range(60)))
    assert all(render(plan, f) for f in FORMATS)
    _, cells = drawn(plan, {"模型": "<b>"})
    assert "模型" in cells[0].find(f"{SVG}title").text and 'w"<' in cells[0].find(f"{SVG}title").text
    assert "\nA1  w51\n" in picture(plan), "letters go on after z"
