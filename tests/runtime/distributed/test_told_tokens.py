"""What is told of rows that run: packed and unpacked it is the same, and each message counts once."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from flowrl.runtime.distributed.told_tokens import HeardTokens, ToldTokens
from flowrl.runtime.local.shared_engine import KeptRows
from flowrl.workers.streaming import SampledRow, last_spans
from flowrl.workers.tokens.row_support import RowSupport

NUMBERS = st.floats(-30, 0, width=32)


@st.composite
def told_rows(draw, support=None):
    """Rows of a call, each of its number, with log-probabilities as rows of a call have them: f32."""
    support = draw(st.booleans()) if support is None else support
    own = draw(st.booleans())
    found = []
    for row in draw(st.lists(st.integers(0, 50), unique=True, max_size=4)):
        ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))
        count = {"min_size": len(ids), "max_size": len(ids)}
        plain = tuple(draw(st.lists(NUMBERS, **count)))
        sampled = plain if own else tuple(draw(st.lists(NUMBERS, **count)))
        of_each = sorted(draw(st.lists(st.integers(0, 3), **count)))
        spans = tuple((version, of_each.count(version)) for version in sorted(set(of_each)))
        drawn = None
        if support:
            sizes = draw(st.lists(st.integers(0, 3), **count))
            drawn = RowSupport(array("i", range(sum(sizes))), array("i", sizes))
        reason = draw(st.sampled_from(["aborted", "stop", "length"]))
        found.append(SampledRow(0, row, tuple(ids), plain, sampled, spans, reason, drawn))
    return tuple(found)


@given(rows=told_rows(), kept_cache=st.booleans())
def test_rows_are_the_same_packed_and_unpacked(rows, kept_cache):
    told = cloudpickle.loads(cloudpickle.dumps(ToldTokens.of(KeptRows(rows, kept_cache), 7)))
    assert tuple(told) == rows and (told.number, told.kept_cache) == (7, kept_cache)


@given(rows=told_rows(), data=st.data())
def test_rows_that_are_told_in_parts_are_heard_whole(rows, data):
    """Some messages come twice, as an answer is lost where another rank dies, and those before them again too."""
    heard, number, sent = HeardTokens(), 0, []
    known = dict.fromkeys((row.row for row in rows), 0)
    whole = {row.row: row for row in rows}
    while True:
        number += 1
        part, over = [], True
        for row in rows:
            to = data.draw(st.integers(known[row.row], len(row.ids)))
            until = row if to == len(row.ids) else cut(row, to)
            part.append(until.since(known[row.row]))
            known[row.row] = to
            over &= to == len(row.ids)
        sent.append(ToldTokens.of(KeptRows(tuple(part)), number))
        heard.take(sent[data.draw(st.integers(0, len(sent) - 1)) :])
        if over or number > 20:
            break
    if not over:
        return
    found = {row.row: row for row in heard.rows()}
    assert found == whole and heard.last == number
    assert sorted(heard.unfinished) == sorted(len(r.ids) for r in rows if r.reason == "aborted" and r.ids)
    handed = heard.hand_on()
    assert heard.last == 0 and ({row.row: row for row in handed} == whole if handed is not None else not rows)


def cut(row, tokens):
    """A row with its first tokens alone, as if it had not ended."""
    ids, left = row.ids[:tokens], len(row.ids) - tokens
    spans = last_spans(tuple(reversed(row.versions)), tokens)
    support = row.support
    if support is not None:
        sizes = support.sizes[:tokens]
        support = RowSupport(support.ids[: sum(sizes)], sizes)
    plain, sampled = row.rollout_logprobs[:tokens], row.sampling_logprobs[:tokens]
    assert left >= 0
    return SampledRow(0, row.row, ids, plain, sampled, tuple(reversed(spans)), "aborted", support)


@pytest.mark.parametrize(("own", "size"), [(True, 8), (False, 12)])
def test_a_token_takes_8_bytes_or_12(own, size):
    plain = tuple((torch.rand(1000) - 5).tolist())
    sampled = plain if own else tuple((torch.rand(1000) - 5).tolist())
    row = SampledRow(0, 3, tuple(range(1000)), plain, sampled, ((2, 1000),), "aborted")
    told = ToldTokens.of(KeptRows((row,)))
    assert told.bytes == 1000 * size + 12 + 8
    assert len(cloudpickle.dumps(told)) < told.bytes + 1000
    assert next(iter(told)) == row, "log-probabilities of f32 lose nothing"
