"""Chat templates that break the prefix, or never read an argument that they are given, found without a run where the
tokenizer is at hand: the program has a function that builds it, or it lies in a folder here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.mix import Mixture
from ..data.source import Source
from ..data.template_arguments import check_read, template_arguments
from ..errors import At, DataError, FlowError, ModelError, WorkerError
from ..graph.stand_ins.values import is_handle
from ..graph.tracing.trace_records import HandleLike, Lint, Traced
from ..workers.model_options import Model
from ..workers.tokens.tokenizer import actor_of, find_tokenizer

if TYPE_CHECKING:
    from ..workers.player import Player

AtHand = Callable[[str], Any]  # a worker's tokenizer by the worker's name; None where it is not at hand
Given = tuple[Mapping[str, Any], type[FlowError], Any, At | None]  # what a template gets, and how a wrong one is told


def template_findings(traced: Traced, handles: Sequence[HandleLike]) -> tuple[list[FlowError], list[Lint]]:
    """Return errors of templates by which no turn can go on from another, and remarks on those that show earlier
    answers in another way, each with the line of the environment, as a run has them. Errors also of arguments that a
    template never reads, with the line of the environment, of the source, or of the call that gives them.

    Those of tokenizers that are not at hand are looked at when the flow opens.
    """
    named = {handle.name: handle for handle in handles}
    errors: list[FlowError] = []
    lints: list[Lint] = []
    at_hand = cache(lambda name: _tokenizer_at_hand(named[name], named))
    for name, policy, at in _rollouts(traced, named):
        if at_hand(policy) is None:
            continue
        told: list[str] = []
        try:
            _environment(named[name]).check_template(at_hand(policy), told.append)
        except (ModelError, WorkerError) as error:
            error.at = error.at or at
            errors.append(error)
        lints += [Lint("template", text, at) for text in told]
    for more, kind, tokenizer, at in (*_of_sources(traced, named, at_hand), *_of_calls(traced, named, at_hand)):
        try:
            check_read(more, tokenizer, kind)
        except FlowError as error:
            error.at = at
            if error.what not in [other.what for other in errors]:  # an environment and its source have the same
                errors.append(error)
    return errors, lints


def _of_sources(traced: Traced, named: Mapping[str, HandleLike], at_hand: AtHand) -> Iterator[Given]:
    """Yield what the chat templates of sources are given."""
    for source in (s for trail in traced.trails for d in trail.draws.values() for s in _parts(d.source)):
        if source.reading.chat_template_kwargs and (tokenizer := _of_source(source, named, at_hand)) is not None:
            more = template_arguments(source.reading.tools, source.reading.chat_template_kwargs)
            yield more, DataError, tokenizer, source.made_at


def _of_source(source: Source, named: Mapping[str, HandleLike], at_hand: AtHand) -> Any:
    """Return the tokenizer of a source; None where it is not at hand."""
    said = source.tokenizer
    if said is None:
        try:
            return at_hand(actor_of({name: (handle.cls, handle.arguments) for name, handle in named.items()}))
        except ModelError:  # the run says that no worker has one
            return None
    if is_handle(said):
        return at_hand(said.name)
    return _read_at_hand(said) if isinstance(said, (str, Path)) or callable(said) else said


def _parts(source: Any) -> Iterator[Source]:
    """Yield the sources of a source: itself, or those that a mixture draws from."""
    if isinstance(source, Mixture):
        for part in source.parts.values():
            yield from _parts(part)
    elif isinstance(source, Source):
        yield source


def _of_calls(traced: Traced, named: Mapping[str, HandleLike], at_hand: AtHand) -> Iterator[Given]:
    """Yield what the chat templates of workers are given by calls, as ``ask`` does."""
    for call in (call for trail in traced.trails for call in trail.calls):
        more = call.arguments.get("chat_template_kwargs")
        if isinstance(more, Mapping) and call.worker in named and at_hand(call.worker) is not None:
            yield more, ModelError, at_hand(call.worker), call.at


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
    if isinstance(model, Model) and model.trust_remote_code:
        return None
    return _read_at_hand((model.tokenizer or model.name) if isinstance(model, Model) else model)


def _read_at_hand(said: Any) -> Any:
    """Return the tokenizer of a folder or a function; None where it would have to be fetched, or cannot be made."""
    is_folder = isinstance(said, (str, Path)) and Path(said).expanduser().is_dir()
    if not (is_folder or callable(said)):
        return None
    try:
        return find_tokenizer(said)
    except Exception:  # of user code, or of transformers: the run says what is wrong with it
        return None
