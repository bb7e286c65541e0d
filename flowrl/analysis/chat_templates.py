"""Chat templates that break the prefix, found without a run where the policy's tokenizer is at hand: the program has a
function that builds it, or it lies in a folder here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import At, FlowError, ModelError
from ..graph.stand_ins.values import is_handle
from ..graph.tracing.trace_records import HandleLike, Lint, Traced
from ..workers.model_options import Model
from ..workers.tokens.tokenizer import find_tokenizer

if TYPE_CHECKING:
    from ..workers.player import Player


def template_findings(traced: Traced, handles: Sequence[HandleLike]) -> tuple[list[FlowError], list[Lint]]:
    """Return errors of templates by which no turn can go on from another, and remarks on those that show earlier
    answers in another way, each with the line of the environment, as a run has them.

    Those of tokenizers that are not at hand are looked at when the flow opens.
    """
    named = {handle.name: handle for handle in handles}
    errors: list[FlowError] = []
    lints: list[Lint] = []
    known: dict[str, Any] = {}  # tokenizers, by the policy
    for name, policy, at in _rollouts(traced, named):
        if policy not in known:
            known[policy] = _tokenizer_at_hand(named[policy], named)
        if known[policy] is None:
            continue
        told: list[str] = []
        try:
            _environment(named[name]).check_template(known[policy], told.append)
        except ModelError as error:
            error.at = error.at or at
            errors.append(error)
        lints += [Lint("template", text, at) for text in told]
    return errors, lints


def _rollouts(traced: Traced, named: Mapping[str, HandleLike]) -> Iterator[tuple[str, str, At]]:
    """Yield each environment that a program plays with a policy, as their names, and its line."""
    told: set[tuple[str, str]] = set()
    for call in (call for trail in traced.trails for call in trail.calls):
        worker = named.get(call.worker or "")
        if worker is None or not (call.op.joins and _is_looked_at(worker.cls)):
            continue
        for policy in call.serves:
            if policy in named and (worker.name, policy) not in told:
                told.add((worker.name, policy))
                yield worker.name, policy, worker.at or call.at


def _is_looked_at(cls: type[Any]) -> bool:
    """Whether it is known what a worker asks of a chat template."""
    from ..workers.player import Player

    return issubclass(cls, Player) and cls.asks_of_template()


def _environment(handle: HandleLike) -> Player:
    made = handle.cls(*handle.args, **handle.kwargs)
    made.name = handle.name
    return made


def _tokenizer_at_hand(handle: HandleLike, named: Mapping[str, HandleLike]) -> Any:
    """Return the tokenizer of a policy; None where it would have to be fetched, or cannot be made."""
    model = handle.arguments.get("model")
    of: Any = handle.arguments.get("of")
    if model is None and is_handle(of) and of.name in named:
        return _tokenizer_at_hand(named[of.name], named)
    trusted = isinstance(model, Model) and model.trust_remote_code
    said: Any = (model.tokenizer or model.name) if isinstance(model, Model) else model
    is_folder = isinstance(said, (str, Path)) and Path(said).expanduser().is_dir()
    if trusted or not (is_folder or callable(said)):
        return None
    try:
        return find_tokenizer(said)
    except Exception:  # of user code, or of transformers: the run says what is wrong with it
        return None
