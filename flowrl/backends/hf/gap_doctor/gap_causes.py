"""What an engine may do otherwise than the trainer, one thing at a time: the changes that the gap doctor tries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....data.template_arguments import own_arguments, template_variables
from ....workers.model_options import Sampling
from ...draw import penalised, truncated
from ...frozen_rows import Change, FrozenRows, OldWeights
from ..engine import HFEngine
from ..net import Net
from .gap_scores import Scores, plain
from .switches import attributes, computing_in, rounded, weights_in_place

Switch = Callable[[], AbstractContextManager[None]]


def changes(engine: HFEngine, rows: FrozenRows, olds: Sequence[OldWeights]) -> Iterator[Change]:
    """Yield the changes to try on the rows, the wider before the narrower of one cause."""
    net, scores = engine.net, Scores(engine.net, rows)
    before = scores.hidden()
    yield from _weights(net, scores, before, olds, adapted=engine.build.lora is not None)
    yield from _adapters(net, scores)
    for old in olds:
        switch = partial(weights_in_place, net, old.weights)
        for whole, what in ((False, "keys and values of the prompts from"), (True, "the prompts computed with")):
            yield Change("cache", f"{what} {old.what}", partial(_prompt_of, scores, switch, whole=whole))
    yield from _kinds(net, scores, before, rows)
    yield from _temperatures(scores, before, rows)
    yield from _dtypes(net, scores, before)
    yield from _attention(net, scores)
    yield from _templates(engine, scores, rows)
    yield from _padding(engine, scores, rows)
    yield from _composition(net, scores, before, rows)


def decoding(engine: HFEngine, rows: FrozenRows) -> Tensor | None:
    """Log-probabilities by the engine's own way to generate; None where it has none."""
    return Scores(engine.net, rows).replayed() if engine.net.own_cache else None


def _prompt_of(scores: Scores, switch: Switch, *, whole: bool) -> Tensor:
    return scores.with_prompt_of(switch(), whole=whole)


def _within(scores: Scores, switch: Switch) -> Tensor:
    """All computed inside of a switch."""
    with switch():
        return scores.now()


# -- weights and adapters ---------------------------------------------------------------------------------------------


def _weights(
    net: Net, scores: Scores, before: Tensor, olds: Sequence[OldWeights], *, adapted: bool
) -> Iterator[Change]:
    output = next((n for n, p in net.model.named_parameters() if p is net.output.weight), "")
    for old in olds:
        for what, names in _parts(list(old.weights)):
            some = {name: old.weights[name] for name in names}
            cause = "adapter" if adapted else "weights"
            yield Change(cause, f"{what}{old.what}", partial(_within, scores, partial(weights_in_place, net, some)))
        if output in old.weights:
            head = replace(net.head, weight=old.weights[output].to(net.device))
            what = f"the output head alone from {old.what}"
            yield Change("weights", what, partial(scores.finished, before, head=head))
    for what, swapped in _exchanged(dict(net.model.named_parameters())):
        yield Change("weights", what, partial(_within, scores, partial(weights_in_place, net, swapped)))


def _parts(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """All weights, then groups of them by what they are, by layer, and by both; each with words for it."""
    yield "all of ", list(names)
    kinds = {name: _kind(name) for name in names}
    groups: dict[str, list[str]] = {}
    for name, (kind, layer) in kinds.items():
        groups.setdefault(f"{kind} alone from ", []).append(name)
        fused = next((f for f, parts in _FUSED.items() if kind in parts), "")
        if fused:
            groups.setdefault(f"{fused} alone from ", []).append(name)
        if layer:
            groups.setdefault(f"layer {layer} alone from ", []).append(name)
            groups.setdefault(f"{kind} of layer {layer} alone from ", []).append(name)
    yield from sorted(groups.items(), key=lambda item: -len(item[1]))


_FUSED = {
    "q, k and v": ("q_proj", "k_proj", "v_proj"),
    "k and v": ("k_proj", "v_proj"),
    "gate and up": ("gate_proj", "up_proj"),
}


def _kind(name: str) -> tuple[str, str]:
    """What a weight is, and the number of its layer: ``("q_proj", "3")``."""
    words = [w for w in name.split(".") if w not in ("weight", "bias", "default", "base_layer")]
    words = [w for w in words if not w.startswith("lora_")]
    return words[-1], next((w for w in words if w.isdigit()), "")


def _exchanged(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for a, b in (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("gate_proj", "up_proj")):
        swapped: dict[str, Tensor] = {}
        for name, weight in weights.items():
            other = name.replace(a, b) if a in name else name.replace(b, a) if b in name else name
            if other != name and other in weights and weights[other].shape == weight.shape:
                swapped[name] = weights[other].data
        if swapped:
            yield f"{a} and {b} exchanged", swapped


def _adapters(net: Net, scores: Scores) -> Iterator[Change]:
    layers = [m for m in net.model.modules() if isinstance(getattr(m, "scaling", None), dict)]
    if not layers:
        return
    usual = next(iter(layers[0].scaling.values()))
    for what, factor in (("left out", 0.0), ("added twice", 2.0), ("added without its scale", 1.0 / usual)):
        if factor != 1:
            said = [(m, "scaling", {k: v * factor for k, v in m.scaling.items()}) for m in layers]
            yield Change("adapter", what, partial(_within, scores, partial(attributes, said)))


# -- what is recorded -------------------------------------------------------------------------------------------------


def _kinds(net: Net, scores: Scores, before: Tensor, rows: FrozenRows) -> Iterator[Change]:
    for sampling in rows.samplings:
        if not sampling.is_policy and not sampling.greedy:
            finish = partial(_processed, sampling=sampling, seen=_seen(net, rows, sampling))
            what = f"of the distribution that was sampled from ({_cuts(sampling)})"
            yield Change("kind", what, partial(_processed_all, scores, before, finish))
    likeliest = partial(scores.finished, before, finish=_likeliest)
    yield Change("kind", "of the likeliest token in place of the sampled one", likeliest)
    for what, by in (("of the token before", 1), ("of the token after", -1)):
        yield Change("kind", what, partial(_shifted, scores, before, by))
    for what, base in (("to base 2", math.log(2)), ("to base 10", math.log(10))):
        yield Change("kind", what, lambda base=base: scores.finished(before) / base)
    yield Change("kind", "probabilities, not their logarithms", lambda: scores.finished(before).exp())
    head = net.head
    if head.scale != 1 or head.softcap is not None:
        bare = replace(head, scale=1.0, softcap=None)
        what = "of logits without their scale and cap"
        yield Change("kind", what, partial(scores.finished, before, head=bare))


def _cuts(sampling: Sampling) -> str:
    said = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return ", ".join(f"{n}={getattr(sampling, n)}" for n, off in said.items() if getattr(sampling, n) != off)


def _seen(net: Net, rows: FrozenRows, sampling: Sampling) -> list[list[int]] | None:
    """The tokens that a row has before each of its own, where a penalty asks for them."""
    if sampling.repetition_penalty == 1.0:
        return None
    pairs = zip(rows.prompts, rows.responses, strict=True)
    return [[*p, *r[:t]] for p, r in pairs for t in range(len(r))]


def _processed_all(scores: Scores, hidden: Tensor, finish: Callable[..., Tensor]) -> Tensor:
    """Log-probabilities after penalty and cuts, token by token as the penalty asks what was there before."""
    head, found = scores.net.head, []
    with torch.no_grad():
        for at in range(len(hidden)):
            part = slice(at, at + 1)
            found.append(finish(head.logits(hidden[part]), scores.targets[part], scores.temperature[part], at=at))
    return torch.cat(found).double().cpu()


def _processed(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    at: int,
    sampling: Sampling,
    seen: list[list[int]] | None,
) -> Tensor:
    if seen is not None:
        there = torch.zeros_like(logits, dtype=torch.bool)
        there[0, torch.tensor(seen[at], device=logits.device)] = True
        logits = penalised(logits, there, sampling.repetition_penalty)
    shaped = truncated(torch.log_softmax(logits / temperature[:, None], -1), sampling)
    return shaped.gather(-1, targets[:, None]).squeeze(-1)


def _likeliest(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    return torch.log_softmax(logits / temperature[:, None], -1).amax(-1)


def _shifted(scores: Scores, before: Tensor, by: int) -> Tensor:
    """Each token has the number of its neighbour in the row."""
    found = list(scores.finished(before).split([len(r) for r in scores.rows.responses]))
    return torch.cat([row.roll(by) for row in found])


def _temperatures(scores: Scores, before: Tensor, rows: FrozenRows) -> Iterator[Change]:
    def at(heat: Tensor) -> Tensor:
        return scores.finished(before, temperature=heat)

    usual = scores.temperature
    named = {"not applied": torch.ones_like(usual), "applied twice": usual * usual, "multiplied": 1 / usual}
    for what, heat in named.items():
        if not torch.equal(heat, usual):
            yield Change("temperature", what, partial(at, heat))
    found = _fitted(lambda factor: rows.gap(at(usual * factor)))
    if abs(found - 1) > 0.005:
        heat = float(usual[0])
        what = f"{heat * found:.3g} in place of {heat:.3g}" if bool((usual == heat).all()) else f"{found:.3g} times it"
        yield Change("temperature", what, partial(at, usual * found))


def _fitted(gap: Callable[[float], float]) -> float:
    """The factor of the temperature, from 0.1 to 10, with the smallest gap: by golden sections of its logarithm."""
    low, high, part = math.log(0.1), math.log(10), (math.sqrt(5) - 1) / 2
    a, b = high - part * (high - low), low + part * (high - low)
    at_a, at_b = gap(math.exp(a)), gap(math.exp(b))
    for _ in range(34):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - part * (high - low)
            at_a = gap(math.exp(a))
        else:
            low, a, at_a = a, b, at_b
            b = low + part * (high - low)
            at_b = gap(math.exp(b))
    return math.exp((low + high) / 2)


# -- how it computes --------------------------------------------------------------------------------------------------


def _dtypes(net: Net, scores: Scores, before: Tensor) -> Iterator[Change]:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8", torch.float32: "fp32"}
    narrow = [d for d in (torch.bfloat16, torch.float16, torch.float8_e4m3fn) if d != net.compute]
    for dtype in narrow:
        what = f"weights rounded to {names[dtype]}"
        yield Change("dtype", what, lambda dtype=dtype: _rounded(net, scores, dtype))
    for dtype in (d for d in (torch.bfloat16, torch.float32) if d != net.compute):
        switch = partial(computing_in, net, dtype)
        if net.own_cache:
            what = f"computed in {names[dtype]}"
            yield Change("dtype", what, lambda switch=switch: _replayed(scores, switch))
        yield Change("dtype", f"computed in {names[dtype]}, whole rows at once", partial(_within, scores, switch))

    def in_bf16(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        shaped = torch.log_softmax((logits / temperature[:, None]).bfloat16(), -1)
        return shaped.gather(-1, targets[:, None]).squeeze(-1)

    def of_bf16(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        return plain(logits.bfloat16().float(), targets, temperature)

    yield Change("dtype", "logits in bf16", partial(scores.finished, before, finish=of_bf16))
    yield Change("dtype", "the softmax of logits in bf16", partial(scores.finished, before, finish=in_bf16))


def _rounded(net: Net, scores: Scores, dtype: torch.dtype) -> Tensor:
    with weights_in_place(net, rounded(net, dtype)):
        return scores.now()


def _replayed(scores: Scores, switch: Switch) -> Tensor:
    with switch():
        return scores.replayed()


def _attention(net: Net, scores: Scores) -> Iterator[Change]:
    config, modules = net.config, list(net.model.modules())
    now = getattr(config, "_attn_implementation", None)
    for other in ("eager", "sdpa"):
        if now is not None and other != now:
            switch = partial(attributes, [(config, "_attn_implementation", other)])
            what = f"the kernel {other} in place of {now}"
            if net.own_cache:
                yield Change("attention", what, lambda switch=switch: _replayed(scores, switch))
            yield Change("attention", f"{what}, whole rows at once", partial(_within, scores, switch))
    windowed = [(m, "sliding_window", 1 << 30) for m in modules if isinstance(getattr(m, "sliding_window", None), int)]
    if isinstance(getattr(config, "sliding_window", None), int):
        switch = partial(attributes, [*windowed, (config, "sliding_window", 1 << 30)])
        yield Change("attention", "without its sliding window", partial(_within, scores, switch))
    scaled = [m for m in modules if isinstance(getattr(m, "scaling", None), float)]
    for what, power in (("without the scale of its scores", 0.0), ("with the scale of its scores squared", 2.0)):
        if scaled:
            switch = partial(attributes, [(m, "scaling", m.scaling**power) for m in scaled])
            yield Change("attention", what, partial(_within, scores, switch))
    yield from _rotations(scores, modules)


def _rotations(scores: Scores, modules: Sequence[Any]) -> Iterator[Change]:
    rotary = [m for m in modules if isinstance(getattr(m, "inv_freq", None), Tensor)]
    for base in (1e4, 5e5, 1e6) if rotary else ():
        said = []
        for module in rotary:
            size = 2 * len(module.inv_freq)
            steps = torch.arange(0, size, 2, dtype=torch.float, device=module.inv_freq.device) / size
            said.append((module, "inv_freq", 1.0 / base**steps))
        if not torch.allclose(said[0][2], rotary[0].inv_freq):
            what = f"rotary positions with the base {base:g}"
            yield Change("attention", what, partial(_within, scores, partial(attributes, said)))


# -- what it was given ------------------------------------------------------------------------------------------------


def _templates(engine: HFEngine, scores: Scores, rows: FrozenRows) -> Iterator[Change]:
    tokenizer = engine._tokenizer
    begin = getattr(tokenizer, "bos_token_id", None)
    begin = getattr(engine.net.config, "bos_token_id", None) if begin is None else begin
    given: list[tuple[str, list[list[int]]]] = []
    if isinstance(begin, int):
        given.append(("a token before the prompt: begin of sequence", [[begin, *p] for p in rows.prompts]))
    given.append(("the prompt without its first token", [list(p[1:]) for p in rows.prompts]))
    given.append(("the prompt without its last token", [list(p[:-1]) for p in rows.prompts]))
    for end in engine.eos_ids:
        given.append(("a token after the prompt: end of sequence", [[*p, end] for p in rows.prompts]))
    if tokenizer is not None and rows.texts and all(isinstance(t, str) for t in rows.texts):
        given += _rendered(tokenizer, [t for t in rows.texts if t is not None])
    own = [list(p) for p in rows.prompts]
    tried = [own]
    for what, prompts in given:
        if prompts not in tried and all(prompts):
            tried.append(prompts)
            yield Change("template", what, lambda prompts=prompts: scores.finished(scores.hidden(prompts)))


def _rendered(tokenizer: Any, texts: Sequence[str]) -> Iterator[tuple[str, list[list[int]]]]:
    yield "the text of the prompt as it is", [tokenizer.encode(t, add_special_tokens=False) for t in texts]
    for what, how in _ways(tokenizer).items() if getattr(tokenizer, "chat_template", None) else ():
        try:
            chats = [[{"role": "user", "content": t}] for t in texts]
            ids = [tokenizer.apply_chat_template(chat, **how, return_dict=False) for chat in chats]
        except Exception:  # of a template that needs another argument, or takes no such value
            continue
        yield f"the chat template {what}", ids


def _ways(tokenizer: Any) -> dict[str, dict[str, Any]]:
    """What a chat template may have been given: the beginning of an answer or none, each of its own arguments."""
    ways: dict[str, dict[str, Any]] = {
        f"{what} the beginning of an answer": {"add_generation_prompt": asks}
        for what, asks in (("with", True), ("without", False))
    }
    for name in own_arguments(template_variables(tokenizer) or ()):
        for value in ("low", "medium", "high") if name.endswith("effort") else (True, False):
            ways[f"with {name}={value!r}"] = {"add_generation_prompt": True, name: value}
    return ways


def _padding(engine: HFEngine, scores: Scores, rows: FrozenRows) -> Iterator[Change]:
    longest = max(len(p) for p in rows.prompts)
    if min(len(p) for p in rows.prompts) < longest:
        for pad in dict.fromkeys((engine.pad_id, *engine.eos_ids, 0)):
            prompts = [[*[pad] * (longest - len(p)), *p] for p in rows.prompts]
            what = f"padding before the prompt is attended to (token {pad})"
            yield Change("padding", what, lambda prompts=prompts: scores.finished(scores.hidden(prompts)))
    ways: dict[str, Callable[[int, int], list[int]]] = {
        "positions of the response one too high": lambda p, r: [*range(p), *range(p + 1, p + r + 1)],
        "positions of the response one too low": lambda p, r: [*range(p), *range(p - 1, p + r - 1)],
        "positions of the response from the longest prompt on": lambda p, r: [*range(p), *range(longest, longest + r)],
        "positions of the response from 0 on": lambda p, r: [*range(p), *range(r)],
        "all positions counted from the padding on": lambda p, r: [*range(longest - p, longest + r)],
        "all positions one too high": lambda p, r: [*range(1, p + r + 1)],
        "one position for all tokens": lambda p, r: [0] * (p + r),
    }
    most = engine.positions
    room = most is None or longest + max(len(r) for r in rows.responses) < most
    for what, positions in ways.items() if room else ():
        yield Change("padding", what, lambda positions=positions: scores.finished(scores.hidden(None, positions)))


def _composition(net: Net, scores: Scores, before: Tensor, rows: FrozenRows) -> Iterator[Change]:
    distinct = list(dict.fromkeys(tuple(p) for p in rows.prompts))
    for shift in range(1, min(len(distinct), 4)):
        others = [distinct[(distinct.index(tuple(p)) + shift) % len(distinct)] for p in rows.prompts]
        what = f"keys and values of another prompt of the batch ({shift} on)"
        yield Change("batch", what, lambda others=others: scores.finished(scores.hidden(others)))
    yield Change("batch", "numbers of another row of the batch", partial(_of_other_rows, scores, before, rows))
    if net.own_cache:
        yield Change("batch", "token by token, all rows together", scores.replayed)
        yield Change("batch", "token by token, each row by itself", partial(scores.replayed, alone=True))


def _of_other_rows(scores: Scores, before: Tensor, rows: FrozenRows) -> Tensor:
    """For each row the numbers of that other row of at least its length that are closest to the engine's."""
    lengths = [len(r) for r in rows.responses]
    own, said = scores.finished(before).split(lengths), rows.logprobs.split(lengths)
    found: list[Tensor] = []
    for i, length in enumerate(lengths):
        others = [own[j][:length] for j in range(len(own)) if lengths[j] >= length]
        found.append(min(others, key=lambda o: float((o - said[i]).abs().sum())))
    return torch.cat(found)
