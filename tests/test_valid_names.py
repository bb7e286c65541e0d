"""Names of workers become files, options and actors: what cannot be one is refused where it is declared."""

import pytest

import flowrl as fl
from flowrl.errors import PlanError, WorkerError
from flowrl.placement.plan.plan import Plan, Pool
from flowrl.placement.plan.plan_file import load


def exact(response: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../../x", "has characters that"),
        ("a/b", "has characters that"),
        ("a\\b", "has characters that"),
        ("a.b", "has characters that"),
        ("a b", "has characters that"),
        ("-rf", "has characters that"),
        ("1st", "has characters that"),
        ("a\0b", "has characters that"),
        ("a\nb", "has characters that"),
        ("\ud800", "has characters that"),
        ("", "is empty"),
        ("x" * 65, "has 65 characters"),
        ("con", "is the name of a device"),
        ("NUL", "is the name of a device"),
        ("com1", "is the name of a device"),
        ("judge\n", "has characters that"),
        ("..", "has characters that"),
        (3, "is no text"),
    ],
)
def test_what_can_be_no_file_is_refused_at_its_line(name, why):
    with pytest.raises(WorkerError, match=why) as error:
        fl.Flow("f").worker(fl.FunctionReward, exact, name=name)
    assert error.value.at.file == __file__ and error.value.fix.startswith("Use letters")
    error.value.report().encode()  # any terminal can show it


@pytest.mark.parametrize("name", ["judge", "judge-2", "_judge", "Judge", "richter_ä", "x" * 64])
def test_other_names_are_fine(name):
    assert fl.Flow("f").worker(fl.FunctionReward, exact, name=name).name == name


def test_names_that_differ_in_case_alone_are_one_file_on_some_systems():
    flow = fl.Flow("f")
    actor = flow.worker(fl.Actor, fl.Model(config={"model_type": "qwen2"}), name="actor")
    first, second = (flow.worker(fl.FunctionReward, exact, name=n) for n in ("judge", "Judge"))

    @flow.program
    def f(steps: int = 1):
        for step, batch in flow.steps(fl.data.rows([{"prompt": "a"}]), steps):
            batch = first.score(actor.generate(batch))
            flow.log(step, a=batch.rewards.mean(), b=second.score(batch, into={"rewards": "b"}).b.mean())

    [error] = [e for e in flow.check().errors if isinstance(e, WorkerError)]
    assert "a worker is called 'Judge', as is the one at line" in error.what and "but for its case" in error.what


def test_workers_that_a_loop_makes_under_one_name_are_told_once():
    flow = fl.Flow("f")
    judges = [flow.worker(fl.FunctionReward, exact, name="judge") for _ in range(3)]

    @flow.program
    def f(steps: int = 1):
        for step, batch in flow.steps(fl.data.rows([{"prompt": "a"}]), steps):
            flow.log(step, rows=batch.count(), judges=len(judges))

    [error] = [e for e in flow.check().errors if isinstance(e, WorkerError)]
    assert error.what == "several workers of this line are called 'judge'."
    assert error.fix == 'Give each its own name: flow.worker(..., name=f"judge_{i}").'


@pytest.mark.parametrize("name", ["../../x", "a.b", "a b", "\ud800", "nul", "x" * 65])
def test_pools_are_files_and_actors_too(name, tmp_path):
    with pytest.raises(PlanError, match="the name of pool") as error:
        Plan({name: Pool(name, device="cpu")})
    error.value.report().encode()
    if name.isprintable():
        file = tmp_path / "plan.yaml"
        file.write_text(f'pools: {{"{name}": {{device: cpu}}}}\n')
        with pytest.raises(PlanError, match="the name of pool") as error:
            load(file)
        assert error.value.at.file == str(file)


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a b", "\ud800", "x\0"])
def test_a_run_lies_below_runs_whatever_its_flow_is_called(name):
    folder = fl.Flow(name).new_folder()
    assert len(folder.parts) == 2 and folder.parts[0] == "runs"
    bytes(folder)
