"""Grades code by unit tests, in a sandbox: which share of them passes, and what became of the others."""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .known_answers import VerdictCache
from .sandbox import Limits, opened_sandbox
from .verdict import Verdict

#: How code ends: all tests pass; some do not; it broke a limit, of time, of memory, or another; it raised or its
#: process ended; it was not run.
OUTCOMES = ("passed", "failed", "timed_out", "out_of_memory", "killed", "crashed", "refused")
_BROKE = {"seconds": "timed_out", "cpu_seconds": "timed_out", "memory": "out_of_memory", "output": "killed"}
_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_LONGEST = 100_000  # characters of code
_GRADES = 2  # how code is graded: another number where equal code may get another verdict than before
Test = str | Mapping[str, Any]


def code_of(response: str) -> str:
    r"""The code in a response: its last block between fences, or all of it where there is none.

    >>> fl.environments.verify.code_of("So:\n```python\nprint(1)\n```")
    'print(1)\n'
    """
    blocks = _FENCED.findall(response)
    if not blocks:
        return response
    code: str = blocks[-1]
    return textwrap.dedent(code) if code.lstrip("\r\n").startswith((" ", "\t")) else code  # a block in a list


def unit_tests(
    response: str,
    tests: Sequence[Test] | str,
    *,
    limits: Limits | None = None,
    partial: bool = True,
    packages: bool = False,
    cache: VerdictCache | None = None,
) -> Verdict:
    """Run the code of a response against tests in a sandbox; its reward is the share of them that passes.

    With ``partial=False`` it is 1 where all of them pass, else 0.

    A test is one of three, also all of them as a text of JSON:

    - ``{"input": "1 2", "output": "3"}``: the code is a program, which reads the one and prints the other;
    - ``{"call": "add", "arguments": [1, 2], "result": 3}``: a function of it, or a method of its class ``Solution``;
    - ``"assert add(1, 2) == 3"``: more code, which raises nothing.

    What is expected is compared outside the sandbox, except in the third kind: there code that looks for it can find
    out how to pass. Each test has a process and ``limits`` of its own. The outcome is that of the first test that does
    not pass; after one that broke a limit no further one is run. ``packages`` lets the code import what is installed.
    With a ``cache`` equal code is run against equal tests once, also where it draws random numbers.

    Raises VerifierFailed, an OSError, where the sandbox fails: no answer is to blame for that, and a rollout counts it
    as ``infrastructure_failure``. Raises ValueError for tests that are none.

    >>> from flowrl.environments import verify
    >>> verify.unit_tests("print(sum(map(int, input().split())))", [{"input": "1 2", "output": "3"}])
    1.0
    """
    listed = _tests(tests)
    code = code_of(response)
    if problem := _refusal(code):
        return Verdict(0.0, "refused", OUTCOMES, why=problem, total=len(listed))
    limits = limits or Limits()
    if cache is None:
        return _run(code, listed, limits, partial=partial, packages=packages)
    asked = ["unit_tests", _GRADES, sys.version, code, listed, limits.record, partial, packages]
    return cache.graded(asked, lambda: _run(code, listed, limits, partial=partial, packages=packages))


def _run(code: str, listed: Sequence[Test], limits: Limits, *, partial: bool, packages: bool) -> Verdict:
    """Run code against its tests."""
    passed, outcome, why = 0, "passed", ""
    with opened_sandbox(limits, packages=packages) as sandbox:
        for test in listed:
            word = secrets.token_hex(8)
            how, said = _outcome(sandbox.run({**_asked(test), "code": code, "word": word}), test, word)
            passed += how == "passed"
            if how != "passed" and outcome == "passed":
                outcome, why = how, said
            if how in _BROKE.values():
                break
    share = passed / len(listed)
    value = share if partial else float(passed == len(listed))
    return Verdict(value, outcome, OUTCOMES, why=why, passed=passed, total=len(listed))


def _tests(tests: Sequence[Test] | str) -> list[Test]:
    found = json.loads(tests) if isinstance(tests, str) else list(tests)
    if not isinstance(found, list) or not found:
        raise ValueError(f"tests are a list of one or more, not {tests!r}")
    for test in found:
        whole = isinstance(test, str) or (
            isinstance(test, Mapping) and (_texts(test, "input", "output") or ("result" in test and _is_call(test)))
        )
        if not whole:
            raise ValueError(f"{test!r} is no test: write input and output; call, arguments and result; or code")
    return found


def _texts(test: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(test.get(name), str) for name in names)


def _is_call(test: Mapping[str, Any]) -> bool:
    return isinstance(test.get("call"), str) and isinstance(test.get("arguments", []), (list, tuple))


def _refusal(code: str) -> str:
    if not code.strip():
        return "there is no code"
    if len(code) > _LONGEST:
        return f"{len(code)} characters of code are more than {_LONGEST}"
    try:
        code.encode()
    except UnicodeEncodeError:
        return "the code has half of a surrogate pair"
    return "the code has a NUL" if "\0" in code else ""


def _asked(test: Test) -> dict[str, Any]:
    """A test as the sandbox takes it: without what is expected."""
    if isinstance(test, str):
        return {"kind": "check", "check": test}
    if "call" in test:
        return {"kind": "call", "call": test["call"], "arguments": list(test.get("arguments", []))}
    return {"kind": "print", "input": test["input"]}


def _outcome(found: Mapping[str, Any], test: Test, word: str) -> tuple[str, str]:
    """What became of a test, and what is wrong."""
    if found["broke"]:
        return _BROKE[found["broke"]], f"it broke the limit of {found['broke']}"
    try:
        said = json.loads(found["result"]) if found["result"] else {}
    except (ValueError, RecursionError):  # the code may have written to where results are
        said = {}
    if not isinstance(said, dict):
        said = {}
    if said.get("memory"):
        return "out_of_memory", "it raised MemoryError"
    if "wrong" in said:
        return "failed", str(said["wrong"])
    if said.get("done") == word:
        return _compared(found, said, test)
    if found["signal"]:
        return "crashed", f"signal {found['signal']} ended it"
    return "crashed", str(said.get("error") or "its process ended before the test did")[:2000]


def _compared(found: Mapping[str, Any], said: Mapping[str, Any], test: Test) -> tuple[str, str]:
    if isinstance(test, str):
        return "passed", ""
    if "call" in test:
        given, expected = said.get("value"), test["result"]
        same = is_same(given, expected)
    else:
        given, expected = found["out"], test["output"]
        same = _lines(given) == _lines(expected)
    return ("passed", "") if same else ("failed", f"it gave {given!r:.500}, not {expected!r:.500}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def is_same(given: Any, expected: Any) -> bool:
    """Whether a value that came as JSON is the one that is expected; floats may differ by a billionth part."""
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, (int, float)) and isinstance(expected, (int, float)):
        if isinstance(given, int) and isinstance(expected, int):
            return given == expected
        try:
            return math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-9)
        except OverflowError:
            return False
    if isinstance(expected, (list, tuple)):
        return isinstance(given, list) and len(given) == len(expected) and all(map(is_same, given, expected))
    if isinstance(expected, Mapping):
        names = {str(name): value for name, value in expected.items()}
        return (
            isinstance(given, dict) and given.keys() == names.keys() and all(is_same(given[n], names[n]) for n in names)
        )
    return given == expected
