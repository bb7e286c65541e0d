"""What a plan names and this machine lacks is told with the line of the plan, before a model is opened."""

import threading
from importlib import metadata

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.backends.vllm import versions
from flowrl.errors import ModelError, PlanError

opened = threading.Event()


def build_tokenizer():
    opened.set()
    raise AssertionError("a model was opened")


flow = fl.Flow("train")
actor = flow.worker(fl.Actor, model=fl.Model(config={"model_type": "qwen2"}, tokenizer=build_tokenizer))
judge = flow.worker(fl.FunctionReward, lambda response: float(len(response)))
source = fl.data.rows([{"prompt": "1+2="}], batch=1)


@flow.program
def train(steps: int = 1):
    for step, batch in flow.steps(source, steps):
        batch = rl.group_advantages(judge.score(actor.generate(batch, n=2)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))


def refused(tmp_path, plan: str, **how) -> PlanError:
    """What a run under a plan is refused with."""
    file = tmp_path / "plan.yaml"
    file.write_text(plan)
    with pytest.raises(PlanError) as error:
        flow.run(out=tmp_path / "run", plan=file, quiet=True, **how)
    assert error.value.at is not None and error.value.at.file == str(file)
    assert not opened.is_set() and not (tmp_path / "run").exists()
    return error.value


def test_a_device_that_is_not_there(tmp_path):
    error = refused(
        tmp_path, 'pools:\n  cpu: {device: cpu}\n  main: {device: "cuda:99"}\nplace: {actor: {pool: main}}\n'
    )
    assert error.what.startswith("pool 'main': The device 'cuda:99' was asked for, but torch finds ")
    assert error.at.line == 3 and error.at.text == 'main: {device: "cuda:99"}'
    assert "Write main: {device: auto}" in error.fix and "device=" not in error.fix


def test_a_device_of_a_worker_without_a_model_is_not_asked_for(tmp_path):
    plan = 'pools:\n  main: {device: "cuda:98"}\n  other: {device: "cuda:99"}\nplace:\n  judge: {pool: other}\n'
    assert refused(tmp_path, plan).at.line == 2


SPLIT = "pools: {train: {device: cpu}, rollout: {device: cpu}}\nplace:\n  actor:\n    train: {pool: train}\n"


@pytest.fixture
def no_vllm(monkeypatch):
    """No vLLM is installed."""
    there = metadata.version

    def version(name: str) -> str:
        if name in versions.PACKAGES:
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "version", version)


def test_an_engine_that_is_not_installed(tmp_path, no_vllm):
    error = refused(tmp_path, SPLIT + "    generate: {pool: rollout, engine: vllm}\n")
    assert error.what == "actor.generate: The engine 'vllm' needs vLLM, which is not installed."
    assert error.at.line == 5 and "engine: hf" in error.fix
    error = refused(tmp_path, SPLIT + "    generate: {pool: rollout, engine: sglang, python: /nowhere/python}\n")
    assert (
        error.what.startswith("actor.generate: The engine 'sglang' needs a Python with SGLang") and error.at.line == 5
    )


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_other_machines_may_have_the_engine(tmp_path, no_vllm, address, monkeypatch):
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    plan = SPLIT.replace("device: cpu", "processes: 1") + "    generate: {pool: rollout, engine: vllm}\n"
    if address is None:
        assert refused(tmp_path, plan, runtime="ray").at.line == 5
        return

    def run(self):
        raise ModelError("the run begins")

    monkeypatch.setattr("flowrl.runtime.driver.runner.Runner.run", run)
    (tmp_path / "plan.yaml").write_text(plan)
    with pytest.raises(ModelError, match="the run begins"):
        flow.run(out=tmp_path / "run", plan=tmp_path / "plan.yaml", quiet=True, runtime="ray", address=address)
