"""Calibration: fits find what a timeline was made from, and say how far off they are on steps they did not see."""

import json
import random

import pytest

from flowrl.errors import PlanError, UsageError
from flowrl.placement.cost.calibrate_run import calibrate
from flowrl.placement.cost.calibrated_costs import Calibrated, Fit
from flowrl.placement.cost.length_distribution import Lengths
from flowrl.placement.cost.work import Role, Work, Workload


def write(folder, lines):
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def line(node, step, seconds, tokens=None, **more):
    where = {"node": node, "step": step, "pool": "main", "start": 10.0 * step, "end": 10.0 * step + seconds}
    return {**where, "rows": 8, "tokens": tokens, **more}


def call(title, tokens, **more):
    return Work(title, title, "generate", Role("actor"), Workload(1, 0, tokens), **more)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Twelve steps; generate takes 0.5 s and 1 ms per token, update 2 s; the first two take ten times as long."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    lines = []
    for step in range(12):
        slow, tokens = 10 if step < 2 else 1, 1000 + 100 * (step % 5)
        lines.append(line("actor.generate", step, slow * (0.5 + 1e-3 * tokens), tokens))
        lines.append(line("actor.update", step, slow * 2.0, 5000))
    write(tmp_path / "run", lines)
    return "run"


def test_a_fit_finds_what_the_timeline_was_made_from(run):
    costs = calibrate(run)
    generate, update = costs.fits["actor.generate"], costs.fits["actor.update"]
    assert (generate.base, generate.per_token) == (pytest.approx(0.5), pytest.approx(1e-3))
    assert (update.base, update.per_token, update.calls) == (2.0, 0.0, 10), "sizes do not vary, warm-up is left out"
    assert costs.error == pytest.approx(0, abs=1e-6) and costs.source == "calibrated: run (error 0.0 %)"
    assert costs.seconds(call("actor.generate", 3000)) == pytest.approx(3.5)
    assert costs.seconds(call("critic.update", 3000)) == 0


def test_the_error_is_told_on_steps_that_were_held_out(tmp_path):
    """Steps 2 to 5 take 1 s and are fitted; steps 6 to 9 take 2 s: off by half, by hand."""
    lines = [line("actor.update", step, 1.0 if step < 6 else 2.0, 100) for step in range(10)]
    costs = calibrate(write(tmp_path, lines))
    fit = costs.fits["actor.update"]
    assert (fit.error, fit.predicted, fit.measured) == (0.5, 1.0, 2.0)
    assert fit.base == 1.5, "the costs themselves know all steps"
    assert costs.error == 0.5 and costs.source.endswith("(error 50.0 %)")


def test_noise_is_in_the_error(tmp_path):
    draw = random.Random(0)
    lines = [line("actor.update", step, draw.uniform(0.9, 1.1), 100) for step in range(102)]
    error = calibrate(write(tmp_path, lines)).error
    assert error is not None and 0.02 < error < 0.08, "the median of |uniform(-0.1, 0.1)| is 0.05"


def test_chunks_of_a_node_are_one_call_and_share_its_cost(tmp_path):
    lines = [line("actor.generate#2", step, 0.5, 50) for step in range(6) for _ in range(4)]
    costs = calibrate(write(tmp_path, lines))
    assert costs.fits["actor.generate"].base == 2.0
    assert costs.seconds(call("actor.generate", 50, share=0.25)) == 0.5


def test_the_program_with_most_ops_is_taken(tmp_path):
    lines = [line("actor.update", step, 9.0, 10, program="warmup") for step in range(4)]
    lines += [line(op, step, 1.0, 10, program="grpo") for step in range(4) for op in ("actor.generate", "actor.update")]
    assert calibrate(write(tmp_path, lines)).fits["actor.update"].base == 1.0


def test_of_programs_with_as_many_ops_the_longest_is_taken(tmp_path):
    lines = [line("actor.update", step, 1.0, 10, program="warmup") for step in range(4)]
    lines += [line("actor.update", step, 3.0, 10, program="grpo") for step in range(4)]
    write(tmp_path, lines)
    assert calibrate(tmp_path).fits["actor.update"].base == 3.0
    assert calibrate(tmp_path, program="warmup").fits["actor.update"].base == 1.0
    with pytest.raises(PlanError, match="has no program 'gpro'") as caught:
        calibrate(tmp_path, program="gpro")
    assert caught.value.fix == "Did you mean 'grpo'?"


def test_lines_without_tokens_give_medians(tmp_path):
    lines = [{"node": "a.b", "step": s, "start": 0.0, "end": float(s)} for s in range(7)]
    fit = calibrate(write(tmp_path, lines)).fits["a.b"]
    assert fit == Fit(4.0, 0.0, error=0.5, predicted=2.5, measured=5.0, calls=5), "2, 3 s predict 4, 5, 6 s"


def test_one_step_has_no_error(tmp_path):
    costs = calibrate(write(tmp_path, [line("a.b", 0, 1.0)]))
    assert costs.fits["a.b"].base == 1.0 and costs.error is None
    assert costs.source.endswith("(error unknown)") and "-" in costs.report()


def test_what_was_saved_is_loaded(run, tmp_path):
    costs = calibrate(run)
    costs.save(tmp_path / "calibrated.yaml")
    loaded = Calibrated.load("calibrated.yaml")
    assert loaded.source == costs.source and loaded.to_json() == costs.to_json()
    work = call("actor.generate", 3000)
    assert loaded.seconds(work) == pytest.approx(costs.seconds(work), rel=1e-5)
    with pytest.raises(PlanError, match=r"costs are given for 'actor\.update'") as caught:
        loaded.check_names(["actor.generate"])
    assert caught.value.at is not None and caught.value.at.file == "calibrated.yaml" and caught.value.at.line > 1
    with pytest.raises(PlanError, match="cannot be written"):
        costs.save("nowhere/calibrated.yaml")


def test_the_report_is_a_table(run):
    assert calibrate(run).report().splitlines() == [
        "op                     calls  predicted s  measured s  error",
        "actor.generate            10          1.7         1.7  0.0 %",
        "actor.update              10            2           2  0.0 %",
        "step (sum of its ops)     10          3.7         3.7  0.0 %",
    ]


def test_a_publish_inside_a_pool_costs_nothing(tmp_path):
    costs = calibrate(write(tmp_path, [line("actor.publish", step, 1.0) for step in range(4)]))
    publish = Work("actor.publish", "actor.publish", "publish", Role("actor"), Workload(0, 0, 0), pool="a")
    assert costs.seconds(publish) == 1.0
    assert costs.seconds(Work(**{**vars(publish), "source_pool": "a"})) == 0


def test_runs_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"run is no folder of a run: it has no timeline\.jsonl\."):
        calibrate("run")
    write(tmp_path, [])
    with pytest.raises(PlanError, match="has no calls to calibrate with"):
        calibrate(".")
    bad = ([0, 2, 3, 0.1], ["1", 2, 3, 0.1], [1, 2, "3", 0.1], [1, -2, 3, 0.1], [1, 2, -3, 0.1], [1, 2, 3])
    bad_passes = [{"passes": passes} for passes in (3, [4], *([each] for each in bad))]
    bad_lines = ['{"node": "a.b"}', "nonsense", "[1]", '{"node": "a", "step": 0, "start": 2, "end": 1}']
    for bad in (*bad_lines, *(json.dumps(line("a.b", 0, 1.0, **passes)) for passes in bad_passes)):
        (tmp_path / "timeline.jsonl").write_text(json.dumps(line("a.b", 0, 1.0)) + "\n" + bad + "\n")
        with pytest.raises(PlanError, match="a line of the timeline is no call") as caught:
            calibrate(".")
        assert caught.value.at is not None and caught.value.at.line == 2


def test_a_last_line_that_a_crash_cut_off_is_left_out(tmp_path):
    write(tmp_path, [line("a.b", step, 1.0) for step in range(3)])
    with (tmp_path / "timeline.jsonl").open("a") as file:
        file.write('{"node": "a.b", "st')
    assert calibrate(tmp_path).fits["a.b"].calls == 2, "three steps, of which one is warm-up where two must stay"


def test_a_run_tells_how_fast_its_engine_is(tmp_path, monkeypatch):
    """A step takes 10 ms and 1 ms for each row; what ran beside another call says nothing of that."""
    monkeypatch.chdir(tmp_path)
    chance, lines = random.Random(3), []
    for step in range(14):
        sizes = [1 + chance.randrange(80) for _ in range(8)]
        said = {"tokens": 40 + sum(sizes), "prompt": 40, "longest": max(sizes), "context": 0}
        seconds = 1e-2 * max(sizes) + 1e-3 * sum(sizes)
        lines.append(line("actor.generate", step, seconds, program="grpo", **said))
        other = {"program": "grpo", **said, "pool": "other"}  # two calls at once
        lines += [line("judge.generate", step, 9.0, **other), line("judge.generate", step, 7.0, **other)]
    costs = calibrate(write(tmp_path, lines))
    assert list(costs.curves) == ["actor.generate"]
    assert "actor.generate, engine: a token of all rows 1e+04 us, each row in it 1e+03 us (12 calls; 0.0 % off" in (
        costs.report()
    )
    costs.save("costs.yaml")
    for known in (costs, Calibrated.load("costs.yaml")):
        lengths = Lengths(5, 64, "uniform", (10, 60))
        load = Workload(4, 5, lengths.mean, 60, lengths)
        work = Work("actor.generate", "actor.generate", "generate", Role("actor"), load)
        engine = known.engine(work)
        assert engine is not None and engine.step(7) == pytest.approx(1.7e-2)
        expected = 1e-2 * lengths.spread(4)[-1] + 1e-3 * sum(lengths.spread(4))
        assert known.seconds(work) == pytest.approx(expected, rel=1e-4)
    assert costs.engine(call("actor.generate", 100)) is None, "of rows whose lengths nobody has said"


def test_passes_that_a_run_has_told_are_in_the_curve_of_its_engine(tmp_path, monkeypatch):
    """Calls are all alike, and passes of 1, 6 and 40 rows take 2 ms and 0.1 ms a row; those of a first step are not used."""
    monkeypatch.chdir(tmp_path)
    lines = []
    for step in range(9):
        passes = [
            [n, n * rows, 0, n * (2e-3 + 1e-4 * rows) * (1 if step else 50)] for n, rows in ((9, 1), (4, 6), (7, 40))
        ]
        said = {"tokens": 40 + 320, "prompt": 40, "longest": 20, "context": 0, "passes": passes}
        lines.append(line("actor.generate", step, 0.3, program="grpo", **said))
    curve = calibrate(write(tmp_path, lines)).curves["actor.generate"]
    assert (curve.step, curve.row) == (pytest.approx(2e-3), pytest.approx(1e-4))
    assert curve.call == pytest.approx(0.3 - 20 * 2e-3 - 320 * 1e-4)


def test_leaving_a_memory_and_coming_back_have_costs_of_their_own(tmp_path):
    """A worker that leaves twice in a step does so twice: a move is not the sum of them."""
    lines = []
    for step in range(8):
        lines.append(line("actor.update", step, 2.0, 100))
        for again in (0.0, 5.0):
            moved = line("actor.train.offload", step, 0.3)
            lines.append({**moved, "start": moved["start"] + again, "end": moved["end"] + again})
        lines.append(line("actor.generate.onload", step, 0.2))
    costs = calibrate(write(tmp_path, lines))

    def move(title, what):
        return costs.seconds(Work(title, title, what, Role("actor"), Workload(0, 0, 0), moved=1e9))

    assert move("actor.train.offload", "offload") == pytest.approx(0.3)
    assert move("actor.generate.onload", "onload") == pytest.approx(0.2)
    assert move("actor.train.onload", "onload") == 0, "which the run did not have"
    assert costs.step.measured == pytest.approx(2.0 + 2 * 0.3 + 0.2)
    costs.save(tmp_path / "costs.yaml")
    assert Calibrated.load(tmp_path / "costs.yaml").fits.keys() == costs.fits.keys()
