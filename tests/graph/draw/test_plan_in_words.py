"""Bytes, seconds, parts, pools and layouts in words."""

from __future__ import annotations

import pytest

from flowrl.graph.draw import plan_in_words as placed
from flowrl.graph.record import Node, PoolInfo


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999.4, "999 B"),
        (1234, "1.2 kB"),
        (99.6e3, "100 kB"),
        (16.4e9, "16 GB"),
        (999.9e9, "1 TB"),
        (4e15, "4000 TB"),
    ],
)
def test_bytes(size: float, words: str) -> None:
    assert placed.bytes_text(size) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (2e-7, "0.2 µs"),
        (59e-6, "59 µs"),
        (0.4, "400 ms"),
        (0.9996, "1 s"),
        (6.24, "6.2 s"),
        (119, "119 s"),
        (210, "3.5 min"),
    ],
)
def test_seconds(seconds: float, words: str) -> None:
    assert placed.seconds_text(seconds) == words


@pytest.mark.parametrize(("part", "words"), [(0, "0 %"), (0.001, "< 1 %"), (0.614, "61 %"), (1.0, "100 %")])
def test_parts(part: float, words: str) -> None:
    assert placed.part_text(part) == words


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (PoolInfo("a", devices="0-7", kind="h100-80", count=8), "devices 0-7 · 8 × h100-80"),
        (PoolInfo("a", "16 processes", kind="cpu", count=16), "16 processes"),
        (PoolInfo("a", kind="cpu", count=4), "4 × cpu"),
        (PoolInfo("a"), ""),
    ],
)
def test_what_a_pool_has(pool: PoolInfo, words: str) -> None:
    assert placed.pool_text(pool) == words


def test_long_layouts_are_cut_and_said_in_full_where_there_is_room() -> None:
    node = Node("a.b", "a", "b", pool="p", mesh="fsdp=4,tp=2", layout="; ".join(["rows over fsdp"] * 6))
    assert placed.place_rows(node) == (
        "mesh fsdp=4, tp=2",
        "rows over fsdp, rows over fsdp",
        "rows over fsdp, rows over fsdp +2",
    )
    assert placed.place_lines(node) == ("pool p, mesh fsdp=4, tp=2", node.layout)
