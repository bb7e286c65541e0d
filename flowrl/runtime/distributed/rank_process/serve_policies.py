"""What a rank answers the environments of other ranks, and its own among several, that ask a policy which is here."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....batch import Column
from ....errors import WrongAnswer
from ....lowering.deployment import WorkerSpec
from ....workers.base import Worker
from ....workers.decode_slots import counts_slots
from ....workers.model_options import Sampled, Sampling
from ....workers.streaming import SampledRow
from ....workers.tokens.sampling import SamplingArguments
from ..protocol import Asked, Failed, Offers, Polled, Serving
from .mirrored_engine import MirroredEngine, TeamCalls, do_as_first, sampled_sum
from .policy_rows import PATIENCE, PolicyRows
from .rank_streams import RankStreams
from .rank_weights import Key

if TYPE_CHECKING:
    from torch import Tensor

    from .peers import Peers


class Policies:
    """Base of a rank. Every thread of it may call this."""

    number: int
    peers: Peers
    workers: dict[Key, Worker]
    specs: dict[Key, WorkerSpec]
    streams: RankStreams

    def __init__(self) -> None:
        self._serves = threading.Lock()  # one whole call at a time is in the engine of a policy
        self._policy_rows: dict[Key, PolicyRows] = {}
        self._teams: dict[Key, TeamCalls] = {}  # of policies whose engine this rank splits with others, as their first
        self._opening = threading.RLock()
        self._team_turn = threading.Lock()

    def offers(self, name: str) -> Offers:
        """Return what the engine of a policy offers."""
        policy: Any = self.serving(name)
        stream = getattr(policy, "stream", None)
        engine = None if stream is None else stream.engine
        if not counts_slots(engine):
            return Offers(policy.positions, stream is not None)
        return Offers(policy.positions, True, True, engine.most_rows)

    def how(self, name: str, said: SamplingArguments) -> Sampling:
        """How a policy samples where a call says this."""
        return self.serving(name).how(said)  # type: ignore[attr-defined]

    def respond(
        self, at: Serving, prompts: Column, seeds: Tensor, starts: Tensor, said: SamplingArguments
    ) -> Sampled | Failed:
        """One response per prompt, when all are there."""
        asked = prompts, seeds, starts, said
        try:
            policy: Any = self.serving(at.name)
            with self._serves:
                team = self._team_of(at)
                if team is None:
                    return policy.respond(*asked)
                found, sums = team.make("respond", lambda: policy.respond(*asked), [asked] * len(team.others))
                team.compare(sampled_sum(found), sums)
                return found
        except Exception as error:
            return Failed.of(error)

    def mirror(self, key: Key, what: str, *asked: Any) -> int | Failed:
        """Make a call of a policy as the first rank does that splits its engine; see :func:`do_as_first`."""
        try:
            return do_as_first(self.workers[key], what, asked)
        except Exception as error:
            return Failed.of(error)

    def poll(
        self,
        at: Serving,
        caller: str,
        asked: Sequence[Asked],
        seconds: float = PATIENCE,
        heard: Mapping[int, Mapping[int, int]] | None = None,
    ) -> Polled | Failed:
        """Have calls join the batch of a policy; see :meth:`PolicyRows.poll`."""
        try:
            policy: Any = self.follow(at.name) if at.follows else self.serving(at.name)
            here = policy.version
            is_other = here < at.version if at.follows else here != at.version
            if self.specs[self._serving_key(at.name)].serving and is_other:
                raise WrongAnswer(f"the weights here are version {here}, and the call is for version {at.version}.")
            polled = self._rows_of(at).poll(caller, asked, seconds, heard)
            return (
                replace(polled, version=policy.version, kept_cache=policy.stream.kept_cache) if at.follows else polled
            )
        except Exception as error:
            return Failed.of(error)

    def follow(self, name: str) -> Worker:
        """Return a policy whose engine counts versions: publishes come while others ask it row by row."""
        policy, stream = self.serving(name), self.stream_of(self._serving_key(name))
        assert stream is not None, "rows leave its engine one by one"
        if not stream.follows:
            with stream.held():
                self.streams.share(self._serving_key(name), policy)
                stream.follows = True
        return policy

    def stream_of(self, key: Key) -> Any:
        """Return by what others ask a worker here row by row; None where nobody does."""
        return getattr(self.workers.get(key), "stream", None)

    def abort_rows(self, at: Serving, caller: str, rows: Mapping[int, Iterable[int]], latest: int) -> list[SampledRow]:
        """End rows in the batch of a policy."""
        return self._rows_of(at).abort(caller, rows, latest)

    def leave_policy(self, at: Serving, caller: str, latest: int) -> list[SampledRow]:
        """End all rows of somebody in the batch of a policy."""
        return self._rows_of(at).leave(caller, latest)

    def end_rows(self, key: Key | None) -> None:
        """End what is left in the batch of a worker that has its turn again, or of all for None.

        Calls that ask a policy are over by then: these rows were asked for by a process that died. Of ranks that split
        an engine the first one has them end on all; the others do nothing by themselves.
        """
        for each in [rows for of, rows in list(self._policy_rows.items()) if key in (of, None)]:
            each.end()

    def serving(self, name: str) -> Worker:
        """Return the copy of a worker that serves."""
        return self.workers[self._serving_key(name)]

    def _serving_key(self, name: str) -> Key:
        return (name, (name, True) in self.workers)

    def forget_policies(self) -> None:
        """Forget who asks policies: these are closed."""
        self._policy_rows.clear()
        self._teams.clear()

    def _rows_of(self, at: Serving) -> PolicyRows:
        key = self._serving_key(at.name)
        with self._opening:
            if key not in self._policy_rows:
                policy: Any = self.workers[key]
                stream, team = policy.stream, self._team_of(at)
                if team is not None:
                    stream = stream.beside(MirroredEngine(policy.engine, team))
                self._policy_rows[key] = PolicyRows(stream)
            return self._policy_rows[key]

    def _team_of(self, at: Serving) -> TeamCalls | None:
        """Return what has calls of a policy made on all ranks that split its engine; None for one that is whole."""
        if not at.beside:
            return None
        key = self._serving_key(at.name)
        with self._opening:
            if key not in self._teams:
                others = at.beside[self.number]
                self._teams[key] = TeamCalls(at.name, key, others, self.peers, self._team_turn)
            return self._teams[key]
