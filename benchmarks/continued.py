"""What ``publish: continue`` changes in the rows that it goes on with, beside ``interrupt``.

    python benchmarks/continued.py [--rows 64] [--docs]

The demo model learns for some steps of GRPO; its weights before and after the last one are two versions. Rows of 192
tokens are sampled, the first 64 by the older version; then the newer one is published, with keys and values computed
again (``interrupt``) or kept (``continue``). The log-probability of every later token is compared with that of a whole
pass under the newer weights, which is what an update computes. ``moved`` is how far the same pass under the older
weights is from it: what one update has changed at all.

``--docs`` writes the table into ``docs/schedule.md``, and ``docs/images/continued.svg``: the distance by token.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "algorithms")]

import flowrl as fl
from flowrl import rl
from flowrl.backends.hf.generation.continuous import NetBatch
from flowrl.testing import SampleRequest, Sampling
from tasks import arithmetic

PAGE, PICTURE = ROOT / "docs" / "schedule.md", ROOT / "docs" / "images" / "continued.svg"
OPEN, CLOSE = "<!-- table: continued, written by benchmarks/continued.py -->", "<!-- end -->"
BEFORE, AFTER = 64, 128  # tokens of a row under the two versions
RATES = (1e-5, 1e-4, 1e-3)
MODEL = fl.Model(
    config={**(arithmetic.MODEL.config or {}), "max_position_embeddings": 256}, tokenizer=arithmetic.build_tokenizer
)


@dataclass(frozen=True)
class Found:
    """What rows of one way of publishing have shown, by token after the publish: f64[rows, AFTER]."""

    gaps: torch.Tensor  # sampled log-probability less that of a whole pass under the newer weights
    moved: torch.Tensor  # that of a whole pass under the older weights less the same
    seconds: float  # of the first token after the publish

    @property
    def k3(self) -> float:
        """The estimate of the KL divergence that an update would see of these tokens."""
        ratio = -self.gaps
        return float((ratio.exp() - 1 - ratio).mean())


def digits(response: str) -> float:
    """A reward with something to learn from the first token on."""
    return sum(c in "13579" for c in response) - 0.1 * len(response)


def two_versions(rate: float, steps: int = 20) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """An actor that has learned for some steps, and its weights before the last one and after."""
    actor: Any = fl.open(fl.Actor(MODEL, lr=rate, max_tokens=16))
    reward = fl.open(fl.FunctionReward(digits, tokenizer=actor))
    source = arithmetic.prompts(16)
    cursor = source.cursor()
    old: dict[str, torch.Tensor] = {}
    for step in range(steps):
        batch = source.to_batch(cursor.draw(), 16 * step, actor.tokenizer)
        rows = rl.group_advantages(reward.score(actor.generate(batch, n=4)))
        old = {name: weight.clone() for name, weight in actor.engine.plain_weights().items()}
        actor.update(rows, loss=rl.ppo_clip())
    return actor, old, {name: weight.clone() for name, weight in actor.engine.plain_weights().items()}


def passed(engine: Any, prompts: list[list[int]], ids: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of all tokens by whole passes: f64[rows, tokens]."""
    tokens = [[*prompt, *row] for prompt, row in zip(prompts, ids, strict=True)]
    mask = [[True] * len(row) for row in ids]
    batch = fl.Batch.of(
        len(ids),
        tokens=fl.Column.of(tokens, dim="tokens", dtype="i32"),
        response_mask=fl.Column.of(mask, dim="response", dtype="bool"),
        temperature=fl.Column.of([1.0] * len(ids), dtype="f32"),
    )
    return engine.logprobs(batch).values.double().view(len(ids), -1)


def publish(actor: Any, old: Any, new: Any, rows: int, *, keep_cache: bool) -> Found:
    """Sample rows through a publish."""
    engine = actor.engine
    vars(engine)["batch"] = NetBatch(engine.net, engine.parameters, ())  # no token ends a row
    engine.take_weights(old)
    engine.resume(0)
    prompts = [[1 + row % 9, 12, 1 + row // 9 % 9, 13] for row in range(rows)]
    column = fl.Column.of(prompts, dim="prompt", dtype="i32")
    engine.submit(SampleRequest(column, 1, torch.arange(rows), Sampling(max_tokens=BEFORE + AFTER)))
    for _ in range(BEFORE):
        engine.step()
    engine.pause()
    engine.take_weights(new)
    engine.resume(1, keep_cache=keep_cache)
    began = time.perf_counter()
    found = engine.step()
    seconds = time.perf_counter() - began
    while engine.running():
        found += engine.step()
    found.sort(key=lambda row: row.row)
    ids = [list(row.ids) for row in found]
    sampled = torch.tensor([row.rollout_logprobs for row in found], dtype=torch.float64)
    now = passed(engine, prompts, ids)
    engine.take_weights(old)
    before = passed(engine, prompts, ids)
    return Found((sampled - now)[:, BEFORE:], (before - now)[:, BEFORE:], seconds)


def in_words(value: float) -> str:
    return f"{value:.1e}" if value < 1e-3 else f"{value:.4f}"


def lines(found: dict[tuple[float, str], Found], rows: int) -> list[str]:
    """The table, and where it was measured."""
    told = [
        "| learning rate | publish | tokens 1 to 8 | 9 to 32 | 33 to 128 | largest | k3 | moved | first token, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (rate, name), each in found.items():
        size = each.gaps.abs()
        parts = [float(size[:, a:b].mean()) for a, b in ((0, 8), (8, 32), (32, AFTER))]
        numbers = [*parts, float(size.max()), each.k3, float(each.moved.abs().mean())]
        told.append(f"| {rate:g} | `{name}` | {' | '.join(map(in_words, numbers))} | {1e3 * each.seconds:.0f} |")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    said = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next(
        (line.partition(":")[2].strip() for line in said.splitlines() if line.startswith("model name")), "a CPU"
    )
    where = f"one core of {' '.join(model.split()[:2])}"
    told += ["", f"Measured on {where}, as of commit {commit.stdout.strip()}, {rows} rows, fp32."]
    told += [
        "",
        "![Distance from a whole pass under the new weights, by token after the publish](images/continued.svg)",
    ]
    return told


def draw(found: dict[tuple[float, str], Found], path: Path) -> None:
    """The mean distance by token after the publish, and how far one update has moved the policy."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "continued"
    from matplotlib import pyplot

    colours = dict(zip(RATES, ("#5a8f29", "#0b6e8a", "#b3462e"), strict=True))
    figure, axis = pyplot.subplots(figsize=(6.8, 3.4))
    for (rate, name), each in found.items():
        curve = each.gaps.abs().mean(0).clamp(min=1e-9).tolist()
        style: Any = {"color": colours[rate], "linewidth": 1.6}
        axis.plot(range(1, AFTER + 1), curve, linestyle="-" if name == "continue" else ":", **style)
        if name == "continue":
            moved = float(each.moved.abs().mean())
            axis.axhline(moved, linestyle="--", linewidth=0.8, color=colours[rate])
            axis.annotate(f"lr {rate:g}", (AFTER + 2, curve[-1]), fontsize=7, color=colours[rate])
    axis.set_yscale("log")
    axis.set_xlim(1, AFTER + 16)
    axis.set_xlabel("tokens after the publish", fontsize=8)
    axis.set_ylabel("mean distance of log-probabilities", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.set_title("solid: continue   dotted: interrupt   dashed: what the update has moved", fontsize=8, loc="left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--docs", action="store_true", help="write the page and the picture")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found: dict[tuple[float, str], Found] = {}
    for rate in RATES:
        actor, old, new = two_versions(rate)
        for name in ("interrupt", "continue"):
            found[rate, name] = publish(actor, old, new, asked.rows, keep_cache=name == "continue")
    told = lines(found, asked.rows)
    print("\n".join(told))
    if asked.docs:
        draw(found, PICTURE)
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(OPEN, 1)
        PAGE.write_text("\n".join([before + OPEN, "", *told, "", CLOSE + rest.split(CLOSE, 1)[1]]), encoding="utf-8")


if __name__ == "__main__":
    main()
