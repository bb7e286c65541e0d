"""NeMo Gym: what a policy plays with its own resources servers is worth what they say of the same answers."""

from __future__ import annotations

import json
import re
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from adapter_play import played
from real_package import expect_trained, own_python, running, said_by

from flowrl.environments import NeMoGymEnvironment
from flowrl.errors import DataError, WorkerError

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"count": 2}}</tool_call>'
OTHER = '<tool_call>{"name": "verify", "arguments": {}}</tool_call>'
PATHS = {"/seed_session": {}, "/verify": {}, "/add": {}}
STEPS = {"/reset": {}, "/step": {}}


def row(**more):
    return {"responses_create_params": {"input": "count", "tools": [TOOL]}, "first": 1, **more}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of playing some servers of the package, each a process of its own with a Python that it takes."""
    temporary = tmp_path_factory.mktemp("site")
    python = own_python("nemo-gym", temporary, (3, 12), "nemo-gym==0.4.0")
    script = Path(__file__).with_name("serve_nemo_gym.py")
    with ExitStack() as stack:
        names = (
            "example_session_state_mgmt",
            "mcqa",
            "example_multi_turn_gymnasium",
            "blackjack",
            "example_mcp_weather",
        )
        said = {name: stack.enter_context(running(str(python), str(script), name)) for name in names}
        yield said_by("nemo_gym_play.py", temporary, json.dumps({n: each.split(" ", 1) for n, each in said.items()}))


class TestPlayed:
    pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]  # noqa: RUF012

    def test_a_session_counts_what_its_own_calls_added(self, found):
        rows = found["example_session_state_mgmt"]["rows"]
        assert len(rows) == 128 and found["example_session_state_mgmt"]["delivered"] == 1
        for row in rows:
            entry = json.loads(row["task"]["entry"])
            taken = row["texts"][:-1] if row["outcome"] == "finished" else row["texts"]  # the last one calls nothing
            added = sum(int(count) for text in taken for count in re.findall(r'"count": (\d)}}', text))
            assert row["reward"] == float(entry["initial_count"] + added == entry["expected_count"])
        assert len({row["reward"] for row in rows}) == 2
        assert {row["outcome"] for row in rows} <= {"finished", "truncated_turns", "truncated_tokens"}

    def test_an_answer_is_verified(self, found):
        for row in found["mcqa"]["rows"]:
            entry = json.loads(row["task"]["entry"])
            assert row["reward"] == float(row["texts"] == [f"\\boxed{{{entry['expected_answer']}}}"])
        assert len({row["reward"] for row in found["mcqa"]["rows"]}) == 2

    def test_steps_go_on_until_the_server_says_so(self, found):
        for row in found["example_multi_turn_gymnasium"]["rows"]:
            entry = json.loads(row["task"]["entry"])
            assert len(row["texts"]) == len(entry["follow_ups"]) + 1 and row["reason"] == "done"
            assert row["reward"] == float(entry["expected_answer"] in row["texts"][-1])
        assert len({row["reward"] for row in found["example_multi_turn_gymnasium"]["rows"]}) == 2

    def test_a_server_that_speaks_first_is_heard(self, found):
        rows = found["blackjack"]["rows"]
        assert {row["reward"] for row in rows} > {1.0, -1.0} or {row["reward"] for row in rows} == {1.0, -1.0}
        assert {row["outcome"] for row in rows} <= {"finished", "truncated_turns", "truncated_tokens"}

    def test_tools_over_mcp_are_called(self, found):
        rows = found["example_mcp_weather"]["rows"]
        called = [row for row in rows if len(row["texts"]) > 1]
        assert called and all("get_weather" in row["texts"][0] for row in called)
        for row in rows:
            asked_for = '"Paris"' in row["task"]["entry"]
            assert row["scores"]["tool_call_seen"] == float(row in called and asked_for)
        assert any(row["scores"]["tool_call_seen"] for row in rows)
        assert not any("failure" in row["outcome"] for row in rows)

    def test_the_program_of_the_page_trains(self, found):
        expect_trained(found["page"])


@contextmanager
def served(answers, paths=PATHS):
    """The address of a server, and what it was asked; ``answers`` maps a path to what it gives for (cookie, body)."""
    asked: list[tuple[str, str, dict]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.give(200, {"paths": paths})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            cookie = self.headers.get("Cookie", "")
            asked.append((self.path, cookie, body))
            answer = answers[self.path]
            found = answer(cookie, body) if callable(answer) else answer
            self.give(*(found if isinstance(found, tuple) else (200, found)))

        def give(self, status, found):
            said = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            if self.path == "/seed_session":
                self.send_header("Set-Cookie", f"session=s{len(asked)}==; path=/; httponly")
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *given):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def graded(cookie, body):
    """Verifies by the calls in the response, and tells more numbers than the reward."""
    calls = [item for item in body["response"]["output"] if item["type"] == "function_call"]
    return {**body, "reward": 0.5 * len(calls), "used": len(calls), "calls": 99, "right": bool(calls), "said": "x"}


GOOD = {"/seed_session": {}, "/add": lambda cookie, body: {"now": body["count"]}, "/verify": graded}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"

    def write(*rows):
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
        return path

    return write


def plays(url, path, words=("done", CALL), tasks=2, n=4, **how):
    return played(NeMoGymEnvironment(url, data=path), list(words), tasks=tasks, n=n, **how)["rows"]


class TestTools:
    def test_calls_go_to_the_server_and_the_reward_is_what_it_verifies(self, data):
        with served(GOOD) as (url, asked):
            rows = plays(url, data(row(), row(first=2)), turns=6)
        assert {r["outcome"] for r in rows} <= {"finished", "truncated_turns", "truncated_tokens"}
        for r in rows:
            calls = sum(text.count(CALL) for text in r["texts"])
            assert r["scores"]["calls"] == len(r["texts"]) and r["scores"]["forks"] == 0
            assert r["scores"]["used"] == calls and r["scores"]["right"] == bool(calls)
            assert r["reward"] == pytest.approx(0.5 * calls)
        assert len({r["reward"] for r in rows}) > 1
        added = [body for path, _, body in asked if path == "/add"]
        assert added and all(body == {"count": 2} for body in added)

    def test_a_session_keeps_its_cookie(self, data):
        with served(GOOD) as (url, asked):
            plays(url, data(row()), tasks=1, n=3, turns=4)
        seeds = [cookie for path, cookie, _ in asked if path == "/seed_session"]
        ends = [cookie for path, cookie, _ in asked if path == "/verify"]
        assert seeds == [""] * 3 and len(set(ends)) == 3 and all(cookie.endswith("==") for cookie in ends)
        assert {cookie for path, cookie, _ in asked if path == "/add"} <= set(ends)

    def test_a_path_that_was_not_offered_is_never_called(self, data):
        with served(GOOD) as (url, asked):
            rows = plays(url, data(row()), words=("done", OTHER), tasks=1, n=8, turns=4)
        assert any(OTHER in text for r in rows for text in r["texts"])
        assert all("response" in body for path, _, body in asked if path == "/verify")

    def test_an_error_of_a_tool_is_told_to_the_policy(self, data):
        with served({**GOOD, "/add": (422, {"detail": "no"})}) as (url, asked):
            rows = plays(url, data(row()), tasks=1, n=8, turns=4)
        told = [i["output"] for p, _, b in asked if p == "/verify" for i in b["response"]["output"] if "output" in i]
        assert told and all("no" in each for each in told)
        assert not any("failure" in r["outcome"] for r in rows)

    def test_tools_over_mcp_are_those_of_the_session(self, data):
        def mcp(cookie, body):
            if body["method"] == "tools/list":
                return {"result": {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]}}
            said = f"{body['params']['arguments']['count']} more"
            return {"result": {"content": [{"type": "text", "text": said}]}}

        seed = {"mcp": {"url_path": "/mcp", "headers": {"X-Token": "t"}}}
        with served({**GOOD, "/seed_session": seed, "/mcp": mcp}, {"/seed_session": {}, "/verify": {}}) as (url, asked):
            plays(url, data({"responses_create_params": {"input": "count", "tools": []}}), tasks=1, n=8, turns=3)
        told = [i["output"] for p, _, b in asked if p == "/verify" for i in b["response"]["output"] if "output" in i]
        assert told and set(told) == {"2 more"}


class TestSteps:
    def test_rewards_of_steps_add_up_until_it_is_over(self, data):
        left: dict[str, int] = {}

        def step(cookie, body):
            left[cookie] = left.get(cookie, 0) + 1
            return {"observation": "on", "reward": 0.25, "terminated": left[cookie] == 3, "info": {"left": 3}}

        answers = {"/reset": {"observation": "go"}, "/step": step}
        with served(answers, STEPS) as (url, asked):
            rows = plays(url, data({"responses_create_params": {"input": []}}), words=("a", "b"), tasks=1, n=1, turns=9)
        assert [r["reward"] for r in rows] == [0.75] and rows[0]["reason"] == "done"
        assert rows[0]["scores"]["left"] == 3 and len(rows[0]["texts"]) == 3
        assert len([p for p, _, _ in asked if p == "/step"]) == 3

    def test_a_limit_ends_an_episode_with_what_it_has(self, data):
        answers = {"/reset": {}, "/step": {"observation": "on", "reward": 0.25}}
        with served(answers, STEPS) as (url, _):
            rows = plays(url, data({"responses_create_params": {"input": "x"}}), words=("a",), tasks=1, n=2, turns=2)
        assert {(r["outcome"], r["reward"]) for r in rows} == {("truncated_turns", 0.5)}


class TestFailures:
    @pytest.mark.parametrize(
        ("answers", "outcome"),
        [
            ({"/seed_session": (500, {"detail": "x"})}, "environment_failure"),
            ({"/seed_session": (422, {"detail": "x"})}, "environment_failure"),
            ({"/seed_session": (503, b"")}, "infrastructure_failure"),
            ({"/seed_session": b"no JSON"}, "environment_failure"),
            ({"/seed_session": [1]}, "environment_failure"),
            ({"/verify": (500, b"x")}, "grader_failure"),
            ({"/verify": (503, b"x")}, "infrastructure_failure"),
            ({"/verify": {}}, "grader_failure"),
            ({"/verify": {"reward": None}}, "grader_failure"),
            ({"/verify": {"reward": "1"}}, "grader_failure"),
            ({"/verify": b'{"reward": NaN}'}, "grader_failure"),
        ],
    )
    def test_what_fails_is_an_outcome_and_no_reward(self, data, answers, outcome):
        with served({**GOOD, **answers}) as (url, _):
            rows = plays(url, data(row()), tasks=1, n=2, turns=2)
        assert {r["outcome"] for r in rows} == {outcome}
        assert all(r["reward"] != r["reward"] for r in rows)

    def test_a_server_that_went_away_is_a_failure_of_the_machine(self, data):
        with served(GOOD) as (url, _):
            env = NeMoGymEnvironment(url, data=data(row()))
            list(env.rows())
        rows = played(env, ["done"], tasks=1, n=2)["rows"]
        assert {r["outcome"] for r in rows} == {"infrastructure_failure"}

    def test_a_tool_that_hangs_ends_with_the_seconds_of_the_rollout_and_is_verified(self, data):
        hangs = threading.Event()
        with served({**GOOD, "/add": lambda cookie, body: hangs.wait() and {}}) as (url, _):
            rows = plays(url, data(row()), words=(CALL,), tasks=1, n=8, turns=99, max_tokens=1, seconds=2.0)
            hangs.set()
        hung = [r for r in rows if r["texts"] == [CALL]]
        assert hung and {(r["outcome"], r["reward"]) for r in hung} == {("truncated_wall", 0.5)}
        assert all(r["outcome"] == "finished" for r in rows if r not in hung)


class TestRefused:
    def test_no_address(self):
        with pytest.raises(WorkerError, match="no address of a server"):
            list(NeMoGymEnvironment("127.0.0.1:80").rows())

    def test_nobody_there(self):
        with pytest.raises(WorkerError, match="no server answers"):
            list(NeMoGymEnvironment("http://127.0.0.1:9").rows())

    def test_another_server(self, data):
        with served(GOOD, {"/chat": {}}) as (url, _), pytest.raises(WorkerError, match="neither /seed_session"):
            list(NeMoGymEnvironment(url, data=data(row())).rows())

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("{", "JSONDecodeError"),
            ("[]", "TypeError"),
            ("{}", "KeyError"),
            (
                json.dumps(
                    {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}}
                ),
                "text alone",
            ),
            (
                json.dumps({"responses_create_params": {"input": "x", "tools": [{**TOOL, "name": "gone"}]}}),
                "no tool 'gone'",
            ),
        ],
    )
    def test_a_row_that_cannot_be_played_is_named(self, data, line, why):
        with served(GOOD) as (url, _):
            path = data(row(), line)
            with pytest.raises(DataError, match="line 2 of") as refused:
                list(NeMoGymEnvironment(url, data=path).rows())
        assert why in str(refused.value)

    def test_a_file_that_is_not_there(self, tmp_path):
        with served(GOOD) as (url, _), pytest.raises(DataError, match="cannot be read"):
            list(NeMoGymEnvironment(url, data=tmp_path / "no.jsonl").rows())

    @pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
    def test_what_ends_a_line_in_a_text_ends_no_row(self, data, end):
        with served(GOOD) as (url, _):
            line = json.dumps({"responses_create_params": {"input": f"a{end}b"}}, ensure_ascii=False)
            first, second = NeMoGymEnvironment(url, data=data(line, line)).rows()
        assert first["prompt"] == second["prompt"] == [{"role": "user", "content": f"a{end}b"}]

    def test_as_many_tasks_as_are_asked_for(self, data):
        with served(GOOD) as (url, _):
            env = NeMoGymEnvironment(url, data=data(row(), "", row(), row()), tasks=2)
            assert [r["task"] for r in env.rows()] == [0, 1]
