import json

import pytest

from flowrl.errors import ModelError
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.per_device_counts import kv_bytes
from flowrl.placement.model.model_shape import ModelShape, shape_named
from flowrl.placement.model.zoo import SHIPPED

#: As the hub counts them, in the metadata of the weights that the models publish.
PUBLISHED = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-34b": 33_743_970_304,
    "llama-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # these without the layers for further tokens, which the weights that are published have too
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
    "glm-4.5": 352_797_814_784,
    "glm-4.5-air": 106_852_245_504,
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2}
LATENT = {**ROUTED, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
CONFIGS = [
    {"model_type": "llama", **SMALL},
    {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "llama", **SMALL, "head_dim": 16},
    {"model_type": "mistral", **SMALL},
    {"model_type": "qwen2", **SMALL},
    {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True},
    {"model_type": "qwen3", **SMALL},
    {"model_type": "qwen3", **SMALL, "attention_bias": True, "head_dim": 8},
    {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "num_experts": 8},
    {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "num_experts": 8, "mlp_only_layers": [1]},
    {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "num_experts": 8, "decoder_sparse_step": 2},
    {"model_type": "qwen2_moe", **SMALL, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 40},
    {"model_type": "deepseek_v3", **SMALL, **LATENT, "q_lora_rank": 20, "first_k_dense_replace": 1},
    {"model_type": "deepseek_v3", **SMALL, **LATENT, "q_lora_rank": None, "first_k_dense_replace": 4},
    {"model_type": "glm4_moe", **SMALL, **ROUTED, "attention_bias": True, "head_dim": 8, "first_k_dense_replace": 2},
    {"model_type": "glm4_moe", **SMALL, **ROUTED, "use_qk_norm": True, "head_dim": 8, "first_k_dense_replace": 0},
    {"model_type": "gemma", **SMALL},
    {"model_type": "gemma2", **SMALL, "head_dim": 8},
    {"model_type": "gemma3_text", **SMALL, "head_dim": 8},
]


def on_meta(config):
    """The model that transformers makes of a configuration, without memory behind its weights."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config["model_type"]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
        )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(v) for k, v in c.items() if k not in SMALL))
def test_sizes_are_those_of_the_model_that_transformers_builds(config):
    model = on_meta(config)
    shape = ModelShape.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    if not shape.experts:  # transformers holds experts fused
        theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert {w.name: w.shape for w in shape.weights()} == theirs


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_have_the_published_size(name):
    assert shape_named(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_are_what_transformers_builds(name):
    """On the meta device, so without memory."""
    config = SHIPPED[name][1]
    assert ModelShape.from_config(config).parameters == sum(p.numel() for p in on_meta(config).parameters())


def test_saved_configurations_are_read_without_the_network(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    transformers.Qwen2Config(**SMALL).save_pretrained(tmp_path / "mine")
    assert shape_named(str(tmp_path / "mine")).hidden == 32
    transformers.GemmaConfig(**SMALL, head_dim=8).save_pretrained(tmp_path / "gemma")
    assert shape_named(str(tmp_path / "gemma")).tied
    snapshot = tmp_path / "hub" / "models--Some--Model" / "snapshots"
    for commit, hidden in (("aaa", 32), ("bbb", 64)):
        (snapshot / commit).mkdir(parents=True)
        config = {"model_type": "llama", **SMALL, "hidden_size": hidden}
        (snapshot / commit / "config.json").write_text(json.dumps(config))
    (snapshot.parent / "refs").mkdir()
    (snapshot.parent / "refs" / "main").write_text("aaa")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert shape_named("some/model").hidden == 32
    assert shape_named("Qwen/Qwen3-8B") == shape_named("QWEN3-8b")


def test_active_parameters_and_cache():
    mixture = shape_named("qwen3-30b-a3b")
    unused = 48 * (128 - 8) * 3 * 2048 * 768
    assert mixture.active_parameters == mixture.parameters - unused
    dense = shape_named("llama-70b")
    assert dense.active_parameters == dense.parameters
    assert dense.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2
    assert dense.bytes == 2 * dense.parameters


def test_a_cache_of_latents_has_no_heads_and_attention_is_as_wide_as_a_key_and_a_value():
    latent = shape_named("deepseek-v3")
    assert latent.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert latent.attention_width == 128 * (128 + 64 + 128)
    assert latent.active_parameters == latent.parameters - 58 * (256 - 8) * 3 * 7168 * 2048
    whole = kv_bytes(latent, Mesh(), 1000)
    assert kv_bytes(latent, Mesh.of("tp=8"), 1000) == whole == 1000 * latent.kv_bytes_per_token
    plain = shape_named("glm-4.5")
    assert plain.attention_width == 2 * 96 * 128 and kv_bytes(plain, Mesh.of("tp=8"), 1) * 8 == kv_bytes(
        plain, Mesh(), 1
    )


def test_weights_of_layers_of_two_makes_keep_their_names():
    shape = ModelShape.from_config(
        {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "num_experts": 8, "decoder_sparse_step": 2}
    )
    names = [w.name for w in shape.weights()]
    assert len(names) == len(set(names))
    assert "model.layers.2.mlp.gate_proj.weight" in names
    assert "model.layers.3.mlp.experts.gate_proj.weight" in names
    assert {w.layer for w in shape.weights()} == {None, 0, 1, 2, 3}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "qwen4", **SMALL}, ["model_type 'qwen4'", "Did you mean 'qwen"]),
        ({**SMALL}, ["names no model_type"]),
        ({"model_type": "llama", **{k: v for k, v in SMALL.items() if k != "vocab_size"}}, ["has no 'vocab_size'"]),
        ({"model_type": "llama", **SMALL, "hidden_size": "32"}, ["hidden_size is '32'"]),
        ({"model_type": "qwen3_moe", **SMALL, "num_experts": 8}, ["has no 'num_experts_per_tok'"]),
    ],
)
def test_what_is_missing_is_named(config, said):
    with pytest.raises(ModelError) as caught:
        ModelShape.from_config(config, "mine")
    for part in said:
        assert part in str(caught.value)


def test_unknown_names_say_the_nearest(tmp_path):
    with pytest.raises(ModelError, match="Did you mean 'llama-70b'"):
        shape_named("lama-70b")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        shape_named(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        shape_named(str(tmp_path))
