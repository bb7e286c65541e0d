"""What a net says of itself: how long its rows may be, so that they do not depend on each other."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flowrl import rl
from flowrl.backends.hf.net import rotary_reach
from flowrl.batch import Batch, CallInfo, Column
from flowrl.errors import DataError
from flowrl.workers.model_options import Sampling

T = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tiny.py"))))  # its own, as it adds models
_LONG = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
T.CONFIGS["phi3"] = {
    **T.CONFIGS["llama"],
    "model_type": "phi3",
    "original_max_position_embeddings": 16,
    "rope_parameters": {**_LONG, "original_max_position_embeddings": 16},
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
T.CONFIGS["llama-dynamic"] = {**T.CONFIGS["llama"], "max_position_embeddings": 16, "rope_parameters": _DYNAMIC}
CHANGING = ["phi3", "llama-dynamic"]


def rows(*lengths, response=4):
    """Rows of so many tokens, the last ones of which are a response."""
    tokens = [[2 + (5 * i + 3 * j) % 30 for j in range(length)] for i, length in enumerate(lengths)]
    columns = {
        "tokens": Column.of(tokens, dim="token", dtype="i32"),
        "response_mask": Column.of([[True] * response for _ in lengths], dim="response", dtype="bool"),
    }
    return Batch.of(len(lengths), **columns).with_call(CallInfo())


@pytest.mark.parametrize("kind", CHANGING)
def test_a_row_has_the_same_numbers_beside_any_other(kind):
    """Alone and beside the longest that there may be, and after the model has read that."""
    opened = T.engine(kind)
    assert opened.positions == 16
    alone = opened.logprobs(rows(8))[0]
    both = opened.logprobs(rows(8, 16))
    assert torch.allclose(alone, both[0], atol=1e-5) and torch.equal(alone, opened.logprobs(rows(8))[0])


@pytest.mark.parametrize("kind", CHANGING)
def test_a_longer_row_is_refused_with_the_reason(kind):
    opened, scored = T.engine(kind, optim=T.OPTIM), T.engine(kind, head="scalar")
    long, prompts = rows(8, 30), Column.of([[5] * 30], dim="prompt", dtype="i32")
    calls = (
        lambda: opened.logprobs(long),
        lambda: opened.distribution(long),
        lambda: opened.update(long, rl.sft()),
        lambda: opened.update(rows(8), rl.sft(), pretraining=long),
        lambda: scored.values(long),
        lambda: scored.scores(long),
    )
    for call in calls:
        with pytest.raises(DataError, match="has 30 tokens. From 17 on, .* would depend on those beside it") as told:
            call()
        assert "to 16 tokens" in str(told.value.fix)
    with pytest.raises(DataError, match="has 30 tokens; the model has 16 positions"):
        opened.generate(prompts, 1, torch.arange(1), Sampling(4))
    made = opened.generate(Column.of([[5] * 9], dim="prompt", dtype="i32"), 1, torch.arange(1), Sampling(99))
    assert len(made.ids[0]) <= 7


def test_what_is_fixed_reaches_any_length():
    assert T.engine("llama").net.rotary_reach is None
    layers = SimpleNamespace(
        max_position_embeddings=64,
        rope_parameters={"full_attention": {**_LONG, "original_max_position_embeddings": 8}, "other": {}},
    )
    assert rotary_reach(layers) == 8
