"""What an engine can be asked for, one small scenario each, held against the engine ``hf`` in one process.

``python docs/make_backends.py`` runs all of them and writes the tables of docs/backends.md with what comes of it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tiny import CONFIGS, PROMPTS, engine, prompts, rollouts

from flowrl import rl
from flowrl.backends import open_engine
from flowrl.backends.gap import EXPECTED
from flowrl.backends.hf.micro_batches import Rows
from flowrl.batch import Column
from flowrl.errors import FlowError
from flowrl.workers.model_options import Build, Lora, Model, Optim, Sampling

OPTIM = Optim(lr=1e-3, weight_decay=0.1, grad_clip=0.5, schedule="cosine", total=20, warmup=2)
CLOSE = 1e-4  # between layouts in fp32
MOE = ("mixtral", "qwen3-moe")
YES = "yes"


class Pair:
    """An engine of ``backend`` on this rank, the reference with the same weights, all rows, and those of this rank."""

    def __init__(self, backend: str, axes: Mapping[str, int], kind: str = "llama", **build: Any) -> None:
        how: dict[str, Any] = {"optim": OPTIM, **build}
        self.backend, self.axes, self.kind, self.how = backend, axes, kind, how
        model = Model(config=CONFIGS[kind])
        self.one = open_engine("hf", Build(model, **how)) if "lora" in how else engine(kind, **how)
        self.it = open_engine(backend, Build(model, axes=dict(axes), **how))
        if "lora" not in how:
            self.same(self.it)
        self.rows = hot(rollouts(engine(kind)))
        self.mine = self.part(self.rows)

    def same(self, opened: Any) -> None:
        """Give an engine the weights of the reference, box by box."""
        whole = self.one.weights()
        with torch.no_grad():
            for shard in opened.shards():
                shard.tensor.copy_(whole[shard.name][at(shard)])
        opened.weights_written()

    def part(self, rows: Any) -> Any:
        """This rank's rows: whole prompts, dealt out."""
        data, place = self.it.team.data, self.it.team.place
        return rows.take([i for g, group in enumerate(rows.groups()) for i in group if g % data == place])

    def reads(self, call: Callable[[Any, Any], Any]) -> None:
        """What both read of the rows of this rank is the same."""
        found, wanted = call(self.it, self.mine), call(self.one, self.mine)
        gap = float((found.values - wanted.values).abs().max()) if len(self.mine) else 0.0
        assert gap < CLOSE, f"differs by {gap:.1e}"

    def trains(self, loss: Any, rows: Any = None, **how: Any) -> None:
        """An update with the same metrics, and the same model after it."""
        whole = self.rows if rows is None else rows
        close(self.it.update(self.part(whole), loss, **how), self.one.update(whole, loss, **how))
        self.reads(lambda e, b: e.logprobs(b) if e.build.head == "lm" else e.values(b))


def hot(rows: Any) -> Any:
    """The rows at temperatures that differ from row to row."""
    return rows.with_columns({"temperature": Column.of([(1.0, 0.6, 1.7)[i % 3] for i in range(len(rows))])})


def at(shard: Any) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in shard.box)


def close(found: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    """The same metrics."""
    assert found.keys() == wanted.keys(), "other metrics"
    for name, value in wanted.items():
        same = math.isclose(found[name], value, rel_tol=1e-3, abs_tol=CLOSE)
        assert same or (math.isnan(found[name]) and math.isnan(value)), f"{name} is {found[name]}, not {value}"


# -- scenarios ---------------------------------------------------------------------------------------------------------


def _logprobs(pair: Pair) -> None:
    pair.reads(lambda e, b: e.logprobs(b, micro_tokens=40))


def _entropy(pair: Pair) -> None:
    pair.reads(lambda e, b: e.logprobs(b, entropy=True)[1])


def _distribution(pair: Pair) -> None:
    pair.reads(lambda e, b: e.distribution(b))


def _support(pair: Pair) -> None:
    """Every third token of the vocabulary and the sampled one could be drawn, and all of it at every fourth place."""
    ids = pair.rows.response_mask.with_values(Rows.of(pair.rows).targets)
    at = [[[] if t % 4 == 3 else sorted({one, *range(t % 3, 40, 3)}) for t, one in enumerate(r)] for r in ids.to_list()]
    told = {
        "support_ids": Column.of([[v for place in row for v in place] for row in at], "support", "i32"),
        "support_sizes": Column.of([[len(place) for place in row] for row in at], "response", "i32"),
    }
    rows, whole = pair.rows.with_columns(told), pair.one.logprobs(pair.rows)
    rows = rows.with_columns({"sampling_logprobs": pair.one.logprobs(rows)})
    assert bool((rows.sampling_logprobs.values > whole.values).any()), "nothing was left out"
    pair.rows, pair.mine = rows, pair.part(rows)
    pair.reads(lambda e, b: e.logprobs(b, micro_tokens=40))
    pair.reads(lambda e, b: e.logprobs(b, entropy=True)[1])
    pair.trains(rl.ppo_clip(anchor="sampling", entropy=0.01))


def _generate(pair: Pair) -> None:
    column, batch = prompts(PROMPTS, 2)
    made = [e.generate(column, 2, batch.row_seeds(), Sampling(max_tokens=4)) for e in (pair.it, pair.one)]
    assert made[0].ids.to_list() == made[1].ids.to_list(), "other tokens"


def _values(pair: Pair) -> None:
    pair.reads(lambda e, b: e.values(b))


def _scores(pair: Pair) -> None:
    pair.reads(lambda e, b: e.scores(b))


def _value_loss(pair: Pair) -> None:
    values = pair.one.values(pair.rows)
    told = {"values": values, "returns": values.with_values(values.values + 0.5)}
    pair.trains(rl.value_clip(), pair.rows.with_columns(told))


def _row_loss(pair: Pair) -> None:
    pair.trains(rl.bradley_terry(), rl.pairs(pair.rows))


def _policy(pair: Pair) -> None:
    seen = pair.rows.rollout_logprobs
    known = torch.arange(len(seen.values)) % 5 > 0  # of the others nothing is expected
    expected = torch.where(known, seen.values + 0.01 * known.cumsum(0), torch.nan)
    pair.trains(rl.ppo_clip(entropy=0.01), pair.rows.with_columns({EXPECTED: seen.with_values(expected)}))


def _given(pair: Pair) -> None:
    pair.trains(rl.sft())


def _preferences(pair: Pair) -> None:
    seen = pair.rows.rollout_logprobs
    noise = torch.randn(len(seen.values), generator=torch.Generator().manual_seed(0))
    rows = pair.rows.with_columns({"ref_logprobs": seen + 0.1 * seen.with_values(noise)})
    pair.trains(rl.dpo(), rl.pairs(rows))


def _minibatches(pair: Pair) -> None:
    pair.trains(rl.ppo_clip(), minibatch=8, epochs=2, micro_tokens=40)


def _pretraining(pair: Pair) -> None:
    given = {"pretraining_weight": 0.5}
    found = pair.it.update(pair.mine, rl.ppo_clip(), pretraining=pair.mine, **given)
    close(found, pair.one.update(pair.rows, rl.ppo_clip(), pretraining=pair.rows, **given))


def _averaged(pair: Pair) -> None:
    build = Build(Model(config=CONFIGS[pair.kind], seed=1), axes=dict(pair.axes))
    followers = [open_engine(pair.backend, build), open_engine("hf", Build(build.model))]
    moved = [f.blend(e, 0.9) for f, e in zip(followers, (pair.it, pair.one), strict=True)]
    assert math.isclose(*moved, rel_tol=1e-4), "another distance"
    assert followers[0].blend(pair.it, 0.0) > 0 and followers[0].digest() == pair.it.digest()


def _boxes(pair: Pair) -> None:
    whole = pair.one.weights()
    for shard in pair.it.shards():
        assert torch.equal(shard.tensor, whole[shard.name][at(shard)]), shard.name
    assert pair.it.digest() == pair.one.digest(), "another digest"


def _state(pair: Pair) -> None:
    for _ in range(2):
        pair.it.update(pair.mine, rl.sft())
    shards, meta = pair.it.state_shards()
    parts = gathered([(s.name, s.shape, s.box, s.tensor.clone()) for s in shards if s.main])
    whole: dict[str, Any] = {}
    for name, shape, box, tensor in parts:
        whole.setdefault(name, torch.zeros(shape))[tuple(slice(a, b) for a, b in box)] = tensor
    assert any(n.startswith("exp_avg.") for n in whole), "no moments"

    def read(shard: Any) -> bool:
        if shard.name in whole:
            shard.tensor.copy_(whole[shard.name][at(shard)])
        return shard.name in whole

    pair.one.load_state_shards(read, meta)  # as one process has it, and back into a new engine on the mesh
    assert pair.it.digest() == pair.one.digest(), "other weights"
    pair.it = open_engine(pair.backend, Build(Model(config=CONFIGS[pair.kind]), axes=dict(pair.axes), **pair.how))
    pair.it.load_state_shards(read, meta)
    pair.trains(rl.sft())


def _saved(pair: Pair) -> None:
    folder = gathered([tempfile.mkdtemp()])[0]
    pair.it.save(folder)
    gathered([None])
    assert open_engine("hf", Build(Model(folder))).digest() == pair.it.digest(), "other weights"


def _idle(pair: Pair) -> None:
    mine = pair.rows if pair.it.team.place == 0 else pair.rows.take([])
    close(pair.it.update(mine, rl.ppo_clip()), pair.one.update(pair.rows, rl.ppo_clip()))


def _half(pair: Pair) -> None:
    found, wanted = (e.logprobs(pair.mine) for e in (pair.it, pair.one))
    assert float(abs(found - wanted).max()) < 0.5, "too far for bf16"
    norms = [e.update(b, rl.ppo_clip())["grad_norm"] for e, b in ((pair.it, pair.mine), (pair.one, pair.rows))]
    assert math.isclose(*norms, rel_tol=0.15), f"gradient norms {norms}"


def gathered(items: list[Any]) -> list[Any]:
    """The items of all ranks, or of this process alone."""
    if not torch.distributed.is_initialized():
        return items
    lists: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lists, items)
    return [item for listed in lists for item in listed]


#: What is asked for, how the engine is built for it, and the scenario.
CAPABILITIES: dict[str, tuple[dict[str, Any], Callable[[Pair], None]]] = {
    "log-probabilities": ({}, _logprobs),
    "entropy": ({}, _entropy),
    "distributions over the vocabulary": ({}, _distribution),
    "the tokens that could be drawn (`support=True`)": ({}, _support),
    "generation": ({}, _generate),
    "values": ({"head": "scalar"}, _values),
    "scores": ({"head": "scalar"}, _scores),
    "policy losses": ({}, _policy),
    "losses on given responses": ({}, _given),
    "losses on pairs of rows": ({}, _preferences),
    "value losses": ({"head": "scalar"}, _value_loss),
    "reward models": ({"head": "scalar"}, _row_loss),
    "mini-batches, epochs, micro-batches": ({}, _minibatches),
    "a second batch (`pretraining=`)": ({}, _pretraining),
    "LoRA": ({"lora": Lora(r=3)}, _policy),
    "recomputed layers (`gradient_checkpointing=True`)": ({"gradient_checkpointing": True}, _policy),
    'half precision (`dtype="bf16"`)': ({"dtype": "bf16"}, _half),
    "averaged weights (`follow`)": ({}, _averaged),
    "weights as boxes, bit for bit, one digest": ({}, _boxes),
    "state saved here, loaded by `hf` and back": ({}, _state),
    "saved as a Hugging Face folder": ({}, _saved),
}
#: A split of a model or of its rows over two ranks, and a model that can be split so.
AXES = {"dp": "llama", "fsdp": "llama", "tp": "llama", "pp": "llama", "cp": "llama", "ep": "mixtral"}
KINDS = tuple(CONFIGS)


def capability(name: str, backend: str, axes: Mapping[str, int]) -> None:
    build, scenario = CAPABILITIES[name]
    scenario(Pair(backend, axes, **build))


def model(kind: str, backend: str, axes: Mapping[str, int]) -> None:
    """Reading and training a kind of model; a mixture of experts is split over ``ep`` where ``pp`` is asked for."""
    pair = Pair(backend, {"ep": 2} if kind in MOE and backend == "megatron" and "pp" in axes else axes, kind)
    _logprobs(pair)
    _policy(pair)


def axis(name: str, backend: str, axes: Mapping[str, int]) -> None:
    """Reading and training on a mesh of this one axis, also where one rank has all rows."""
    pair = Pair(backend, axes, AXES[name])
    _logprobs(pair)
    _minibatches(pair)
    _idle(pair)


ASKED: dict[str, Callable[..., None]] = {"capability": capability, "model": model, "axis": axis}


def answers(asked: str, names: Iterable[str], backend: str, axes: Mapping[str, int]) -> list[str]:
    """For each name ``yes``, or what is said. Every rank of a mesh makes the same call."""
    found: list[str] = []
    for name in names:
        try:
            ASKED[asked](name, backend, axes)
            found.append(YES)
        except FlowError as error:
            found.append(error.what)
        except Exception as error:
            found.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    return found
