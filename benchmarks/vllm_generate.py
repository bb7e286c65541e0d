"""vLLM through flowrl beside its own offline ``LLM.generate``, and a publish beside a copy of the same bytes.

    make vllm; .venv-vllm/bin/python benchmarks/vllm_generate.py [--rounds 5] [--only generate|publish] [--device cuda]
        [--model 5m|98m|494m]

Both sides have the same model, requests, sampling settings, options and number of threads, each in a process of its
own, and take turns in one run; figures are medians, to be read as ratios. Requests ask for the log-probability of each
token. ``LLM.generate`` has no seed for each row, which flowrl always has.

``in place`` is flowrl with ``packed: false``. On CUDA nothing is packed, and both sides have graphs of decode steps;
with ``--compiled`` both compile the model too. ``--model`` says how many parameters it has: by itself 5 M on a CPU, for
a publish there 98 M, and 494 M on CUDA.

A publish is into an engine that packs and into one with ``packed: false``, in turns.
``raw`` copies its bytes once within one process. ``load`` is the publish, ``proof`` what it takes besides, in both
processes, to see that it has arrived. Ratios are medians of those within a round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch

from flowrl.backends import open_engine
from flowrl.backends.vllm import on_cpu, on_cuda
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
#: The sizes of Qwen2-0.5B.
HALF_BILLION = {
    **_BASE,
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
MODELS = {"5m": SMALL, "98m": LARGE, "494m": HALF_BILLION}
#: Name: how many prompts, tokens of a prompt, rows of each, tokens of a row.
REQUESTS = {
    "64 prompts": (64, 32, 1, 128),
    "8 prompts x 8": (8, 128, 8, 128),
    "4 long rows": (4, 32, 1, 384),
}
ON_CUDA = {
    "256 prompts": (256, 128, 1, 256),
    "32 prompts x 8": (32, 256, 8, 256),
    "4 long rows": (4, 128, 1, 512),
}
#: What both sides have, by device.
OPTIONS = {"cpu": {"kv_cache": 1.0, "rows": 64}, "cuda": {"kv_cache": 8.0, "rows": 256}}


def prompts_of(count: int, tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(2, SMALL["vocab_size"], (count, tokens), generator=generator).tolist()


def serve(connection: Any, folder: str, dtype: str, device: str, compiled: bool) -> None:
    """vLLM alone: open it, answer with the seconds of each call."""
    from flowrl.backends.vllm.v0_32 import ENVIRONMENT

    options, where = OPTIONS[device], on_cpu if device == "cpu" else on_cuda
    os.environ.update(ENVIRONMENT if compiled else {**ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"})
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=SMALL["max_position_embeddings"],
        kv_cache_memory_bytes=int(options["kv_cache"] * (1 << 30)),
        max_num_seqs=options["rows"],
        disable_log_stats=True,
        **where.engine_options(compiled=compiled),
    )
    connection.send("ready")
    while (name := connection.recv()) is not None:
        count, tokens, n, most = requests(device)[name]
        params = SamplingParams(n=n, max_tokens=most, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
        given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts_of(count, tokens)]
        began = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        made = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        connection.send((seconds, made))
    os._exit(0)


def requests(device: str) -> dict[str, tuple[int, int, int, int]]:
    return REQUESTS if device == "cpu" else ON_CUDA


def through_flowrl(engine: Any, request: tuple[int, int, int, int]) -> tuple[float, int]:
    count, tokens, n, most = request
    prompts = Column.of(prompts_of(count, tokens), "prompt", "i32")
    began = time.perf_counter()
    made = engine.generate(prompts, n, torch.arange(count * n), Sampling(most))
    return time.perf_counter() - began, int(made.ids.lengths.sum())


def generation(rounds: int, dtype: str, device: str, compiled: bool, size: str) -> dict[str, Any]:
    model = Model(config=MODELS[size])
    options = {**OPTIONS[device], "compiled": compiled}
    build = Build(model, dtype=dtype, device=device, options=options)
    engines = {"flowrl": open_engine("vllm", build)}
    if device == "cpu":
        engines["in place"] = open_engine("vllm", replace(build, options={**options, "packed": False}))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        engines["flowrl"].save(folder)
        here, there = context.Pipe()
        kind = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        peer = context.Process(target=serve, args=(there, folder, kind, device, compiled), daemon=True)
        peer.start()
        here.recv()
    found: dict[str, Any] = {}
    sides = [*engines, "vllm"]
    for name, request in requests(device).items():
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        for round_ in range(rounds + 1):
            for side in sides if round_ % 2 else reversed(sides):
                if side in engines:
                    seconds, tokens = through_flowrl(engines[side], request)
                else:
                    here.send(name)
                    seconds, tokens = here.recv()
                if round_:  # the first one warms up
                    speeds[side].append(tokens / seconds)
        found[name] = {side: round(statistics.median(speeds[side])) for side in sides}
        found[name]["ratio"] = ratio(speeds["flowrl"], speeds["vllm"])
        if "in place" in engines:
            found[name]["in place, ratio"] = ratio(speeds["in place"], speeds["flowrl"])
    here.send(None)
    peer.join(60)
    for engine in engines.values():
        engine.close()
    return found


def ratio(ones: list[float], others: list[float]) -> float:
    """The median of the ratios within a round."""
    return round(statistics.median(a / b for a, b in zip(ones, others, strict=True)), 3)


def publishing(rounds: int, dtype: str, device: str, size: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    options = {"kv_cache": 0.25, "context": 128}
    here = device == "cpu"
    build = Build(Model(config=MODELS[size]), dtype=dtype, device=device, options=options)
    kinds = (True, False) if here else (True,)
    engines = {p: open_engine("vllm", replace(build, options={**options, "packed": p})) for p in kinds}
    taken: dict[bool, list[tuple[float, float, float]]] = {p: [] for p in kinds}
    weights = {packed: [shard.tensor for shard in engine.shards()] for packed, engine in engines.items()}
    copies = [torch.empty_like(weight, device=device) for weight in weights[True]]
    for round_ in range(rounds + 1):
        for packed, engine in engines.items():
            began = time.perf_counter()
            for copy, weight in zip(copies, weights[packed], strict=True):
                copy.copy_(weight)
            if not here:
                torch.cuda.synchronize()
            raw = time.perf_counter() - began
            engine.weights_written()
            if round_:
                taken[packed].append((raw, engine.published.load, engine.published.proof))
    for packed, engine in engines.items():
        raw, load, proof = map(list, zip(*taken[packed], strict=True))
        both = [a + b for a, b in zip(load, proof, strict=True)]
        named = {"raw": raw, "load": load, "proof": proof}
        one = {name: round(statistics.median(seconds), 4) for name, seconds in named.items()}
        one |= {"ratio": ratio(load, raw), "with proof": ratio(both, raw), "published": engine.published.bytes}
        found[("packed" if packed else "in place") if here else "to the device"] = one
        engine.close()
    found["parameters"], found["bytes"] = sum(c.numel() for c in copies), sum(c.nbytes for c in copies)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM through flowrl beside vLLM")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side (5)")
    parser.add_argument("--only", choices=["generate", "publish"], help="one of the two")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=list(MODELS), help="how many parameters (5m and 98m, on CUDA 494m)")
    parser.add_argument("--compiled", action="store_true", help="both sides compile the model")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args()
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    found: dict[str, Any] = {"threads": threads, "dtype": options.dtype}
    sizes = ("5m", "98m") if options.device == "cpu" else ("494m", "494m")
    small, large = (options.model or size for size in sizes)
    if options.only != "publish":
        found["generate"] = generation(options.rounds, options.dtype, options.device, options.compiled, small)
    if options.only != "generate":
        found["publish"] = publishing(options.rounds, options.dtype, options.device, large)
    if options.format == "json":
        print(json.dumps(found))
        return
    for name, one in found.get("generate", {}).items():
        print(f"{name:16} flowrl {one['flowrl']} tokens/s, LLM.generate {one['vllm']}: {one['ratio']:.2f}x", end="")
        print(f"; in place {one['in place']}: {one['in place, ratio']:.2f}x of packed" if "in place" in one else "")
    if "publish" in found:
        of = found["publish"]
        print(f"publish of {of['parameters'] / 1e6:.0f} M parameters")
        for name, one in ((name, one) for name, one in of.items() if isinstance(one, dict)):
            print(f"  {name:9} {one['published'] / of['bytes']:.2f}x their bytes, raw copy {one['raw']} s", end=", ")
            print(f"load {one['load']} s ({one['ratio']:.2f}x), proof {one['proof']} s")


if __name__ == "__main__":
    main()
