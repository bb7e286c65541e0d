"""``flowrl reshard``: how many bytes move when a model goes from one layout to another."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from ..errors import UsageError
from ..placement.backends import backend
from ..placement.cluster.cluster import Cluster
from ..placement.cluster.mesh import Mesh
from ..placement.model.model_shape import shape_named
from ..placement.model.rank_parameters import Parameter, parameters_of
from ..placement.model.weight_layout import PLAIN
from ..placement.reshard.boxes import shown
from ..placement.reshard.hosting import GROUPINGS
from ..placement.reshard.planner import Reshard, plan_reshard
from .arguments.options import check_format, read_words

FORMATS = ("table", "json")


def reshard_command(words: Sequence[str]) -> int:
    """Print a reshard as a table or as JSON. Returns the exit status; raises UsageError, PlanError or ModelError."""
    options = _parse(words)
    check_format(options.format, FORMATS)
    move = plan_reshard(
        shape_named(options.model),
        Mesh.of(options.src),
        Mesh.of(options.dst),
        read_devices("--src-devices", options.src_devices),
        read_devices("--dst-devices", options.dst_devices),
        cluster=Cluster.of(options.cluster) if options.cluster else None,
        inside_node=options.inside_node,
        grouping=options.grouping,
        src_fused=options.src_fused,
        dst_fused=options.dst_fused,
        rules=backend(options.engine).layout if options.engine else PLAIN,
    )
    as_json = options.format == "json"
    if options.parameters is not None:
        parameters = list(parameters_of(move.dst, _rank(options.parameters, move)))
        print(json.dumps([asdict(p) for p in parameters]) if as_json else parameters_table(parameters))
    else:
        print(json.dumps(move.to_json()) if as_json else reshard_table(move))
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flowrl reshard", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--src", metavar="MESH", help="the mesh that the weights are on: tp=8,pp=4,dp=4")
    parser.add_argument("--dst", metavar="MESH", help="the mesh that they go to; copies of it fill the devices")
    parser.add_argument("--model", metavar="NAME", help="a shipped model, a folder with config.json, a cached hub name")
    parser.add_argument("--engine", metavar="NAME", help="the destination lays weights out as this engine does")
    parser.add_argument("--parameters", metavar="RANK", help="print which box lies where on a rank of the destination")
    parser.add_argument("--src-devices", metavar="LIST", help="the device of each source rank: 0-63 (the first ones)")
    parser.add_argument("--dst-devices", metavar="LIST", help="the devices of the destination: 64-71 (the source's)")
    parser.add_argument("--cluster", metavar="NODES", help="h100-80:16x8: also count bytes inside and between nodes")
    parser.add_argument("--inside-node", action="store_true", help="keep a replica of the destination in one node")
    parser.add_argument("--grouping", default="overlap", help=f"who hosts what: {', '.join(GROUPINGS)} (overlap)")
    parser.add_argument("--src-fused", action="store_true", help="the source splits q, k, v and gate, up as one tensor")
    parser.add_argument("--dst-fused", action="store_true", help="the destination does")
    parser.add_argument("--format", default="table", help=f"{', '.join(FORMATS)} (table)")
    options = read_words(parser, words, "flowrl reshard --help")
    for name in ("src", "dst", "model"):
        if getattr(options, name) is None:
            raise UsageError(
                f"flowrl reshard needs --{name}.",
                fix="Write flowrl reshard --src tp=8,pp=4,dp=4 --dst tp=8 --model llama-70b.",
            )
    return options


def read_devices(option: str, text: str | None) -> tuple[int, ...] | None:
    """Read ``0-3,8``: devices 0, 1, 2, 3 and 8. None stays None. Raises UsageError."""
    if text is None:
        return None
    devices: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
            raise UsageError(f"{option} {text}: '{part}' is no device or range.", fix="Write devices as 0-7,16.")
        devices += range(int(first), int(last or first) + 1)
    return tuple(devices)


def _rank(text: str, move: Reshard) -> int:
    """Read a rank of the destination. Raises UsageError."""
    size = move.dst.mesh.size
    if not text.isdigit() or int(text) >= size:
        what = f"--parameters {text}: the destination {move.dst.mesh} has no such rank."
        raise UsageError(what, fix=f"Write a rank from 0 to {size - 1}.")
    if move.dst.mesh["fsdp"] > 1:
        raise UsageError(f"--parameters: the destination {move.dst.mesh} has parameters that fsdp splits as a whole.")
    return int(text)


def parameters_table(parameters: Iterable[Parameter]) -> str:
    """The parts of parameters, those of equal layers in a row together."""
    layers: dict[tuple[str, ...], list[str]] = {}
    for parameter in parameters:
        shape = " x ".join(map(str, parameter.shape))
        for part in parameter.parts:
            layer = re.search(r"\.layers\.(\d+)\.", part.name)
            names = (re.sub(r"\.layers\.\d+\.", ".layers.{}.", name) for name in (parameter.name, part.name))
            layers.setdefault((*names, shape, shown(part.at), shown(part.box)), []).append(layer[1] if layer else "")
    rows = [("parameter", "shape", "rows and columns", "are those of", "weight")]
    for (name, weight, shape, at, box), found in layers.items():
        in_a_row = [int(layer) for layer in found if layer] == list(range(int(found[0] or 0), int(found[-1] or 0) + 1))
        which = found[0] if len(found) == 1 else f"{found[0]}-{found[-1]}" if in_a_row else ",".join(found)
        rows.append((name.format(which), shape, at, box, weight.format(which)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def reshard_table(move: Reshard) -> str:
    """The counts, devices with equal ones together."""
    whole = move.model_bytes
    rows: list[tuple[str, ...]] = [("devices", "rank", "received", "of M", "peak", "of M", "redundant", "of M")]
    for devices, rank, counts in _alike(move):
        cells = [cell for n in counts for cell in (f"{n / 1e9:.3f} GB", f"{n / whole:.4f}")]
        rows.append((devices, rank, *cells))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    count = len(move.devices)
    head = [
        f"{move.src.model.name}  M = {whole / 1e9:.3f} GB  {move.src.mesh} -> {move.dst.mesh}"
        f" x {count // move.dst.mesh.size}  grouping {move.grouping}",
        f"received per device: {move.total / count / 1e9:.3f} GB on average, {max(move.received) / 1e9:.3f} GB at most",
    ]
    sent = move.sent
    average = f"{sum(sent) / len(sent) / 1e9:.3f} GB on average"
    head.append(f"sent per device of the source: {average}, {max(sent) / 1e9:.3f} GB at most")
    if move.links is not None:
        inside, between = move.links["same_node"], move.links["between_nodes"]
        head.append(f"all devices: {inside / 1e9:.3f} GB inside nodes, {between / 1e9:.3f} GB between nodes")
        if move.node_links:
            out, into = (max(bytes_) / 1e9 for bytes_ in zip(*move.node_links.values(), strict=True))
            head.append(f"the busiest node: {out:.3f} GB leave it, {into:.3f} GB come to it")
    return "\n".join([*head, "", *lines])


def _alike(move: Reshard) -> list[tuple[str, str, tuple[int, int, int]]]:
    """Devices in a row with equal counts: (devices, ranks, counts)."""
    runs: list[tuple[list[int], list[int], tuple[int, int, int]]] = []
    for device, rank, *counts in zip(move.devices, move.ranks, move.received, move.peak, move.redundant, strict=True):
        received, peak, redundant = counts
        if runs and runs[-1][2] == (received, peak, redundant) and runs[-1][0][-1] == device - 1:
            runs[-1][0].append(device)
            runs[-1][1].append(rank)
        else:
            runs.append(([device], [rank], (received, peak, redundant)))
    return [(_span(devices), _span(sorted(set(ranks))), counts) for devices, ranks, counts in runs]


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
