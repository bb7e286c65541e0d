"""Mathematics is compared by value, in processes that end when an answer takes too long."""

import os
import signal
import threading

import pytest

import flowrl as fl
from flowrl.environments import verify
from flowrl.environments.verify import mathematics

pytest.importorskip("math_verify", reason="it needs the package math-verify")


@pytest.mark.parametrize(
    ("response", "answer", "outcome"),
    [
        (r"So it is \boxed{\frac{2}{4}}.", "0.5", "right"),
        (r"$x = 1 + y$", "$y+1$", "right"),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", "right"),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", "right"),
        ("<answer>12</answer> since $7$ is too small", "12", "right"),
        ("<answer>12</answer> since $7$ is too small", "7", "wrong"),
        (r"<answer>\pi + 1</answer>", r"1 + \pi", "right"),
        (r"<answer>So it is $\pi$.</answer>", r"\pi", "right"),
        (r"<answer>7</answer> \boxed{8}", "8", "right"),
        (r"$7$ #### 2\sqrt{2}", r"\sqrt{8}", "right"),
        (r"#### 2\sqrt{2}", "2", "wrong"),
        (r"#### 2\sqrt{2}\text{ cm}", r"\sqrt{8}", "right"),
        ("#### x+1", "$1 + x$", "right"),
        ("#### The answer is 5 apples.", "5", "right"),
        ("$7$ ####", "7", "no_answer"),
        (r"\boxed{3}", "4", "wrong"),
        ("I do not know.", "4", "no_answer"),
        ("", "4", "no_answer"),
    ],
)
def test_answers_are_compared_by_value(response, answer, outcome):
    found = verify.symbolic(response, answer, seconds=30)
    assert (found.outcome, float(found)) == (outcome, float(outcome == "right"))


def test_an_answer_that_hangs_is_ended_and_others_go_on():
    found = verify.symbolic(r"\boxed{9^{9^{9^{9}}}}", "4", seconds=1)
    assert found == 0 and found.outcome in ("timed_out", "out_of_memory", "crashed", "wrong")
    slow = r"\boxed{" + "+".join(rf"\sqrt[{i}]{{{i}^{{{i}}}!}}" for i in range(3, 60)) + "}"
    assert verify.symbolic(slow, "4", seconds=0.05).outcome == "timed_out"
    assert verify.symbolic(r"\boxed{4}", "4", seconds=30) == 1


def test_what_is_expected_has_to_be_mathematics():
    with pytest.raises(ValueError, match="is no mathematics that math-verify can read"):
        verify.symbolic(r"\boxed{4}", "", seconds=30)


def test_threads_share_the_processes():
    found = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(verify.symbolic(rf"\boxed{{{i}}}", str(i), seconds=30)))
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == [1.0] * 12


def test_a_process_that_is_killed_from_outside_is_no_reward(monkeypatch):
    made = mathematics._Process()
    os.kill(made._process.pid, signal.SIGKILL)
    with pytest.raises(verify.VerifierFailed, match="has ended"):
        made.ask({"response": "1", "answer": "$1$", "seconds": 5})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(mathematics, "find_spec", lambda name: None)
    with pytest.raises(fl.errors.WorkerError, match="pip install math-verify"):
        verify.symbolic("1", "1")
