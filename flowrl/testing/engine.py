"""An engine without a model: the next token depends on the last one alone, by a table that a test can compute with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backends.continuous import ContinuousBatch, Draw, RunningRow
from ..backends.draw import draw_from
from ..backends.stream import Stream, generate_streamed, stream_of
from ..errors import DataError, FlowError, ModelError, NotFinite
from ..workers.model_options import Sampled, Sampling
from ..workers.streaming import Reason, SampleRequest
from ..workers.weights.offloaded import Offloaded
from .clock import Clock, VirtualClock

if TYPE_CHECKING:
    from ..batch import Column


class FakeEngine(ContinuousBatch):
    """Samples as an engine does, from a table: token ``u`` comes after ``v`` with ``softmax(table[v])[u]``.

    It keeps the whole contract of an engine that generates (docs/engines.md): a seed for each row, all settings of
    sampling, rows one by one, several calls in one batch, abort, publishes while rows run, and versions. A test
    computes each log-probability from the table. Nothing is loaded, and time passes on a clock of its own.

    Args:
        vocab: how many tokens there are.
        table: logits [vocab, vocab]; None is ``2 sin(1 + 3 v + 5 u)``.
        stop: ids that end a row.
        positions: tokens that a row may have, its prompt included; None is any number.
        tokenizer: what ``tokenizer`` is, for workers that ask for one.
        rows: rows that get tokens at a time, at most; others wait for their turn. None is any number.
        token_seconds: what a step takes, however many rows it has.
        prompt_seconds: what each token takes that a row brings with it: of its prompt, and of all that it has when its
            keys and values are computed again.
        clock: where this time passes; None is a :class:`VirtualClock`.
        prefix_cache: whether what a row brings takes no time as far as another row has had it under the same weights.
        lengths: from a row's seed how many tokens it has; then no token ends it. None: as tokens are drawn.

    ``table`` is a tensor, which a test may write between :meth:`pause` and :meth:`resume`. ``steps`` counts steps, and
    ``brought`` the tokens that rows have brought with them.

    >>> import torch
    >>> engine = fl.testing.FakeEngine(vocab=8, token_seconds=0.02)
    >>> prompts = fl.Column.of([[3], [5, 1]], dim="prompt", dtype="i32")
    >>> made = engine.generate(prompts, 2, torch.arange(4), fl.testing.Sampling(max_tokens=6))
    >>> made.ids.lengths, engine.steps, round(engine.clock.now(), 3)
    (tensor([3, 6, 6, 6]), 6, 0.12)
    >>> first, after = made.ids.to_list()[1][:2]
    >>> expected = engine.table[first].log_softmax(-1)[after]
    >>> abs(float(made.rollout_logprobs.to_list()[1][1] - expected)) < 1e-6
    True
    """

    def __init__(
        self,
        vocab: int = 16,
        *,
        table: Tensor | Sequence[Sequence[float]] | None = None,
        stop: Sequence[int] = (0,),
        positions: int | None = None,
        tokenizer: Any = None,
        rows: int | None = None,
        token_seconds: float = 0.0,
        prompt_seconds: float = 0.0,
        clock: Clock | None = None,
        prefix_cache: bool = False,
        lengths: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(positions, () if lengths else stop)
        at = torch.arange(vocab, dtype=torch.float64)
        made = 2 * torch.sin(1 + 3 * at[:, None] + 5 * at) if table is None else torch.as_tensor(table)
        self.table = made.to(torch.float64).clone()
        if self.table.dim() != 2 or self.table.shape[0] != self.table.shape[1]:
            raise ModelError(f"The table has the shape {tuple(self.table.shape)}.", fix="Give it a row for each token.")
        self.clock: Clock = clock or VirtualClock()
        self.steps = self.brought = 0
        self._tokenizer, self._most, self._lengths = tokenizer, rows, lengths
        self._token_seconds, self._prompt_seconds = token_seconds, prompt_seconds
        self._inside: dict[RunningRow, None] = {}  # rows whose tokens so far are computed
        self._known: dict[int, Any] | None = {} if prefix_cache else None  # what rows have had, token by token
        self.offloaded: Offloaded | None = None  # what is out of memory while it sleeps

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that it was given. ModelError where there is none."""
        if self._tokenizer is None:
            raise ModelError("This fake engine has no tokenizer.", fix="Give it one: FakeEngine(tokenizer=...).")
        return self._tokenizer

    @property
    def stream(self) -> Stream:
        """Its calls as iterators of rows, for threads and for asyncio."""
        return stream_of(self)

    def generate(
        self, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None = None
    ) -> Sampled:
        """``n`` responses to each prompt, when all of them are there."""
        return generate_streamed(self, prompts, n, seeds, sampling, starts)

    def submit(self, request: SampleRequest) -> int:
        """Begin a call; return its number."""
        vocab = self.vocab()
        for row, prompt in enumerate(request.prompts):
            wrong = [token for token in prompt.tolist() if not 0 <= token < vocab]
            if wrong:
                what = f"The prompt of row {row} has the token {wrong[0]}; the table has {vocab}."
                raise DataError(what, fix=f"Give FakeEngine vocab={max(wrong) + 1} or more.")
        call = super().submit(request)
        for (whose, _), row in self._rows.items():
            if whose == call and self._lengths is not None:
                row.limit = min(row.limit, max(1, self._lengths(row.seed)))
        return call

    # -- what the batch asks ------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """The time on its clock."""
        return self.clock.now()

    def vocab(self) -> int:
        """How many tokens there are."""
        return len(self.table)

    def next_tokens(self, rows: list[RunningRow]) -> tuple[list[RunningRow], Draw]:
        """The rows that have a place, and their logits from the table."""
        waiting = [row for row in rows if row not in self._inside]
        room = len(rows) if self._most is None else self._most - len(self._inside)
        brought = 0
        for row in waiting[: max(0, room)]:
            self._inside[row] = None
            asked, found = len(row.tokens), self._find(row.tokens)
            self.note_prefix(asked, found)
            brought += asked - found
        self.steps += 1
        self.brought += brought
        self.clock.sleep(self._token_seconds + brought * self._prompt_seconds)
        going = list(self._inside)
        logits = self.table[[row.tokens[-1] for row in going]]
        return going, lambda places, *how: draw_from(logits[places], *how)

    def let_go(self, rows: list[RunningRow]) -> None:
        """Give their places to others."""
        for row in rows:
            if row in self._inside:
                del self._inside[row]
                self._find(row.tokens[:-1])  # the last one was drawn and not computed

    def forget_cache(self) -> None:
        """Have rows bring all their tokens again."""
        self._inside.clear()

    def resume(self, version: int | None = None, *, keep_cache: bool = False) -> None:
        """Go on; with a version what was kept of rows before is forgotten."""
        if version is not None and self._known:
            self._known = {}
        super().resume(version, keep_cache=keep_cache)

    def _find(self, tokens: tuple[int, ...]) -> int:
        """Keep tokens as those of a row; how many of them, not counting the last one, were there."""
        if self._known is None:
            return 0
        found, at = 0, self._known
        for token in tokens:
            found += token in at
            at = at.setdefault(token, {})
        return min(found, len(tokens) - 1)

    # -- memory -------------------------------------------------------------------------------------------------------

    def sleep(self) -> int:
        """Empty the table; see :class:`flowrl.workers.engine.Sleeps`. Returns its bytes."""
        if self.offloaded is not None:
            return 0
        self.offloaded = Offloaded()
        self.fall_asleep()
        return self.offloaded.take([self.table])

    def wake(self) -> int:
        """Fill the table again. Returns its bytes."""
        if self.offloaded is None:
            return 0
        size = self.offloaded.bring_back()
        self.offloaded = None
        self.awake()
        return size

    def end_of(self, row: RunningRow) -> Reason | None:
        """Whether a row ends here; one whose length is given is finished then."""
        found = super().end_of(row)
        whole = self._lengths is not None and len(row.ids) >= max(1, self._lengths(row.seed))
        return "stop" if found and whole else found

    def not_finite(self, what: str) -> FlowError:
        """The error of a table with numbers that are not finite."""
        return NotFinite(f"{what}.", names=["table"], fix="Look at what was written into the table.")
