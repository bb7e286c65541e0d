"""What is called of vLLM 0.32: its options, its requests, its control calls, and how it loads weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from . import on_cpu, on_cuda

#: What has to be in the environment before vLLM is imported.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process, and so are the rows that Draw keeps
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one has another interface for logits processors
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS counts, and other processes keep their cores
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # Draw has drawn before any sampler of vLLM looks
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TRITON_F32_DEFAULT": "tf32x3",  # on CUDA: in attention and experts fp32 is no TF32, which has 10 bits
    "HF_HUB_OFFLINE": "1",  # all that it needs lies in a folder
}


def open_engine(
    folder: str, *, dtype: str, positions: int | None, options: Mapping[str, Any], ranks: Mapping[str, Any]
) -> Any:
    """Return vLLM's engine for the configuration in ``folder``, with weights that mean nothing yet.

    ``ranks``: how many processes split the model, which of them this is, and the file at which they meet. They are
    asked for the same, and decide alike what each step computes.
    """
    os.environ.update(ENVIRONMENT if options["compiled"] else {**ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"})
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    from .draw import Draw

    device: Any = on_cuda if current_platform.is_cuda() else on_cpu
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
            enable_prefix_caching=options["prefix_cache"],
            async_scheduling=False,  # Draw needs the tokens of a row before its next one
            logits_processors=[Draw],
            disable_log_stats=True,
            **device.engine_options(compiled=options["compiled"]),
            **(_together(ranks) if ranks["size"] > 1 else {}),
        )
    )
    for shared in Path("/dev/shm").glob(f"{Path(ranks['meeting']).name}-*"):
        shared.unlink(missing_ok=True)  # all have it open by now, and nothing is left of it, however they end
    engine.device, engine.packed = device, options["packed"]
    device.prepare(packed=engine.packed)
    return engine


def _together(ranks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one of several processes, which meet at a file: no port is opened for it."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    where = f"file://{ranks['meeting']}", ranks["rank"], ranks["rank"]
    ExecutorWithExternalLauncher._distributed_args = lambda self: where  # type: ignore[method-assign]
    os.environ.update({"RANK": str(ranks["rank"]), "LOCAL_RANK": str(ranks["rank"]), "WORLD_SIZE": str(ranks["size"])})
    return {"tensor_parallel_size": ranks["size"], "distributed_executor_backend": "external_launcher"}


def hold(engine: Any, memory: Tensor) -> None:
    """Make ready to read weights from memory of another process, which lasts as long as this one."""
    engine.device.hold(memory)


def load_weights(engine: Any, parameters: Mapping[str, Tensor]) -> set[str]:
    """Load whole parameters by vLLM's names. Returns the names of those that got nothing."""
    (lacking,) = engine.collective_rpc(engine.device.load, args=(parameters, engine.packed))
    return lacking


def sleep(engine: Any, parameters: Mapping[str, Tensor]) -> int:
    """Free the cache of keys and values, and weights that are copies of ``parameters``. Returns the bytes.

    No row may run. The next :func:`load_weights` has to come after :func:`wake`.
    """
    forget_prefixes(engine)
    (freed,) = engine.collective_rpc(engine.device.sleep, args=(parameters,))
    return freed


def wake(engine: Any) -> None:
    """Have memory again where :func:`sleep` has freed it, with nothing that means anything in it."""
    engine.collective_rpc(engine.device.wake)


def computed(engine: Any, publish: int) -> dict[str, Tensor]:
    """Return columns of the weights that vLLM computes with; see :func:`flowrl.backends.vllm.columns.computed`."""
    (found,) = engine.collective_rpc(_computed, args=(publish,))
    return found


def _computed(worker: Any, publish: int) -> dict[str, Tensor]:
    from .columns import computed

    return computed(worker.model_runner.get_model(), publish)


def wanted(engine: Any, parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor], publish: int) -> Any:
    """Return the same of what was given; see :mod:`flowrl.backends.vllm.columns`."""
    (found,) = engine.collective_rpc(_wanted, args=(parameters, weights, publish, engine.device.packed_experts))
    return found


def _wanted(
    worker: Any,
    parameters: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    publish: int,
    pack: Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    from .columns import experts_wanted, wanted

    return wanted(weights, publish) | experts_wanted(worker.model_runner.get_model(), parameters, publish, pack)


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
