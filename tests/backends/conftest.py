"""What tests of vLLM share: engines of tiny models, which stay open from test to test."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

#: How many kinds of engines are open at a time; each has a process of 1.6 GB.
OPEN = 4


@pytest.fixture(scope="session")
def fault(tmp_path_factory):
    """What goes wrong in the processes of vLLM: ``fault("stale head")``."""
    from vllm_tiny import FAULTS

    folder = tmp_path_factory.mktemp("faults")
    (folder / "sitecustomize.py").write_text(FAULTS)
    path = folder / "fault"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT", str(path))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield path.write_text


@pytest.fixture(scope="session")
def opened(fault):
    """Both engines of a kind of model: ``opened("qwen2")``, ``opened("qwen2", "bf16", packed=False)``.

    Of more kinds than ``OPEN`` those are closed that were asked for longest ago.
    """
    from vllm_tiny import CONFIGS, DEVICE

    from flowrl.backends import open_engine
    from flowrl.workers.model_options import Build, Model

    found = {}

    def both(kind, dtype="fp32", **options):
        fault("")
        if DEVICE != "cpu" and "moe" in kind:
            pytest.skip("vLLM computes mixtures of experts on CPUs alone")
        key = kind, dtype, *options.items()
        if key in found:
            found[key] = found.pop(key)  # now the last one
        else:
            while len(found) >= OPEN:
                found.pop(next(iter(found)))[0].close()
            build = Build(Model(config=CONFIGS[kind]), dtype=dtype, device="cpu")
            ours = replace(build, device=DEVICE, options=options)
            found[key] = open_engine("vllm", ours), open_engine("hf", build)
        return found[key]

    yield both
    for ours, _ in found.values():
        ours.close()


@pytest.fixture(scope="session")
def split(fault):
    """Both engines of a model, vLLM split over two ranks: ``split()``."""
    from split_engine import SplitEngine
    from vllm_tiny import CONFIGS

    from flowrl.backends import open_engine
    from flowrl.workers.model_options import Build, Model

    found = []

    def both():
        fault("")
        if not found:
            build = Build(Model(config=CONFIGS["qwen2"]), dtype="fp32", device="cpu")
            found.extend((SplitEngine(replace(build, axes={"tp": 2})), open_engine("hf", build)))
        return found

    yield both
    if found:
        found[0].close()
