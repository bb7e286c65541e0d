"""Another user of this host, without the secret, attacks a run: reads nothing, changes nothing, stops nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from flows import module_of

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Place, Plan, Pool

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self") or os.getuid() != 0, reason="only root can become another user"
)
ATTACK = Path(__file__).parents[3] / "benchmarks" / "attack.py"


@pytest.fixture(scope="module")
def private():
    """A Ray as a run starts it, for all runs of this file."""
    import ray

    from flowrl.runtime.distributed.ray.private_ray import PrivateRay

    ours = PrivateRay()
    ray.init(address="local", num_cpus=6, log_to_driver=False, configure_logging=False, **ours.open())
    yield
    ray.shutdown()
    ours.close()


@pytest.fixture
def open_folder():
    """A folder that everybody can look into; those that pytest makes are not."""
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def attack(out: Path) -> subprocess.Popen:
    words = [sys.executable, str(ATTACK), str(os.getpid()), "--folder", str(out), "--seconds", "600"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(begun: subprocess.Popen) -> dict:
    """What the attacker got, once it was told that there is no more to attack."""
    begun.terminate()
    out, err = begun.communicate(timeout=60)
    assert out, err
    return json.loads(out)


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [3, 40])
def test_a_stranger_reads_changes_and_stops_nothing(private, open_folder, steps):
    train = Mesh.of("fsdp=2")
    pools = {
        "train": Pool("train", devices=(0, 1)),
        "rollout": Pool("rollout", devices=(2,)),
        "cpu": Pool("cpu", processes=1),
    }
    place = {
        "actor": {"train": Place("train", train, "fsdp2"), "generate": Place("rollout")},
        "reward": Place("cpu"),
        "ref": Place("train"),
    }
    plan = Plan(pools, place, cluster=Cluster.of("cpu:1x3"))
    how = {"quiet": True, "runtime": "ray", "plan": plan, "parameters": {"stale": {"steps": steps}}}
    flow = module_of("stale_flow").flow
    calm = flow.run("stale", out=open_folder / "calm", **how)
    (open_folder / "attacked").mkdir(mode=0o700)
    begun = attack(open_folder / "attacked")
    try:
        time.sleep(1)
        found = flow.run("stale", out=open_folder / "attacked", **how)
    finally:
        got = ended(begun)
    assert found.weights_digest == calm.weights_digest
    assert json.loads((open_folder / "attacked" / "run.json").read_text())["restarts"] == 0
    assert not any(got[name] for name in ("answers", "doors", "files", "leaks")), got
    assert got["hosts"] == ["127.0.0.1"], "what listens does so on loopback"
    assert got["ports"] >= 8 and got["connections"] > 100, got  # Ray's own, and those of gloo as they come and go
    assert (open_folder / "calm").stat().st_mode & 0o077 == 0, "a run folder is its user's"
