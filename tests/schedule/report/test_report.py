"""Simulations as tables, JSON, pages and traces: what is told, how it is aligned, what strange names do."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import EVIL, hostile, many, nothing, overlapping, ppo, tiny, turns

from flowrl.errors import UsageError
from flowrl.graph.draw.palette import HUES
from flowrl.schedule.report import FORMATS, render
from flowrl.schedule.report.figures import cut, duration, lanes, looks, percent, printable, room, totals, volume
from flowrl.schedule.simulation import Bar, Simulation

SAMPLES = {
    "ppo": ppo(3, staleness=1),
    "overlapping": overlapping(12),
    "turns": turns(3),
    "hostile": hostile(),
    "tiny": tiny(),
    "nothing": nothing(),
}

PPO = """\
ppo: 3 steps in 24.3 s, a steady step takes 5.9 s
  costs      given: costs.yaml
  staleness  1
  lag        mean 0.667, max 1; prompt groups by lag 0: 8, 1: 16

pool     has                       busy    idle  waited for
train    devices 0-7 (h100-80)   65.4 %  34.6 %  actor.generate 7.9 s, the end 500 ms
rollout  devices 8-15 (h100-80)  80.2 %  19.8 %  actor.update 4.8 s
cpu      4 processes             12.3 %  87.7 %  actor.generate 16.5 s, the end 4.8 s

node            pool     calls  mean s  total s  of pool
actor.update    train        3   2.200     6.60   27.2 %
ref.logprobs    train        3   1.200     3.60   14.8 %
critic.update   train        3   1.100     3.30   13.6 %
critic.values   train        3   0.800     2.40    9.9 %
actor.generate  rollout      3   6.000    18.00   74.1 %
actor.publish   rollout      3   0.500     1.50    6.2 %
reward.score    cpu          3   1.000     3.00   12.3 %

edge                            bytes of a step  transport
actor.update -> actor.generate           141 GB  nccl
actor.generate -> reward.score          33.1 MB  memory

assumed
  - not (float(kl) > 0.2)   algorithms/ppo.py:31

notes
  - tokens of a prompt: 512 (assumed); of a response: 800
"""


# -- formats ----------------------------------------------------------------------------------------------------------


def test_an_unknown_format_names_the_near_one():
    with pytest.raises(UsageError) as error:
        render(SAMPLES["ppo"], "tabel")
    assert str(error.value) == (
        "there is no format 'tabel' of a simulation.\n  have table, json, html, trace\n  fix  Use --format table."
    )


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_tells_every_simulation_and_ends_with_a_line_break(name, format):
    shown = render(SAMPLES[name], format)
    assert shown.endswith("\n") and not shown.endswith("\n\n")
    assert shown == render(SAMPLES[name], format)


def test_json_is_the_record_with_a_line_per_span():
    simulation = SAMPLES["ppo"]
    shown = render(simulation, "json")
    assert json.loads(shown) == json.loads(json.dumps(simulation.to_json()))
    assert len([line for line in shown.splitlines() if '"node"' in line]) == len(simulation.bars)
    assert json.loads(render(SAMPLES["nothing"], "json"))["spans"] == []


# -- tables -----------------------------------------------------------------------------------------------------------


def test_the_tables_of_a_small_run():
    assert render(SAMPLES["ppo"], "table") == PPO


@pytest.mark.parametrize("name", SAMPLES)
def test_a_table_fits_100_columns_and_has_no_control_characters(name):
    for line in render(SAMPLES[name], "table").splitlines():
        assert room(line) <= 100, line
        assert line == line.rstrip() and line.isprintable(), line


def test_memory_is_told_where_it_is_known():
    shown = render(SAMPLES["turns"], "table")
    assert re.search(r"memory of +peak +device has +of it +first at\ngpu +60 GB +80 GB +75\.0 % +7\.7 s", shown)
    assert "memory" not in render(replace(SAMPLES["ppo"], edges=()), "table")


def test_reasons_beyond_three_are_summed():
    pool = SAMPLES["ppo"].pools[0]
    idle = {"b.go": 3.0, "a.go": 5.0, "c.go": 2.0, "d.go": 1.0, "e.go": 0.25}
    shown = render(replace(SAMPLES["ppo"], pools=(replace(pool, idle=idle),)), "table")
    assert "a.go 5 s, b.go 3 s, c.go 2 s," in shown and "others 1.25 s" in shown


def test_a_table_of_microseconds_counts_in_them():
    assert "a.go  here      1    1.000     1.000   50.0 %" in render(SAMPLES["tiny"], "table")
    assert "mean µs" in render(SAMPLES["tiny"], "table")


def test_a_program_without_calls_has_no_empty_tables():
    shown = render(SAMPLES["nothing"], "table")
    assert "node" not in shown and "no rows were trained on" in shown and "steady" not in shown


# -- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_bars_of_a_row_do_not_overlap_and_all_bars_are_in_one(name):
    simulation = SAMPLES[name]
    seen: list[int] = []
    for lane in lanes(simulation):
        for row in lane.rows:
            seen.extend(row)
            bars = [simulation.bars[i] for i in row]
            assert all(bar.pool == lane.pool.name for bar in bars)
            assert all(a.end <= b.start + 1e-9 * simulation.makespan for a, b in pairwise(bars))
    assert sorted(seen) == list(range(len(simulation.bars)))


def test_rollouts_side_by_side_take_rows_and_a_pool_of_turns_one():
    assert [len(lane.rows) for lane in lanes(SAMPLES["turns"])] == [1, 1]
    train, rollout, cpu = lanes(SAMPLES["overlapping"])
    assert len(train.rows) == 1 and len(rollout.rows) > 2 and len(cpu.rows) == 1


def test_pieces_are_one_call_and_overlap_is_time_once():
    first = (Bar("a.go", 0, "p", 0, 2, call=7), Bar("a.go", 0, "p", 1, 3, chunk=1, call=7))
    bars = (*first, Bar("a.go", 1, "p", 5, 6, call=8))
    (total,) = totals(Simulation("x", 2, 10.0, 5.0, bars, (), {}, ""))
    assert (total.count, total.seconds, total.share, total.mean) == (2, 4, 0.4, 2)


def test_colours_are_those_of_the_graph():
    found = looks(SAMPLES["ppo"])
    assert found["actor.generate"].fill == HUES[0].edge and found["ref.logprobs"].fill == HUES[1].edge
    assert found["critic.values"].fill == HUES[2].edge and found["reward.score"].fill == HUES[3].edge
    assert found["actor.publish"].move and not found["actor.update"].move
    assert len({look.fill for node, look in found.items() if not look.move}) == len(found) - 1
    for look in found.values():
        assert look.move or _contrast(look.fill, look.ink) > 4.5, look


def _contrast(a: str, b: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (5e-10, "0.5 ns"),
        (1e-6, "1 µs"),
        (0.00035, "350 µs"),
        (0.99949, "999 ms"),
        (0.9996, "1 s"),
        (6.5, "6.5 s"),
        (999.4, "999 s"),
        (1000, "16 min 40 s"),
        (7199.6, "2 h 0 min"),
        (9960, "2 h 46 min"),
        (1e6, "11 d 14 h"),
        (-2, "-2 s"),
    ],
)
def test_durations_read_well_at_every_scale(seconds, said):
    assert duration(seconds) == said


@given(st.floats(1e-9, 1e9))
def test_a_duration_is_never_an_exponent(seconds):
    assert re.fullmatch(r"[\d.]+ (ns|µs|ms|s)|\d+ (min|h|d) \d+ (s|min|h)", duration(seconds))


def test_other_words():
    assert [volume(v) for v in (0, 812, 33.1e6, 1.52e9, 141e9, 2.5e12)] == [
        "0 B",
        "812 B",
        "33.1 MB",
        "1.52 GB",
        "141 GB",
        "2.5 TB",
    ]
    assert percent(0.5) == "50.0 %" and printable("a\n\x1b") == "a\\n\\x1b"
    assert room("日本") == 4 and cut("日本語", 5) == "日本…" and cut("short", 5) == "short"


# -- trace ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_a_trace_has_a_thread_per_row_and_bars_in_microseconds(name):
    simulation = SAMPLES[name]
    trace = json.loads(render(simulation, "trace"))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = [e for e in events if e["ph"] == "X"]
    found = sorted((e["name"], e["ts"], e["dur"], e["args"]["step"], e["args"]["because"]) for e in bars)
    wanted = [(b.node, b.start * 1e6, (b.end - b.start) * 1e6, b.step, b.because) for b in simulation.bars]
    for one, other in zip(found, sorted(wanted), strict=True):
        assert one[0] == other[0] and one[3:] == other[3:]
        assert one[1:3] == pytest.approx(other[1:3], abs=2e-3, rel=1e-9)
    assert {re.sub(r" \(\d+\)$", "", names[e["tid"]]) for e in bars} == {b.pool for b in simulation.bars}
    by_thread = defaultdict(list)
    for event in bars:
        by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        assert all(a[1] <= b[0] + 2e-3 for a, b in pairwise(sorted(spans)))
    assert trace["otherData"]["cost_source"] == simulation.cost_source


def test_arrows_come_in_pairs_from_the_end_of_one_bar_to_the_start_of_another():
    events = json.loads(render(SAMPLES["ppo"], "trace"))["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) > 6
    bars = [e for e in events if e["ph"] == "X"]
    for id, start in starts.items():
        (cause,) = [b for b in bars if b["tid"] == start["tid"] and b["ts"] <= start["ts"] < b["ts"] + b["dur"]]
        (bar,) = [b for b in bars if b["tid"] == ends[id]["tid"] and b["ts"] == ends[id]["ts"]]
        assert bar["args"]["because"] == cause["name"] == start["name"] and bar["tid"] != cause["tid"]
        assert bar["ts"] == pytest.approx(cause["ts"] + cause["dur"], abs=2e-3)


def test_memory_is_a_counter():
    simulation = SAMPLES["turns"]
    counters = [e for e in json.loads(render(simulation, "trace"))["traceEvents"] if e["ph"] == "C"]
    assert [(e["ts"], e["args"]["GB"]) for e in counters] == [
        (pytest.approx(at * 1e6), size / 1e9) for at, size in simulation.pools[0].memory
    ]
    assert {e["name"] for e in counters} == {"memory of gpu"}


# -- the page without a browser ---------------------------------------------------------------------------------------


def test_the_page_fetches_nothing_and_holds_all_bars():
    page = render(SAMPLES["ppo"], "html")
    assert not re.search(r"https?://|<link[^>]+stylesheet|<script[^>]+src|@import|\bfetch\(", page)
    assert "default-src 'none'" in page
    record = _record(page)
    assert len(record["bars"]["start"]) == len(SAMPLES["ppo"].bars)
    assert [p["name"] for p in record["pools"]] == ["train", "rollout", "cpu"]
    assert all(len(column) == len(record["bars"]["start"]) for column in record["bars"].values())


def test_the_page_tells_its_summary_without_a_script():
    page = re.sub(r"<script.*?</script>", "", render(SAMPLES["ppo"], "html"), flags=re.S)
    for said in ("given: costs.yaml", "5.9 s", "0.667 mean, 1 max", "algorithms/ppo.py:31", "141 GB", "74.1 %"):
        assert said in page, said


def test_hostile_names_stay_text_on_the_page():
    page = render(SAMPLES["hostile"], "html")
    assert "<img" not in page and "\x1b" not in page and page.count("</script>") == 2
    assert _record(page)["nodes"][0]["id"] == printable(EVIL)


def _record(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="record">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def test_a_hundred_thousand_bars_are_told_in_seconds():
    simulation = many(100_000)
    assert len(render(simulation, "html")) < 8e6
    assert render(simulation, "table").count("\n") < 60
