"""What the plan says of vLLM's parameters is what vLLM's own classes have after they loaded the same checkpoint, at tp=2.

No engine is started: models are built on two ranks, and loaded. They need vLLM: `make vllm-nightly`.
"""

import json
import multiprocessing
import os
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from fusing import CONFIGS, SIZES, checkpoint

from flowrl.placement.backends import backend
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.model_shape import ModelShape
from flowrl.placement.model.rank_parameters import parameters_of
from flowrl.placement.model.weight_layout import Layout

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]
#: A model with experts first: what its ranks agree on at the start is enough for the others.
KINDS = ("experts", "a shared expert", "qwen3", "qwen2, tied", "qwen2, heads for all", "llama", "llama with biases")
#: Sizes that vLLM takes.
_WIDE = {**SIZES, "hidden_size": 32, "intermediate_size": 32, "head_dim": 4, "max_position_embeddings": 128}
_NAMES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "qwen2_moe": "Qwen2Moe"}


def named(whole, model):
    """The weights of a checkpoint as files have them: experts apart, and of tied ones the head too."""
    for name, weight in whole.items():
        if ".mlp.experts." in name:
            yield from ((name.replace(".experts.", f".experts.{e}."), one) for e, one in enumerate(weight))
        else:
            yield name, weight
    if model.tied:
        yield "lm_head.weight", whole["model.embed_tokens.weight"]


def planned(whole, model, tp, rank):
    """The parameters of a rank by the plan, filled from the whole weights."""
    found = {}
    for one in parameters_of(Layout(model, Mesh({"tp": tp}), rules=backend("vllm").layout), rank):
        found[one.name] = torch.zeros(one.shape)
        for part in one.parts:
            at, box = (tuple(slice(a, b) for a, b in ranges) for ranges in (part.at, part.box))
            found[one.name][at] = whole[part.name][box]
    return found


def built(rank, tp, folder, port, told):
    """One rank: by model the number of vLLM's parameters, and which are not those of the plan."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    here = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_DIST_IDENT": f"flowrl-{port}"}
    os.environ.update(quiet | here)
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.set_num_threads(1)
    args = {"dtype": "float32", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64}
    args |= {"tensor_parallel_size": tp, "distributed_executor_backend": "mp", "enforce_eager": True}
    found = {}
    for name in KINDS:
        path = Path(folder, name)
        config = EngineArgs(model=str(path), **args).create_engine_config()
        model = ModelShape.from_config(json.loads((path / "config.json").read_text()))
        whole = {n: torch.tensor(array, dtype=torch.float32) for n, array in checkpoint(model).items()}
        with set_current_vllm_config(config):
            if not found:
                init_distributed_environment(tp, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
                ensure_model_parallel_initialized(tp, 1)
            with set_default_torch_dtype(torch.float32):
                net = initialize_model(vllm_config=config)
            net.load_weights(named(whole, model))
        theirs, ours = dict(net.named_parameters()), planned(whole, model, tp, rank)
        differ = [n for n in theirs.keys() & ours.keys() if not torch.equal(theirs[n].data, ours[n])]
        found[name] = len(theirs), sorted(differ + list(theirs.keys() ^ ours.keys()))
    told.send(found)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two ranks of vLLM found, by rank and model."""
    folder = tmp_path_factory.mktemp("models")
    for name in KINDS:
        config = {"tie_word_embeddings": False, **_WIDE, **CONFIGS[name], "hidden_act": "silu", "rms_norm_eps": 1e-6}
        config |= {"moe_intermediate_size": 32} if "num_experts" in config else {}
        config["architectures"] = [f"{_NAMES[config['model_type']]}ForCausalLM"]
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=built, args=(rank, 2, str(folder), port, said), daemon=True)
        for rank, (_, said) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, said in pipes:
        said.close()
    found = [heard.recv() for heard, _ in pipes]
    for process in processes:
        process.join(60)
    for shared in Path("/dev/shm").glob(f"flowrl-{port}-*"):  # vLLM leaves them
        shared.unlink()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_ranks_of_vllm_have_the_parameters_of_the_plan(ranks, name):
    for found in ranks:
        count, differ = found[name]
        assert count > 15 and differ == []
