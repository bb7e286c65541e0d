"""The flow: names of workers, what is logged, other models, and running without a command line."""

import json

import pytest

import flowrl as fl
from flowrl.errors import CheckError, ProgramError, UsageError, WorkerError
from flowrl.graph.ops.field_types import FieldType


class Counter(fl.Worker):
    """Counts."""

    keeps = ("total",)

    def __init__(self, start: int = 0):
        self.total = start

    @fl.op(updates="total")
    def add(self, amount: int = 1) -> fl.Metrics:
        self.total += amount
        return fl.Metrics(total=self.total)

    @fl.op(cost="local")
    def now(self) -> float:
        return float(self.total)


flow = fl.Flow("count")
counter = flow.worker(Counter, 3)
other = flow.worker(Counter, start=10, name="second")


@flow.program
def count(times: int = 2, by: int = 1):
    for step in range(times):
        first = counter.add(by)
        flow.log(step, first, counter.add(by), other.add(), now=counter.now() * 2)


class Numbers:
    """A source of one number per row."""

    tokenizer = staticmethod(lambda: None)

    def schema(self):
        return {"x": FieldType("f32")}

    def cursor(self):
        return self

    def draw(self, rows):
        return [{"x": 1.0}] * (rows or 3)

    def to_batch(self, rows, first_uid, tokenizer):
        return fl.Batch.of([(first_uid + i,) for i in range(len(rows))], x=[row["x"] for row in rows])

    def state(self):
        return {}


@flow.program
def left(limit: float = 2.0):
    """Leaves a loop in the middle of a step, and goes on with another."""
    for step, batch in flow.steps(Numbers(), 5):
        flow.log(step, rows=batch.count())
        if counter.add().total > limit:
            break
    flow.log(step, after=counter.now())
    for step, batch in flow.steps(Numbers(), 2):
        flow.log(step, more=batch.concat(flow.more(2)).count())


@flow.program
def until(limit: int):
    step = 0
    while counter.now() < limit:
        counter.add(2)
        step += 1
    flow.log(step, other.add(0), now=counter.now())


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_a_flow_runs_without_a_command_line(tmp_path, runtime):
    outcome = flow.run(out=tmp_path / "run", runtime=runtime, parameters={"count": {"times": 1, "by": 5}}, quiet=True)
    assert outcome.status == "done"
    [line] = lines(tmp_path / "run")
    logged = {k: line[k] for k in ("counter/total", "counter_2/total", "second/total", "now")}
    assert logged == {"counter/total": 8, "counter_2/total": 13, "second/total": 11, "now": 26.0}


def test_a_loop_may_be_left_in_the_middle_of_a_step(tmp_path):
    flow.run("left", out=tmp_path / "run", parameters={"left": {"limit": 4.5}}, quiet=True)
    kept = [
        {k: v for k, v in line.items() if k in ("step", "rows", "after", "more")} for line in lines(tmp_path / "run")
    ]
    assert kept == [
        {"step": 0, "rows": 3},
        {"step": 1, "rows": 3, "after": 5.0},
        {"step": 0, "more": 5},
        {"step": 1, "more": 5},
    ]


def test_programs_share_workers(tmp_path):
    parameters = {"count": {"times": 1}, "until": {"limit": 9}}
    flow.run("count", "until", out=tmp_path / "run", parameters=parameters, quiet=True)
    first, second = lines(tmp_path / "run")
    assert first["counter_2/total"] == 5 and second["now"] == 9.0 and second["total"] == 11
    assert (first["program"], second["program"], second["step"]) == ("count", "until", 2)


def test_findings_stop_a_run_before_anything_is_made(tmp_path):
    wrong = fl.Flow("wrong")
    worker = wrong.worker(Counter, name="worker")

    @wrong.program
    def wrong_program():
        worker.add(amuont=3)

    with pytest.raises(CheckError, match="1 error found before anything was loaded") as found:
        wrong.run("wrong_program", out=tmp_path / "run")
    assert "Write amount= for amuont=." in found.value.report()
    assert not (tmp_path / "run").exists()


def test_a_workers_name_is_that_of_its_variable():
    assert (counter.name, other.name) == ("counter", "second")
    assert repr(counter) == "<Counter 'counter'>"
    assert fl.Flow("x").worker(Counter).name == "counter", "without a variable: the name of its class"


def test_a_handle_says_what_it_offers():
    with pytest.raises(ProgramError, match=r"counter.ad is not there; the ops of Counter are add, now."):
        _ = counter.ad
    with pytest.raises(ProgramError, match=r"counter.total is not there"):
        _ = counter.total
    with pytest.raises(ProgramError, match=r"counter.state is no op: it can be called on its rank only"):
        _ = counter.state
    with pytest.raises(ProgramError, match=r"counter.add was called outside of a program."):
        counter.add()
    assert not hasattr(counter, "nothing")


def test_constructor_arguments_are_looked_at_at_once():
    with pytest.raises(WorkerError, match="Write start= for strat="):
        flow.worker(Counter, strat=3)
    with pytest.raises(WorkerError, match="takes a worker class, and was given int 3"):
        flow.worker(3)
    with pytest.raises(WorkerError, match="the class list"):
        flow.worker(list)
    assert [h.name for h in flow.handles] == ["counter", "second"], "a worker that was refused is none"


def test_programs_are_found_by_name():
    assert flow.find_program(None).name == flow.find_program("count").name == "count"
    with pytest.raises(UsageError, match="flow 'count' has no program 'cuont'"):
        flow.find_program("cuont")
    lone = fl.Flow("somebody")

    @lone.program
    def only(): ...

    assert lone.default_program() == "only"


def test_a_program_is_named_like_its_function_and_its_parameters_have_names():
    with pytest.raises(ProgramError, match="a program is named like its function") as refused:
        fl.Flow("named").program("warmup")
    assert refused.value.at.file == __file__ and "without a name" in refused.value.fix

    def extras(steps: int = 2, *extra, **more): ...

    with pytest.raises(ProgramError, match=r"program 'extras' takes '\*extra'") as refused:
        fl.Flow("extras").program(extras)
    assert refused.value.fix.startswith("Name each parameter, with a default")


def test_a_program_is_not_called():
    with pytest.raises(ProgramError, match="program 'count' was called like a function"):
        count()


@pytest.mark.parametrize("what", ["steps", "more", "take", "log"])
def test_the_language_is_for_programs(what):
    with pytest.raises(ProgramError, match=rf"flow.{what} was called outside of a program."):
        getattr(flow, what)(1)


def test_a_trace_is_made_once_per_set_of_parameters():
    assert flow.trace("count", times=3) is flow.trace("count", times=3)
    assert flow.trace("count", times=3) is not flow.trace("count", times=4)


def test_main_does_nothing_where_the_script_is_imported():
    assert flow.main() is None


def test_parameters_of_a_program_are_keywords_of_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = flow.run(times=1, by=5, quiet=True)
    assert outcome.out.parts[0] == "runs" and outcome.out.name.startswith("count-")
    assert [line["counter_2/total"] for line in lines(outcome.out)] == [13]
    flow.run("count", "until", times=1, limit=9, out="both", quiet=True)
    assert [line["program"] for line in lines(tmp_path / "both")] == ["count", "until"]


@pytest.mark.parametrize(
    ("programs", "given", "what", "fix"),
    [
        ((), {"tmes": 1}, "flow.run(tmes=...): neither flow.run nor program 'count' has it.", "Did you mean 'times'?"),
        ((), {"resum": True}, "neither flow.run nor program 'count' has it.", "Did you mean 'resume'?"),
        (("count", "until"), {"zzz": 1}, "neither flow.run nor program 'count' or 'until' has it.", None),
        (
            ("left", "until"),
            {"limit": 3},
            "flow.run(limit=...): programs 'left', 'until' have it.",
            'Write parameters={"left": {"limit": ...}}.',
        ),
        (
            (),
            {"times": 3, "parameters": {"count": {"times": 2}}},
            "flow.run(times=...): parameters= gives it to 'count' too.",
            "Give it once.",
        ),
        (
            (),
            {"parameters": {"left": {"limit": 2.0}}},
            "parameters= names 'left', which is none of the programs that are run.",
            "Run it too: flow.run('count', 'left', ...).",
        ),
    ],
)
def test_keywords_of_run_that_are_nothing_here(tmp_path, programs, given, what, fix):
    with pytest.raises(UsageError) as found:
        flow.run(*programs, out=tmp_path / "run", **given)
    assert found.value.what.endswith(what) and found.value.fix == fix
    assert found.value.at is not None and found.value.at.file == __file__
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "value", "what", "fix"),
    [
        ("runtime", "rays", "runtime='rays' is none of local, eager, ray.", 'Write runtime="ray".'),
        ("checkpoint_every", 0, "checkpoint_every=0 is not a whole number of at least 1.", None),
        ("trajectories", -1, "trajectories=-1 is not a whole number of at least 0.", None),
        ("trajectories_every", 2.5, "trajectories_every=2.5 is not a whole number of at least 1.", None),
        ("seed", "7", "seed='7' is not a whole number.", "Write seed=7."),
        ("quiet", "yes", "quiet='yes' is not True or False.", None),
    ],
)
def test_options_of_run_that_mean_nothing(tmp_path, option, value, what, fix):
    with pytest.raises(UsageError) as found:
        flow.run(out=tmp_path / "run", times=1, **{option: value})
    assert found.value.what == f"flow.run: {what}" and found.value.at.file == __file__
    assert fix is None or found.value.fix == fix
    assert not (tmp_path / "run").exists()


def test_a_plan_without_a_name_is_none(tmp_path):
    with pytest.raises(UsageError, match="The plan has an empty name"):
        flow.run(out=tmp_path / "run", times=1, plan="")


@pytest.mark.parametrize("runtime", ["local", "eager"])
def test_an_address_of_ray_is_for_the_runtime_ray(tmp_path, runtime):
    with pytest.raises(UsageError) as found:
        flow.run(out=tmp_path / "run", times=1, runtime=runtime, address="10.0.0.1:6379")
    assert found.value.what == f"--address 10.0.0.1:6379 is for --runtime ray, and the runtime is {runtime}."
    assert found.value.fix == 'Add --runtime ray (runtime="ray" in Python), or leave the address out.'
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("drawn", "what"),
    [
        (lambda f, source: f.more(0), "flow.more: count=0 is not a whole number of at least 1."),
        (lambda f, source: f.more(source), "flow.more: count=<"),
        (lambda f, source: f.take(source, 0), "flow.take: count=0 is not a whole number of at least 1, or None."),
        (lambda f, source: f.take(source, "8"), "flow.take: count='8' is not a whole number of at least 1, or None."),
        (lambda f, source: f.take(8, source), "flow.take(source, count) takes a source of data, and was given int 8."),
        (lambda f, source: f.steps(source, -3), "flow.steps: steps=-3 is not a whole number of at least 0, or None."),
    ],
)
def test_rows_are_drawn_by_whole_numbers(drawn, what):
    own = fl.Flow("drawn")
    source = fl.data.rows([{"prompt": "a"}], batch=1)

    @own.program
    def drawn_rows(steps: int = 1):
        for _step, _batch in own.steps(source, steps):
            drawn(own, source)

    assert any(error.what.startswith(what) for error in own.check().errors)


def test_as_many_rows_as_the_program_computes_are_drawn():
    own = fl.Flow("drawn")
    source = fl.data.rows([{"prompt": "a"}], batch=1)

    @own.program
    def drawn_rows(steps: int = 1):
        for _step, batch in own.steps(source, steps):
            own.more(len(batch.concat(own.take(source, 2))) + 1)

    assert own.check().errors == ()
