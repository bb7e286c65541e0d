"""What a rank answers the environments of other ranks, and its own among several, that ask a policy which is here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import monotonic, sleep
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

#: Seconds that who asks for rows waits for weights that a rank is about to have.
OWED = 600.0

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
        """Make a call of a policy as the first rank does that splits its engine; see :func:`do_as_first`.

        Where publishes come in between it waits for one that is under way here. Where that was given up the call is
        made all the same: the first rank is told of it too, and has rows fail. A call that fails here alone would leave
        it without the engine, also once the run has gone back.
        """
        try:
            stream = self.stream_of(key)
            if what == "follow":
                self._follow(key, also_given_up=True)
                return self.workers[key].version
            with stream.held(also_given_up=True) if stream is not None and stream.follows else nullcontext():
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
            rows = self._rows_of(at)
            rows.expect_open(caller)
            self._expect_version(at)
            policy = self.follow(at) if at.follows else self.serving(at.name)
            polled = rows.poll(caller, asked, seconds, heard)
            if not at.follows:
                return polled
            kept_cache = self.stream_of(self._serving_key(at.name)).kept_cache
            return replace(polled, version=policy.version, kept_cache=kept_cache)
        except Exception as error:
            return Failed.of(error)

    def _expect_version(self, at: Serving) -> None:
        """Raise WrongAnswer where a call is for other weights than those here. Where publishes come in between, newer
        ones are right, and older ones are those of a rank that was started anew in a publish: it is about to have them.
        """
        key, ends = self._serving_key(at.name), monotonic() + OWED
        policy, stream = self.workers[key], self.stream_of(key)
        if not self.specs[key].serving:
            return
        while at.follows and policy.version < at.version and not stream.is_given_up and monotonic() < ends:
            sleep(0.005)
        here = policy.version
        if here < at.version if at.follows else here != at.version:
            raise WrongAnswer(f"the weights here are version {here}, and the call is for version {at.version}.")

    def follow(self, at: Serving) -> Worker:
        """Return a policy whose engine counts versions: publishes come while others ask it row by row. Ranks that split
        the engine do so from the same call on."""
        key, team = self._serving_key(at.name), self._team_of(at)
        self._follow(key, lambda here: here() if team is None else team.make("follow", here, [()] * len(team.others)))
        return self.workers[key]

    def _follow(
        self, key: Key, on_all: Callable[[Callable[[], Any]], Any] = lambda here: here(), *, also_given_up: bool = False
    ) -> None:
        """Have the engine of a policy count versions, if it does not yet; ``on_all`` does the same on other ranks."""
        stream = self.stream_of(key)
        assert stream is not None, "rows leave its engine one by one"
        if stream.follows:
            return
        with stream.held(also_given_up=also_given_up):
            on_all(lambda: self.streams.share(key, self.workers[key]))
            stream.follows = True

    def hold_rows(self, key: Key, others: Sequence[int] = ()) -> None:
        """Have rows stand still that environments have here, as weights are about to come.

        Where publishes do not come in between, they end: their calls are over, and who has asked for them has died. Of
        ranks that split an engine the first one is asked before any of them takes weights, as it has the ``others``
        make its calls too.
        """
        if others and self.stream_of(key) is not None:
            self._open_rows(key, others)
        stream = self.stream_of(key)
        if stream is None or not (stream.follows or stream.is_held):
            self.end_rows(key)
        if stream is not None:
            stream.hold()

    def give_up_rows(self, key: Key) -> None:
        """Have rows fail that stand still for weights which do not come: who waits for them would do so for ever.

        It overtakes a :meth:`hold_rows` that has not begun. So :meth:`leave_rows` has to be called too, after that one.
        """
        if (stream := self.stream_of(key)) is not None:
            stream.give_up()

    def leave_rows(self, key: Key) -> None:
        """Have rows go on as before :meth:`hold_rows`: those of a publish that was given up fail."""
        if (stream := self.stream_of(key)) is not None:
            stream.give_up() if stream.is_given_up else stream.let_go()

    def stream_of(self, key: Key) -> Any:
        """Return by what others ask a worker here row by row; None where nobody does."""
        rows = self._policy_rows.get(key)
        return getattr(self.workers.get(key), "stream", None) if rows is None else rows.stream

    def abort_rows(self, at: Serving, caller: str, rows: Mapping[int, Iterable[int]], latest: int) -> list[SampledRow]:
        """End rows in the batch of a policy."""
        return self._rows_of(at).abort(caller, rows, latest)

    def leave_policy(self, at: Serving, caller: str, latest: int) -> list[SampledRow]:
        """End all rows of somebody in the batch of a policy."""
        return self._rows_of(at).leave(caller, latest)

    def end_rows(self, key: Key) -> None:
        """End what is left in the batch of a worker that has its turn again.

        Calls that ask a policy are over by then: these rows were asked for by a process that died. Of ranks that split
        an engine the first one has them end on all; the others do nothing by themselves.
        """
        if (rows := self._policy_rows.get(key)) is not None:
            rows.end()

    def renew_rows(self) -> None:
        """End what is left in all batches, with what has failed there: the run goes back to a checkpoint."""
        for rows in list(self._policy_rows.values()):
            rows.renew()

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
        return self._open_rows(self._serving_key(at.name), self._others(at))

    def _open_rows(self, key: Key, others: Sequence[int]) -> PolicyRows:
        """Return the rows of a policy, whose engine this rank splits with ``others``, if any, as the first one."""
        with self._opening:
            if key not in self._policy_rows:
                policy: Any = self.workers[key]
                stream: Any = policy.stream
                if (team := self._open_team(key, others)) is not None:
                    stream = stream.beside(MirroredEngine(policy.engine, team))
                self._policy_rows[key] = PolicyRows(stream)
            return self._policy_rows[key]

    def _team_of(self, at: Serving) -> TeamCalls | None:
        return self._open_team(self._serving_key(at.name), self._others(at))

    def _others(self, at: Serving) -> Sequence[int]:
        """Return the ranks with which this one, as the first, splits the engine of a policy."""
        return at.beside[self.number] if at.beside else ()

    def _open_team(self, key: Key, others: Sequence[int]) -> TeamCalls | None:
        """Return what has calls of a policy made on all ranks that split its engine; None for one that is whole."""
        if not others:
            return None
        with self._opening:
            if key not in self._teams:
                self._teams[key] = TeamCalls(key[0], key, others, self.peers, self._team_turn)
            return self._teams[key]
