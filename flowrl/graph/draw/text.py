"""The graph as a small language, one line per call, made for reading and for comparing with an earlier one::

    program grpo {                                                          # algorithms/grpo.py
      worker actor: Actor(model='a/model', lr=0.0001)                       # :7
      data.train -> prompt_ids, answer                                      # :12
      data.heldout -> prompt_ids, answer if step % 50 == 0                  # :16
      actor.generate(prompt_ids; n=8) -> tokens rows=expand weights<-actor.update lag=0      # :14
      if step % 50 == 0 {
        actor.generate#2(prompt_ids@data.heldout) -> tokens weights<-actor.update lag=0       # :16
      }
      types {
        tokens: i32[*token]
      }
    }

Arguments are the fields that travel to the call; settings that are not the default come after a semicolon. A field
comes from the last call above that adds it or makes other rows of it, outside of blocks that the line is not in, or
from the first source; else its origin is said: ``rewards@reward.score``. ``rewards as costs`` was made as
``rewards``. A number without a name is its origin alone, ``@batch.mean``; ``?`` marks a field that nothing adds.
``weights<-x``, ``carried<-x``, ``order<-x``, ``control<-x`` and ``serves<-x`` say what else comes from where.
Arithmetic ends in what it computes, ``= rewards - costs``.

A plan adds blocks behind the calls, so that two plans of a program differ in these alone::

      pools {
        train: devices 0-7 · 8 × h100-80                                    # 83 % busy
      }
      places {
        actor.update on train[fsdp=4,tp=2]: rows over fsdp; weights over fsdp x tp      # 6.2 s · 61 %
      }
      moves {
        actor.publish -> actor.generate: weights v(k-1) 16 GB (network)
      }
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import shown
from ..record import Edge, Graph, Node, WorkerInfo
from . import plan_in_words as placed
from .picture import NAMELESS, given, names_of

_COMMENT = 76  # where comments start; fixed, so that one long line does not move all the others


def render(graph: Graph) -> str:
    """The graph in the language of this module."""
    return "\n".join(" ".join(row.splitlines()) for row in _rows(graph)) + "\n"


def _rows(graph: Graph) -> Iterator[str]:
    files = [file for file in (*(n.file for n in graph.nodes), *(w.file for w in graph.workers)) if file]
    home = _file(max(files, key=files.count, default=""))
    yield _commented(f"program {graph.program} {{", ", ".join([*([home] if home else []), *_paths(graph)]))
    for worker in graph.workers:
        how = f"({given(worker)})" if worker.settings else ""
        yield _commented(f"  worker {worker.name}: {worker.kind}{how}", _place(worker.file, worker.line, home))
    for source in graph.sources:
        when = f" if {source.branch}" if source.branch else ""
        once = " once" if source.stage == "once" else ""
        row = f"  {source.id} -> {', '.join(source.fields)}{once}{when}"
        marks = "".join(f" {_mark(edge, source.branch, graph)}" for edge in graph.edges if edge.dst == source.id)
        yield _commented(row + marks, _place(source.file, source.line, home))
    yield from _calls(graph, home)
    yield from _plan(graph)
    yield from _types(graph)
    yield "}"


def _calls(graph: Graph, home: str) -> Iterator[str]:
    """One line per call, in blocks by stage and condition."""
    edges = graph.edges
    open_block: str | None = None
    for node in graph.nodes:
        block = _block(node)
        if block != open_block:
            if open_block:
                yield "  }"
            if block:
                yield f"  {block} {{"
            open_block = block
        inner = "    " if block else "  "
        yield _commented(inner + _call(node, graph, edges), _place(node.file, node.line, home))
    if open_block:
        yield "  }"


def _block(node: Node) -> str | None:
    once = "once" if node.stage == "once" else ""
    condition = f"if {node.branch}" if node.branch else ""
    return f"{once} {condition}".strip() or None


def _call(node: Node, graph: Graph, edges: tuple[Edge, ...]) -> str:
    incoming = [edge for edge in edges if edge.dst == node.id]
    inside = [", ".join(_arguments(node, graph, incoming)), *([given(node)] if node.settings else [])]
    words = [f"{node.id}({'; '.join(inside)})"]
    if node.adds:
        words.append(f"-> {', '.join(node.adds)}")
    words += [f"rows={node.rows}"] if node.rows != "same" else []
    words += [f"updates={node.updates}"] if node.updates else []
    words += [f"loss={node.loss}"] if node.loss else []
    words += [f"cost={node.cost}"] if node.cost not in ("none", "external") else []
    words += ["external"] if node.external else []
    words += [node.kind] if node.kind != "op" else []
    words += ["repeats"] if node.repeats else []
    words += [_mark(edge, node.branch, graph) for edge in incoming if edge.kind != "data"]
    words += [f"= {node.expression}"] if node.expression else []
    return " ".join(words)


def _arguments(node: Node, graph: Graph, incoming: list[Edge]) -> list[str]:
    """Fields in the order in which the op reads them, then what else travels to the call."""
    words_of: dict[str, list[str]] = {}
    nameless: list[str] = []
    for edge in incoming:
        condition = _condition(edge, node.branch)
        if edge.kind == "data":
            written = names_of(edge, graph)
            named = [name for name in edge.fields if name != NAMELESS or NAMELESS in written]
            nameless += [f"@{edge.src}{condition}"] if len(named) < len(edge.fields) or not named else []
            for name, words in zip(named, written, strict=True):
                words_of.setdefault(name, []).append(f"{words}{_origin(name, edge.src, node, graph)}{condition}")
    known = {NAMELESS, *words_of, *(name for edge in incoming if edge.kind == "carried" for name in edge.fields)}
    order = [*node.reads, *(name for name in words_of if name not in node.reads)]
    missing = [f"?{name}" for name in node.reads if name not in known]
    return [word for name in order for word in words_of.get(name, ())] + nameless + missing


def _origin(name: str, src: str, node: Node, graph: Graph) -> str:
    """``@src`` where the field does not come from the last call above that adds it or makes other rows of it."""
    usual = next((source.id for source in graph.sources if name in source.fields), None)
    for above in graph.nodes[: graph.nodes.index(node)]:
        if above.branch in (None, node.branch) and (name in above.adds or (usual and above.rows != "same")):
            usual = above.id
    return "" if usual == src else f"@{src}"


def _mark(edge: Edge, branch: str | None, graph: Graph) -> str:
    names = names_of(edge, graph)
    fields = f"({', '.join(names)})" if names else ""
    lag = f" lag={edge.lag}" if edge.lag is not None else ""
    repeats = " repeats" if edge.repeats else ""
    return f"{edge.kind}<-{edge.src}{fields}{lag}{repeats}{_condition(edge, branch)}"


def _condition(edge: Edge, branch: str | None) -> str:
    return f" if {edge.branch}" if edge.branch and edge.branch != branch else ""


def _plan(graph: Graph) -> Iterator[str]:
    """Where calls are placed and what moves; what a run measured stands in comments."""
    pools = placed.pools_of(graph)
    if pools:
        yield _commented("  pools {", graph.plan)
        for pool in pools:
            yield _commented(f"    {pool.name}: {placed.pool_text(pool)}".rstrip(": "), placed.busy_text(pool))
        yield "  }"
    rows = [row for thing in (*graph.workers, *graph.nodes) if (row := _where(thing))]
    yield from ["  places {", *rows, "  }"] if rows else []
    rows = [row for edge in graph.edges if (row := _move(edge))]
    yield from ["  moves {", *rows, "  }"] if rows else []


def _where(thing: Node | WorkerInfo) -> str:
    name, time = (thing.id, placed.time_text(thing)) if isinstance(thing, Node) else (thing.name, "")
    if not thing.pool and not time:
        return ""
    on = f" on {thing.pool}" + (f"[{thing.mesh}]" if thing.mesh else "") if thing.pool else ""
    how = f": {thing.layout}" if thing.layout else ""
    return _commented(f"    {name}{on}{how}", time)


def _move(edge: Edge) -> str:
    size = placed.bytes_text(edge.bytes) if edge.bytes is not None and placed.tells_bytes(edge) else ""
    words = (edge.version, size, f"({edge.transport})" if size and edge.transport else "")
    text = " ".join(word for word in words if word)
    return f"    {edge.src} -> {edge.dst}: {edge.kind} {text}" if text else ""


def _types(graph: Graph) -> Iterator[str]:
    """The type of every field, in order of appearance; several where calls do not agree."""
    types: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        for name in (*node.reads, *node.adds):
            if name in node.types:
                types.setdefault(name, {})[node.types[name]] = None
    if types:
        yield "  types {"
        yield from (f"    {name}: {' | '.join(found)}" for name, found in types.items())
        yield "  }"


def _paths(graph: Graph) -> list[str]:
    return ([f"{graph.paths} paths"] if graph.paths > 1 else []) + (["more not followed"] if graph.capped else [])


def _place(file: str, line: int, home: str) -> str:
    if not line:
        return ""
    name = _file(file)
    return f":{line}" if name == home else f"{name}:{line}"


def _file(file: str) -> str:
    return file if not file or file.startswith("<") else shown(file)


def _commented(row: str, comment: str) -> str:
    return f"{row.ljust(_COMMENT)}  # {comment}" if comment else row
