"""Low-rank adapters through peft: put into a model, and taken together with its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError, near
from ...workers.model_options import Build, Lora
from ...workers.weights.saved_lora import WEIGHTS

_NAME = "default"
_THEIR_MODEL = "Give the model that they were trained on: adapter_config.json names it as base_model_name_or_path."


def add(model: Any, lora: Lora, seed: int) -> None:
    """Put adapters into the model; they alone, and a scalar head, are trained. They start as no change at all."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ModelError(
            "Adapters need the package 'peft', which is not installed.",
            fix="Install flowrl with its extra: pip install '.[lora]' in the source tree.",
        ) from error
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    if targets == "all-linear":
        heads = {id(model.get_output_embeddings()), id(getattr(model, "score", None))}
        targets = sorted(n for n, m in model.named_modules() if type(m) is torch.nn.Linear and id(m) not in heads)
    settings = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=targets)
    try:
        with _stand_ins(model), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(settings, model, _NAME)
    except ValueError as error:
        raise ModelError(
            f"Adapters cannot be put into {type(model).__name__}: {str(error).splitlines()[0][:200]}",
            fix="Name linear layers of the model in targets=, such as ('q_proj', 'v_proj').",
        ) from error
    _place(model)
    model.eval()
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    if lora.path is not None:
        _load(model, Path(lora.path))


def _load(model: Any, folder: Path) -> None:
    """Read saved adapters, and the scalar head beside them, into those of the model. ModelError where they do not fit.

    Weights have the names of :func:`save`.
    """
    from safetensors.torch import load_file

    saved = load_file(folder / WEIGHTS)
    trained = {_saved_name(n): w for n, w in model.named_parameters() if w.requires_grad}
    unknown, lacking = sorted(set(saved) - set(trained)), sorted(set(trained) - set(saved))
    if unknown or lacking:
        name = (unknown or lacking)[0]
        meant = near(name, trained if unknown else saved)
        raise ModelError(
            f"The adapters in '{folder}' are not of {type(model).__name__}: "
            + (f"it has no '{name}'." if unknown else f"they have no '{name}'."),
            have=[meant] if meant else None,
            fix=_THEIR_MODEL,
        )
    for name, weight in trained.items():
        if weight.shape != saved[name].shape:
            raise ModelError(
                f"The adapters in '{folder}' are not of this model: '{name}' is {list(saved[name].shape)}, and the "
                f"model has place for {list(weight.shape)}.",
                fix=_THEIR_MODEL,
            )
    if any(weight.is_meta for weight in trained.values()):
        raise ModelError(
            f"The head beside the adapters in '{folder}' cannot be read by this engine: it reads that of the model.",
            fix="Name the backend hf.",
        )
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(saved[name])
    model.fresh_head = None  # it lay beside the adapters


def _saved_name(name: str) -> str:
    """The name under which peft saves a weight."""
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


@contextmanager
def _stand_ins(model: Any) -> Iterator[None]:
    """Inside, all weights are empty ones on the CPU: peft makes an adapter where the weight is.

    So adapters are drawn on the CPU on every device, for weights without numbers too, and weights never move: they may
    be those of other adapters as well.
    """
    there = [(m, n, w) for m in model.modules() for n, w in m._parameters.items() if w is not None]
    for module, name, weight in there:
        module._parameters[name] = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), weight.requires_grad)
    try:
        yield
    finally:
        for module, name, weight in there:
            module._parameters[name] = weight.requires_grad_(module._parameters[name].requires_grad)


def _place(model: Any) -> None:
    """Bring adapters to the device of the weights, where these have numbers, and to their dtype."""
    weights = [w for n, w in model.named_parameters() if ".lora_" not in n]
    device = next((w.device for w in weights if not w.is_meta), torch.device("cpu"))
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            weight.data = weight.data.to(device=device, dtype=weights[0].dtype)


def without(model: Any) -> Any:
    """A second model of the very same weights, with no adapters: not a weight is copied."""
    made = deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for name, layer in [(n, m) for n, m in made.named_modules() if hasattr(m, "base_layer")]:
        owner, _, last = name.rpartition(".")
        setattr(made.get_submodule(owner), last, layer.base_layer)
    del made.peft_config
    return made


@contextmanager
def off(model: Any) -> Iterator[None]:
    """Inside, layers compute without their adapters, as the model did before it had any."""
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def add_nothing(model: Any) -> bool:
    """Whether all adapters are as they began: their second factor is zero."""
    return not any(bool(weight.any()) for name, weight in model.named_parameters() if ".lora_B." in name)


def base_name(name: str) -> str:
    """The name that a weight has without adapters."""
    return name.replace(".base_layer.", ".")


def plain(model: Any) -> dict[str, Tensor]:
    """All weights by name, tied ones once."""
    return {n: p.detach() for n, p in model.named_parameters()}


def merged(model: Any) -> dict[str, Tensor]:
    """All weights under the names that they have without adapters, each adapter added to its layer's weight."""
    found: dict[str, Tensor] = {}
    layers = dict(model.named_modules())
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            continue
        outer = base_name(name)
        weight = weight.detach()
        if outer != name and outer.endswith(".weight"):
            layer = layers[outer.rpartition(".")[0]]
            weight = weight + layer.get_delta_weight(_NAME).detach().to(weight.dtype)
        found[outer] = weight
    return found


def save(folder: str | Path, model: Any, build: Build, trained: Mapping[str, Tensor]) -> None:
    """Save adapters as peft does: ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``trained`` are the adapters' weights, and those of a scalar head, by their names in ``model``, on any device.
    """
    from safetensors.torch import save_file

    settings = deepcopy(model.peft_config[_NAME])
    settings.base_model_name_or_path = build.model.name
    settings.task_type = "CAUSAL_LM" if build.head == "lm" else "SEQ_CLS"
    settings.modules_to_save = None if build.head == "lm" else ["score"]
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    named = {_saved_name(n): w.cpu().contiguous() for n, w in trained.items()}
    save_file(named, Path(folder) / WEIGHTS, metadata={"format": "pt"})


def whole_state(model: Any) -> dict[str, Tensor] | None:
    """What to save for a model with adapters: its state with them merged. None: the model's own state will do."""
    if not any(".lora_" in name for name, _ in model.named_parameters()):
        return None
    weights = merged(model)
    buffers = {n: b for n, b in model.state_dict().items() if n not in dict(model.named_parameters())}
    tied = {n: b for n, b in buffers.items() if ".lora_" not in n and ".base_layer." not in n and n not in weights}
    return {**tied, **weights}
