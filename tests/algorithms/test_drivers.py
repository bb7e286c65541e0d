"""The driver scripts: short, right, the same in every runtime and on plain workers, and continued after any end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.analysis.run_difference import CLOCKED
from flowrl.backends.hf.engine import HFEngine
from flowrl.batch import CallInfo
from flowrl.errors import RunError
from flowrl.placement.plan.plan import Place, Plan

pytestmark = pytest.mark.usefixtures("one_thread", "drivers_path")

ROOT = Path(__file__).parents[2]
DRIVERS = ("grpo", "ppo", "sft")
FEW = {
    "grpo": {"steps": 3, "prompts_per_step": 4, "group_size": 4},
    "ppo": {"steps": 3, "prompts_per_step": 16},
    "sft": {"steps": 3, "rows": 16},
}


@pytest.fixture(scope="module")
def arithmetic():
    from tasks import arithmetic

    return arithmetic


@pytest.fixture(scope="module")
def model(small_model):
    return small_model


@pytest.fixture
def load(load_driver):
    return load_driver


def metrics(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.split("/")[-1] not in CLOCKED} for line in lines]


def run(flow, out, **how):
    name = flow.name
    return flow.run(out=out, quiet=True, save_models=False, parameters={name: FEW[name]}, **how)


# -- what they are ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_and_its_other_programs_have_no_findings(load, name):
    flow = load(name)
    for program in flow.programs:
        report = flow.check(program)
        assert not report.errors and not report.lints, report.text()


def test_each_loss_gets_what_it_reads(load):
    graph = load("ppo").graph()
    assert set(graph.node("critic.update").reads) >= {"tokens", "response_mask", "values", "returns"}
    assert set(graph.node("actor.update").reads) >= {"rollout_logprobs", "advantages"}
    assert "ref_logprobs" in load("grpo").graph().node("actor.update").reads


# -- how they run ----------------------------------------------------------------------------------

POOLS = {"a": "cpu", "b": "cpu", "c": "cpu"}
SPREAD = {"grpo": {"ref": "b", "reward": "c"}, "ppo": {"critic": "b", "ref": "c", "reward": "c"}, "sft": {}}


@pytest.mark.parametrize("name", DRIVERS)
def test_eager_and_local_give_the_same_bits(load, tmp_path, name):
    spread = Plan(POOLS, {worker: Place(pool) for worker, pool in SPREAD[name].items()})
    ways = {"eager": {"runtime": "eager"}, "local": {}, "spread": {"plan": spread}}
    found = {way: run(load(name), tmp_path / way, **how).weights_digest for way, how in ways.items()}
    assert len(set(found.values())) == 1
    lines = metrics(tmp_path / "eager")
    assert lines == metrics(tmp_path / "local") == metrics(tmp_path / "spread")
    assert len(lines) == 3 and lines[-1].get("actor/grad_norm", lines[-1].get("grad_norm")) > 0
    assert run(load(name), tmp_path / "seed", seed=1).weights_digest != found["eager"] or name == "sft"


class Plain:
    """Calls ops of plain workers as a run with seed 0 would: each with the step and the op that it is."""

    def __init__(self, program):
        self.program, self.step = program, 0

    def __call__(self, op, batch, **how):
        worker = op.args[0]
        info = CallInfo(0, self.program, self.step, f"{worker.name}.{op.func.__self__.name}", 0)
        return op(batch.with_call(info), **how)

    def batches(self, source, steps, tokenizer):
        cursor, uid = source.cursor(), 0
        for self.step in range(steps):
            rows = cursor.draw()
            yield source.to_batch(rows, uid, tokenizer)
            uid += len(rows)


def opened(handle, name, **peers):
    """A worker made by hand with the arguments of a handle."""
    return fl.open(handle.cls(*handle.args, **{**handle.kwargs, **peers}), name=name)


def of_worker(out, name):
    return json.loads((out / "run.json").read_text())["weights_digests"][name]


def test_grpo_on_plain_workers_gives_the_same_numbers(load, arithmetic, tmp_path):
    flow = load("grpo")
    run(flow, tmp_path)
    handles = {h.name: h for h in flow.handles}
    actor = opened(handles["actor"], "actor")
    ref = opened(handles["ref"], "ref", of=actor)
    reward = opened(handles["reward"], "reward", tokenizer=actor)
    call, seen = Plain("grpo"), []
    for batch in call.batches(arithmetic.prompts(4), 3, actor.tokenizer):
        batch = call(actor.generate, batch, n=4)
        batch = call(reward.score, batch)
        batch = call(ref.logprobs, batch)
        batch = rl.group_advantages(batch)
        told = call(actor.update, batch, loss=rl.ppo_clip(kl=1e-3))
        seen.append({**told, "reward": batch.rewards.mean()})
    for line, plain in zip(metrics(tmp_path), seen, strict=True):
        assert {k: line[k] for k in plain} == plain
    assert actor.digest() == of_worker(tmp_path, "actor") and ref.digest() == of_worker(tmp_path, "ref")


def test_two_agents_on_plain_workers_give_the_same_numbers(load, arithmetic, tmp_path):
    """A solver and a verifier, each trained on its own tokens with its own baseline."""
    flow = load("judge")
    few = {"steps": 2, "prompts_per_step": 4, "group_size": 4, "votes": 3}
    flow.run("two_agents", out=tmp_path, quiet=True, save_models=False, parameters={"two_agents": few})
    handles = {h.name: h for h in flow.handles}
    actor, judge = opened(handles["actor"], "actor"), opened(handles["judge"], "judge")
    reward = opened(handles["reward"], "reward", tokenizer=actor)
    verdict = opened(handles["verdict"], "verdict", tokenizer=judge)
    truth = opened(handles["truth"], "truth", tokenizer=judge)
    fresh = actor.digest(), judge.digest()
    call = Plain("two_agents")
    for batch in call.batches(arithmetic.prompts(4, one_digit=0.8), 2, actor.tokenizer):
        batch = call(actor.generate, batch, n=4)
        batch = batch.with_columns({"right": call(reward.score, batch).rewards})
        said = call(judge.generate, judge.ask(batch, arithmetic.QUESTION, tokenizer=actor), n=3)
        yes = {key: [] for key in batch.keys}
        for key, value in zip(said.keys, call(verdict.score, said).rewards.to_list(), strict=True):
            yes[key[:-1]].append(value)
        share = [sum(values) / 3 for values in yes.values()]
        rewards = [right + 0.5 * float(part) for right, part in zip(batch.right.to_list(), share, strict=True)]
        batch = rl.group_advantages(batch.with_columns({"rewards": fl.Column.of(rewards, dtype="f32")}))
        said = rl.group_advantages(call(truth.score, said), scale="none")
        call(actor.update, batch, loss=rl.ppo_clip())
        call(judge.update, said, loss=rl.ppo_clip(entropy=0.01))
    assert fresh[1] != judge.digest() == of_worker(tmp_path, "judge")
    assert actor.digest() == of_worker(tmp_path, "actor")
    for line in metrics(tmp_path):
        assert line["judge/tokens"] == line["judge/rows"] == 4 * 4 * 3, "the verifier learns from its verdicts alone"
        assert 0 <= line["truth"] <= 1


def test_ppo_on_plain_workers_gives_the_same_numbers(load, arithmetic, tmp_path):
    flow = load("ppo")
    run(flow, tmp_path)
    handles = {h.name: h for h in flow.handles}
    actor, critic = opened(handles["actor"], "actor"), opened(handles["critic"], "critic")
    ref = opened(handles["ref"], "ref", of=actor)
    reward = opened(handles["reward"], "reward", tokenizer=actor)
    call, seen = Plain("ppo"), []
    for batch in call.batches(arithmetic.prompts(16), 3, actor.tokenizer):
        batch = call(actor.generate, batch)
        batch = call(reward.score, batch) | call(ref.logprobs, batch) | call(critic.values, batch)
        batch = rl.kl_penalty(batch, coef=1e-3)
        batch = rl.gae(batch, gamma=1.0, lam=0.95)
        of_critic = call(critic.update, batch)
        of_actor = call(actor.update, batch, loss=rl.ppo_clip())
        told = {**{f"actor/{k}": v for k, v in of_actor.items()}, **{f"critic/{k}": v for k, v in of_critic.items()}}
        seen.append({**told, "reward": batch.rewards.mean()})
    for line, plain in zip(metrics(tmp_path), seen, strict=True):
        assert {k: line[k] for k in plain} == plain
    assert actor.digest() == of_worker(tmp_path, "actor") and critic.digest() == of_worker(tmp_path, "critic")


def test_sft_on_plain_workers_gives_the_same_numbers(load, arithmetic, tmp_path):
    flow = load("sft")
    run(flow, tmp_path)
    actor, call, seen = opened(flow.handles[0], "actor"), Plain("sft"), []
    for batch in call.batches(arithmetic.examples(16), 3, actor.tokenizer):
        seen.append(dict(call(actor.update, batch, loss=rl.sft())))
    for line, plain in zip(metrics(tmp_path), seen, strict=True):
        assert {k: line[k] for k in plain} == plain
    assert actor.digest() == of_worker(tmp_path, "actor")


def test_warm_up_training_and_evaluation_in_one_run(load, tmp_path):
    """Programs share their workers; the reference is the actor as it was when its program began."""
    few = {"warmup": {"steps": 2, "rows": 8}, "grpo": {**FEW["grpo"], "steps": 2}, "evaluate": {}}
    outcome = load("grpo").run("evaluate", "warmup", "grpo", "evaluate", out=tmp_path, quiet=True, parameters=few)
    assert [program for program, _ in outcome.last] == ["evaluate", "warmup", "grpo", "evaluate"]
    lines = metrics(tmp_path)
    assert [line["program"] for line in lines] == ["evaluate", "warmup", "warmup", "grpo", "grpo", "evaluate-2"]
    first, second = (line for line in lines if line["program"] == "grpo")
    assert abs(first["kl"]) < 1e-10 < second["kl"]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "model" / "actor")
    assert fl.open(fl.Actor(str(tmp_path / "model" / "actor"))).digest() == of_worker(tmp_path, "actor")


# -- how they end and go on ------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRIVERS)
@pytest.mark.parametrize("at", [1, 3])
def test_a_run_that_died_in_an_update_goes_on_to_the_same_end(load, tmp_path, monkeypatch, name, at):
    whole = run(load(name), tmp_path / "whole")
    update, count = HFEngine.update, [0]

    def dying(self, *args, **how):
        count[0] += 1
        if count[0] == at:
            raise KeyError("died on purpose")
        return update(self, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "update", dying)
        with pytest.raises(RunError, match="died on purpose"):
            run(load(name), tmp_path / "run", checkpoint_every=1)
    again = run(load(name), tmp_path / "run", checkpoint_every=1, resume=True)
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


STEPS = 24
WORDS = f"--steps {STEPS} --checkpoint-every 3 --prompts-per-step 4 --group-size 4 --no-save --quiet".split()


class Process:
    """``python algorithms/grpo.py`` in a process of its own, watched through its records."""

    def __init__(self, model, out, *words):
        self.out = out
        command = [sys.executable, str(ROOT / "algorithms" / "grpo.py"), *words, "--out", str(out)]
        if "--resume" not in words:
            command += [*WORDS, "--model", f"actor={model}"]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def lines(self):
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def send_after(self, steps, signum, delay):
        """Send a signal once so many steps are recorded, and a moment more."""
        limit = time.monotonic() + 120
        while self.lines() < steps:
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < limit, "no step was recorded in time"
            time.sleep(0.001)
        time.sleep(delay)
        self.process.send_signal(signum)
        return self

    def end(self):
        """The exit status."""
        said, _ = self.process.communicate(timeout=120)
        self.said = said
        return self.process.returncode


@pytest.mark.slow
def test_a_run_that_is_ended_in_every_way_ends_like_one_left_alone(load, model, tmp_path):
    """Killed before its first checkpoint, killed between two, stopped by Ctrl-C, killed anywhere: it goes on each time."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    few = {"steps": STEPS, "prompts_per_step": 4, "group_size": 4}
    load("grpo").run(out=whole, quiet=True, save_models=False, parameters={"grpo": few})
    ends = ((1, signal.SIGKILL, 0), (7, signal.SIGKILL, 0.004), (12, signal.SIGINT, 0), (17, signal.SIGKILL, 0.011))
    for number, (steps, signum, delay) in enumerate(ends):
        process = Process(model, out, *(["--resume"] if number else [])).send_after(steps, signum, delay)
        stopped = signum == signal.SIGINT
        assert process.end() == (130 if stopped else -signum), process.said
        assert steps <= process.lines() < STEPS
        record = json.loads((out / "run.json").read_text())
        assert record["status"] == ("interrupted" if stopped else "running")
        if stopped:
            assert "--resume" in process.said
            newest = sorted((out / "checkpoints").glob("0*"))[-1]
            kept = json.loads((newest / "manifest.json").read_text())["program"]["steps"]
            assert kept == process.lines(), "the checkpoint holds the last step"
    last = Process(model, out, "--resume")
    assert last.end() == 0, last.said

    records = [json.loads((folder / "run.json").read_text()) for folder in (out, whole)]
    assert records[0]["weights_digest"] == records[1]["weights_digest"]
    assert records[0]["status"] == records[1]["status"] == "done"
    lines = metrics(out)
    assert lines == metrics(whole)
    assert [line["step"] for line in lines] == list(range(STEPS)), "each step is recorded once"
    assert sum(line["grad_norm"] > 1e-3 for line in lines) > STEPS / 2, "most steps trained"
    trajectories = [(folder / "trajectories.jsonl").read_text() for folder in (out, whole)]
    assert trajectories[0] == trajectories[1]
