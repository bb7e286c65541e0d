"""Ranks on several machines: weights and rows go over their network, which may be cut, and machines die.

They are namespaces of this one, as ``network_nodes`` makes them: no two share memory, processes or a network.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from network_nodes import Network, Node, network, why_not

pytest.importorskip("ray", reason="the extra [ray] is not installed")

NOT_HERE = why_not()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(NOT_HERE), reason=NOT_HERE)]
SCRIPT = Path(__file__).parents[1] / "paced_flow.py"
SECONDS = 240.0


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as made:
        yield made


class Run:
    """A run of ``flowrl run`` on a machine, or here without one."""

    def __init__(self, out: Path, plan: str, steps: int, node: Node | None = None, address: str = "") -> None:
        self.out = out
        file = out.with_suffix(".yaml")
        file.write_text(plan)
        words = [sys.executable, "-m", "flowrl", "run", str(SCRIPT), "--plan", str(file), "--out", str(out)]
        words += ["--steps", str(steps), "--runtime", "ray", "--trajectories", "8", "--trajectories-every", "1"]
        words += ["--address", address] if address else []
        self._log = open(out.with_suffix(".log"), "w")  # noqa: SIM115
        if node is None:
            self.process = subprocess.Popen(words, stdout=self._log, stderr=self._log, text=True)
        else:
            self.process = node.popen(*words, output=self._log)

    def lines(self, file: str) -> list[dict]:
        path = self.out / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, kind: str) -> list[str]:
        return [event["text"] for event in self.lines("events.jsonl") if event["kind"] == kind]

    def wait(self, done: Callable[[], bool]) -> None:
        """Until something is so."""
        until = time.monotonic() + SECONDS
        while not done():
            said = self.out.with_suffix(".log").read_text()
            assert self.process.poll() is None and time.monotonic() < until, said
            time.sleep(0.1)

    def make_steps(self, count: int) -> None:
        """Until so many more steps are recorded."""
        begun = len(self.lines("metrics.jsonl"))
        self.wait(lambda: len(self.lines("metrics.jsonl")) >= begun + count)

    def end(self) -> None:
        """Until it has come to its end, which is a good one."""
        status = self.process.wait(SECONDS)
        self._log.close()
        assert status == 0, self.out.with_suffix(".log").read_text()

    def tokens(self) -> dict[tuple, list[int]]:
        return {(line["step"], tuple(line["key"])): line["response_ids"] for line in self.lines("trajectories.jsonl")}

    def machines(self, pool: str) -> set[str]:
        """On which machines the ranks of a pool are."""
        ranks = json.loads((self.out / "ranks.json").read_text()).values()
        return {rank["node"] for rank in ranks if rank["pool"] == pool}


APART = """
cluster: {device: cpu, nodes: 2, devices_per_node: 2}
pools: {train: {devices: "0-1"}, rollout: {devices: "2-3"}}
place:
  actor: {train: {pool: train, mesh: {fsdp: 2}, backend: fsdp2}, generate: {pool: rollout}}
  reward: {pool: rollout}
pipeline: {deadline: 120}
"""


@pytest.mark.parametrize("rooms", [(2, 2), (1, 3)], ids=["pools_apart", "a_mesh_over_both"])
def test_machines_make_the_weights_that_one_makes(net, tmp_path, rooms):
    """Pools on two machines, and a mesh that is on both: gradients, weights and rows go from one to the other."""
    one = Run(tmp_path / "one", APART, 4)
    one.end()
    first, _ = (net.add(cpus) for cpus in rooms)
    run = Run(tmp_path / "two", APART, 4, first, net.address)
    run.wait(lambda: len(run.lines("metrics.jsonl")) >= 1)
    where = [run.machines(pool) for pool in ("train", "rollout")]
    run.end()
    assert len(set.union(*where)) == 2 and (rooms == (2, 2)) == all(len(there) == 1 for there in where), where
    digests = [json.loads((each.out / "run.json").read_text())["weights_digest"] for each in (one, run)]
    assert digests[0] == digests[1] is not None
    assert run.tokens() == one.tokens() and run.tokens()


ELASTIC = """
pools: {train: {processes: 1}, rollout: {processes: 2, least: 1}}
place:
  actor: {train: {pool: train}, generate: {pool: rollout}}
  reward: {pool: train}
pipeline: {restart: 3, deadline: DEADLINE}
"""


def begin(net: Network, out: Path, *, deadline: int, steps: int) -> tuple[Run, Node]:
    """A run on one machine, and then on two: the second one has a rank that samples."""
    run = Run(out, ELASTIC.replace("DEADLINE", str(deadline)), steps, net.add(2), net.address)
    run.make_steps(2)
    other = net.add(1)
    run.wait(lambda: "has all its ranks" in run.events("resized")[-1])
    run.make_steps(2)
    return run, other


def test_a_machine_that_dies_is_found_long_before_the_deadline(net, tmp_path):
    run, other = begin(net, tmp_path / "run", deadline=600, steps=40)
    killed = time.monotonic()
    other.kill()
    run.make_steps(4)
    assert time.monotonic() - killed < 120
    run.end()
    (lost,) = run.events("lost")
    assert lost.startswith("rank 3 of pool 'rollout' died during")
    assert run.events("resized")[-1].startswith("pool 'rollout' goes on with 1 rank: rank 3 could not be started again")
    assert not run.events("recovered")


def test_a_machine_that_cannot_be_reached_is_given_up_and_taken_up_again(net, tmp_path):
    """Its network is silent: nobody is told. The deadline finds it; once it is back, a new rank begins there."""
    run, other = begin(net, tmp_path / "run", deadline=20, steps=60)
    other.cut()
    run.make_steps(4)
    (lost,) = run.events("lost")
    assert lost.startswith("rank 3 of pool 'rollout' has not answered")
    other.heal()
    run.wait(lambda: sum("has all its ranks" in text for text in run.events("resized")) == 2)
    run.end()
    assert run.events("resized")[-1] == "pool 'rollout' has all its ranks: rank 4 has come"
    assert not run.events("recovered")


def test_a_network_that_is_gone_for_some_seconds_costs_nothing(net, tmp_path):
    run, other = begin(net, tmp_path / "run", deadline=60, steps=30)
    other.cut()
    time.sleep(5)
    other.heal()
    run.end()
    assert not run.events("lost") and not run.events("recovered")


TRAINS = """
pools: {train: {processes: 1}, rollout: {processes: 1}}
place:
  actor: {train: {pool: train}, generate: {pool: rollout}}
  reward: {pool: rollout}
pipeline: {deadline: 120, staleness: STALENESS}
"""


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_machine_that_trains_dies_and_another_comes(net, tmp_path, staleness):
    """The run goes back to its checkpoint, which all machines see, and makes the weights of a run without that."""
    plan = TRAINS.replace("STALENESS", str(staleness))
    calm = Run(tmp_path / "calm", plan, 16)
    calm.end()
    head, *others = (net.add(cpus) for cpus in (0, 1, 1))
    run = Run(tmp_path / "run", plan, 16, head, net.address)
    run.make_steps(4)
    (there,) = run.machines("train")
    next(node for node in others if node.address == there).kill()
    run.wait(lambda: bool(run.events("lost")))
    net.add(1)
    run.end()
    assert len(run.events("recovered")) == 1
    digests = [json.loads((each.out / "run.json").read_text())["weights_digest"] for each in (calm, run)]
    assert digests[0] == digests[1] is not None


def test_a_folder_that_one_machine_alone_has_is_named(net, tmp_path):
    """The memory of a machine is not that of another one: its ranks would wait for each other until the deadline."""
    first, _ = net.add(2), net.add(2)
    plan = tmp_path / "plan.yaml"
    plan.write_text(APART)
    words = ["run", str(SCRIPT), "--plan", str(plan), "--runtime", "ray", "--address", net.address]
    with open(tmp_path / "log", "w+") as log:
        run = first.popen(sys.executable, "-m", "flowrl", *words, "--out", "/dev/shm/run", output=log)
        assert run.wait(SECONDS) == 1
        log.seek(0)
        said = log.read()
    assert "on 10.77.0." in said and "does not see the folder of the run: /dev/shm/run" in said
    assert "Give --out a folder that all machines of the cluster share." in said


VLLM = """
cluster: {device: cpu, nodes: 2, devices_per_node: 2}
pools: {train: {devices: "0-1"}, rollout: {devices: "2-3"}}
place:
  actor:
    train: {pool: train, mesh: {fsdp: 2}, backend: fsdp2}
    generate: {pool: rollout, mesh: {tp: 2}, engine: vllm, kv_cache: 0.0625, rows: 32}
  reward: {pool: train}
pipeline: {staleness: 1, publish: interrupt, deadline: 300}
"""


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")
def test_vllm_is_published_to_on_another_machine(net, tmp_path):
    """Two ranks of one machine split it, two of another one train: each publish proves that it computes with them."""
    first, _ = net.add(2), net.add(2)
    run = Run(tmp_path / "run", VLLM, 6, first, net.address)
    run.wait(lambda: (run.out / "ranks.json").exists())
    where = [run.machines(pool) for pool in ("train", "rollout")]
    run.end()
    assert [len(there) for there in where] == [1, 1] and where[0] != where[1]
    lines = run.lines("metrics.jsonl")
    proved = [line["actor.publish/probe_gap"] for line in lines if "actor.publish/probe_gap" in line]
    assert len(proved) >= len(lines) - 1 and all(0 < gap < 1e-3 for gap in proved)
    gaps = [gap for line in lines if (gap := line["gap_max"]) is not None]  # of rows that are of the trainer's version
    assert gaps and max(gaps) < 1e-3 and any(line["grad_norm"] for line in lines)
