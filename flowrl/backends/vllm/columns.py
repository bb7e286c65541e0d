"""What each layer of vLLM computes with, a few columns of its weights at a time, bit for bit.

A row that is 1 at one place and 0 elsewhere, sent through a linear layer, gives a column of its weights, exactly and in
any dtype. So a layer shows what it computes with, however it has fused, packed or copied its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

COLUMNS = 4  # of each matrix: the first, the last, and others that differ from publish to publish
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def picked(size: int, publish: int) -> list[int]:
    """Return the columns of a matrix with so many that a publish looks at.

    >>> picked(64, 1)[:2], len(picked(64, 1)), picked(64, 1) == picked(64, 2)
    ([0, 63], 4, False)
    """
    generator = torch.Generator().manual_seed(publish)
    return [0, size - 1, *torch.randint(size, (COLUMNS - 2,), generator=generator).tolist()]


@torch.no_grad()
def computed(model: Any, publish: int) -> dict[str, Tensor]:
    """Return what vLLM computes with, by name in the checkpoint: columns of matrices, and vectors whole."""
    return {name: value.cpu() for name, value in _computed(model, publish)}


def _computed(model: Any, publish: int) -> Iterator[tuple[str, Tensor]]:
    fused: Mapping[str, list[str]] = {"gate_up_proj": ["gate_proj", "up_proj"], **model.packed_modules_mapping}
    for path, layer in model.named_modules(remove_duplicate=False):
        above, _, last = path.rpartition(".")
        if hasattr(layer, "embedding_dim"):
            if not (words := layer.shard_indices.num_org_elements):
                continue  # this rank has rows that were added to the vocabulary, and no others
            if path + ".weight" == HEAD:
                yield HEAD, _columns(layer, layer.embedding_dim, publish)[:words]
            else:
                rows = torch.tensor(picked(words, publish), device=layer.weight.device)
                yield f"{path}.weight", layer.quant_method.embedding(layer, rows).T
        elif hasattr(layer, "output_partition_sizes"):
            parts = fused.get(last, [last])
            columns = _columns(layer, getattr(layer, "input_size_per_partition", layer.input_size), publish)
            yield from _parts(above, parts, "weight", columns.split(layer.output_partition_sizes))
            if layer.bias is not None:
                yield from _parts(above, parts, "bias", layer.bias.split(layer.output_partition_sizes))
        elif hasattr(layer, "w13_weight"):
            at = picked(len(layer.w13_weight), publish)
            yield f"{above}.gate_up_proj", layer.w13_weight[at]
            yield f"{above}.down_proj", layer.w2_weight[at]
        elif isinstance(weight := getattr(layer, "weight", None), Tensor) and weight.dim() == 1:
            yield f"{path}.weight", weight.clone()


def _columns(layer: Any, size: int, publish: int) -> Tensor:
    """Columns of a layer's weights [outputs, columns], as it computes with them."""
    at = torch.tensor(picked(size, publish), device=layer.weight.device)
    rows = torch.zeros(len(at), size, dtype=layer.weight.dtype, device=layer.weight.device)
    rows[torch.arange(len(at)), at] = 1
    return layer.quant_method.apply(layer, rows, None).T


def _parts(above: str, parts: list[str], kind: str, values: Any) -> Iterator[tuple[str, Tensor]]:
    for part, value in zip(parts, values, strict=True):
        yield f"{above}.{part}.{kind}", value.clone()


def wanted(weights: Mapping[str, Tensor], publish: int) -> dict[str, Tensor]:
    """Return the same of what a rank has of published weights, by name. A head that is not there is tied."""
    found = {name: weight for name, weight in weights.items() if weight.dim() == 1}
    tied = {HEAD: weights[EMBEDDING]} if EMBEDDING in weights else {}
    matrices = {**tied, **{name: weight for name, weight in weights.items() if weight.dim() == 2}}
    for name, weight in matrices.items():
        by_row = name == EMBEDDING
        at = picked(weight.shape[0 if by_row else 1], publish)
        found[name] = weight[at].T if by_row else weight[:, at]
    return found


@torch.no_grad()
def experts_wanted(
    model: Any,
    parameters: Mapping[str, Tensor],
    publish: int,
    pack: Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Return the same of experts that were published: some of each layer, whole, as ``pack`` lays them out for it."""
    found: dict[str, Tensor] = {}
    for path, layer in model.named_modules():
        if not hasattr(layer, "w13_weight"):
            continue
        some: dict[str, Tensor] = {}
        for last in ("w13_weight", "w2_weight"):
            given = parameters[f"{path}.{last}"]
            some[last] = given[picked(len(given), publish)].to(getattr(layer, last).dtype)
        packed, above = pack(layer, some), path.rpartition(".")[0]
        found[f"{above}.gate_up_proj"], found[f"{above}.down_proj"] = packed["w13_weight"], packed["w2_weight"]
    return found


def differing(
    there: Mapping[str, Tensor], here: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """Return, by what is wrong, the names of weights that vLLM does not compute with as they were published.

    ``there``: what it computes with; ``here``: what was published; ``before``: what it computed with before.
    """
    known = {_bits(value): name for name, value in here.items()}
    found: dict[str, list[str]] = {}
    for name, value in there.items():
        if name in here and not torch.equal(value, here[name].to(value.dtype)):
            found.setdefault(_cause(value, here[name].to(value.dtype), before.get(name), known), []).append(name)
    return found


def _cause(there: Tensor, here: Tensor, before: Tensor | None, known: Mapping[bytes, str]) -> str:
    """What is wrong with weights of one name, in words."""
    if not bool(there.isfinite().all()):
        return "not finite"
    if before is not None and torch.equal(there, before):
        return "as before this publish"
    if not bool(there.any()):
        return "zeros"
    if (other := known.get(_bits(there))) is not None:
        return f"those of {other}"
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(there, here.to(dtype).to(here.dtype)):
            return f"rounded to {str(dtype).removeprefix('torch.')}"
    if before is not None and bool(((there == here) | (there == before)).all()):
        return "as before this publish in a part"
    if torch.equal(there.sort(0).values, here.sort(0).values):
        return "in another order"
    return "other numbers"


def _bits(value: Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).cpu().numpy().tobytes()
