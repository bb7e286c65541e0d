"""The layers of Llama and its like in fewer, larger products: q, k and v are one, and gate and up are one.

No weight is copied for it: those that are multiplied together are laid one behind the other in memory as a model is
opened, and the product is with a view of all of them. Whoever writes a weight writes the view, so it is never of
another version. Where weights do not lie so, as they are swapped or have adapters, each is multiplied by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from .. import products
from .cache import Slots
from .ragged_cache import RaggedCache

if TYPE_CHECKING:
    from ..net import Net

#: Models whose layers compute what is computed here, by the name of their body in ``transformers.models``.
BODIES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
#: Rotary embeddings in which the angle of a position does not depend on how long a sequence is.
ROTARY = ("default", "linear", "llama3", "yarn")
#: Tokens up to which attention with a mask is faster on a CPU as plain products than in torch's kernel.
SHORT = 64


def fuse(net: Net) -> None:
    """Have a net compute in larger products where its model is known to allow it, and a trial gives the same."""
    if not _is_known(net):
        return
    whole, ids = net.body, (torch.arange(18, device=net.device).view(2, 9) * 5 + 1) % _vocabulary(net)
    fused = Fused(whole)
    with torch.no_grad(), net.mixed():
        wanted, found = (body(input_ids=ids, use_cache=False).last_hidden_state for body in (whole, fused))
    if net.is_same(found, wanted):
        net.body = fused


def _is_known(net: Net) -> bool:
    """Whether the model is one of :data:`BODIES` itself, all of whose tokens attend to each other."""
    body = net.body
    kind = type(body).__name__
    if kind not in BODIES or not type(body).__module__.startswith("transformers.models."):
        return False
    family = kind.removesuffix("Model")
    layers, norms = f"{family}DecoderLayer", f"{family}RMSNorm"
    if any(type(m).__name__ != layers or type(m.input_layernorm).__name__ != norms for m in body.layers):
        return False
    return net.reach is None and net.weights_dtype == net.compute and body.rotary_emb.rope_type in ROTARY


def _vocabulary(net: Net) -> int:
    return int(net.model.get_input_embeddings().weight.shape[0])


class Fused(torch.nn.Module):
    """The body of a model, called as transformers' is: ``Fused(model.model)(input_ids=ids).last_hidden_state``.

    What it does not do is left to the ``whole`` body: caches that are not of this engine, other attention than that of
    torch, layers that are computed again in the backward pass.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole, self.config = whole, whole.config
        self.layers_here = [_Layer(layer, self.config) for layer in whole.layers[: self.config.num_hidden_layers]]
        self._table: tuple[Tensor, tuple[Any, ...], Tensor] | None = None  # of these frequencies, as they were then

    def forward(
        self,
        input_ids: Tensor,
        use_cache: bool = False,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
    ) -> Any:
        """As transformers' bodies: hidden states [rows, tokens, hidden] as ``last_hidden_state``."""
        cache, tokens = past_key_values, input_ids.shape[1]
        if not self._serves(tokens, position_ids, attention_mask, cache):
            given: dict[str, Any] = {"position_ids": position_ids, "attention_mask": attention_mask}
            given = {name: value for name, value in given.items() if value is not None}
            if cache is not None:
                given["past_key_values"] = cache
            return self.whole(input_ids=input_ids, use_cache=use_cache, **given)
        hidden = self.whole.embed_tokens(input_ids)
        turns = self._turns(hidden, position_ids, None if cache is None else cache.width)
        alone = cache is not None and bool(cache.get_seq_length())  # one token, which all before it are for
        for layer in self.layers_here:
            hidden = layer(hidden, turns, attention_mask, cache, alone)
        return SimpleNamespace(last_hidden_state=_normed(self.whole.norm, hidden))

    def _serves(self, tokens: int, positions: Tensor | None, mask: Tensor | None, cache: Any) -> bool:
        if self.config._attn_implementation != "sdpa":
            return False
        if torch.is_grad_enabled() and self.whole.layers[0].training:
            return False
        if cache is None:
            return mask is not None or positions is None
        return isinstance(cache, (Slots, RaggedCache)) and (tokens == 1 or not cache.get_seq_length())

    def _turns(self, hidden: Tensor, positions: Tensor | None, width: int | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows or 1, tokens, 1, head size]; sines of the first half have the other sign."""
        if width is None and positions is not None:
            cos, sin = self.whole.rotary_emb(hidden, positions)
            return cos[:, :, None], _signed(sin)[:, :, None]
        tokens = hidden.shape[1]
        table = self._table_of(hidden, width or tokens)
        found = table[:tokens][None] if positions is None else table[positions]
        return found[:, :, 0:1], found[:, :, 1:2]

    def _table_of(self, hidden: Tensor, width: int) -> Tensor:
        """Cosines and sines of at least the first ``width`` positions, [positions, 2, head size]."""
        rotary = self.whole.rotary_emb
        frequencies: Tensor = rotary.inv_freq
        key = (hidden.dtype, hidden.device, frequencies._version, rotary.attention_scaling)
        held = self._table
        if held is None or held[0] is not frequencies or held[1] != key or len(held[2]) < width:
            at = torch.arange(-(-width // 64) * 64, device=hidden.device)[None]
            cos, sin = rotary(hidden, at)
            held = self._table = frequencies, key, torch.stack([cos[0], _signed(sin)[0]], 1)
        return held[2]


def _signed(sin: Tensor) -> Tensor:
    """Sines as a turn of two halves takes them that are swapped: ``rotate_half(x) * sin`` is ``swapped(x) * this``."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], -1)


class _Layer:
    """A layer as it is computed here."""

    def __init__(self, layer: Any, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.number, self.size = attention, attention.layer_idx, attention.head_dim
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = Joined((attention.q_proj, attention.k_proj, attention.v_proj))
        self.norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.out, self.down = Joined((attention.o_proj,)), Joined((mlp.down_proj,))
        self.gate_up, self.act = Joined((mlp.gate_proj, mlp.up_proj)), mlp.act_fn

    def __call__(
        self, hidden: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any, alone: bool
    ) -> Tensor:
        rows, tokens, _ = hidden.shape
        heads, kv = self.heads, self.kv
        qkv = self.qkv(_normed(self.before, hidden)).view(rows, tokens, heads + 2 * kv, self.size)
        qk = qkv[:, :, : heads + kv]
        if self.norms is not None:
            qk = torch.cat([_normed(self.norms[0], qk[:, :, :heads]), _normed(self.norms[1], qk[:, :, heads:])], 2)
        qk = qk * turns[0] + qk.roll(self.size // 2, -1) * turns[1]
        key, value = qk[:, :, heads:].transpose(1, 2), qkv[:, :, heads + kv :].transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.number)
        how: dict[str, Any] = {"attn_mask": mask, "scale": self.attention.scaling}
        if alone:  # heads that share keys and values are like tokens that do
            query = qk[:, 0, :heads].reshape(rows, kv, heads // kv, self.size)
            found = scaled_dot_product_attention(query, key, value, **how)
            found = found.reshape(rows, 1, heads * self.size)
        elif mask is not None and tokens <= SHORT and hidden.device.type == "cpu":
            query = (
                (qk[:, :, :heads] * self.attention.scaling)
                .transpose(1, 2)
                .reshape(rows, kv, heads // kv * tokens, self.size)
            )
            scores = (query @ key.transpose(2, 3)).view(rows, heads, tokens, tokens) + mask
            found = scores.softmax(-1).view(rows, kv, heads // kv * tokens, tokens) @ value
            found = found.view(rows, heads, tokens, self.size).transpose(1, 2).reshape(rows, tokens, heads * self.size)
        else:
            query = qk[:, :, :heads].transpose(1, 2)
            how["is_causal"] = mask is None and tokens > 1
            found = scaled_dot_product_attention(query, key, value, enable_gqa=heads != kv, **how)
            found = found.transpose(1, 2).reshape(rows, tokens, heads * self.size)
        hidden = hidden + self.out(found)
        gate, up = self.gate_up(_normed(self.between, hidden)).chunk(2, -1)
        return hidden + self.down(self.act(gate) * up)


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    """The norm of a model; in half and in double precision as transformers rounds it."""
    if hidden.dtype != torch.float32:
        return norm(hidden)
    return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


class Joined:
    """Linear layers of one input, whose results lie side by side: ``Joined((q_proj, k_proj, v_proj))(hidden)``.

    The weights are laid one behind the other, unless they are already.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self._held: list[tuple[dict[str, Any], str]] = []  # where each weight is, then where each bias is
        self._at: tuple[int, ...] = ()
        self._views: tuple[Tensor, Tensor | None] | None = None
        if all(type(part) is torch.nn.Linear for part in parts) and len({part.bias is None for part in parts}) == 1:
            names = ("weight",) if parts[0].bias is None else ("weight", "bias")
            self._held = [(part._parameters, name) for name in names for part in parts]
            for name in names:
                _lay_together([part._parameters[name] for part in parts])

    def __call__(self, hidden: Tensor) -> Tensor:
        views = self._joined()
        if views is None:
            found = [part(hidden) for part in self.parts]
            return torch.cat(found, -1) if found[1:] else found[0]
        weight, bias = views
        if not torch.is_grad_enabled():
            return products.multiply(hidden, weight, bias)
        return _Product.apply(hidden, weight, bias, len(self.parts), *[held[name] for held, name in self._held])

    def _joined(self) -> tuple[Tensor, Tensor | None] | None:
        """A view of all weights, and one of all biases, where they lie one behind the other just now."""
        at = tuple([held[name].data_ptr() for held, name in self._held])
        if at != self._at:
            self._at, self._views = at, self._view()
        return self._views

    def _view(self) -> tuple[Tensor, Tensor | None] | None:
        tensors = [held[name] for held, name in self._held]
        if not tensors:
            return None
        count = len(self.parts)
        weight = _together(tensors[:count])
        bias = _together(tensors[count:]) if tensors[count:] else None
        return None if weight is None or (bias is None and len(tensors) > count) else (weight, bias)


def _lay_together(weights: Sequence[Tensor]) -> None:
    """Move weights one behind the other in memory; tensors and names stay."""
    if not weights or _together(weights) is not None:
        return
    memory = torch.cat([weight.detach() for weight in weights])
    for weight, place in zip(weights, memory.split([len(weight) for weight in weights]), strict=True):
        weight.data = place


def _together(weights: Sequence[Tensor]) -> Tensor | None:
    """A view of weights that lie one behind the other; None where they do not."""
    first = weights[0]
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        same = weight.data_ptr() == end and weight.untyped_storage().data_ptr() == storage
        if not same or not weight.is_contiguous() or weight.dtype != first.dtype or not storage:
            return None
        end += weight.nbytes
    shape = (sum(len(weight) for weight in weights), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


class _Product(torch.autograd.Function):
    """The product with a view of several weights, each of which gets its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, count: int, *parts: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        ctx.here = products.serves(rows)
        used = products.rounded_up(rows) if ctx.here else rows
        ctx.save_for_backward(used, weight)
        ctx.sizes, ctx.shape = [len(part) for part in parts[:count]], hidden.shape
        ctx.biased = bias is not None
        found = (products.by_onednn if ctx.here else linear)(used, weight, bias)
        return found[: rows.shape[0]].view(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        used, size = (products.rounded_up(grad) if ctx.here else grad), len(grad)
        multiply = products.by_onednn if ctx.here else linear
        count, needs = len(ctx.sizes), ctx.needs_input_grad
        back = multiply(used, weight.T)[:size].view(ctx.shape) if needs[0] else None
        found: list[Tensor | None] = [None] * (len(needs) - 4)
        if any(needs[4 : 4 + count]):
            found[:count] = multiply(used.T, rows.T).split(ctx.sizes)
        if ctx.biased and any(needs[4 + count :]):
            found[count:] = grad.sum(0).split(ctx.sizes)
        return (back, None, None, None, *[f if n else None for f, n in zip(found, needs[4:], strict=True)])
