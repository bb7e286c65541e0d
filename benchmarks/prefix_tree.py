"""What an update costs whose rows are branches of trees: each token of a tree computed once, or each row by itself.

    python benchmarks/prefix_tree.py [--rounds 3] [--branches 4]

The rows are those that ``rl.branches`` makes of agents which rewrote their history: 2 tasks with 4 episodes of 6 turns
each, every episode with so many branches, each of which goes on from some turn of another one. Told are the tokens that
are fed, seconds of the CPU of an update in both ways, the median of rounds in turn, and how far log-probabilities and
gradients lie apart. The exit status is 1 where that is more than 1e-6, or 1e-6 of the largest number.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from statistics import median

import torch

import flowrl as fl
from flowrl import rl
from flowrl.backends.hf.engine import HFEngine, open_engine
from flowrl.backends.hf.logits import token_logprobs
from flowrl.backends.hf.micro_batches import Rows, micro_batches
from flowrl.workers.model_options import Build, Optim

VOCAB = 256
MODEL = fl.Model(
    config={
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "eos_token_id": 1,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
)
PROMPT, SEEN, SAID, TURNS = 60, 20, 10, 6  # tokens of a prompt, of what is observed, of an answer; turns


def trees(branches: int, tasks: int = 2, episodes: int = 4, seed: int = 0) -> fl.Batch:
    """Rows of all branches; an answer is trained in the first row that has it."""
    draw = random.Random(seed)

    def words(count: int) -> list[int]:
        return [draw.randrange(2, VOCAB) for _ in range(count)]

    keys: list[tuple[int, ...]] = []
    tokens: list[list[int]] = []
    masks: list[list[bool]] = []
    for task in range(tasks):
        prompt = words(PROMPT)
        for episode in range(episodes):
            paths: list[list[tuple[list[int], list[int]]]] = []
            trained: set[int] = set()
            for branch in range(branches):
                kept = draw.choice(paths)[: draw.randrange(1, TURNS)] if paths else []
                paths.append([*kept, *((words(SEEN), words(SAID)) for _ in range(TURNS - len(kept)))])
                row, mask = list(prompt), []
                for seen, said in paths[-1]:
                    row += [*seen, *said]
                    mask += [*[False] * SEEN, *[id(said) not in trained] * SAID]
                    trained.add(id(said))
                keys.append((task, episode, branch))
                tokens.append(row)
                masks.append(mask)
    response = fl.Column.of(masks, dim="response", dtype="bool")
    numbers = torch.rand(len(response.values), generator=torch.Generator().manual_seed(seed))
    return fl.Batch.of(
        keys,
        tokens=fl.Column.of(tokens, dim="token", dtype="i32"),
        response_mask=response,
        advantages=response.with_values((numbers - 0.5) * response.values),
        rollout_logprobs=response.with_values(-5.5 * response.values.float()),
    )


def opened() -> HFEngine:
    torch.manual_seed(0)
    engine = open_engine(Build(MODEL, optim=Optim(lr=1e-5)))
    assert isinstance(engine, HFEngine)
    return engine


def gradients(engine: HFEngine, batch: fl.Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Log-probabilities, the gradients of a weighted sum of them, and how many tokens were fed."""
    rows, fed = Rows.of(batch), 0
    found = torch.zeros(len(rows.targets))
    for micro in micro_batches(engine.net, rows, torch.arange(len(rows)), 1 << 14):
        said, _ = token_logprobs(micro.hidden(engine.net), engine.net.head, rows.targets[micro.at])
        (said * batch.advantages.values[micro.at]).sum().div(len(rows)).backward()
        found[micro.at] = said.detach()
        fed += micro.ids.numel()
    grads = {n: p.grad.clone() for n, p in engine.net.model.named_parameters() if p.grad is not None}
    engine.net.model.zero_grad()
    return found, grads, fed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--branches", type=int, default=4)
    options = parser.parse_args()
    batch = trees(options.branches)
    ways = {"tree": opened(), "rows": opened()}
    ways["rows"].net.grouped = False
    found = {name: gradients(engine, batch) for name, engine in ways.items()}
    print(f"{len(batch)} rows of {batch.tokens.lengths[0]} tokens: {int(batch.tokens.lengths.sum())} tokens")
    spared = PROMPT * (len(batch) - len({key[0] for key in batch.keys}))
    print(f"prompts alone shared: {int(batch.tokens.lengths.sum()) - len(batch) - spared} tokens fed")
    for name, (_, _, fed) in found.items():
        print(f"{name:6}{fed:8} tokens fed, with padding")
    (said, grads, _), (other, wanted, _) = found.values()
    apart = float((said - other).abs().max())
    scale = max(float(grad.abs().max()) for grad in wanted.values())
    bent = max(float((grads[name] - wanted[name]).abs().max()) for name in wanted)
    print(f"log-probabilities differ by {apart:.1e} at most, gradients by {bent:.1e} (the largest is {scale:.1e})")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, engine in ways.items():
            began = time.process_time()
            engine.update(batch, rl.ppo_clip(), micro_tokens=1 << 14)
            seconds[name].append(time.process_time() - began)
    tree, rows = median(seconds["tree"]), median(seconds["rows"])
    print(f"an update takes {tree:.3f} s as trees and {rows:.3f} s row by row: {rows / tree:.2f}x")
    return int(apart > 1e-6 * max(1.0, float(other.abs().max())) or bent > 1e-6 * max(1.0, scale))


if __name__ == "__main__":
    sys.exit(main())
