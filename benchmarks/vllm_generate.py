"""vLLM through flowrl beside its own offline ``LLM.generate``, and a publish beside a copy of the same bytes.

    make vllm; .venv-vllm/bin/python benchmarks/vllm_generate.py [--rounds 5] [--only generate|publish]

Both sides have the same model, requests, sampling settings, options and number of threads, each in a process of its
own, and take turns in one run; figures are medians, to be read as ratios. Requests ask for the log-probability of each
token. ``LLM.generate`` has no seed for each row, which flowrl always has.

A publish is of a model with 98 M parameters. ``raw`` copies its bytes once within one process. ``load`` is the
publish, ``proof`` what it takes besides, in both processes, to see that it has arrived.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import Any

import torch

from flowrl.backends import open_engine
from flowrl.batch import Column
from flowrl.workers.model_options import Build, Model, Sampling

_BASE = {"model_type": "qwen2", "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SMALL = {
    **_BASE,
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
LARGE = {
    **SMALL,
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
#: Name: how many prompts, tokens of a prompt, rows of each, tokens of a row.
REQUESTS = {
    "64 prompts": (64, 32, 1, 128),
    "8 prompts x 8": (8, 128, 8, 128),
    "4 long rows": (4, 32, 1, 384),
}
OPTIONS = {"kv_cache": 1.0, "rows": 64}


def prompts_of(count: int, tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(2, SMALL["vocab_size"], (count, tokens), generator=generator).tolist()


def serve(connection: Any, folder: str, dtype: str) -> None:
    """vLLM alone: open it, answer with the seconds of each call."""
    from flowrl.backends.vllm.v0_32 import ENVIRONMENT

    os.environ.update({**ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"})
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=SMALL["max_position_embeddings"],
        kv_cache_memory_bytes=int(OPTIONS["kv_cache"] * (1 << 30)),
        max_num_seqs=OPTIONS["rows"],
        enforce_eager=True,
        disable_log_stats=True,
    )
    connection.send("ready")
    while (name := connection.recv()) is not None:
        count, tokens, n, most = REQUESTS[name]
        params = SamplingParams(n=n, max_tokens=most, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
        given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts_of(count, tokens)]
        began = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        made = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        connection.send((seconds, made))
    os._exit(0)


def through_flowrl(engine: Any, name: str) -> tuple[float, int]:
    count, tokens, n, most = REQUESTS[name]
    prompts = Column.of(prompts_of(count, tokens), "prompt", "i32")
    began = time.perf_counter()
    made = engine.generate(prompts, n, torch.arange(count * n), Sampling(most))
    return time.perf_counter() - began, int(made.ids.lengths.sum())


def generation(rounds: int, dtype: str) -> dict[str, Any]:
    build = Build(Model(config=SMALL), dtype=dtype, device="cpu", options=OPTIONS)
    ours = open_engine("vllm", build)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours.save(folder)
        here, there = context.Pipe()
        kind = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        peer = context.Process(target=serve, args=(there, folder, kind), daemon=True)
        peer.start()
        here.recv()
    found: dict[str, Any] = {}
    for name in REQUESTS:
        speeds: dict[str, list[float]] = {"flowrl": [], "vllm": []}
        for round_ in range(rounds + 1):
            for side in ("flowrl", "vllm") if round_ % 2 else ("vllm", "flowrl"):
                if side == "flowrl":
                    seconds, tokens = through_flowrl(ours, name)
                else:
                    here.send(name)
                    seconds, tokens = here.recv()
                if round_:  # the first one warms up
                    speeds[side].append(tokens / seconds)
        mine, its = (statistics.median(speeds[side]) for side in ("flowrl", "vllm"))
        found[name] = {"flowrl": round(mine), "vllm": round(its), "ratio": round(mine / its, 3)}
    here.send(None)
    peer.join(60)
    ours.close()
    return found


def publishing(rounds: int, dtype: str) -> dict[str, Any]:
    build = Build(Model(config=LARGE), dtype=dtype, device="cpu", options={"kv_cache": 0.25, "context": 128})
    engine = open_engine("vllm", build)
    weights = [shard.tensor for shard in engine.shards()]
    copies = [torch.empty_like(weight) for weight in weights]
    taken: dict[str, list[float]] = {"raw": [], "load": [], "proof": []}
    for round_ in range(rounds + 1):
        began = time.perf_counter()
        for copy, weight in zip(copies, weights, strict=True):
            copy.copy_(weight)
        raw = time.perf_counter() - began
        engine.weights_written()
        if round_:
            for name, seconds in zip(taken, (raw, engine.published.load, engine.published.proof), strict=True):
                taken[name].append(seconds)
    size = sum(weight.nbytes for weight in weights)
    found: dict[str, Any] = {name: round(statistics.median(seconds), 4) for name, seconds in taken.items()}
    found |= {"parameters": sum(w.numel() for w in weights), "bytes": size, "published": engine.published.bytes}
    found["ratio"] = round(found["load"] / found["raw"], 2)
    found["with proof"] = round((found["load"] + found["proof"]) / found["raw"], 2)
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM through flowrl beside vLLM")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side (5)")
    parser.add_argument("--only", choices=["generate", "publish"], help="one of the two")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args()
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    found: dict[str, Any] = {"threads": threads, "dtype": options.dtype}
    if options.only != "publish":
        found["generate"] = generation(options.rounds, options.dtype)
    if options.only != "generate":
        found["publish"] = publishing(options.rounds, options.dtype)
    if options.format == "json":
        print(json.dumps(found))
        return
    for name, one in found.get("generate", {}).items():
        print(f"{name:16} flowrl {one['flowrl']} tokens/s, LLM.generate {one['vllm']}: {one['ratio']:.2f}x")
    if "publish" in found:
        one = found["publish"]
        print(
            f"publish of {one['parameters'] / 1e6:.0f} M parameters, {one['published'] / one['bytes']:.2f}x their bytes"
        )
        print(f"  raw copy {one['raw']} s, load {one['load']} s ({one['ratio']}x), proof {one['proof']} s")


if __name__ == "__main__":
    main()
