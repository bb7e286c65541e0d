"""Answers of ranks: who waits for some learns what they are, and which ranks have died, and of what, or say nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from ....errors import RankLost
from ....workers.headway import Headway
from ..process_exits import Watched
from ..protocol import Failed
from .ray_head import check_head

GRACE = 5.0  # seconds that the other ranks of a call have when one has failed
LAST_WORDS = 1.0  # seconds that they have when one has died: what they are at is done again
LOOK = 1.0  # seconds after which who waits looks whether others have found a rank to be lost
SILENT = 10.0  # seconds after which a rank that does not even say that it is there counts as hung
_OUT_OF_MEMORY = "it ran out of memory, and Ray's memory monitor ended it"


@dataclass(frozen=True)
class Asked:
    """When ranks were asked whether they are there, and by their answers to come which processes: (rank, handle)."""

    at: float
    answers: Mapping[Any, tuple[int, Any]]


class RankAnswers:
    """``RankAnswers(handles, pool_of)``: the actors of ranks, as they are now, and the pool of a rank.

    ``starting``: ranks that are being started, which nobody asks whether they are there.
    """

    def __init__(self, handles: Mapping[int, Any], pool_of: Callable[[int], str]) -> None:
        self.starting: frozenset[int] = frozenset()
        self._handles, self._pool_of = handles, pool_of
        self._watched: dict[int, Watched] = {}  # the processes of this host
        self._fallen: dict[int, Any] = {}  # processes that were found to be lost

    def wait(
        self,
        begun: Mapping[int, Any],
        what: str,
        deadline: float | None = None,
        on_death: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """The answers by rank.

        Raises RankLost for ranks that died, here or where one of these has asked, and for those that have not answered
        ``deadline`` seconds after this was called. ``on_death`` is called as soon as one has died.
        """
        check_head()
        refs = [ref for ref, _ in begun.values()]
        if len(refs) > 1:  # one that fails may leave the others waiting for it: they are looked at one by one
            ray.wait(refs, num_returns=len(refs), timeout=0.2)
            ready, late = ray.wait(refs, num_returns=len(refs), timeout=0)
            if late or len(ready) < len(refs):
                return self._one_by_one(begun, what, deadline, on_death)
        try:
            answers = ray.get(refs, timeout=LOOK if deadline is None else min(LOOK, deadline))
        except (RayError, TimeoutError):
            return self._one_by_one(begun, what, deadline, on_death)
        if any(isinstance(a, Failed) for a in answers) and (dead := self._dead()[0]):
            raise self._lost(dict.fromkeys(dead, "its process is gone"), what, dict(zip(begun, answers, strict=True)))
        return dict(zip(begun, answers, strict=True))

    def _one_by_one(
        self, begun: Mapping[int, Any], what: str, deadline: float | None, on_death: Callable[[], None] | None
    ) -> dict[int, Any]:
        """The answers as they come. When one has failed or died, the others have some seconds more."""
        by_ref = {ref: rank for rank, (ref, _) in begun.items()}
        answers: dict[int, Any] = {}
        died: dict[int, str] = {}
        ends = None if deadline is None else time.monotonic() + deadline
        asked: Asked | None = None
        while by_ref:
            if asked is None and ends is not None and time.monotonic() > ends - SILENT:
                asked = self._ask()
            left = LOOK if ends is None else max(0.0, min(LOOK, ends - time.monotonic()))
            ready = ray.wait(list(by_ref), num_returns=1, timeout=left)[0]
            check_head()
            for ref in ready:
                rank = by_ref.pop(ref)
                try:
                    answers[rank] = ray.get(ref)
                except RayTaskError as error:
                    answers[rank] = Failed(None, str(error.cause or error), str(error))
                except RayError as error:
                    died[rank] = _OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else str(error).splitlines()[0]
                if rank in died or isinstance(answers.get(rank), Failed):
                    ends = min(ends or math.inf, time.monotonic() + (LAST_WORDS if died else GRACE))
                if rank in died and by_ref and on_death is not None:
                    on_death()
                    on_death = None
            if not ready and ends is not None and time.monotonic() >= ends:
                break
            known = [rank for rank in by_ref.values() if self._fallen.get(rank) is begun[rank][1]]
            if known:  # somebody else has waited for it already
                raise self._lost(dict.fromkeys(known, "it is lost"), what, answers)
        failed = [a for a in answers.values() if isinstance(a, Failed)]
        self._fallen |= {rank: begun[rank][1] for rank in died}
        dead, silent = self._dead(asked) if died or failed or by_ref else ([], [])
        died = dict.fromkeys(dead, "its process is gone") | died
        if died:
            raise self._lost(died, what, answers)
        if by_ref and (silent or not failed):
            late = silent or sorted(by_ref.values())  # who waits for a silent one is late too, and not to blame
            there = {**self._handles, **{rank: handle for rank, (_, handle) in begun.items()}}
            self._fallen |= {rank: there[rank] for rank in late}  # nobody waits as long for one of them again
            raise RankLost(
                f"rank {late[0]} of pool '{self._pool_of(late[0])}' has not answered {what} in time.",
                ranks=late,
                answers=answers,
                fix="Give the plan a longer pipeline.deadline if such calls may take that long.",
            )
        return {rank: answers[rank] for rank in begun if rank in answers}

    def _lost(self, died: Mapping[int, str], what: str, answers: Mapping[int, Any]) -> RankLost:
        rank, more = min(died), len(died) - 1
        ends = [_OUT_OF_MEMORY] if _OUT_OF_MEMORY in died.values() else self._ends(died)
        return RankLost(
            f"rank {rank} of pool '{self._pool_of(rank)}' died during {what}"
            f"{f', and {more} more' if more else ''}{''.join(f': {end}' for end in ends[:1])}.",
            ranks=sorted(died),
            answers=answers,
            fix="If it happens again, look into the logs of Ray for this process: memory is the usual reason.",
        )

    def _ends(self, ranks: Iterable[int]) -> list[str]:
        """How these ended, as far as this host knows: those that ran out of memory first."""
        watched = [self._watched.get(rank) for rank in sorted(ranks)]  # another thread may start them again meanwhile
        found = [one.ended() for one in watched if one is not None]
        return sorted(filter(None, found), key=lambda end: "ran out of memory" not in end)

    def watch(self, where: Mapping[int, Mapping[str, Any]]) -> None:
        """Be able to say how these ranks end, as far as they are on this host."""
        here = ray.util.get_node_ip_address()
        for rank, process in where.items():
            self.unwatch(rank)
            if process["node"] == here:
                self._watched[rank] = Watched(process["pid"])

    def unwatch(self, rank: int) -> None:
        """From here on the rank is ended by the run, if at all."""
        if (watched := self._watched.pop(rank, None)) is not None:
            watched.close()

    def unwatch_all(self) -> None:
        """From here on all ranks are ended by the run."""
        while self._watched:
            self._watched.popitem()[1].close()

    def _ask(self) -> Asked:
        """Ask all ranks whether they are there, but for those that are being started."""
        known = list(self._handles.items())  # another thread may take up ranks that arrive, or let go of some
        there = {rank: handle for rank, handle in known if rank not in self.starting}
        return Asked(time.monotonic(), {h.pull.remote("alive"): (rank, h) for rank, h in there.items()})

    def headway(self) -> dict[int, Headway]:
        """How far each rank has come, of those that answer within a few seconds."""
        asked = {h.pull.remote("headway"): rank for rank, h in list(self._handles.items()) if rank not in self.starting}
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=SILENT)[0] if asked else []
        found: dict[int, Headway] = {}
        for ref in ready:
            with suppress(RayError):
                found[asked[ref]] = ray.get(ref)
        return found

    def _dead(self, asked: Asked | None = None) -> tuple[list[int], list[int]]:
        """Ranks whose process is gone, and those that say nothing; where all had answered to ``asked``, as of now."""
        gone: list[int] = []
        late: list[int] = []
        for earlier in (None,) if asked is None else (asked, None):
            asking = earlier or self._ask()
            left = max(0.0, asking.at + SILENT - time.monotonic())
            ready, waited = ray.wait(list(asking.answers), num_returns=len(asking.answers), timeout=left)
            late = [r for r, handle in (asking.answers[ref] for ref in waited) if self._handles.get(r) is handle]
            for ref in ready:
                rank, handle = asking.answers[ref]
                try:
                    ray.get(ref)
                except RayError:
                    if self._handles.get(rank) is handle:  # nobody has started it anew since
                        gone.append(rank)
                        self._fallen[rank] = handle
            if gone or late:
                break
        return gone, sorted(late)
