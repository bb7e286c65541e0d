"""What is called of vLLM 0.32: its options, its requests, its control calls, and how it loads weights."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: What has to be in the environment before vLLM is imported.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process, and so are the rows that Draw keeps
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one has another interface for logits processors
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS counts, and other processes keep their cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",  # all that it needs lies in a folder
}
#: Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def open_engine(
    folder: str, *, dtype: str, positions: int | None, options: Mapping[str, Any], ranks: Mapping[str, Any]
) -> Any:
    """Return vLLM's engine for the configuration in ``folder``, with weights that mean nothing yet.

    ``ranks``: how many processes split the model, which of them this is, and the file at which they meet. They are
    asked for the same, and decide alike what each step computes.
    """
    os.environ.update(ENVIRONMENT if options["compiled"] else {**ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"})
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from .draw import Draw

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder,
            dtype=dtype,  # type: ignore[arg-type]
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=positions,
            kv_cache_memory_bytes=int(options["kv_cache"] * (1 << 30)),
            max_num_seqs=options["rows"],
            enforce_eager=not options["compiled"],
            enable_prefix_caching=options["prefix_cache"],
            async_scheduling=False,  # Draw needs the tokens of a row before its next one
            logits_processors=[Draw],
            disable_log_stats=True,
            **(_together(ranks) if ranks["size"] > 1 else {}),
        )
    )
    for shared in Path("/dev/shm").glob(f"{Path(ranks['meeting']).name}-*"):
        shared.unlink(missing_ok=True)  # all have it open by now, and nothing is left of it, however they end
    engine.packed = options["packed"]
    if engine.packed:
        _keep_freed_memory()
    return engine


def _keep_freed_memory() -> None:
    """Have glibc keep what is freed: each publish packs weights of the same sizes, and fresh memory is dear."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        change(_M_MMAP_MAX, 0)
        change(_M_TRIM_THRESHOLD, -1)


def _together(ranks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one of several processes, which meet at a file: no port is opened for it."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    where = f"file://{ranks['meeting']}", ranks["rank"], ranks["rank"]
    ExecutorWithExternalLauncher._distributed_args = lambda self: where  # type: ignore[method-assign]
    os.environ.update({"RANK": str(ranks["rank"]), "LOCAL_RANK": str(ranks["rank"]), "WORLD_SIZE": str(ranks["size"])})
    return {"tensor_parallel_size": ranks["size"], "distributed_executor_backend": "external_launcher"}


def load_weights(engine: Any, parameters: Mapping[str, Tensor]) -> set[str]:
    """Load whole parameters by vLLM's names. Returns the names of those that got nothing."""
    (lacking,) = engine.collective_rpc(_load, args=(parameters, engine.packed))
    return lacking


@torch.no_grad()
def _load(worker: Any, parameters: Mapping[str, Tensor], packed: bool) -> set[str]:
    from vllm.config import set_current_vllm_config

    runner = worker.model_runner
    model = runner.get_model()
    mine = dict(model.named_parameters())
    experts = {id(layer): layer for layer in model.modules() if hasattr(layer, "w13_weight")}
    with set_current_vllm_config(runner.vllm_config):
        for name, given in parameters.items():
            (_write if packed or given.dim() != 2 else _lay)(model, name, mine.pop(name), given)
        for layer in experts.values():
            _pack_experts(layer)
        if packed:
            _pack_heads(model)
    return set(mine)


def _write(model: Any, name: str, mine: Tensor, given: Tensor) -> None:
    """Write one parameter. What a layer has packed for the CPU, and then emptied, it packs again."""
    path, _, last = name.rpartition(".")
    layer = model.get_submodule(path)
    if hasattr(layer, "w13_weight"):  # of experts, which are packed in place of those as they are given
        setattr(layer, last, torch.nn.Parameter(given.to(mine.dtype, copy=True), requires_grad=False))
        return
    if mine.shape == given.shape:
        mine.data.copy_(given)
        return
    assert not mine.numel(), f"vLLM has {name} as {list(mine.shape)}, and not as {list(given.shape)}"
    setattr(layer, last, torch.nn.Parameter(given.to(mine.dtype), requires_grad=False))
    _pack(layer)


def _lay(model: Any, name: str, mine: Tensor, given: Tensor) -> None:
    """Have a layer, and an output head that is tied to it, compute with a matrix where it lies."""
    weight = torch.nn.Parameter(given.to(mine.dtype), requires_grad=False)
    path, _, last = name.rpartition(".")
    layer = model.get_submodule(path)
    for one in {layer, *(module for module in model.modules() if getattr(module, last, None) is mine)}:
        setattr(one, last, weight)
        one.cpu_linear = _multiply


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias`` by oneDNN, which in fp32 torch's own linear layer does not use."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def _pack(layer: Any) -> None:
    layer.cpu_linear = None  # what was packed leaves its memory to what is
    layer.quant_method.process_weights_after_loading(layer)


def _pack_experts(layer: Any) -> None:
    layer.quant_method.moe_kernel = None  # with one that is there, they would be taken as they are, and not packed
    layer.quant_method.process_weights_after_loading(layer)


def _pack_heads(model: Any) -> None:
    """Pack the weights of output heads for the CPU again: they keep those of before, tied to an embedding or not."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            _pack(module)


def sleep(engine: Any, parameters: Mapping[str, Tensor]) -> int:
    """Free the cache of keys and values, and weights that are copies of ``parameters``. Returns the bytes.

    No row may run. The next :func:`load_weights` has to come after :func:`wake`.
    """
    forget_prefixes(engine)
    (freed,) = engine.collective_rpc(_sleep, args=(parameters,))
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    return freed


def _sleep(worker: Any, parameters: Mapping[str, Tensor]) -> int:
    runner = worker.model_runner
    model = runner.get_model()
    held = [*runner.kv_caches, *model.parameters()]
    storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in held) if s.resizable()}
    worker.emptied = [(storage, storage.nbytes()) for storage in storages.values()]
    packed = {n: parameters[n] for n, mine in model.named_parameters() if n in parameters and not mine.numel()}
    for storage, _ in worker.emptied:
        storage.resize_(0)
    for layer in model.modules():
        if getattr(layer, "cpu_linear", None) is not None:
            layer.cpu_linear = None  # and what was packed for it: load_weights packs again
        if hasattr(layer, "w13_weight"):
            layer.quant_method.moe_kernel = None
    return sum(size for _, size in worker.emptied) + sum(given.nbytes for given in packed.values())


def wake(engine: Any) -> None:
    """Have memory again where :func:`sleep` has freed it, with nothing that means anything in it."""
    engine.collective_rpc(_wake)


def _wake(worker: Any) -> None:
    for storage, size in worker.emptied:
        storage.resize_(size)
    worker.emptied = []


def computed(engine: Any, publish: int) -> dict[str, Tensor]:
    """Return columns of the weights that vLLM computes with; see :func:`flowrl.backends.vllm.columns.computed`."""
    (found,) = engine.collective_rpc(_computed, args=(publish,))
    return found


def _computed(worker: Any, publish: int) -> dict[str, Tensor]:
    from .columns import computed

    return computed(worker.model_runner.get_model(), publish)


def wanted(engine: Any, parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor], publish: int) -> Any:
    """Return the same of what was given; see :mod:`flowrl.backends.vllm.columns`."""
    (found,) = engine.collective_rpc(_wanted, args=(parameters, weights, publish))
    return found


def _wanted(
    worker: Any, parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor], publish: int
) -> dict[str, Tensor]:
    from .columns import packed_experts, wanted

    return wanted(weights, publish) | packed_experts(worker.model_runner.get_model(), parameters, publish)


def kept_prefixes(engine: Any) -> int:
    """Return of how many blocks of tokens the cache has keys and values that a later row would take."""
    return len(engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


def running_rows(engine: Any) -> int:
    """Return how many rows the engine has, those that wait included."""
    return engine.get_num_unfinished_requests()


def forget_prefixes(engine: Any) -> bool:
    """Empty the cache of keys and values, which are those of the weights before. Returns whether it is empty."""
    return bool(engine.reset_prefix_cache())


def add_row(engine: Any, name: str, prompt: list[int], tokens: int, stops: list[int], drawn: Mapping[str, Any]) -> None:
    """Begin a row of at most ``tokens`` tokens; ``drawn`` is what :class:`~flowrl.backends.vllm.draw.Draw` is told."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        output_kind=RequestOutputKind.DELTA,
        stop_token_ids=stops,
        ignore_eos=True,
        detokenize=False,
        extra_args=dict(drawn),
    )
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def found_tokens(output: Any) -> int:
    """Return how many tokens that a row brought were in the cache; its first output says it."""
    return output.num_cached_tokens or 0


def add_probe(engine: Any, name: str, tokens: list[int]) -> None:
    """Begin a row of which the log-probabilities of its own tokens are wanted."""
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": tokens}, params)


def probed(output: Any) -> list[float]:
    """Return the log-probability of each token of a probe but the first."""
    ids = output.prompt_token_ids[1:]
    return [given[id].logprob for id, given in zip(ids, output.prompt_logprobs[1:], strict=True)]
