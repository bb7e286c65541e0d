"""A signal ends a run after its step, with a checkpoint and the status that a shell expects; a second one at once."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from flows import module_of

from flowrl.backends.hf.engine import HFEngine
from flowrl.backends.hf.generation import generate
from flowrl.placement.plan.plan import Place, Plan, Pool
from flowrl.runtime.driver import stop_signals as stop
from flowrl.runtime.driver.stop_signals import Stop, StopNow
from flowrl.runtime.storage.checkpoints import checkpoint_folder as checkpoint

HERE = Path(__file__).parents[1]
#: A mutex that is locked twice: nothing wakes the thread.
DEADLOCK = "c, m = ctypes.CDLL(None), ctypes.create_string_buffer(64); c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"


@pytest.fixture(autouse=True)
def heard():
    """Nothing is ignored, also where the tests were started with nohup."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(small, out, **options):
    return small.flow.run(
        "train", out=out, quiet=True, parameters={"train": {"steps": 8}}, runtime="local", **{"seed": 0} | options
    )


def lines(out):
    return len((out / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("name", "where"),
    [("SIGTERM", "update"), ("SIGTERM", "judge"), ("SIGTERM", "checkpoint"), ("SIGHUP", "judge"), ("SIGUSR1", "judge")],
)
def test_wherever_the_driver_is_it_takes_a_checkpoint_and_the_run_goes_on(small, tmp_path, monkeypatch, name, where):
    """In the op of its own pool, in user code, and where a checkpoint begins: that one is enough then."""
    whole = run(small, tmp_path / "whole")
    number, sent = getattr(signal, name), []

    def once_from_now():
        if not sent:
            sent.append(lines(tmp_path / "run"))
            os.kill(os.getpid(), number)
            time.sleep(0.02)  # long enough for another thread to hear of it

    if where == "checkpoint":
        begin = checkpoint.begin

        def begun(*args, **how):
            once_from_now()
            return begin(*args, **how)

        monkeypatch.setattr(checkpoint, "begin", begun)
    else:
        op = (small.Counter if where == "update" else small.World).__dict__[where]
        real = op.fn

        def fn(self, batch, **how):
            if lines(tmp_path / "run") == 3:
                once_from_now()
            return real(self, batch, **how)

        fn.__annotations__ = real.__annotations__
        object.__setattr__(op, "fn", fn)
    stopped = run(small, tmp_path / "run", checkpoint_every=3)
    assert (stopped.status, stopped.exit_status) == ("interrupted", 128 + number)
    assert lines(tmp_path / "run") == (3 if where == "checkpoint" else 4)
    assert sent == [3]
    done = run(small, tmp_path / "run", resume=True)
    assert done.weights_digest == whole.weights_digest and done.exit_status == 0


def trained(flow, out, **how):
    """A run of two pools: one trains, the other generates with a copy, to which weights are published."""
    pools = {"train": Pool("train", device="cpu"), "rollout": Pool("rollout", device="cpu")}
    split = Plan(pools, {"actor": {"train": Place("train"), "generate": Place("rollout")}})
    return flow.run("stale", out=out, plan=split, parameters={"stale": {"steps": 4}}, quiet=True, **how)


@pytest.mark.parametrize("reused", [False, True])
def test_who_listened_before_may_be_gone_as_the_run_ends(tmp_path, reused):
    """Its descriptor is closed, or another file's by now; the handlers of before are back whatever becomes of that."""
    before = signal.getsignal(signal.SIGINT)
    here, there = socket.socketpair()
    there.setblocking(False)
    number = there.fileno()
    outside = signal.set_wakeup_fd(number)
    try:
        with Stop(lambda text: None).listening(), (tmp_path / "other").open("wb") as other:
            here.close()
            there.close()
            if reused:
                os.dup2(other.fileno(), number)
        assert signal.getsignal(signal.SIGINT) == before
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(outside)
        if reused:
            os.close(number)


def test_a_signal_as_the_run_ends_is_no_error():
    """It has ended by itself: nothing is left to be stopped."""
    stop = Stop(lambda text: None)
    with stop.listening():
        hears = signal.getsignal(signal.SIGINT)
    hears(signal.SIGINT, None)
    hears(signal.SIGINT, None)
    assert not stop.asked
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.asked


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of the weights of a run that nobody stops."""
    return trained(module_of("stale_flow").flow, tmp_path_factory.mktemp("whole") / "run").weights_digest


@pytest.mark.parametrize(
    ("name", "where", "twice"),
    [
        ("SIGTERM", "generate", False),
        ("SIGINT", "generate", True),
        ("SIGINT", "publish", False),
    ],
)
def test_in_a_generate_and_in_a_publish_of_a_model(undisturbed, tmp_path, monkeypatch, name, where, twice):
    """A first one lets the step end and takes a checkpoint; a second one ends it there, and the one before counts."""
    flow, number, sent, arrived = module_of("stale_flow").flow, getattr(signal, name), [], []
    came = Stop._came

    def hear(self, number, frame):
        arrived.append(number)
        came(self, number, frame)

    monkeypatch.setattr(Stop, "_came", hear)

    def now(*said, **how):
        if lines(tmp_path / "run") == 2 and not sent:
            sent.append(lines(tmp_path / "run"))
            for count in range(1, 2 + twice):
                os.kill(os.getpid(), number)
                time.sleep(0.02)  # long enough for another thread to hear of it
                while where == "generate" and len(arrived) < count:  # two at once are one to Python
                    time.sleep(0.01)
        return real(*said, **how)

    owner, method = (generate, "draw") if where == "generate" else (HFEngine, "take_weights")
    real = getattr(owner, method)
    monkeypatch.setattr(owner, method, now)
    if twice:
        with pytest.raises(StopNow) as stopped:
            trained(flow, tmp_path / "run", checkpoint_every=1)
        assert stopped.value.status == 128 + number
    else:
        ended = trained(flow, tmp_path / "run", checkpoint_every=100)
        assert (ended.status, ended.exit_status) == ("interrupted", 128 + number)
        assert lines(tmp_path / "run") == 3
    assert sent == [2] and list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))
    assert trained(flow, tmp_path / "run", resume=True).weights_digest == undisturbed


@pytest.mark.parametrize("second", ["SIGTERM", "SIGINT"])
def test_two_at_once_in_a_publish(undisturbed, tmp_path, monkeypatch, second):
    """Two of one kind may be one to Python, which lets the step end; another kind ends it at once. Nothing is lost."""
    flow, heard, came, real = module_of("stale_flow").flow, [], Stop._came, HFEngine.take_weights

    def hear(self, number, frame):
        heard.append(number)
        came(self, number, frame)

    def take_weights(*said, **how):
        if lines(tmp_path / "run") == 2 and not heard:
            for name in ("SIGTERM", second):
                os.kill(os.getpid(), getattr(signal, name))
        return real(*said, **how)

    monkeypatch.setattr(Stop, "_came", hear)
    monkeypatch.setattr(HFEngine, "take_weights", take_weights)
    monkeypatch.setattr(stop, "PATIENCE", 600.0)  # it would be this process that ends
    try:
        ended = trained(flow, tmp_path / "run", checkpoint_every=1)
    except StopNow as stopped:
        assert len(heard) == 2 and stopped.status == 128 + heard[1]
    else:
        assert heard == [signal.SIGTERM] and second == "SIGTERM"
        assert (ended.status, ended.exit_status, lines(tmp_path / "run")) == ("interrupted", 143, 3)
    assert trained(flow, tmp_path / "run", resume=True).weights_digest == undisturbed


def test_what_a_process_ignores_stays_ignored_and_handlers_come_back(small, tmp_path):
    """As nohup ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        op = small.World.__dict__["judge"]
        real = op.fn

        def fn(self, batch):
            os.kill(os.getpid(), signal.SIGHUP)
            return real(self, batch)

        fn.__annotations__ = real.__annotations__
        object.__setattr__(op, "fn", fn)
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        assert run(small, tmp_path / "run").status == "done"
        assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        assert not [t for t in threading.enumerate() if t.name == "flowrl-signals" and t.is_alive() and t.join(1)]
    finally:
        signal.signal(signal.SIGHUP, before)


#: A driver whose user code says that it runs, and then does not come back in time.
DRIVER = """
import ctypes, sys, time
sys.path.insert(0, {beside!r})
from small_flow import Numbers
import flowrl as fl
from flowrl.runtime.driver import stop_signals

stop_signals.PATIENCE = 0.5

class World(fl.Worker):
    @fl.op(reads="x", adds="r: f32[]", cost="external")
    def judge(self, batch):
        if batch.keys[0][0] > 3:
            print("inside", flush=True)
            {hold}
        return {{"r": batch.x.values * 2}}

flow = fl.Flow("slow")
world = flow.worker(World)

@flow.program
def slow(steps: int = 100000):
    for step, batch in flow.steps(Numbers(), steps):
        flow.log(step, reward=world.judge(batch).r.mean())
"""


def started(tmp_path, hold):
    folder = tmp_path / "my runs"
    folder.mkdir()
    script = folder / "slow.py"
    script.write_text(DRIVER.format(beside=str(HERE), hold=hold))
    words = ["run", str(script), "--out", str(folder / "a"), "--checkpoint-every", "1", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "inside\n", process.communicate()
    return process, folder


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_one_ends_it_at_once_with_the_status_of_shells(tmp_path, name):
    """Also where a thread is in user code that never returns; what it says is a command that goes on."""
    process, folder = started(tmp_path, "time.sleep(1000)")
    for _ in range(2):
        process.send_signal(getattr(signal, name))
        time.sleep(0.2)
    said = process.communicate(timeout=20)[1].splitlines()
    assert process.returncode == 128 + getattr(signal, name), said
    assert said[-1].startswith("stopped at once; go on with: flowrl run ")
    assert shlex.split(said[-1])[-3:] == ["--out", str(folder / "a"), "--resume"]


def test_a_call_of_c_that_never_returns_is_ended_with_its_process(tmp_path):
    process, _ = started(tmp_path, DEADLOCK)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    said = process.communicate(timeout=20)[1].splitlines()
    assert process.returncode == 143
    assert said[-1] == "stopped at once; what was running did not end by itself"


@pytest.mark.slow
def test_on_ranks_a_signal_for_the_whole_group_leaves_the_ranks_to_the_checkpoint(tmp_path):
    """As Slurm's scancel, systemd and ``timeout`` send it."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    script, plan, out = tmp_path / "slow.py", tmp_path / "plan.yaml", tmp_path / "run"
    script.write_text(DRIVER.format(beside=str(HERE), hold="time.sleep(0.3)"))
    plan.write_text("pools:\n  b: {processes: 2}\nplace:\n  world: {pool: b}\n")
    words = ["run", str(script), "--out", str(out), "--quiet", "--runtime", "ray", "--plan", str(plan)]
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    end = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or lines(out) < 3:
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 143, said
    assert said[-2].startswith("stopped after a checkpoint; go on with: "), said
    assert said[-1].startswith("graph: "), said
    assert not [line for line in (out / "events.jsonl").read_text().splitlines() if '"lost"' in line]
    assert list((out / "checkpoints").glob("*/manifest.json"))


#: A driver whose ranks say that they generate in the third step, or take the weights after it, and take their time.
MODEL_DRIVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {beside!r})
import flowrl as fl
from flowrl import rl
from stale_flow import MODEL, arithmetic, digits

class Slow(fl.Actor):
    def hold(self):
        Path({said!r}).touch()
        time.sleep(2)

    def generating_engine(self):
        if self.version == 2 and not Path({said!r}).exists():
            if {where!r} == "generate":
                self.hold()
            else:
                hold_in_a_publish(self)
        return super().generating_engine()

def hold_in_a_publish(actor):
    engine = type(actor.engine_with_weights())
    real = engine.weights_written
    def weights_written(self):
        if not Path({said!r}).exists():
            actor.hold()
        return real(self)
    engine.weights_written = weights_written

flow = fl.Flow("slow")
actor = flow.worker(Slow, MODEL, lr=3e-3, max_tokens=5)
reward = flow.worker(fl.FunctionReward, digits)

@flow.program
def slow(steps: int = 5):
    for step, batch in flow.steps(arithmetic.prompts(4), steps):
        batch = rl.group_advantages(reward.score(actor.generate(batch, n=3)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
"""
SPLIT = """
cluster: {device: cpu, nodes: 1, devices_per_node: 2}
pools: {train: {devices: 0}, rollout: {devices: 1}, rewards: {processes: 1}}
place: {actor: {train: {pool: train}, generate: {pool: rollout}}, reward: {pool: rewards}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["generate", pytest.param("publish", marks=pytest.mark.nightly)])
def test_on_ranks_a_signal_in_a_generate_and_in_a_publish_waits_for_its_step(tmp_path, where):
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    script, plan, out, said = tmp_path / "slow.py", tmp_path / "plan.yaml", tmp_path / "run", tmp_path / "said"
    script.write_text(MODEL_DRIVER.format(beside=str(HERE), said=str(said), where=where))
    plan.write_text(SPLIT)
    words = [sys.executable, "-m", "flowrl", "run", str(script), "--out", str(out), "--quiet"]
    how = ["--runtime", "ray", "--plan", str(plan)]
    process = subprocess.Popen([*words, *how], stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + 120
    while not said.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 143, told
    assert list((out / "checkpoints").glob("*/manifest.json"))
    assert lines(out) == 3 if where == "generate" else lines(out) in (3, 4), "the step has ended"
    assert '"lost"' not in (out / "events.jsonl").read_text()
    if where == "publish":
        subprocess.run([*words, *how, "--resume"], check=True, timeout=300)
        subprocess.run([*words[:-2], str(tmp_path / "whole"), "--quiet"], check=True, timeout=300)
        digests = [
            json.loads((folder / "run.json").read_text())["weights_digest"] for folder in (out, tmp_path / "whole")
        ]
        assert digests[0] == digests[1]
