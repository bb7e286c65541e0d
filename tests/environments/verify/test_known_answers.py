"""Equal answers to equal tasks are graded once, also by several at once and in later runs; what the machine did is not."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest

from flowrl.environments import verify
from flowrl.environments.verify import mathematics
from flowrl.environments.verify.known_answers import KnownAnswers, VerdictCache

DRAWS = "import random\nprint(random.random())"  # what it gave is in the verdict
TESTS = [{"input": "", "output": "2"}]


def test_equal_code_is_run_once(tmp_path):
    def why(code=DRAWS, tests=TESTS, **how):
        return verify.unit_tests(code, tests, **how).why

    assert why() != why(), "without a cache it is run each time"
    cache = verify.VerdictCache(tmp_path / "graded.jsonl")
    with ThreadPoolExecutor(4) as pool:
        [first] = {*pool.map(lambda _: why(cache=cache), range(8))}
    assert why(f"```python\n{DRAWS}\n```", cache=cache) != first, "a newline more is other code"
    for how in ({"limits": verify.Limits(memory_mb=256)}, {"partial": False}, {"packages": True}):
        assert why(cache=cache, **how) != first
    assert why(tests=[{"input": "1", "output": "2"}], cache=cache) != first
    with (tmp_path / "graded.jsonl").open("a") as file:
        file.write('{"request": "cut o')
    later, sent = verify.VerdictCache(tmp_path / "graded.jsonl"), copy.copy(cache)
    assert why(cache=later) == why(cache=sent) == first
    found = verify.unit_tests(DRAWS, TESTS, cache=later)
    assert (float(found), found.outcome, found.passed, found.total) == (0.0, "failed", 0, 1)
    assert found.outcomes == verify.unit_tests("1", TESTS).outcomes


def test_what_broke_a_limit_is_run_again(monkeypatch):
    module = import_module("flowrl.environments.verify.unit_tests")
    runs, opened = [], module.opened_sandbox

    def counted(*given, **how):
        runs.append(given)
        return opened(*given, **how)

    monkeypatch.setattr(module, "opened_sandbox", counted)
    cache = VerdictCache()
    for _ in range(2):
        found = verify.unit_tests("while True: pass", TESTS, limits=verify.Limits(cpu_seconds=1), cache=cache)
        assert found.outcome == "timed_out"
    assert len(runs) == 2
    for _ in range(2):
        assert verify.unit_tests("print(2)", TESTS, cache=cache) == 1
    assert len(runs) == 3
    with pytest.raises(ValueError, match="is no test"):
        verify.unit_tests("print(2)", [{"output": "2"}], cache=cache)


def test_equal_mathematics_is_compared_once(monkeypatch):
    pytest.importorskip("math_verify", reason="the extra [math] is not installed")
    asked, pool = [], mathematics._pool()

    class Counted:
        def ask(self, given):
            asked.append(given)
            return pool.ask(given)

    monkeypatch.setattr(mathematics, "_pool", Counted)
    cache = VerdictCache()
    for _ in range(3):
        assert verify.symbolic(r"It is \boxed{\frac{2}{4}}.", "0.5", cache=cache).outcome == "right"
    assert len(asked) == 1
    assert verify.symbolic(r"It is \boxed{\frac{2}{4}}.", "0.25", cache=cache).outcome == "wrong" and len(asked) == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="is no mathematics"):
            verify.symbolic("1", "", cache=cache)
    assert len(asked) == 4, "what raises is asked for again"


def test_what_raises_or_is_not_kept_is_asked_for_again():
    known, said = KnownAnswers(None), iter(["a", "b", "c", "d"])

    def refuse(text):
        raise ValueError(text)

    with pytest.raises(ValueError, match="a"):
        known.read("x", lambda: next(said), refuse)
    assert known.read("x", lambda: next(said), str.upper, lambda found: False) == "B"
    assert known.read("x", lambda: next(said), str.upper) == "C"
    assert known.read("x", lambda: next(said), str.lower) == "c" and next(said) == "d"
