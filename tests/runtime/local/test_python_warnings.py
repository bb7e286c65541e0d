"""What an op warns of is an event of the run, once for each place and text, on every runtime."""

from __future__ import annotations

import json
import warnings

import pytest
from direct import run_direct
from flows import module_of

from flowrl.batch import CallInfo
from flowrl.placement.plan.plan import Plan, Pool
from flowrl.runtime.local.python_warnings import Raised, hear_warnings
from flowrl.workers.user_code.run_rows import run_rows


def told(out):
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "warning"]


def expected(texts):
    (old,) = [text for text in texts if "numbers are old" in text]
    (away,) = [text for text in texts if "goes away" in text]
    assert old.startswith("counter.values of step 0: numbers are old (") and "warns_flow.py:" in old
    assert away.startswith("counter.values of step 0: FutureWarning: this way goes away (")


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_warnings_of_ops_are_events(tmp_path, runtime):
    for name in ("first", "again"):  # a process shows a warning once, and another run has it too
        module_of("warns_flow").flow.run(out=tmp_path / name, runtime=runtime, quiet=True)
        expected(told(tmp_path / name))


def test_many_ranks_tell_them_once(tmp_path):
    plan = Plan({"b": Pool("b", processes=3)})
    run_direct(module_of("warns_flow").flow, plan, tmp_path / "run", "warns")
    expected(told(tmp_path / "run"))


def test_threads_of_a_reward_tell_them_too():
    heard_here = []
    with hear_warnings(heard_here.append, CallInfo(op="reward.score", step=4)), warnings.catch_warnings():
        warnings.simplefilter("always")
        rows = [{"prompt": "a", "response": "b"}] * 2
        assert run_rows(module_of("warns_flow").grade, rows, concurrency=2, timeout=None) == [1.0, 1.0]
    assert {text.partition(" (")[0] for text in heard_here} == {"reward.score of step 4: a grade is rough"}


def test_a_warning_that_nobody_hears_goes_where_it_went():
    with hear_warnings(lambda text: None, CallInfo()):
        pass
    with pytest.warns(UserWarning, match="outside"):
        warnings.warn("outside", stacklevel=1)


def test_a_text_knows_what_is_told_once():
    assert Raised("a.b of step 3: no: way (c.py:4)").key == Raised("a.b of step 9: no: way (c.py:4)").key
