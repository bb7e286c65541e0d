"""A rank of a saved model reads its own part of the files, and has the weights that one process has, bit for bit."""

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny as T
import torch
from ranks import PRELOAD, run
from safetensors.torch import load_file, save_file
from sharded import EXACT, apart, one_layout, part, rollouts
from transformers import AutoConfig, AutoModelForCausalLM

from flowrl import rl
from flowrl.backends import open_engine
from flowrl.backends.fsdp2 import engine as fsdp2
from flowrl.backends.fsdp2.small import small_like
from flowrl.backends.hf.load import load_unread
from flowrl.backends.hf.saved import Saved
from flowrl.errors import ModelError
from flowrl.workers.model_options import Build, Lora, Model, Optim

KINDS = {
    "llama": T.CONFIGS["llama"],
    "llama, tied": {**T.CONFIGS["llama"], "tie_word_embeddings": True},
    "qwen2": {**T.CONFIGS["qwen2"], "tie_word_embeddings": False, "vocab_size": 41},
    "qwen2, tied": {**T.CONFIGS["qwen2"], "vocab_size": 41, "num_hidden_layers": 3},
    "qwen3": T.CONFIGS["qwen3"],
    "qwen3, tied": {**T.CONFIGS["qwen3"], "tie_word_embeddings": True},
}
MEGATRON = find_spec("megatron") is not None
if MEGATRON and "flowrl.backends.megatron.engine" not in PRELOAD:
    PRELOAD.append("flowrl.backends.megatron.engine")
needs_megatron = pytest.mark.skipif(not MEGATRON, reason="megatron-core is not installed: pip install '.[megatron]'")


def saved(folder, config, dtype=torch.float32, size="5GB", **build):
    """A folder of transformers with random weights, norms and biases among them; in several files where they are larger."""
    opened = open_engine("hf", Build(Model(config=config), dtype="fp32", **build))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in opened.net.model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    opened.net.model.to(dtype).save_pretrained(folder, max_shard_size=size)
    return str(folder)


class Watched:
    """How many numbers are read from files by boxes, while it is there."""

    def __enter__(self):
        self.numbers, self.bytes, self.highest, self.fill = 0, 0, 0, Saved.fill

        def fill(files, shard):
            before = files.taken
            self.fill(files, shard)
            self.numbers += shard.tensor.numel()
            self.bytes += files.taken - before
            self.highest = max(self.highest, own_memory())

        Saved.fill = fill
        return self

    def __exit__(self, *_):
        Saved.fill = self.fill


def opens(folder, cases):
    """Each engine has the weights and buffers of one process; gives how many numbers it read, and how many there are."""
    found = []
    for backend, axes, more in cases:
        how = {"optim": Optim(lr=1e-3), "seed": 3, **more}
        with Watched() as watched:
            one = open_engine("hf", Build(Model(folder), **how))
            assert not watched.numbers
            engine = open_engine(backend, Build(Model(folder), axes=axes, **how))
        whole = {s.name: s.tensor for s in one.shards()}
        for shard in engine.shards():
            assert shard.tensor.dtype == whole[shard.name].dtype
            assert torch.equal(shard.tensor, whole[shard.name][tuple(slice(a, b) for a, b in shard.box)]), shard.name
        assert engine.digest() == one.digest()
        if backend == "fsdp2":
            pairs = zip(one.net.model.named_buffers(), engine.net.model.named_buffers(), strict=True)
            assert all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in pairs)
            assert engine.net.model.training is one.net.model.training is False
            assert engine.net.grouped == one.net.grouped
        else:
            assert torch.equal(engine.net.plain.frequencies, one.net.model.base_model.rotary_emb.inv_freq.float())
        assert (engine.eos_ids, engine.pad_id, engine.vocab_size) == (one.eos_ids, one.pad_id, one.vocab_size)
        found.append((watched.numbers, watched.bytes, sum(w.numel() for w in whole.values())))
    return found


TWO = [("fsdp2", {axis: 2}, {}) for axis in ("fsdp", "tp", "pp")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_its_part(tmp_path, kind):
    folder = saved(tmp_path / "m", KINDS[kind])
    for read in run(opens, 2, folder, TWO):
        assert all(0 < numbers < 0.75 * whole for numbers, _, whole in read)


@pytest.mark.parametrize("kind", ["llama", "qwen2, tied"])
def test_a_rank_reads_its_part_on_two_axes(tmp_path, kind):
    folder = saved(tmp_path / "m", KINDS[kind])
    cases = [("fsdp2", axes, {}) for axes in ({"fsdp": 2, "tp": 2}, {"pp": 2, "fsdp": 2}, {"dp": 2, "tp": 2})]
    for read in run(opens, 4, folder, cases):
        assert all(0 < numbers < 0.75 * whole for numbers, _, whole in read)


@needs_megatron
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_of_megatron_reads_its_part(tmp_path, kind):
    folder = saved(tmp_path / "m", KINDS[kind])
    cases = [("megatron", axes, {}) for axes in ({"tp": 2}, {"pp": 2})]
    cases.append(("megatron", {"tp": 2}, {"dtype": "bf16", "optim": None}))
    for read in run(opens, 2, folder, cases):
        assert all(0 < numbers < 0.75 * whole for numbers, _, whole in read)


def test_experts_are_read_one_by_one(tmp_path):
    """transformers saves the experts of a layer as matrices, and has them on one stack in memory."""
    for kind in ("mixtral", "qwen3-moe"):
        folder = saved(tmp_path / kind, T.CONFIGS[kind])
        assert any(".experts.3." in key for key in load_file(f"{folder}/model.safetensors"))
        cases = [("fsdp2", axes, {}) for axes in ({"fsdp": 2}, {"pp": 2})]
        cases += [("megatron", {"ep": 2}, {})] if MEGATRON else []
        for read in run(opens, 2, folder, cases):
            assert all(0 < numbers < 0.8 * whole for numbers, _, whole in read)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "bloom", "phi", "cohere", "granite", "mistral-window"])
def test_other_kinds_of_layers(tmp_path, kind):
    for read in run(opens, 2, saved(tmp_path / "m", T.CONFIGS[kind]), [("fsdp2", {"fsdp": 2}, {})]):
        assert all(0 < numbers < 0.75 * whole for numbers, _, whole in read)


def test_several_files_of_another_dtype(tmp_path):
    folder = saved(tmp_path / "m", KINDS["qwen3"], torch.bfloat16, size="10KB")
    assert len(set(json.loads((tmp_path / "m/model.safetensors.index.json").read_text())["weight_map"].values())) > 3
    how = [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16", "optim": None}, {"dtype": "fp64"}]
    cases = [("fsdp2", {axis: 2}, more) for axis in ("fsdp", "tp") for more in how]
    for read in run(opens, 2, folder, cases):
        assert all(taken == 2 * numbers for numbers, taken, _ in read)


def test_adapters_and_layers_that_are_computed_again(tmp_path):
    folder = saved(tmp_path / "m", KINDS["qwen2, tied"])
    cases = [("fsdp2", {"fsdp": 2}, {"lora": Lora(r=3)}), ("fsdp2", {"tp": 2}, {"gradient_checkpointing": True})]
    for read in run(opens, 2, folder, cases):
        assert all(0 < numbers < 0.6 * whole for numbers, _, whole in read)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_scalar_heads(tmp_path, head):
    """Of a language model the head is fresh, of a saved scorer its own."""
    folder = saved(tmp_path / "m", KINDS["llama"], head=head)
    assert any(key.startswith("score") for key in load_file(f"{folder}/model.safetensors")) == (head == "scalar")
    cases = [(b, a, {**m, "head": "scalar"}) for b, a, m in TWO]
    cases += [("megatron", {axis: 2}, {"head": "scalar"}) for axis in ("tp", "pp")] if MEGATRON else []
    for read in run(opens, 2, folder, cases):
        assert all(0 < numbers < 0.75 * whole for numbers, _, whole in read)


def test_names_without_their_prefix_and_tied_weights_that_are_there_twice(tmp_path):
    plain = saved(tmp_path / "plain", KINDS["llama"])
    AutoModelForCausalLM.from_pretrained(plain).model.save_pretrained(tmp_path / "body")
    read = run(opens, 2, str(tmp_path / "body"), [("fsdp2", {"fsdp": 2}, {"head": "scalar"})])
    assert all(0 < numbers < 0.6 * whole for ((numbers, _, whole),) in read)
    for name, names in (("both", ("embed", "head")), ("head", ("head",))):
        folder = saved(tmp_path / name, KINDS["llama, tied"])
        rewrite(folder, lambda w, names=names: twice(w, names))
        read = run(opens, 2, folder, [("fsdp2", {"fsdp": 2}, {}), ("fsdp2", {"pp": 2}, {})])
        assert all(0 < numbers < 0.75 * whole for found in read for numbers, _, whole in found)


def twice(weights, names):
    embedding = weights.pop("model.embed_tokens.weight")
    there = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    return {**weights, **{there[name]: embedding.clone() for name in names}}


def rewrite(folder, change):
    file = f"{folder}/model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_what_is_not_understood_is_read_whole(tmp_path):
    """Tied weights that are not equal, and a matrix of integers: transformers loads them, and so does a rank."""
    untied, packed = (saved(tmp_path / name, KINDS["llama, tied"]) for name in ("untied", "packed"))
    rewrite(untied, lambda w: {**w, "lm_head.weight": w["model.embed_tokens.weight"] + 1})
    rewrite(packed, lambda w: {**w, "model.norm.weight": w["model.norm.weight"].mul(9).to(torch.int32)})
    for folder in (untied, packed):
        for read in run(opens, 2, folder, [("fsdp2", {"fsdp": 2}, {}), ("fsdp2", {"pp": 2}, {})]):
            assert all(numbers == 0 for numbers, _, _ in read)


def whole_where_no_small_one_runs(folder):
    fsdp2.small_like = lambda *_, **__: None
    return opens(folder, [("fsdp2", {"fsdp": 2}, {}), ("fsdp2", {"tp": 2}, {})])


def test_a_model_of_which_no_small_one_can_be_made_is_read_whole(tmp_path):
    for read in run(whole_where_no_small_one_runs, 2, saved(tmp_path / "m", KINDS["llama"])):
        assert all(numbers == 0 for numbers, _, _ in read)


def told(folder, cases):
    """What is said by one process, and by ranks."""
    found = []
    for backend, axes in [("hf", {}), *cases]:
        with pytest.raises(ModelError) as error:
            open_engine(backend, Build(Model(folder), axes=axes))
        found.append(str(error.value))
    return found


def test_files_that_lack_a_weight_or_have_another(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    lacks, wrong = (saved(tmp_path / n, KINDS["llama"]) for n in ("lacks", "wrong"))
    rewrite(lacks, lambda w: {k: v for k, v in w.items() if k != name})
    rewrite(wrong, lambda w: {**w, name: w[name][:-1].clone()})
    cases = [("fsdp2", {"fsdp": 2}), ("fsdp2", {"pp": 2})] + ([("megatron", {"tp": 2})] if MEGATRON else [])
    for folder, what in (
        (lacks, f"lacks 1 weights of LlamaForCausalLM, such as '{name}'"),
        (wrong, "cannot be loaded"),
    ):
        for said in run(told, 2, folder, cases):
            assert len(set(said)) == 1 and what in said[0]


# -- what is tried in place of the whole model ---------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3", "gemma2", "mixtral", "qwen3-moe", "phi", "gpt2", "bloom"])
def test_a_small_model_has_the_names_of_the_large_one(kind, head):
    config = {**T.CONFIGS[kind], "vocab_size": 50_000, "pad_token_id": 49_999}
    large = open_engine("hf", Build(Model(config=config), head=head)).net.model
    for tp in (1, 2):
        small = small_like(large, Build(Model(config=config), head=head), torch.float32, tp=tp)
        assert {n: w.dim() for n, w in small.named_parameters()} == {n: w.dim() for n, w in large.named_parameters()}
        assert small.get_input_embeddings().weight.shape[0] == 61
        assert all(float(w.std()) > 0 for w in small.parameters() if w.numel() > 1)


def test_a_small_model_is_small_where_the_large_one_is_not():
    sizes = {"hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = {"model_type": "qwen2", "num_hidden_layers": 80, "vocab_size": 152_064, **sizes}
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    small = small_like(large, Build(Model(config=config)), torch.float32, tp=8)
    assert sum(w.numel() for w in large.parameters()) > 72e9
    assert sum(w.numel() for w in small.parameters()) < 9e6
    assert (small.config.num_attention_heads, small.config.num_key_value_heads) == (16, 8)


def test_sizes_that_hang_together_in_another_way_have_no_small_model():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
    config = {**T.CONFIGS["llama"], "num_attention_heads": 2, "rope_parameters": {"rope_type": "longrope", **factors}}
    large = open_engine("hf", Build(Model(config=config))).net.model
    assert small_like(large, Build(Model(config=config)), torch.float32, tp=1) is None


def misplaced(folder, axes):
    """Boxes that say another place than where the weights are."""
    real = fsdp2.ShardedParameters._box

    def box(self, name, shape):
        ranges, before = real(self, name, shape), self.at
        self.at = [place if axis != 1 else 1 - place for axis, place in enumerate(before)]
        swapped = real(self, name, shape)
        self.at = before
        same = [b - a for a, b in ranges] == [b - a for a, b in swapped]
        return swapped if name.endswith("layernorm.weight") and same else ranges

    fsdp2.ShardedParameters._box = box
    try:
        with pytest.raises(ModelError, match="The hidden states of LlamaForCausalLM, split over ranks, differ by"):
            open_engine("fsdp2", Build(Model(folder), axes=axes))
    finally:
        fsdp2.ShardedParameters._box = real


def refused(folder, axes):
    with pytest.raises(ModelError, match="The hidden states of GraniteForCausalLM, split over ranks, differ by"):
        open_engine("fsdp2", Build(Model(folder), axes=axes))


def test_parts_that_are_not_the_whole_are_found_out(tmp_path):
    run(misplaced, 2, saved(tmp_path / "llama", KINDS["llama"]), {"fsdp": 2})
    multiplied = saved(tmp_path / "granite", {**T.CONFIGS["granite"], "embedding_multiplier": 3.0})
    run(refused, 2, multiplied, {"pp": 2})  # each stage would multiply


def trains_as_one(folder, axes):
    one, engine = (
        open_engine(name, Build(Model(folder), axes=a, optim=Optim(lr=1e-2), dtype="fp64", head="lm"))
        for name, a in (("hf", {}), ("fsdp2", axes))
    )
    one_layout("qwen2", one, engine)
    batch = rollouts()
    for _ in range(2):
        wanted = one.update(batch, rl.ppo_clip(), minibatch=8)
        mine = part(batch, engine, [9, 7] if engine.team.data > 1 else [16])
        assert apart(wanted, engine.update(mine, rl.ppo_clip(), minibatch=8)) < EXACT
    engine.save(f"{folder}-{'-'.join(axes)}")
    torch.distributed.barrier()
    again = open_engine("hf", Build(Model(f"{folder}-{'-'.join(axes)}"), dtype="fp64"))
    assert again.digest() == engine.digest()


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_what_was_read_by_boxes_trains_and_is_saved(tmp_path, axes):
    run(trains_as_one, 2, saved(tmp_path / "m", KINDS["qwen2, tied"]), axes)


# -- what a rank reads and holds -----------------------------------------------------------------------------------------

LARGE = {
    **T.CONFIGS["llama"],
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def measured(small, folder, axes):
    """Bytes read from the files, those that the weights take, and the growth of the process's own memory at its highest."""
    open_engine("fsdp2", Build(Model(small), axes=axes, dtype="fp32"))  # what is imported and made once
    before = own_memory()
    with Watched() as watched:
        engine = open_engine("fsdp2", Build(Model(folder), axes=axes, dtype="fp32"))
    held = sum(p.to_local().untyped_storage().nbytes() for p in engine.net.model.parameters())
    return watched.bytes, held, max(watched.highest, own_memory()) - before


def own_memory():
    """What this process alone has in memory, in bytes: not the pages of files, which all ranks share."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory by /proc")
@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "tp": 2}], ids=str)
def test_a_rank_of_four_reads_and_holds_a_quarter(tmp_path, axes):
    small, folder = saved(tmp_path / "small", KINDS["llama"]), saved(tmp_path / "m", LARGE)
    weights = load_file(f"{folder}/model.safetensors")
    whole, largest = (f([w.nbytes for w in weights.values()]) for f in (sum, max))
    assert whole > 90e6
    for read, held, grown in run(measured, math.prod(axes.values()), small, folder, axes):
        print(f"whole {whole}, largest {largest}, read {read}, held {held}, own memory grown by {grown}")
        assert read == held == pytest.approx(whole / 4, rel=0.01)
        assert grown < whole / 4 + largest


def test_random_weights_are_made_whole():
    model, files = load_unread(Build(Model(config=KINDS["llama"])), torch.float32)
    assert files is None and not any(w.is_meta for w in model.parameters())
