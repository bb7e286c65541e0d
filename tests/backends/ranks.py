"""Run a function on several processes that are one gloo group, and get what each of them gives."""

import contextlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import runpy
import tempfile
import time
import traceback

import numpy
import torch

#: What a process imports before the others are copied from it.
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "flowrl.backends.fsdp2.engine",
    "flowrl.rl",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.llama.modeling_llama",
]


def copies():
    """A context of multiprocessing whose processes are copies of one that has made the imports that take seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return context


def run(function, count, *arguments, timeout=120.0, backend="gloo"):
    """``function(*arguments)`` of a test file on ``count`` ranks; its results, by rank.

    Arguments and results are plain data and tensors. AssertionError with the traceback of the first rank that fails,
    or with the names of those that are not done in time; no process outlives the call.
    """
    context = copies()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(count):
            mine, theirs = context.Pipe()
            said = (
                inspect.getfile(function),
                function.__name__,
                rank,
                count,
                f"{folder}/store",
                backend,
                _arrays(arguments),
                theirs,
            )
            process = context.Process(target=_child, args=said, daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            return _collected(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collected(pipes, end):
    """The results in the order of ranks."""
    found, waiting = {}, {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} are not done in time"
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                failed, result = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            assert not failed, f"rank {rank}:\n{result}"
            found[rank] = _tensors(result)
    return [found[rank] for rank in range(len(pipes))]


def _child(file, name, rank, count, store, backend, arguments, pipe):
    torch.set_num_threads(1)
    try:
        if "cuda" in backend:
            torch.cuda.set_device(rank)
        torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
        result = runpy.run_path(file)[name](*_tensors(arguments))
        pipe.send((False, _arrays(result)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
        raise
    with contextlib.suppress(EOFError):
        pipe.recv()  # a peer may still need this process; whoever called ends it, or is gone
    os._exit(0)


class _Array:
    """A tensor on its way."""

    def __init__(self, tensor):
        self.array = tensor.detach().cpu().numpy()


def _arrays(item):
    if isinstance(item, torch.Tensor):
        return _Array(item)
    if isinstance(item, dict):
        return {k: _arrays(v) for k, v in item.items()}
    return type(item)(_arrays(x) for x in item) if type(item) in (list, tuple) else item


def _tensors(item):
    if isinstance(item, _Array):
        return torch.from_numpy(numpy.array(item.array))
    if isinstance(item, dict):
        return {k: _tensors(v) for k, v in item.items()}
    return type(item)(_tensors(x) for x in item) if type(item) in (list, tuple) else item
