"""Rewards of a service that fails, hangs and recovers: asked again, marked, left out, counted, told of once."""

import json
import runpy
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.errors import RewardError
from flowrl.workers.user_code.failed_rewards import Policy, ask_again

TASK = runpy.run_path(str(Path(__file__).parents[3] / "algorithms" / "tasks" / "arithmetic.py"))


class Service(BaseHTTPRequestHandler):
    """Answers ``/text`` with its length; what it does instead is said by ``Service.plan``."""

    plan = staticmethod(lambda path, count: "answer")
    counts: ClassVar[dict[str, int]] = {}
    lock = threading.Lock()
    most = now = 0
    wait = threading.Event()

    def do_GET(self):
        cls = Service
        with cls.lock:
            cls.counts[self.path] = count = cls.counts.get(self.path, 0) + 1
            cls.now += 1
            cls.most = max(cls.most, cls.now)
        try:
            what = cls.plan(self.path, count)
            if what == "hang":
                cls.wait.wait(5)
            self.send_response(200 if what != "fail" else 503)
            self.end_headers()
            if what != "fail":
                self.wfile.write(json.dumps(float(len(self.path))).encode())
        except BrokenPipeError:
            pass
        finally:
            with cls.lock:
                cls.now -= 1

    def log_message(self, *said):
        pass


@pytest.fixture
def service():
    Service.counts, Service.most, Service.now = {}, 0, 0
    Service.wait = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Service.wait.set()
    server.shutdown()
    server.server_close()
    thread.join(5)


def asking(url):
    def ask(key: str) -> float:
        with urllib.request.urlopen(f"{url}/{key}", timeout=5) as answer:
            return json.loads(answer.read())

    return ask


def rows(count):
    ids = fl.Column.of([[1]] * count, dim="response", dtype="i32")
    keys = fl.Column.of([f"row{i:02}" for i in range(count)], dtype="any")
    return fl.Batch.of(count, prompt_ids=ids, response_ids=ids, key=keys)


def scored(url, count=16, **how):
    reward = fl.open(fl.FunctionReward(asking(url), tokenizer=TASK["build_tokenizer"], **how), name="reward")
    return reward.score(rows(count))


def test_rows_that_fail_are_asked_again_and_only_those(service):
    Service.plan = staticmethod(lambda path, count: "fail" if path == "/row03" and count < 3 else "answer")
    assert scored(service, retries=2, backoff=0.01).rewards.to_list() == [6.0] * 16
    assert Service.counts == {f"/row{i:02}": 3 if i == 3 else 1 for i in range(16)}


def test_no_more_calls_are_under_way_than_allowed(service):
    Service.plan = staticmethod(lambda path, count: "answer")
    scored(service, concurrency=3)
    assert 1 <= Service.most <= 3


def test_what_fails_or_hangs_to_the_end_is_marked_and_told_of_once(service):
    wrong = {"/row01": "fail", "/row05": "hang", "/row06": "fail"}
    Service.plan = staticmethod(lambda path, count: wrong.get(path, "answer"))
    with pytest.warns(UserWarning, match="reward.score: ask failed for 3 of 16 rows: ") as told:
        batch = scored(service, retries=1, backoff=0.01, timeout=0.3, on_error="mark")
    [warning] = [w for w in told if issubclass(w.category, UserWarning)]
    assert "HTTPError: HTTP Error 503" in str(warning.message) and "it took longer than 0.3 s (row 5)" in str(
        warning.message
    )
    assert [i for i, f in enumerate(batch.failed.to_list()) if f] == [1, 5, 6]
    kept = batch.filter(~batch.failed)
    assert kept.rewards.to_list() == [6.0] * 13


@pytest.mark.parametrize("on_error", [0.0, "mark"])
def test_a_service_that_is_down_stops_the_run_with_one_error(service, on_error):
    Service.plan = staticmethod(lambda path, count: "fail")
    with pytest.raises(RewardError) as error:
        scored(service, on_error=on_error)
    assert error.value.what.startswith(
        "reward.score: ask failed for 16 of 16 rows; max_failed is 0.5. First row 0: HTTPError: HTTP Error 503"
    )
    assert (
        error.value.fix
        == "See that the service runs, and go on with --resume; or give it retries=3, or a longer timeout=."
    )


def test_the_pauses_double_up_to_half_a_minute():
    slept = []
    outcomes = ask_again(lambda numbers: [ValueError()] * len(numbers), 2, Policy("mark", 7, 1.0), slept.append)
    assert slept == [1, 2, 4, 8, 16, 30, 30] and len(outcomes) == 2
    assert ask_again(lambda numbers: [1.0 for _ in numbers], 2, Policy("mark", 7, 1.0), slept.append) == [1.0, 1.0]
    assert len(slept) == 7


def constant(response: str) -> float:
    return 1.0


PROMPTS = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=2)


def make_flow(fn, *, filtered):
    flow = fl.Flow("f")
    actor = flow.worker(fl.Actor, model=TASK["MODEL"], max_tokens=2, name="actor")
    reward = flow.worker(fl.FunctionReward, fn, on_error="mark", name="reward")

    @flow.program
    def f(steps: int = 2):
        for step, batch in flow.steps(PROMPTS, steps):
            batch = reward.score(actor.generate(batch, n=4))
            if filtered:
                batch = batch.filter(~batch.failed)
            batch = rl.group_advantages(batch)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), kept=batch.count())

    return flow


def test_check_asks_for_the_line_that_leaves_failed_rows_out():
    [error] = make_flow(constant, filtered=False).check().errors
    assert (
        error.what
        == "reward.score marks rows that failed in 'failed', and nothing leaves them out: their other fields are nan."
    )
    assert error.fix == "Leave them out after this line: batch = batch.filter(~batch.failed)."
    assert make_flow(constant, filtered=True).check().errors == ()


HEEDED = {
    "filtered": lambda batch: batch.filter(~batch.failed),
    "filtered under another name": lambda batch: batch.rename(failed="broken").filter(~batch.failed),
    "a column of an op": lambda batch: batch.drop("rewards").with_columns({"rewards": batch.rewards * ~batch.failed}),
    "a condition": lambda batch: batch if float(batch.failed.mean()) > 0.5 else batch.filter(batch.rewards > 0),
}
IGNORED = {
    "logged": lambda batch: (batch, batch.failed.mean())[0],
    "the share that is left, logged": lambda batch: (batch, 1 - (~batch.failed).mean())[0],
    "renamed": lambda batch: batch.rename(failed="broken"),
}


@pytest.mark.parametrize("way", [*HEEDED, *IGNORED])
@pytest.mark.parametrize("name", ["failed", "no_answer"])
def test_a_mark_that_reaches_only_what_is_logged_leaves_no_row_out(way, name):
    flow = fl.Flow("f")
    actor = flow.worker(fl.Actor, model=TASK["MODEL"], max_tokens=2, name="actor")
    reward = flow.worker(fl.FunctionReward, constant, on_error="mark", name="reward")

    @flow.program
    def f(steps: int = 2):
        for step, batch in flow.steps(PROMPTS, steps):
            batch = reward.score(actor.generate(batch, n=4), into={} if name == "failed" else {"failed": name})
            batch = batch if name == "failed" else batch.rename(no_answer="failed")
            batch = rl.group_advantages({**HEEDED, **IGNORED}[way](batch))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    errors = flow.check().errors
    assert [e.what for e in errors] == [
        f"reward.score marks rows that failed in '{name}', and nothing leaves them out: their other fields are nan."
    ] * (way in IGNORED)


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_groups_with_a_missing_row_are_trained_on_the_others(tmp_path, runtime):
    seen = []

    def third_fails(response: str) -> float:
        seen.append(response)
        if len(seen) % 4 == 3:
            raise ConnectionError("no answer")
        return float(len(seen) % 2)

    outcome = make_flow(third_fails, filtered=True).run(out=tmp_path, runtime=runtime, quiet=True, save_models=False)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert outcome.status == "done" and [line["kept"] for line in lines] == [6, 6]
    assert all(line["loss"] == line["loss"] for line in lines), "no loss is nan"


def test_no_number_of_retries_is_too_many():
    """The seconds between them are bounded before they are a number that no float holds."""
    slept = []
    policy = Policy("mark", retries=1100, backoff=1.0, max_failed=1.0)
    found = ask_again(lambda rows: [ValueError("down")] * len(rows), 1, policy, slept.append)
    assert isinstance(found[0], ValueError) and len(slept) == 1100
    assert slept[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0] and set(slept[5:]) == {30.0}
