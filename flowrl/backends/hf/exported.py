"""Whether a saved folder is the model that was trained: transformers loads it, and its logits are held against ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ...errors import RunError
from .engine import HFEngine
from .load import quiet

TOKENS = 64  # that are read to compare logits
BOUND = 1e-3  # as a share of the largest logit: adapters that are merged, and other shapes, round otherwise
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def hold_against(folder: Path, engine: HFEngine, dtype: str | None) -> tuple[int, float, str]:
    """Load a saved model, compare its logits with those of the engine, and round its weights where that is asked for.

    Returns how many tokens were read, the largest difference, and the dtype of the weights. Raises RunError.
    """
    with quiet():
        found: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype="auto", output_loading_info=True, trust_remote_code=False
        )
    loaded, told = found
    strange = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in told[kind]]
    if strange:
        raise RunError(f"transformers does not find the weights that were saved: {', '.join(map(str, strange[:3]))}.")
    model = engine.net.model
    most = min(TOKENS, getattr(model.config, "max_position_embeddings", TOKENS))
    ids = torch.arange(most).remainder(model.config.vocab_size)[None]
    with torch.no_grad():
        ours = model.eval()(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()
        theirs = loaded.eval()(input_ids=ids, use_cache=False).logits.float()
    difference = float((ours - theirs).abs().max())
    if not difference <= BOUND * max(1.0, float(ours.abs().max())):
        raise RunError(f"the logits of the saved model differ from those of the actor by {difference:.2g}.")
    if dtype is not None and loaded.dtype != KINDS[dtype]:
        with quiet():
            loaded.to(KINDS[dtype]).save_pretrained(str(folder))
    return most, difference, next((name for name, kind in KINDS.items() if kind == loaded.dtype), str(loaded.dtype))
