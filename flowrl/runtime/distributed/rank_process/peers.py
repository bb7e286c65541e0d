"""Workers that are on other ranks, as those of a rank meet them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ....batch import Column
from ....column import concat
from ....errors import WrongAnswer
from ....workers.base import Worker
from ....workers.model_options import Build, Sampled, Sampling
from ....workers.tokens.check_sampled import check_sampled
from ....workers.tokens.sampling import SamplingArguments
from ..balance_rows import by_prefix
from ..protocol import Named, Offers, Serving
from .remote_stream import RemoteStream

if TYPE_CHECKING:
    from torch import Tensor

    from .rank import Rank


class Begun(Protocol):
    """A call of another rank that was begun: what it returns is waited for."""

    def __call__(self) -> Any: ...


class Peers(Protocol):
    """Other ranks, as this one calls them. ``ready``: the places of calls that are over, or end in so many seconds."""

    def call(self, rank: int, method: str, *args: Any) -> Begun: ...
    def ready(self, begun: Sequence[Begun], seconds: float) -> list[int]: ...


class Elsewhere:
    """A worker that is not on this rank: what it was declared to be is known, its weights are not here."""

    def __init__(self, worker: Worker, tokenizer: Callable[[], Any]) -> None:
        self._worker, self._tokenizer = worker, tokenizer

    def build(self) -> Build:
        """The engine that it asks for where it is."""
        return self._worker.build()  # type: ignore[attr-defined]

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer()


class Policy:
    """A policy on other ranks, as an environment calls it: row by row, or in whole calls where these are all it has.

    They are the processes that there were when it was made: one that is started again may not have its weights yet. The
    rows of one prompt begin on one rank, and a row that goes on is asked for where its tokens so far are known; in
    whole calls as long as no rank has much more to do than others.
    """

    def __init__(self, rank: Rank, at: Serving) -> None:
        self._rank, self._at, self._peers = rank, at, rank.peers
        self._homes: dict[int, int] = {}  # which of the ranks has had a row, by its seed
        self._how: dict[str, Sampling] = {}  # how it samples, by what was said

    @property
    def tokenizer(self) -> Any:
        return self._rank.tokenizer(Named(self._at.name))

    def identity(self) -> str:
        """See :meth:`flowrl.workers.base.Worker.identity`."""
        return self._at.name

    @property
    def positions(self) -> int | None:
        return self._offers.positions

    @cached_property
    def _offers(self) -> Offers:
        return self._ask("offers")

    @cached_property
    def stream(self) -> RemoteStream | None:
        """The stream of its engines, where rows leave one by one; None for one that answers in whole calls."""
        return RemoteStream(self._at, self._peers, self._offers) if self._offers.streams else None

    def how(self, said: SamplingArguments) -> Sampling:
        """See :meth:`flowrl.workers.actor.Actor.how`."""
        if (known := repr(said)) not in self._how:
            self._how[known] = self._ask("how", said)
        return self._how[known]

    def _ask(self, method: str, *args: Any) -> Any:
        return self._rank.ask_all([(self._at.ranks[0], method, self._at.name, *args)], self._peers)[0]

    def read_version(self) -> int:
        return self._at.version

    def respond(self, prompts: Column, seeds: Tensor, starts: Tensor, said: SamplingArguments) -> Sampled:
        """See :meth:`flowrl.workers.actor.Actor.respond`."""
        import torch

        shares = self._shares(prompts, seeds.tolist(), starts.tolist())
        asked = [(r, rows) for r, rows in zip(self._at.ranks, shares, strict=True) if rows]
        calls = [(r, "respond", self._at, prompts.take(rows), seeds[rows], starts[rows], said) for r, rows in asked]
        answers = self._rank.ask_all(calls, self._peers)
        for (rank, rows), answer in zip(asked, answers, strict=True):
            try:
                check_sampled(answer, [(row,) for row in rows], self._at.version)
            except WrongAnswer as error:
                error.what = f"{self._at.name} on rank {rank}, asked for {len(rows)} rows: {error.what}"
                raise
        order = torch.tensor([i for _, rows in asked for i in rows]).argsort().tolist()
        columns: list[Column] = []
        for name in ("ids", "rollout_logprobs", "sampling_logprobs"):
            parts = [getattr(a, name) for a in answers]
            columns.append(concat(name, parts, {}))
        finished = torch.cat([a.finished for a in answers])[order]
        ids, rollout, sampling = (column.take(order) for column in columns)
        recorded = [answer.support for answer in answers if answer.support is not None]
        support = None
        if len(recorded) == len(answers):
            of_ids = concat("support_ids", [ids for ids, _ in recorded], {})
            of_sizes = concat("support_sizes", [sizes for _, sizes in recorded], {})
            support = of_ids.take(order), of_sizes.take(order)
        return Sampled(ids, rollout, sampling, finished, answers[0].temperature, support)

    def _shares(self, prompts: Column, seeds: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
        """Return the rows of each rank, and remember where they went."""
        homes = [self._homes.get(seed) for seed in seeds]
        begun = [None if start else prompt.numpy().tobytes() for prompt, start in zip(prompts, starts, strict=True)]
        shares = by_prefix([int(n) + 1 for n in prompts.lengths], len(self._at.ranks), homes, begun)
        self._homes |= {seeds[row]: part for part, rows in enumerate(shares) for row in rows}
        return shares
