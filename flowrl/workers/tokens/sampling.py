"""How responses are sampled: as the worker was declared, as a call says, and what is known of the rows for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ...batch import Column
from ...errors import ModelError, ProgramError
from ...graph.ops.signature import CallShape
from ...marks import Marks, marks, spelled
from ..model_options import Sampled, Sampling
from .check_sampled import check_sampled
from .packed_tokens import append, constant

if TYPE_CHECKING:
    from ...batch import Batch

GENERATED = (
    "response_ids: i32[*response], tokens: i32[*token], response_mask: bool[*response], "
    "rollout_logprobs: f32[*response], sampling_logprobs: f32[*response], versions: i32[*response], "
    "temperature: f32[], finished: bool[], finish_reason: any"
)
#: What a call that records its support adds, and what one reads that looks at no other tokens.
SUPPORT = "support_ids, support_sizes"

#: One or several tokens that end a response: ids, or texts that are one token each.
Stop = int | str | tuple[int | str, ...]

#: What leaves tokens out, or changes how likely they are beside the temperature, and its value that does not.
_CUTS: Mapping[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
#: Names of dtypes in the words of columns, by those of ``dtype=``; that of ``auto`` is known once a model is open.
DTYPES = {"fp32": "f32", "bf16": "bf16", "fp64": "f64"}


@dataclass(frozen=True)
class SamplingArguments:
    """What one call says of sampling: ``SamplingArguments(temperature=0.7)``. None is as the worker was declared.

    ``support``: record which tokens could be drawn.
    """

    greedy: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: Stop | None = None
    support: bool = False

    @staticmethod
    def of(call: Mapping[str, Any], **others: Any) -> SamplingArguments:
        """From the arguments of a call by name, ``of(locals())``, with ``others`` in the place of some."""
        said = {**call, **others}
        return SamplingArguments(**{f.name: said[f.name] for f in fields(SamplingArguments)})

    def over(self, declared: Sampling, stop: Stop, tokenizer: Any) -> Sampling:
        """How the call samples: what it says in the place of what the worker was declared with."""
        said = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(declared, **{**said, "stop": stop_ids(said.get("stop", stop), tokenizer)})


def stop_ids(stop: Stop, tokenizer: Any) -> tuple[int, ...]:
    """The ids of stop tokens. Raises ModelError for a text that is not one token of the tokenizer."""
    several = (stop,) if isinstance(stop, (int, str)) else stop  # a text would be a tuple of its letters
    return tuple(one if isinstance(one, int) else _id(one, tokenizer) for one in several)


def _id(text: str, tokenizer: Any) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ModelError(
            f"stop={text!r} is {len(ids)} tokens of this tokenizer, not one.",
            fix="Give a string that is one token, or its id.",
        )
    reads = tokenizer.decode(ids)
    if text.strip() not in reads:
        raise ModelError(
            f"stop={text!r} is no token of this tokenizer, which reads it as {reads!r}.",
            fix="Give a string that is one token, or its id.",
        )
    return int(ids[0])


def generated(shape: CallShape) -> str:
    """``adds=`` of an op that samples."""
    return f"{GENERATED}, {SUPPORT}" if shape.call.get("support") is True else GENERATED


def prompted(shape: CallShape) -> str:
    """``reads=`` of an op that samples. Raises ProgramError as :func:`check_penalty` does."""
    said = {**shape.init, **{n: v for n, v in shape.call.items() if v is not None}}
    if said.get("support") is True:
        check_penalty(said.get("repetition_penalty", 1.0))
    return "prompt_ids"


def check_penalty(penalty: Any) -> None:
    """Raise ProgramError where the support would not say what was sampled from."""
    if isinstance(penalty, (int, float)) and penalty != 1:
        raise ProgramError(
            f"support=True with repetition_penalty={penalty}: the penalty changes how likely tokens are, and the "
            "support says only which there are.",
            fix="Leave out one of the two.",
        )


def sampled_fields(children: Batch, sampled: Sampled, version: int) -> dict[str, Any]:
    """The fields that sampling adds to rows, one response each; ``version`` is that of the weights, unless each token
    has its own. Raises WrongAnswer for what cannot be right.
    """
    check_sampled(sampled, children.keys, version)
    support = sampled.support or ()
    versions = constant(sampled.ids, version, "i32") if sampled.versions is None else sampled.versions
    if sampled.kept_cache:
        versions = versions.marked(marks(cache="kept"))
    return {
        **dict(zip(SUPPORT.split(", "), support, strict=False)),
        "response_ids": sampled.ids,
        "tokens": append(children["prompt_ids"], sampled.ids, dim="token"),
        "response_mask": constant(sampled.ids, True, "bool"),
        "rollout_logprobs": sampled.rollout_logprobs,
        "sampling_logprobs": sampled.sampling_logprobs,
        "versions": versions,
        "temperature": Column.of([sampled.temperature] * len(children), dtype="f32"),
        "finished": Column(sampled.finished),
        "finish_reason": Column(["stop" if stopped else "length" for stopped in sampled.finished.tolist()]),
    }


def sampling_marks(shape: CallShape) -> Mapping[str, Marks]:
    """``marks=`` of an op that samples: what is known of the rows before there is one."""
    said = {**shape.init, **{n: v for n, v in shape.call.items() if v is not None}}
    greedy = shape.call.get("greedy")
    known = isinstance(greedy, bool)
    temperature = 1.0 if greedy is True else said.get("temperature")
    cut = cut_of(said)
    return sampled_marks(
        spelled(temperature) if known else "?",
        cut if known and "?" not in cut else "?",
        worker=shape.worker,
        tokenizer=shape.tokenizer,
        dtype=DTYPES.get(shape.init.get("dtype", ""), ""),
    )


def cut_of(said: Mapping[str, Any]) -> str:
    """What leaves tokens out or changes how likely they are, beside the temperature: ``top_p=0.9``; empty for nothing.

    ``said`` are settings of :class:`Sampling` by name.
    """
    if said.get("greedy") is True:
        return "greedy"
    given = {name: spelled(said[name]) for name in _CUTS if name in said}
    return ", ".join(f"{name}={value}" for name, value in given.items() if value != spelled(_CUTS[name]))


def sampled_marks(
    temperature: str | list[str], cut: str, *, worker: str, tokenizer: str, dtype: str = ""
) -> dict[str, Marks]:
    """The marks of the fields that sampling adds; ``dtype`` is that of the model's products."""
    rows = marks(tokenizer=tokenizer, sampler=worker, temperature=temperature)
    by = f"{worker}.generate" if worker else ""
    logprobs = marks(scale="row", temperature=temperature, by=by, dtype=dtype)
    return {
        "response_ids": rows,
        "tokens": rows,
        "temperature": marks(temperature=temperature),
        "rollout_logprobs": logprobs,
        "sampling_logprobs": logprobs | marks(cut=cut),
        "support_ids": marks(tokenizer=tokenizer, cut=cut),
    }
