"""Which adapters a folder of peft holds: their rank, scale and layers, read without peft and without their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ...graph.script.site import caller

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAMES = {"r": "r", "alpha": "lora_alpha", "targets": "target_modules"}
#: Settings of peft with which adapters are more, or elsewhere, than ``alpha / r`` times the product of two factors.
_NOT_PLAIN = (
    "use_rslora",
    "use_dora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layer_replication",
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
    "fan_in_fan_out",
    "use_qalora",
    "alora_invocation_tokens",
)


def read_saved(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """``r``, ``alpha`` and ``targets`` of the adapters in a folder. ``given`` are those that the user has said.

    Raises ModelError, at the line of the user, for a folder without adapters, with another kind, or with others than
    those that were said.
    """
    missing = [name for name in (SETTINGS, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"Lora: path='{folder}' has no adapters: there is no {missing[0]}.",
            at=caller(),
            have=sorted(p.name for p in folder.iterdir()) if folder.is_dir() else None,
            fix=_nearby(folder),
        )
    try:
        said = json.loads((folder / SETTINGS).read_text())
    except ValueError as error:
        raise ModelError(
            f"Lora: {folder / SETTINGS} is no JSON: {error}.", at=caller(), fix="Save the adapters again."
        ) from error
    _check_plain(folder, said)
    found = {name: said[word] for name, word in _NAMES.items()}
    if not isinstance(found["targets"], str):
        found["targets"] = tuple(sorted(found["targets"]))
    for name, value in given.items():
        if (tuple(sorted(value)) if isinstance(value, (tuple, list)) else value) != found[name]:
            raise ModelError(
                f"Lora: {name}={value!r}, but the adapters in '{folder}' have {name}={found[name]!r}.",
                at=caller(),
                fix=f"Leave {name}= out.",
            )
    return found


def _check_plain(folder: Path, said: Mapping[str, Any]) -> None:
    """Refuse adapters that are not the product of two factors on linear layers."""
    odd = {name: said[name] for name in _NOT_PLAIN if said.get(name)}
    odd |= {name: None for name in _NAMES.values() if not said.get(name)}
    if said.get("peft_type") != "LORA":
        odd = {"peft_type": said.get("peft_type")}
    elif said.get("bias", "none") != "none":
        odd["bias"] = said["bias"]
    elif set(said.get("modules_to_save") or ()) - {"score"}:
        odd["modules_to_save"] = said["modules_to_save"]
    if odd:
        what = ", ".join(f"{name}={value!r}" for name, value in odd.items())
        raise ModelError(
            f"Lora: the adapters in '{folder}' are of a kind that is not known here: {what}.",
            at=caller(),
            fix="Merge them into their model with peft (merge_and_unload), and give that model as model=.",
        )


def _nearby(folder: Path) -> str:
    """The folder that was meant: the one beside a saved model, or what peft writes."""
    inside = folder / "adapter"
    if (inside / SETTINGS).is_file():
        return f"Did you mean '{inside}'?"
    return f"Name the folder with {SETTINGS} and {WEIGHTS}, such as runs/first/model/actor/adapter."
