"""Layers in larger products: the same numbers and gradients, whoever writes the weights, and the model's own where not."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flowrl import rl
from flowrl.backends.hf.adapters import off
from flowrl.backends.hf.gap_doctor.switches import attributes, weights_in_place
from flowrl.backends.hf.generation.fused import Fused, Joined, fuse
from flowrl.workers.model_options import Lora, Sampling

T = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tiny.py"))))  # its own, as it adds models
T.CONFIGS["mistral"] = {**T.CONFIGS["mistral-window"], "sliding_window": None}
T.CONFIGS["llama-biased"] = {**T.CONFIGS["llama"], "attention_bias": True, "mlp_bias": True}
T.CONFIGS["llama-one-head"] = {**T.CONFIGS["llama"], "num_key_value_heads": 4}
KNOWN = ["llama", "qwen2", "qwen3", "mistral", "llama-biased", "llama-one-head"]
CLOSE = 1e-5


def sampled_and_whole(opened, max_tokens=8):
    """Log-probabilities of sampled tokens, and those that the model's own forward pass gives of them."""
    column, batch = T.prompts(n=2)
    made = opened.generate(column, 2, batch.row_seeds(), Sampling(max_tokens=max_tokens))
    wanted = []
    for prompt, ids in zip(batch.prompt_ids.to_list(), made.ids.to_list(), strict=True):
        with attributes([(opened.net.body, "_serves", lambda *_: False)]):
            logits = T.whole_logits(opened, prompt + ids)[len(prompt) - 1 : -1]
        wanted.append(logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1))
    return made.rollout_logprobs.values.double(), torch.cat(wanted)


def check_follows(opened):
    found, wanted = sampled_and_whole(opened)
    assert torch.allclose(found, wanted, atol=1e-4)
    return found


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("tokens", [9, 70])
def test_numbers_and_gradients_are_those_of_the_model(kind, tokens):
    """Short rows and long ones, with a mask and without one."""
    T.CONFIGS["long"] = {**T.CONFIGS[kind], "max_position_embeddings": 128}
    opened = T.engine("long", optim=T.OPTIM)
    assert type(opened.net.body) is Fused
    ids = torch.randint(1, T.VOCAB, (3, tokens), generator=torch.Generator().manual_seed(1))
    at = torch.arange(tokens).expand(3, -1)
    banned = torch.zeros(3, 1, tokens, tokens).masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), -3e38)
    banned[1, :, 4:, 1] = -3e38
    weights = list(opened.net.model.parameters())
    for more in ({}, {"position_ids": at, "attention_mask": banned}):
        found, wanted = (
            body(input_ids=ids, use_cache=False, **more).last_hidden_state
            for body in (opened.net.body, opened.net.body.whole)
        )
        assert torch.allclose(found, wanted, atol=CLOSE)
        seen = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
        grads = [torch.autograd.grad((h * seen).sum(), weights, allow_unused=True) for h in (found, wanted)]
        for one, other in zip(*grads, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert torch.allclose(one, other, atol=CLOSE * float(other.abs().max().clamp(min=1)))


@pytest.mark.parametrize("kind", ["granite", "gemma2", "cohere", "mixtral", "gpt2", "mistral-window", "bloom"])
def test_other_models_compute_as_they_do(kind):
    assert type(T.engine(kind).net.body) is not Fused


def test_a_model_that_is_like_a_known_one_computes_as_it_does():
    opened = T.engine("llama")
    net, whole = opened.net, opened.net.body.whole

    class Scaled(type(whole.layers[0])):
        def forward(self, *args, **more):
            return 2 * super().forward(*args, **more)

    for kind in (Scaled, type("LlamaDecoderLayer", (Scaled,), {})):  # also one that has the name: it is tried
        net.body = whole
        whole.layers[0].__class__ = kind
        fuse(net)
        assert net.body is whole


def test_no_weight_is_copied():
    opened = T.engine("qwen2")
    weights = list(opened.net.model.parameters())
    storages = {w.untyped_storage()._cdata: w.untyped_storage().nbytes() for w in weights}
    assert sum(storages.values()) == sum(w.nbytes for w in weights)
    attention = opened.net.body.whole.layers[0].self_attn
    together = Joined((attention.q_proj, attention.k_proj, attention.v_proj))
    joined = together._view()
    assert joined is not None and joined[0].data_ptr() == attention.q_proj.weight.data_ptr()
    memory = [w.data_ptr() for w in weights]
    fuse(opened.net)
    assert memory == [w.data_ptr() for w in weights], "they lie together already"


def test_whoever_writes_the_weights_they_are_those_that_it_computes_with():
    opened, other = T.engine("qwen2", optim=T.OPTIM), T.engine("qwen2", sharpen=2.0)
    first = check_follows(opened)
    opened.update(T.rollouts(opened), rl.ppo_clip(), lr=0.05)
    second = check_follows(opened)
    assert not torch.equal(first, second)
    opened.take_weights(other.plain_weights())
    assert torch.allclose(check_follows(opened), check_follows(other), atol=1e-5)
    tensors, meta = opened.state()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        opened.net.body.whole.layers[0].mlp.up_proj.weight.mul_(3)
        opened.net.body.whole.layers[1].self_attn.v_proj.bias.add_(1)
    changed = check_follows(opened)
    opened.load_state(kept, meta)
    assert not torch.equal(changed, check_follows(opened))
    opened.sleep()
    opened.wake()
    check_follows(opened)


def test_weights_that_are_swapped_for_a_computation_are_used():
    opened = T.engine("qwen2")
    name = "model.layers.0.self_attn.k_proj"
    before = check_follows(opened)
    for part in ("weight", "bias"):
        kept = opened.plain_weights()[f"{name}.{part}"]
        with weights_in_place(opened.net, {f"{name}.{part}": torch.randn(kept.shape)}):
            assert not torch.equal(check_follows(opened), before)
        assert torch.equal(check_follows(opened), before)


def test_another_attention_is_the_models_own():
    opened = T.engine("qwen2")
    passes = []
    opened.net.body.whole.register_forward_pre_hook(lambda *_: passes.append(1))
    check_follows(opened)
    passes.clear()
    column, batch = T.prompts(n=2)
    with attributes([(opened.net.config, "_attn_implementation", "eager")]):
        opened.generate(column, 2, batch.row_seeds(), Sampling(max_tokens=4))
    assert len(passes) == 4


def test_what_is_set_on_layers_later_counts():
    opened = T.engine("qwen2")
    plain, modules = check_follows(opened), list(opened.net.model.modules())
    rotary = [m for m in modules if hasattr(m, "inv_freq")]
    scaled = [m for m in modules if isinstance(getattr(m, "scaling", None), float)]
    for said in ([(m, "inv_freq", m.inv_freq / 3) for m in rotary], [(m, "scaling", 1.0) for m in scaled]):
        assert said
        with attributes(said):
            assert not torch.equal(check_follows(opened), plain)
        assert torch.equal(check_follows(opened), plain)


def test_adapters_are_used_and_can_be_off():
    opened = T.engine("qwen2", optim=T.OPTIM, lora=Lora(r=4, alpha=8, targets=("q_proj", "up_proj")))
    plain = check_follows(opened)
    opened.update(T.rollouts(opened), rl.ppo_clip(), lr=0.1)
    trained = check_follows(opened)
    assert not torch.equal(trained, plain)
    with off(opened.net.model):
        assert torch.equal(check_follows(opened), plain)


def test_frozen_weights_have_no_gradient_and_others_do():
    opened = T.engine("qwen2", optim=T.OPTIM, freeze=("*.k_proj.*", "*.gate_proj.*"))
    before = {n: w.clone() for n, w in opened.plain_weights().items()}
    opened.update(T.rollouts(opened), rl.ppo_clip(), lr=0.05)
    changed = {n for n, w in opened.plain_weights().items() if not torch.equal(w, before[n])}
    assert any("q_proj.weight" in n for n in changed) and any("up_proj" in n for n in changed)
    assert not any("k_proj" in n or "gate_proj" in n for n in changed)
    check_follows(opened)


def test_in_half_precision_it_is_as_close_as_the_model():
    opened = T.engine("qwen2", dtype="bf16")
    found, wanted = sampled_and_whole(opened)
    assert type(opened.net.body) is Fused and torch.allclose(found, wanted, atol=0.3)
    mixed = T.engine("qwen2", dtype="bf16", optim=T.OPTIM)
    if mixed.net.weights_dtype != mixed.net.compute:
        assert type(mixed.net.body) is not Fused, "weights would be rounded for each token"
