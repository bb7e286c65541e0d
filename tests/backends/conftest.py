"""What tests of vLLM share: engines of tiny models, each opened once for all of them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest


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
    """Both engines of a kind of model: ``opened("qwen2")``, ``opened("qwen2", "bf16", packed=False)``."""
    from vllm_tiny import CONFIGS

    from flowrl.backends import open_engine
    from flowrl.workers.model_options import Build, Model

    found = {}

    def both(kind, dtype="fp32", **options):
        fault("")
        key = kind, dtype, *options.items()
        if key not in found:
            build = Build(Model(config=CONFIGS[kind]), dtype=dtype, device="cpu")
            found[key] = open_engine("vllm", replace(build, options=options)), open_engine("hf", build)
        return found[key]

    yield both
    for ours, _ in found.values():
        ours.close()
