"""Processes of a run killed at random times: nothing is lost, nothing is done twice, the weights are the same.

    python benchmarks/kills.py [--kills 30] [--steps 400] [--seed 0]

A small GRPO on Ray (two ranks train, two generate and are the reference, one gives rewards) is run undisturbed, then
with SIGKILL sent to a random rank at random times, also while ranks are being started again. At S=0 every line of
metrics, every journalled reward and every weight has to be what it was. Exit status 1 where something is not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "algorithms"))

import flowrl as fl
from flowrl import rl
from flowrl.placement.cluster import Cluster
from flowrl.placement.mesh import Mesh
from flowrl.placement.plan import Place, Plan, Pool
from tasks import arithmetic

SMALL = {
    **arithmetic.MODEL.config,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def odd(prompt: str, response: str) -> float:
    """A reward with something to learn from the first token on."""
    return sum(c in "13579" for c in response) - 0.1 * len(response)


flow = fl.Flow("kills")
actor = flow.worker(fl.Actor, fl.Model(config=SMALL, tokenizer=arithmetic.build_tokenizer), lr=3e-3, max_tokens=5)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, odd)


@flow.program
def kills(steps: int = 400):
    for step, batch in flow.steps(arithmetic.prompts(4), steps):
        batch = actor.generate(batch, n=3)
        batch = reward.score(batch)
        batch = ref.logprobs(batch)
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip(kl=1e-3))
        flow.log(step, metrics, reward=batch.rewards.mean())


PLAN = Plan(
    {
        "train": Pool("train", devices=(0, 1)),
        "rollout": Pool("rollout", devices=(2, 3)),
        "rewards": Pool("rewards", processes=1),
    },
    {
        "actor": {"train": Place("train", Mesh.of("fsdp=2"), "fsdp2"), "generate": Place("rollout")},
        "ref": Place("rollout"),
        "reward": Place("rewards"),
    },
    cluster=Cluster.of("cpu:1x4"),
)


def metrics(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def rewards(out: Path) -> dict[int, int]:
    """How often each call that touches the world is journalled."""
    found: dict[int, int] = {}
    for file in out.glob("journal.*.jsonl"):
        for line in file.read_text().splitlines():
            call = json.loads(line)["call"]
            found[call] = found.get(call, 0) + 1
    return found


def killer(out: Path, count: int, chance: random.Random, told: list[int], done: threading.Event) -> None:
    """Kill ``count`` ranks: three of four a while after the run has done a step again, the others whatever it does.

    More than ten losses without a step in between end a run.
    """
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        time.sleep(0.05)
    while len(told) < count and not done.is_set():
        rank = chance.randrange(5)
        with suppress(OSError, ValueError, KeyError):
            os.kill(json.loads((out / "ranks.json").read_text())[str(rank)]["pid"], signal.SIGKILL)
            told.append(rank)
        if chance.random() < 0.75:
            before = went_on(out)
            while went_on(out) == before and not done.wait(0.1):
                pass
            steps = lines(out)
            while lines(out) == steps and not done.wait(0.1):
                pass
            done.wait(chance.uniform(0, 3))
        else:
            done.wait(chance.uniform(0.5, 8))


def lines(out: Path) -> int:
    """Steps that are recorded; fewer when the run goes back."""
    return len((out / "metrics.jsonl").read_text().splitlines())


def events(out: Path, kind: str) -> int:
    """How often something happened."""
    return (out / "events.jsonl").read_text().count(f'"kind": "{kind}"')


def went_on(out: Path) -> int:
    """How often the run went on after a loss."""
    return events(out, "recovered") + events(out, "renewed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    how = {"runtime": "ray", "plan": PLAN, "quiet": True, "checkpoint_every": 4}
    parameters = {"kills": {"steps": asked.steps}}
    calm = flow.run(out=folder / "calm", parameters=parameters, **how)
    told: list[int] = []
    done = threading.Event()
    chance = random.Random(asked.seed)
    out = folder / "killed"
    thread = threading.Thread(target=killer, args=(out, asked.kills, chance, told, done))
    thread.start()
    start = time.time()
    killed = flow.run(out=out, parameters=parameters, **how)
    done.set()
    thread.join()
    twice = [call for call, times in rewards(out).items() if times > 1]
    findings = {
        "weights differ": calm.weights_digest != killed.weights_digest,
        "metrics differ": metrics(folder / "calm") != metrics(out),
        "rewards asked for twice": bool(twice),
        "rewards lost": set(rewards(out)) != set(rewards(folder / "calm")),
    }
    said = json.loads((out / "run.json").read_text())
    seconds = time.time() - start
    print(f"{len(told)} kills in {seconds:.0f} s, of ranks {told}; {said['restarts']} restarts")
    print(f"{events(out, 'renewed')} while the program waited, {events(out, 'recovered')} times back to a checkpoint")
    for what, wrong in findings.items():
        print(f"{'NO' if not wrong else 'YES'}: {what}")
    shutil.rmtree(folder)
    return int(any(findings.values()))


if __name__ == "__main__":
    sys.exit(main())
