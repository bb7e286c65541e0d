"""Tensor parallel: which weights of a model are split along which dim, and the split itself by DTensor.

Columns of q, k, v, gate and up, rows of o and down, the vocabulary of the embedding and of the head; all else is whole
on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ModelError

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
#: Modules inside of which a rank has some of the heads or columns, between those two.
_INSIDE = ("self_attn", "mlp")


def split_dims(model: Any, head: str) -> dict[str, int]:
    """The dim along which each weight is split, by name; weights that are not in it are whole on every rank.

    Raises ModelError for a model with weights of which this is not known.
    """
    found: dict[str, int] = {}
    vocab = [model.get_input_embeddings(), *([model.get_output_embeddings()] if head == "lm" else [])]
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        for name, weight in module.named_parameters(path, recurse=False):
            if any(module is v for v in vocab) or (last in COLUMNS and type(module) is torch.nn.Linear):
                found[name] = 0
            elif last in ROWS and type(module) is torch.nn.Linear:
                if weight.dim() > 1:
                    found[name] = 1
            elif weight.dim() > 1 and module is not getattr(model, "score", None):
                raise ModelError(
                    f"{type(model).__name__} has the weight '{name}', and how tensor parallel splits it is not known.",
                    fix="Use fsdp instead of tp, or a model with the layers of Llama, Qwen2, Qwen3 or Mistral.",
                )
    return found


def check_sizes(config: Any, tp: int) -> None:
    """Raise ModelError where heads or columns do not divide by ``tp``."""
    heads = config.num_attention_heads
    for what, count in (
        ("attention heads", heads),
        ("heads of keys and values", getattr(config, "num_key_value_heads", None) or heads),
        ("columns in its middle layers", config.intermediate_size),
    ):
        if count % tp:
            fits = [n for n in range(1, tp) if count % n == 0]
            raise ModelError(
                f"A model with {count} {what} cannot be split by tp={tp}.",
                fix=f"Write tp={fits[-1]}, and fsdp for the other devices.",
            )


def partial(name: str, dims: dict[str, int]) -> bool:
    """Whether a whole weight sees the part of heads that its rank has, so that gradients of ranks add up."""
    path = name.split(".")
    return name not in dims and path[-2] not in ROWS and any(part in path for part in _INSIDE)


def split(model: Any, head: str, mesh: Any) -> None:
    """Give this rank of the one-dimensional ``mesh`` its part of every weight, as DTensors; tied ones stay tied."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    embedding, output = model.get_input_embeddings(), model.get_output_embeddings() if head == "lm" else None
    tied = output is not None and output.weight is embedding.weight
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if next(module.parameters(), None) is None:
            continue  # nothing, or what another stage has
        if module is embedding:
            style: Any = RowwiseParallel(input_layouts=Replicate())
        elif module is output or last in COLUMNS:
            style = ColwiseParallel()
        elif last in ROWS:
            style = RowwiseParallel()
        else:
            continue
        # every rank has the same weights: nothing is sent
        parallelize_module(module, mesh, style, src_data_rank=None)
    if output is not None and tied:
        output.weight = embedding.weight  # splitting has made them two
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in _INSIDE:
            module.register_forward_pre_hook(_Shared(mesh), with_kwargs=True)


class _Shared:
    """The hidden states that a layer's columns share become one DTensor: their gradients are summed, then sent once."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._spread(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._spread(kwargs["hidden_states"])}

    def _spread(self, hidden: Any) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
