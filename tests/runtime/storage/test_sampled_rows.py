"""Rows that calls have sampled are kept a file a call, read again as they were, and compared token by token."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.errors import RunError
from flowrl.runtime.storage.sampled_rows import RecordedRows, SampledRows, compare_rows, read_sampled_again


def rows(ids: list[list[int]], logprobs: list[list[float]] | None = None, texts: list[str] | None = None) -> fl.Batch:
    fields = {"response_ids": ids, "rollout_logprobs": logprobs, "response": texts}
    return fl.Batch.of(len(ids), **{name: values for name, values in fields.items() if values is not None})


def test_rows_are_read_as_they_were_written(tmp_path):
    kept = SampledRows(tmp_path)
    first = rows([[1, 2, 3], [], [4]], [[-0.5, -1.0, -0.25], [], [-2.0]], ["a", "\ud83d", "ü"])
    kept.write(0, 7, 2, first)
    again = kept.read(0, 7, 2)
    assert again is not None and again.keys == first.keys
    assert {n: again[n].to_list() for n in again.fields} == {n: first[n].to_list() for n in first.fields}
    kept.write(0, 7, 2, rows([[9]]))
    last = kept.read(0, 7, 2)
    assert last is not None and last["response_ids"].to_list() == [[9]], "a step that is done again writes over it"
    assert (kept.read(0, 7, 1), kept.read(1, 7, 2), kept.read(0, 8, 2)) == (None, None, None)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (([[1, 2]], [[-1.0, -2.0]]), ([[1, 2]], [[-1.0, -2.5]]), {"parted": 0, "tokens": 2, "gap": 0.5}),
        (([[1, 2]], None), ([[1, 2]], [[-1.0, -2.5]]), {"parted": 0, "tokens": 2, "gap": 0.0}),
        (([[1, 2, 3]], None), ([[1, 2]], None), {"parted": 1, "tokens": 2, "gap": 0.0, "token": 2, "key": (0,)}),
        (([[], [5]], None), ([[7], [6]], None), {"parted": 2, "tokens": 0, "gap": 0.0, "token": 0, "key": (0,)}),
        (([], None), ([], None), {"parted": 0, "tokens": 0, "gap": 0.0}),
    ],
)
def test_what_differs_is_counted(mine, theirs, expected):
    assert compare_rows(rows(*mine), rows(*theirs)) == {"rows": len(mine[0]), **expected}


def test_rows_of_the_run_are_given_in_the_order_of_the_replay(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    out.mkdir()
    SampledRows(run).write(0, 3, 0, rows([[1], [2], [3]]))
    recorded = RecordedRows(run, out)
    given = recorded.take(0, "actor.generate", 5, 3, 0, rows([[1], [2], [4]]).take([2, 0, 1]))
    assert given["response_ids"].to_list() == [[3], [1], [2]] and given.keys == ((2,), (0,), (1,))
    (compared,) = read_sampled_again(out)
    assert (compared.node, compared.step, compared.rows, compared.parted, compared.key) == (
        *("actor.generate", 5, 3, 1),
        (2,),
    )
    with pytest.raises(RunError, match="is asked for other rows than in the run"):
        recorded.take(0, "actor.generate", 5, 3, 0, rows([[1], [2]]))
    with pytest.raises(RunError, match="has not kept the rows of actor.generate in step 6"):
        recorded.take(0, "actor.generate", 6, 4, 0, rows([[1]]))
