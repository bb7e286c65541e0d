"""vLLM in a process of its own: its rows and log-probabilities are those of the reference engine, after every publish.

They need vLLM: `make vllm-test`.
"""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from flowrl.backends import open_engine
from flowrl.batch import Batch, Column
from flowrl.errors import DataError, ModelError, NotFinite, RunError
from flowrl.workers.model_options import Build, Lora, Model, Sampling

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]
torch.set_num_threads(1)

VOCAB, EOS = 80, 13
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
CONFIGS = {
    "qwen2": {**_BASE, "model_type": "qwen2", "tie_word_embeddings": True},
    "llama": {**_BASE, "model_type": "llama", "tie_word_embeddings": False},
    "qwen3": {**_BASE, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}
PROMPTS = [[2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 14], [15, 16, 17, 18, 19], [20], *([i, 30, i + 1] for i in range(12))]

#: In the process of vLLM: what the file of FAULT names goes wrong there.
FAULTS = """
import os

def fault():
    path = os.environ.get("FAULT")
    return open(path).read() if path and os.path.exists(path) else ""

if os.environ.get("FAULT"):
    from flowrl.backends.vllm import v0_32 as it
    pack, load, forget, add = it._pack_heads, it.load_weights, it.forget_prefixes, it.add_row
    it._pack_heads = lambda model: None if fault() == "stale head" else pack(model)

    def load_some(engine, weights):
        if fault() == "a weight is missing":
            weights = {n: w for n, w in weights.items() if not n.endswith("0.mlp.down_proj.weight")}
        if fault() == "an old part":
            weights = {n: w.flip(0) if n.endswith("0.self_attn.k_proj.weight") else w for n, w in weights.items()}
        if fault() == "half written":
            for w in weights.values():
                w.view(-1)[: w.numel() // 2] = 0
        if fault() == "wrong dtype":
            weights = {n: w.bfloat16().float() for n, w in weights.items()}
        return load(engine, weights)

    def add_if_it_can(engine, name, *more):
        if fault() == "a row fails" and name.endswith(".2"):
            raise ValueError("no room")
        add(engine, name, *more)

    it.load_weights, it.add_row = load_some, add_if_it_can
    it.forget_prefixes = lambda engine: False if fault() == "cache kept" else forget(engine)
"""


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    """What goes wrong in the processes of this module: ``fault("stale head")``."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "sitecustomize.py").write_text(FAULTS)
    path = folder / "fault"
    before = {name: os.environ.get(name) for name in ("FAULT", "PYTHONPATH")}
    os.environ["FAULT"] = str(path)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before["PYTHONPATH"]]))
    yield path.write_text
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@pytest.fixture(scope="module")
def opened(fault):
    """Both engines of a kind of model, opened once: ``opened("qwen2")``."""
    found = {}

    def both(kind):
        fault("")
        if kind not in found:
            build = Build(Model(config=CONFIGS[kind]), dtype="fp32", device="cpu")
            found[kind] = open_engine("vllm", build), open_engine("hf", build)
        return found[kind]

    yield both
    for ours, _ in found.values():
        ours.close()


def train(engine, seed):
    """Other weights, of which distributions are not flat."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in engine.net.model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * 0.25 if weight.dim() > 1 else 1 + 0.1 * noise)


def published(opened, kind, seed=1):
    ours, theirs = opened(kind)
    train(theirs, seed)
    ours.take_weights(theirs.plain_weights())
    return ours, theirs


def whole(engine, prompt, tokens):
    """Greedy tokens by transformers' own generate, its end included."""
    with torch.no_grad():
        ids = engine.net.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_rows_are_those_of_transformers_after_each_publish(opened, kind):
    seen = set()
    for publish in range(5):
        ours, theirs = published(opened, kind, seed=publish)
        seeds = torch.arange(len(PROMPTS))
        made = ours.generate(Column.of(PROMPTS, "prompt", "i32"), 1, seeds, Sampling(16, greedy=True))
        rows = made.ids.to_list()
        assert rows == [whole(theirs, prompt, 16) for prompt in PROMPTS]
        assert made.finished.tolist() == [row[-1] == EOS for row in rows]
        assert ours.digest() == theirs.digest() and ours.published.gap < 2e-4
        seen.add(str(rows))
    assert len(seen) == 5, "each publish gives other rows"


HOW = [
    Sampling(12),
    Sampling(12, temperature=0.6),
    Sampling(12, temperature=1.4, top_k=7),
    Sampling(12, top_p=0.8, min_p=0.02, stop=(33, 34)),
    Sampling(12, temperature=1.2, top_p=0.9, repetition_penalty=1.3),
    Sampling(80, greedy=True, repetition_penalty=1.1),  # to the last position
]


@pytest.mark.parametrize("sampling", HOW, ids=lambda s: f"{s.temperature}-{s.top_k}-{s.top_p}-{s.greedy}")
def test_sampled_rows_are_those_of_the_reference_engine(opened, sampling):
    ours, theirs = published(opened, "qwen2")
    prompts, seeds = Column.of(PROMPTS, "prompt", "i32"), torch.arange(2 * len(PROMPTS)) * 7919 - 3
    starts = torch.arange(2 * len(PROMPTS)) % 3
    here, there = (e.generate(prompts, 2, seeds, sampling, starts) for e in (ours, theirs))
    assert here.ids.to_list() == there.ids.to_list()
    assert here.finished.tolist() == there.finished.tolist()
    assert torch.allclose(here.rollout_logprobs.values, there.rollout_logprobs.values, atol=1e-4)
    assert torch.allclose(here.sampling_logprobs.values, there.sampling_logprobs.values, atol=1e-4)
    same = there.sampling_logprobs is there.rollout_logprobs
    assert (here.sampling_logprobs is here.rollout_logprobs) == same and here.temperature == there.temperature


def test_log_probabilities_are_those_of_the_trainer(opened):
    ours, theirs = published(opened, "llama", seed=9)
    prompts = Column.of(PROMPTS, "prompt", "i32")
    made = ours.generate(prompts, 1, torch.arange(len(PROMPTS)), Sampling(20))
    tokens = [a + b for a, b in zip(PROMPTS, made.ids.to_list(), strict=True)]
    mask = Column.of([[True] * len(row) for row in made.ids.to_list()], "response", "bool")
    read = theirs.logprobs(Batch.of(tokens=Column.of(tokens, "token", "i32"), response_mask=mask))
    assert torch.allclose(made.rollout_logprobs.values, read.values, atol=1e-4)


def test_a_row_does_not_depend_on_those_beside_it(opened):
    ours, _ = published(opened, "qwen2")
    alone = ours.generate(Column.of(PROMPTS[1:2], "prompt", "i32"), 1, torch.tensor([11]), Sampling(12))
    among = ours.generate(Column.of(PROMPTS, "prompt", "i32"), 1, torch.arange(10, 10 + len(PROMPTS)), Sampling(12))
    assert among.ids.to_list()[1] == alone.ids.to_list()[0]


def test_no_rows_and_wrong_prompts(opened):
    ours, _ = published(opened, "qwen2")
    none = ours.generate(Column.of([], "prompt", "i32"), 2, torch.zeros(0, dtype=torch.int64), Sampling(4))
    assert len(none.ids) == len(none.rollout_logprobs) == len(none.finished) == 0
    for prompts, what in (([[3], []], "The prompt of row 1 is empty"), ([[3] * 64], "row 0 has 64 tokens")):
        with pytest.raises(DataError, match=what):
            ours.generate(Column.of(prompts, "prompt", "i32"), 1, torch.arange(len(prompts)), Sampling(4))


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("stale head", "qwen2", "the weights came whole, and vLLM computes with others"),
        ("an old part", "llama", "the weights came whole, and vLLM computes with others"),
        ("wrong dtype", "llama", "the weights came whole, and vLLM computes with others"),
        ("a weight is missing", "llama", "such as model.layers.0.mlp.down_proj.weight"),
        ("half written", "llama", "came to vLLM with other numbers"),
        ("cache kept", "qwen2", "the prefix cache could not be emptied"),
    ],
)
def test_a_publish_that_does_not_arrive_is_an_error_that_says_what(opened, fault, what, kind, said):
    ours, theirs = published(opened, kind, seed=20)
    train(theirs, 21)
    fault(what)
    with pytest.raises(RunError, match=f"publish {ours.publishes + 1} of random {kind}.*") as info:
        ours.take_weights(theirs.plain_weights())
    assert said in info.value.what
    fault("")
    ours.take_weights(theirs.plain_weights())  # and nothing is left of it
    assert ours.published.gap < 2e-4


def test_weights_that_are_not_finite_are_named(opened):
    ours, theirs = published(opened, "llama")
    weights = {n: w.clone() for n, w in theirs.plain_weights().items()}
    weights["model.norm.weight"][3] = torch.nan
    with pytest.raises(NotFinite, match="model.norm.weight"):
        ours.take_weights(weights)


def test_a_row_that_fails_there_is_named_and_the_others_are_ended(opened, fault):
    ours, _ = published(opened, "qwen2")
    fault("a row fails")
    prompts = Column.of(PROMPTS[:4], "prompt", "i32")
    with pytest.raises(RunError, match="row 2: no room"):
        ours.generate(prompts, 1, torch.arange(4), Sampling(4))
    fault("")
    assert len(ours.generate(prompts, 1, torch.arange(4), Sampling(4)).ids) == 4


def test_views_are_published_when_they_are_written(opened):
    ours, theirs = published(opened, "qwen2", seed=30)
    train(theirs, 31)
    given = theirs.plain_weights()
    for shard in ours.shards():
        shard.tensor.copy_(given[shard.name])
    ours.weights_written()
    seeds = torch.arange(4)
    prompts = Column.of(PROMPTS[:4], "prompt", "i32")
    here, there = (e.generate(prompts, 1, seeds, Sampling(8)) for e in (ours, theirs))
    assert here.ids.to_list() == there.ids.to_list() and ours.digest() == theirs.digest()


def test_what_it_does_not_do_is_refused():
    build = Build(Model(config=CONFIGS["llama"]), dtype="fp32", device="cpu")
    cases = [
        (Build(build.model, head="scalar"), "scalar head"),
        (Build(build.model, lora=Lora(r=2)), "adapters"),
        (Build(Model(config={**_BASE, "model_type": "gemma"})), "the kind 'gemma'"),
    ]
    for wrong, said in cases:
        with pytest.raises(ModelError, match=said):
            open_engine("vllm", wrong)


def gone(pid, seconds=20):
    end = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.2)
    return not Path(f"/proc/{pid}").exists()


def test_a_process_that_is_gone_is_said_and_closing_leaves_nothing():
    shared = set(os.listdir("/dev/shm"))
    config = {**CONFIGS["qwen2"], "num_hidden_layers": 1}
    ours = open_engine("vllm", Build(Model(config=config), dtype="fp32", device="cpu", options={"context": 32}))
    assert ours.positions == 32
    prompts = Column.of([[3] * 31], "prompt", "i32")
    assert len(ours.generate(prompts, 1, torch.arange(1), Sampling(9, greedy=True)).ids.to_list()[0]) == 1
    os.kill(ours.child.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="the process of vLLM is gone, with exit status -9"):
        ours.generate(prompts, 1, torch.arange(1), Sampling(1))
    ours.close()
    assert set(os.listdir("/dev/shm")) <= shared


HOLDER = """
import os, sys, torch
sys.path.insert(0, {folder!r})
import test_vllm as T
from flowrl.backends import open_engine
engine = open_engine("vllm", T.Build(T.Model(config=T.CONFIGS["llama"]), dtype="fp32", device="cpu"))
print(engine.child.pid, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_it_ends_with_the_process_that_began_it(how):
    shared = set(os.listdir("/dev/shm"))
    script = HOLDER.format(folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, timeout=300)
    assert done.returncode == (-9 if how == "killed" else 0), done.stderr
    assert gone(int(done.stdout.split()[-1]))
    assert set(os.listdir("/dev/shm")) <= shared
