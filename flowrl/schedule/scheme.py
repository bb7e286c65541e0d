"""How the calls of a program look to the schedule: pools, the weights that they see, and whether they may be cut."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..graph.may_see_older_weights import Site, gives_rows, samples
from ..graph.ops.op import Op
from .events import Call, Setup


@dataclass(frozen=True)
class Scheme:
    """What a plan and a traced program say of calls: ``Scheme({"actor": "train", "reward": "cpu"}, relaxed=...)``.

    ``train`` and ``generate`` are the pools of each worker for its two uses; ``relaxed`` the calls that may see older
    weights; ``residents`` by pool and worker what its memory holds in a turn, where turns matter. ``home`` are the
    pools whose calls the driver's thread does while the program waits. ``arguments``: those of each worker. Where the
    setup ``streams``, ``one_by_one`` are the workers whose engine has the rows of several calls in one batch, and
    ``rowwise`` those whose engine others may ask row by row.
    """

    train: Mapping[str, str]
    generate: Mapping[str, str] = field(default_factory=dict[str, str])
    relaxed: frozenset[Site] = frozenset()
    residents: Mapping[str, Mapping[str, tuple[str, ...]]] = field(
        default_factory=dict[str, "Mapping[str, tuple[str, ...]]"]
    )
    setup: Setup = field(default_factory=lambda: Setup(("main",)))
    nodes: Mapping[Site, str] = field(default_factory=dict[Site, str])  # ids of the graph
    main: frozenset[Site] = frozenset()  # the calls whose responses are the step's own
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    home: frozenset[str] = frozenset()
    rowwise: frozenset[str] = frozenset()
    one_by_one: frozenset[str] = frozenset()

    def call(
        self,
        id: int,
        step: int,
        op: Op,
        worker: str | None,
        site: Site,
        *,
        inputs: Iterable[int],
        handles: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
        cut: bool = True,
        groups: int = 0,
    ) -> Call:
        """One call. A call of a library has no pool: it runs where its rows are, as soon as they are.

        ``cut``: whether its rows can be cut into chunks.
        """
        sampling = samples(op, tuple(handles))
        served = tuple(dict.fromkeys((*handles, worker) if op.cost == "generate" and worker else handles))
        follows = tuple(w for w in served if w in self.setup.followers)
        pools = self.pools(op, worker, handles)
        relaxed = sampling and step >= 0 and site in self.relaxed
        declared: Mapping[str, Any] = self.arguments.get(worker or "", {})
        streams, joins = self.setup.streams, self.joins(op, served)
        return Call(
            id,
            step,
            site[0],
            pools,
            tuple(inputs),
            reads=tuple(w for w in (worker, *served) if w is not None and w not in follows),
            serves=follows,
            relaxed=relaxed,
            updates=worker if op.updates is not None else None,
            rowwise=cut and self.setup.chunks > 1 and op.in_pieces(declared, arguments or {}),
            groups=groups if relaxed else 0,
            residents=self._residents(pools, _needs(op, worker, handles)),
            rows=gives_rows(op),
            queues=op.updates is None and not op.external and op.cost != "generate" and not handles,
            instant=op.owner == "data",
            whole=bool(follows) and not joins and not (op.asks and streams and self.one_by_one.issuperset(follows)),
            joins=joins,
        )

    def joins(self, op: Op, serves: Sequence[str]) -> bool:
        """Whether calls of an op go on over publishes: they ask the engines of ``serves`` row by row meanwhile."""
        follows = [worker for worker in serves if worker in self.setup.followers]
        into_rows = self.setup.streams and self.setup.publish != "drain"
        return op.joins and into_rows and bool(follows) and self.rowwise.issuperset(follows)

    def _residents(self, pools: Sequence[str], needed: Container[str]) -> tuple[str, ...]:
        """Return whose turn it is in the memory of pools, and what else of them its turn needs."""
        turns = ((name, there) for p in pools for name, there in self.residents.get(p, {}).items() if name in needed)
        return tuple(dict.fromkeys(each for name, there in turns for each in (name, *there)))

    def pools(self, op: Op, worker: str | None, handles: Sequence[str] = ()) -> tuple[str, ...]:
        """The pools that a call takes, all at once: its worker's, and those of the handles that it holds."""
        if worker is None:
            return ()
        own = self.place(worker, "generate" if op.cost == "generate" else "train")
        return tuple(dict.fromkeys((own, *(self.place(h, "generate") for h in handles))))

    def place(self, worker: str, use: str) -> str:
        """The pool of a worker for one of its uses."""
        return self.generate.get(worker, self.train[worker]) if use == "generate" else self.train[worker]


def _needs(op: Op, worker: str | None, handles: Sequence[str]) -> set[str]:
    use = "generate" if op.cost == "generate" else "train"
    return {f"{worker}.{use}", *(f"{h}.generate" for h in handles)}
