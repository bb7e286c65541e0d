"""Generate, log-probabilities and update of a random-weight 0.5 B Qwen2 beside plain torch loops, with peak memory.

    python benchmarks/gpu_step.py [--prompts 32] [--group 8] [--prompt-tokens 256] [--response-tokens 256]
                                  [--rounds 5] [--device cuda] [--small] [--format table|json]

The plain loops are what one writes by hand: ``model.generate``, a forward pass with ``log_softmax`` over all logits,
and AdamW on the same clipped loss, in bf16 autocast with fp32 master weights. Both sides run in turn in one process;
figures are medians, to be read as ratios. ``--small --device cpu`` tries the script itself on a small model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import flowrl as fl
from flowrl import rl

QWEN2_05B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SMALL = {**QWEN2_05B, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4}


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 500)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


class Plain:
    """The same work by hand."""

    def __init__(self, config: dict[str, Any], device: str, lr: float) -> None:
        from transformers import AutoConfig

        self.device = device
        torch.manual_seed(0)
        about = AutoConfig.for_model(**config)
        with torch.device(device):  # drawn there: on a CPU it takes longer than all that is measured
            self.model = AutoModelForCausalLM.from_config(about, dtype=torch.float32, attn_implementation="sdpa")
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0, fused=True)

    def autocast(self) -> Any:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda")

    def generate(self, prompts: torch.Tensor, group: int, count: int) -> torch.Tensor:
        with torch.no_grad(), self.autocast():
            return self.model.generate(
                prompts, do_sample=True, top_k=0, max_new_tokens=count, min_new_tokens=count, num_return_sequences=group
            )

    def _logprobs(self, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
        with self.autocast():
            logits = self.model(tokens[:, :-1]).logits[:, prompt - 1 :]
        return logits.float().log_softmax(-1).gather(-1, tokens[:, prompt:, None]).squeeze(-1)

    def logprobs(self, tokens: torch.Tensor, prompt: int, micro: int) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([self._logprobs(part, prompt) for part in tokens.split(micro)])

    def update(
        self, tokens: torch.Tensor, prompt: int, old: torch.Tensor, advantages: torch.Tensor, micro: int
    ) -> None:
        for part, before, advantage in zip(tokens.split(micro), old.split(micro), advantages.split(micro), strict=True):
            ratio = (self._logprobs(part, prompt) - before).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None]).sum() / old.numel()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)


def timed(device: str, rounds: int, pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]]) -> dict[str, Any]:
    """Medians in seconds and peak bytes of both sides of each pair, run in turn."""
    found: dict[str, Any] = {}
    for name, sides in pairs.items():
        walls: tuple[list[float], list[float]] = ([], [])
        peaks = [0, 0]
        for _ in range(rounds + 1):
            for side, run in enumerate(sides):
                if device == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                run()
                if device == "cuda":
                    torch.cuda.synchronize()
                    peaks[side] = max(peaks[side], torch.cuda.max_memory_allocated())
                walls[side].append(time.perf_counter() - start)
        mine, plain = (statistics.median(w[1:]) for w in walls)
        found[name] = {
            "flowrl_s": round(mine, 4),
            "plain_s": round(plain, 4),
            "ratio": round(mine / plain, 3),
            "flowrl_peak_gib": round(peaks[0] / 2**30, 2),
            "plain_peak_gib": round(peaks[1] / 2**30, 2),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in (("prompts", 32), ("group", 8), ("prompt-tokens", 256), ("response-tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro", type=int, default=8, help="rows of a forward pass of the plain loops")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    said = parser.parse_args()
    config = SMALL if said.small else QWEN2_05B
    lr = 1e-6
    model = fl.Model(config=config, tokenizer=tokenizer)
    actor = fl.open(fl.Actor(model, lr=lr, max_tokens=said.response_tokens), device=said.device)
    plain = Plain(config, said.device, lr)
    ids = torch.randint(2, 500, (said.prompts, said.prompt_tokens), generator=torch.Generator().manual_seed(0))
    batch = fl.Batch.of(said.prompts, prompt_ids=fl.Column.of(ids.int(), dim="prompt"))
    rows = actor.generate(batch, n=said.group)
    scored = rows.with_columns({"rewards": fl.Column.of([float(i % 3) for i in range(len(rows))], dtype="f32")})
    scored = rl.group_advantages(scored)
    there = ids.to(said.device)
    tokens = plain.generate(there, said.group, said.response_tokens)
    old = plain.logprobs(tokens, said.prompt_tokens, said.micro)
    advantages = torch.linspace(-1, 1, len(tokens), device=said.device)
    figures = timed(
        said.device,
        said.rounds,
        {
            "generate": (
                lambda: actor.generate(batch, n=said.group),
                lambda: plain.generate(there, said.group, said.response_tokens),
            ),
            "logprobs": (lambda: actor.logprobs(rows), lambda: plain.logprobs(tokens, said.prompt_tokens, said.micro)),
            "update": (
                lambda: actor.update(scored, loss=rl.ppo_clip()),
                lambda: plain.update(tokens, said.prompt_tokens, old, advantages, said.micro),
            ),
        },
    )
    if said.format == "json":
        name = torch.cuda.get_device_name() if said.device == "cuda" else said.device
        print(json.dumps({"device": name, "torch": torch.__version__, **figures}))
        return
    for name, row in figures.items():
        peak = f"peak {row['flowrl_peak_gib']} against {row['plain_peak_gib']} GiB" if said.device == "cuda" else ""
        print(f"{name:10}{row['flowrl_s']:9.4f} s  plain {row['plain_s']:9.4f} s  ratio {row['ratio']:.2f}  {peak}")


if __name__ == "__main__":
    main()
