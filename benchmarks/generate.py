"""Generation by `hf`, whole calls and row by row, beside transformers' `generate` and a hand-written loop.

    python benchmarks/generate.py [--prompts 16] [--samples 8] [--longest 24] [--tokens 48] [--rounds 5] [--threads 2]

One model with random weights, the same prompts of several lengths, the same number of samples and of tokens at most.
All run in this process in turn, ``rounds`` times over after one that does not count. A figure is a median over rounds:
tokens for each second of CPU time, which other processes of the machine change less than the time on the wall, and the
ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers"
SMALL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--longest", type=int, default=24, help="tokens of the longest prompt, 3x the shortest")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    said = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flowrl-generate-") as folder:
        os.environ.update(PEERS_OUT=folder, THREADS=str(said.threads), OMP_NUM_THREADS=str(said.threads))
        make_model(Path(folder) / "ckpt", said.longest + said.tokens)
        found = measure(Bench(Path(folder) / "ckpt", said), said.rounds)
    if said.format == "json":
        print(json.dumps(found))
        return
    for name, (rate, ratio) in found.items():
        print(f"{name:14}{rate:10.0f} tokens per CPU second{'' if ratio is None else f'   hf is {ratio:.2f}x of it'}")


def make_model(folder: Path, positions: int) -> None:
    """Write a Qwen2 with random weights, as `peers/work.py` describes its own."""
    import torch

    sys.path.insert(0, str(PEERS))
    import work
    from transformers import AutoModelForCausalLM

    config = work.model_config()
    for name, value in {**SMALL, "max_position_embeddings": positions}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


class Bench:
    """The four ways, each of which returns how many tokens it has made."""

    def __init__(self, folder: Path, said: Any) -> None:
        sys.argv = [sys.argv[0]]  # which the hand-written loop reads too
        import limit_grpo
        import torch
        import work
        from transformers import AutoModelForCausalLM

        import flowrl as fl
        from flowrl.backends import open_engine
        from flowrl.workers.model_options import Build, Model

        torch.set_num_threads(said.threads)
        random = torch.Generator().manual_seed(1)
        lengths = torch.linspace(said.longest // 3, said.longest, said.prompts).long().tolist()
        rows = [torch.randint(20, SMALL["vocab_size"], (n,), generator=random).tolist() for n in lengths]
        self.samples, self.tokens, self.eos = said.samples, said.tokens, work.EOS
        self.prompts = fl.Column.of(rows, dim="prompt", dtype="i32")
        self.lengths = torch.tensor(lengths)
        self.padded = torch.tensor([[work.PAD] * (said.longest - len(row)) + row for row in rows])
        self.sampling = fl.testing.Sampling(max_tokens=said.tokens)
        self.seeds = torch.arange(said.prompts * said.samples) * 7919
        self.request = fl.testing.SampleRequest(self.prompts, self.samples, self.seeds, self.sampling)
        self.engine: Any = open_engine("hf", Build(Model(str(folder))))
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        ).eval()
        self.hand: Any = limit_grpo
        self.hand.N, self.hand.G, self.hand.P, work.MAX_NEW = said.prompts, said.samples, said.longest, said.tokens

    def hf(self) -> int:
        made = self.engine.generate(self.prompts, self.samples, self.seeds, self.sampling)
        return int(made.ids.lengths.sum())

    def hf_rows(self) -> int:
        """Rows one by one, in a continuous batch."""
        self.engine.submit(self.request)
        made = 0
        while self.engine.running():
            made += sum(len(row.ids) for row in self.engine.step())
        return made

    def transformers(self) -> int:
        import torch

        with torch.no_grad():
            ids = self.model.generate(
                input_ids=self.padded,
                attention_mask=(self.padded != 0).long(),
                max_new_tokens=self.tokens,
                num_return_sequences=self.samples,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
            )[:, self.padded.shape[1] :]
        ended = ids == self.eos
        return int(torch.where(ended.any(1), ended.int().argmax(1) + 1, ids.shape[1]).sum())

    def by_hand(self) -> int:
        return int(self.hand.generate(self.padded, self.lengths)[1].sum())


def measure(bench: Bench, rounds: int) -> dict[str, tuple[float, float | None]]:
    """Return the median rate of each way, and the median ratio of that of `hf` to it."""
    ways: dict[str, Callable[[], int]] = {
        "hf": bench.hf,
        "hf, row by row": bench.hf_rows,
        "transformers": bench.transformers,
        "by hand": bench.by_hand,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.process_time()
            rate = way() / (time.process_time() - began)
            rates[name] += [rate] if number else []
    own = rates["hf"]
    return {
        name: (
            statistics.median(found),
            None if name == "hf" else statistics.median(a / b for a, b in zip(own, found, strict=True)),
        )
        for name, found in rates.items()
    }


if __name__ == "__main__":
    main()
