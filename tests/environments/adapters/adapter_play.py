"""Plays environments of other packages with small models, and runs the programs of docs/adapters.md."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import flowrl as fl
from flowrl.batch import CallInfo

ROOT = Path(__file__).parents[3]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %};{% endif %}{% endfor %}"


def tokenizer_of(words: list[str]) -> Any:
    """A tokenizer of whole words; what it does not know is ``?``, and ``;`` ends a turn."""
    known = ["<pad>", ";", "?", *words]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="?"))
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pattern}|."), "isolated")
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token=";", padding_side="left")
    fast.chat_template = TEMPLATE
    return fast


def model_of(words: list[str]) -> fl.Model:
    """A model with random weights that speaks these words."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "num_key_value_heads": 2}
    config = {"model_type": "llama", "vocab_size": len(words) + 3, "max_position_embeddings": 8192, **sizes, **ids}
    return fl.Model(config={**config, "initializer_range": 0.3}, tokenizer=partial(tokenizer_of, words))


def played(env: Any, words: list[str], *, tasks: int, n: int, max_tokens: int = 2, **how: Any) -> dict[str, Any]:
    """The rows of a rollout, each with its task and the texts of its turns; and what became of them."""
    tokenizer = tokenizer_of(words)
    source = env.source(batch=tasks, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer).with_call(CallInfo(seed=3, op="game.rollout"))
    engine = fl.testing.FakeEngine(vocab=len(words) + 3, stop=(1,), tokenizer=tokenizer)
    policy = fl.open(fl.Actor(model_of(words), max_tokens=max_tokens), name="actor", engine=engine)
    worker = fl.open(env, name="game")
    try:
        found = worker.rollout(batch, policy=policy, n=n, on_error="mark", max_failed=1.0, **how)
        ends = dict(worker.outcomes(found))
    finally:
        worker.close()
    own = [name for name in source.schema() if name != "prompt_ids"]
    columns = (
        "response_ids",
        "turn_ids",
        "scores",
        "rewards",
        "turn_rewards",
        "finish_reason",
        "outcome",
        "failed_why",
    )
    rows = []
    for at, (ids, turns, *rest) in enumerate(zip(*(found[name].to_list() for name in columns), strict=True)):
        texts = [
            tokenizer.decode([i for i, t in zip(ids, turns, strict=True) if t == turn], skip_special_tokens=True)
            for turn in range(max(turns, default=-1) + 1)
        ]
        named = dict(zip(("scores", "reward", "turn_rewards", "reason", "outcome", "why"), rest, strict=True))
        rows.append({"texts": texts, "task": {name: found[name].to_list()[at] for name in own}, **named})
    return {"rows": rows, "delivered": ends["delivered_fraction"]}


def page_trained(heading: str, words: list[str], changed: Mapping[str, str] = {}) -> dict[str, Any]:
    """Runs the program under a heading of docs/adapters.md with a small model: its lines of metrics, and its length."""
    text = (ROOT / "docs" / "adapters.md").read_text()
    block = re.findall(rf"^## {re.escape(heading)}\n.*?```python\n(.*?)```", text, re.S | re.M)[0]
    lines = sum(bool(line.strip()) for line in block.splitlines())
    entropy = {"rl.ppo_clip()": "rl.ppo_clip(entropy=0.01)"}  # so that there is a gradient whatever was sampled
    for old, new in {'"Qwen/Qwen3-0.6B"': "small", **entropy, **changed}.items():
        assert old in block, old
        block = block.replace(old, new)
    names = {"__name__": "page", "small": model_of(words)}
    exec(compile(block, heading, "exec"), names)
    with tempfile.TemporaryDirectory() as folder:
        names["flow"].run("train", steps=2, tasks=2, out=Path(folder) / "run")
        metrics = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return {"lines": lines, "metrics": [json.loads(line) for line in metrics]}
