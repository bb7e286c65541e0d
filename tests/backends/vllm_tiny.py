"""Tiny models for the tests of vLLM, and the faults that its process can be told to have."""

from __future__ import annotations

import torch

VOCAB, EOS = 80, 13
#: Where vLLM computes in the tests; the trainer that it is held against is on the CPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POSITIONS = 160  # more than a block of the prefix cache, which has 128
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
CONFIGS = {
    # As many heads of keys as of queries, so that the two can be confused.
    "qwen2": {**_BASE, "model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 2},
    "qwen2-untied": {**_BASE, "model_type": "qwen2", "tie_word_embeddings": False},
    "llama": {**_BASE, "model_type": "llama", "tie_word_embeddings": False},
    "qwen3": {**_BASE, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-untied": {**_BASE, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False},
    "qwen3_moe": {
        **_BASE,
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "tie_word_embeddings": False,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        **_BASE,
        "model_type": "qwen2_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "gemma": {**_BASE, "model_type": "gemma"},  # which is refused
}
PROMPTS = [[2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 14], [15, 16, 17, 18, 19], [20], *([i, 30, i + 1] for i in range(12))]

MANY = [[2 + (7 * i + 3 * j * (i + 1)) % 70 for j in range(1 + i % 9)] for i in range(64)]

#: In the process of vLLM: what the file of FAULT names goes wrong there. It is a module that Python loads at start.
FAULTS = '''
import os

def fault():
    path = os.environ.get("FAULT")
    return open(path).read() if path and os.path.exists(path) else ""

def swapped(weights, one, other):
    old = {n: w.clone() for n, w in weights.items()}
    for n, w in weights.items():
        if one in n or other in n:
            w.copy_(old[n.replace(one, other) if one in n else n.replace(other, one)])

def changed(weights, end, change):
    for n, w in weights.items():
        if n.endswith(end):
            w.copy_(change(w.clone()))

def half(weight):
    weight = weight.clone()
    weight.view(-1)[: weight.numel() // 2] = 0
    return weight

def last_number_off(weight):
    weight[-1, -1, -1] += 2e-7 * weight.abs().max()
    return weight

def transposed(weight):
    return weight.T.contiguous()

def not_given(weights, end):
    changed(weights, end, lambda w: LAST[end])

#: What is given to vLLM in place of the weights that lie in the memory: changes of a copy of them.
GIVEN = {
    "k not given": lambda w: not_given(w, "0.self_attn.k_proj.weight"),
    "q and k swapped": lambda w: swapped(w, ".q_proj.", ".k_proj."),
    "gate and up swapped": lambda w: swapped(w, ".gate_proj.", ".up_proj."),
    "layers swapped": lambda w: swapped(w, ".layers.0.", ".layers.1."),
    "heads in another order": lambda w: changed(w, "1.self_attn.q_proj.weight", lambda x: x.roll(32, 0)),
    "o transposed": lambda w: changed(w, "1.self_attn.o_proj.weight", transposed),
    "rounded": lambda w: changed(w, "", lambda x: x.bfloat16().float()),
    "one number off": lambda w: changed(w, "1.mlp.up_proj.weight", lambda x: x + 2e-7 * x.abs().max()),
    "zeros": lambda w: changed(w, "0.self_attn.v_proj.weight", lambda x: x * 0),
    "bias lost": lambda w: changed(w, "0.self_attn.q_proj.bias", lambda x: x * 0),
    "scaled": lambda w: changed(w, "0.mlp.down_proj.weight", lambda x: x * 2),
    "not a number": lambda w: changed(w, "0.mlp.down_proj.weight", lambda x: x * float("nan")),
    "experts in another order": lambda w: changed(w, "1.mlp.experts.down_proj", lambda x: x.roll(1, 0)),
    "gate and up of experts swapped": lambda w: changed(w, "0.mlp.experts.gate_up_proj", lambda x: x.roll(32, 1)),
    "one number of an expert off": lambda w: changed(w, "1.mlp.experts.gate_up_proj", last_number_off),
    "router lost": lambda w: changed(w, "0.mlp.gate.weight", lambda x: x * 0),
}

def restore(model, kept, ends):
    """Put old numbers back into weights of vLLM: a publish that did not reach all that it computes with."""
    import torch
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(ends) and weight.numel():
                weight.copy_(kept[name])

if os.environ.get("FAULT"):
    from flowrl.backends.vllm import on_cpu, on_cuda
    from flowrl.backends.vllm import v0_32 as it
    here = on_cuda if os.environ["CUDA_VISIBLE_DEVICES"] else on_cpu
    from flowrl.backends.vllm import weight_memory
    #: The table of the weights, and what some were at the publish before.
    BASE = {}
    TOLD, LAST, OLD = {}, {}, "model.layers.1.mlp.experts.routed_experts.w13_weight"
    read = weight_memory.open_weights

    def open_weights(told):
        TOLD.update(told)
        return read(told)

    weight_memory.open_weights = open_weights

    def named(parameters):
        return {box.name: box.tensor for box in weight_memory.boxes_of(parameters, TOLD)}

    pack, load, forget, add, inside = on_cpu._pack_heads, it.load_weights, it.forget_prefixes, it.add_row, here.load
    on_cpu._pack_heads = lambda model: None if fault() == "stale head" else pack(model)

    def pack_experts_or_not(layer, pack_experts=on_cpu._pack_experts):
        if fault() == "experts as they are given":
            return layer.quant_method.process_weights_after_loading(layer)  # what vLLM does by itself
        pack_experts(layer)

    on_cpu._pack_experts = pack_experts_or_not

    def load_some(engine, parameters):
        weights = named(parameters)
        if fault() == "nothing loaded":
            return set()
        if fault() == "half written":
            for w in weights.values():
                w.copy_(half(w))
        if fault() == "one written":
            weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
        given = {n: w.clone() if fault() else w for n, w in parameters.items()}
        if fault() == "adapter not delivered":
            for name, weight in named(given).items():
                if name in BASE:
                    weight.copy_(BASE[name])
        else:  # what adapters are trained on, as it came before
            BASE.update({n: w.clone() for n, w in weights.items() if n.endswith(("q_proj.weight", "v_proj.weight"))})
        if fault() == "down not given":
            del given["model.layers.0.mlp.down_proj.weight"]
        if fault() in GIVEN:
            GIVEN[fault()](named(given))
        k = "0.self_attn.k_proj.weight"
        LAST[k] = weights["model.layers." + k].clone()
        return load(engine, given)

    def load_inside(worker, parameters, packed):
        model = worker.model_runner.get_model()
        kept = {n: w.clone() for n, w in model.named_parameters()}
        turns = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
        kept_turns = model.kept_turns = getattr(model, "kept_turns", turns.clone())
        for layer in model.model.layers:
            layer.self_attn.qkv_proj.was = getattr(layer.self_attn.qkv_proj, "cpu_linear", None)
        lacking = inside(worker, parameters, packed)
        if fault() == "old norm":
            restore(model, kept, "1.input_layernorm.weight")
        if fault() == "old expert":
            weight = model.get_parameter(OLD)
            weight.data[-1].copy_(kept[OLD][-1])
        if fault() == "old half of q, k and v":
            # As where one of two ranks of a tensor-parallel engine has kept its part.
            for layer in model.model.layers:
                linear = layer.self_attn.qkv_proj
                now, was = linear.cpu_linear, linear.was
                rows = linear.output_partition_sizes[0] // 2
                def part(x, weight, bias, now=now, was=was, rows=rows):
                    out = now(x, weight, bias)
                    out[..., :rows] = was(x, weight, bias)[..., :rows]
                    return out
                linear.cpu_linear = part
        if fault() == "old embedding":
            restore(model, kept, "embed_tokens.weight")
        turns = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
        turns.copy_(kept_turns.flip(0) if fault() == "other positions" else kept_turns)
        return lacking

    from flowrl.workers.tokens import row_support

    class CallSupport(row_support.CallSupport):
        def count(self, tokens, ids):
            row_support.MOST_IDS = 500 if fault() == "little room" else 1 << 28
            super().count(tokens, ids)

    row_support.CallSupport = CallSupport

    KEPT = []  # rows that were to be taken out and were not

    def keeping(engine):
        take_out = engine.abort_request
        def abort(names, *more):
            KEPT.extend(names if fault() == "rows kept" else ())
            return None if fault() == "rows kept" else take_out(names, *more)
        engine.abort_request, engine.take_out = abort, take_out

    def add_if_it_can(engine, name, *more):
        if KEPT:  # the publish is over
            engine.take_out(list(KEPT))
            KEPT.clear()
        if fault() == "a row fails" and name.endswith(".2"):
            raise ValueError("no room")
        add(engine, name, *more)

    def forget_or_not(engine):
        return fault() == "cache said to be empty" if fault().startswith("cache") else forget(engine)

    def drawn(self, logits, places, sampling, draw_rows=None):
        said, _, token = fault().partition(" ")
        if said == "spoiled":
            for place in places:
                if int(token) in self.rows[place].prompt:
                    logits[place] = float("nan")
        draw_rows(self, logits, places, sampling)

    def open_spoiled(*args, open_engine=it.open_engine, **options):
        engine = open_engine(*args, **options)
        keeping(engine)
        from functools import partialmethod

        from flowrl.backends.vllm.draw import Draw
        Draw._draw = partialmethod(drawn, draw_rows=Draw._draw)
        return engine

    it.open_engine = open_spoiled
    it.load_weights, it.add_row, here.load, it.forget_prefixes = load_some, add_if_it_can, load_inside, forget_or_not
'''


def train(engine, seed):
    """Other weights, of which distributions are not flat."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in engine.net.model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * 0.25 if weight.dim() > 1 else 1 + 0.1 * noise)


def published(opened, kind, seed=1, dtype="fp32", **options):
    """Both engines of a kind of model, with the same other weights."""
    ours, theirs = opened(kind, dtype, **options)
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
