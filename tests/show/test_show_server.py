"""The server of the page: who gets an answer, what it may be asked, and that strange runs and questions are answered."""

from __future__ import annotations

import http.client
import json
import os
import sqlite3
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from show_runs import HOSTILE, LABEL, hostile_folder, lines, row, run_folder

from flowrl.cli import main
from flowrl.errors import UsageError
from flowrl.show.answers import QUESTIONS, Answers
from flowrl.show.find_runs import find_runs
from flowrl.show.follow_runs import Follower
from flowrl.show.server import PageServer, open_server


class Served:
    """A page that is served, asked as a browser asks."""

    def __init__(self, follower: Follower) -> None:
        self.follower, self.answers = follower, Answers(follower)
        self.server = open_server(self.answers, 0)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def get(self, path: str, *, token: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=60)
        headers = {"X-Flowrl-Token": self.server.token if token is None else token, **headers}
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found

    def ask(self, what: str, **words: Any) -> Any:
        status, _, body = self.get(f"/api/{what}?{urllib.parse.urlencode(words, doseq=True, errors='replace')}")
        assert status == 200, body
        return json.loads(body)

    def id(self, label: str) -> str:
        return next(run["id"] for run in self.ask("runs")["runs"] if run["label"] == label)

    def take_in(self) -> None:
        while self.follower.look():
            pass

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        self.follower.stop()
        self.answers.drawings.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    opened: list[Served] = []

    def begin(*folders: Path) -> Served:
        cache = tmp_path / "cache"
        cache.mkdir(exist_ok=True)
        served = Served(Follower(folders, cache))
        opened.append(served)
        served.take_in()
        return served

    yield begin
    for served in opened:
        served.close()


def test_a_run_is_told_of(serve: Any, tmp_path: Path) -> None:
    served = serve(run_folder(tmp_path / "grpo"))
    (short,) = served.ask("runs")["runs"]
    assert (short["label"], short["status"], short["lines"], short["rows"]) == ("grpo", "done", 3, 12)
    assert (short["alarms"], short["indexed"], short["reward"]) == (1, 1.0, 0.2)
    run = short["id"]
    assert served.ask("curves", run=run, program="grpo", name=["reward", "none"])["curves"]["reward"][0]["last"] == 0.2
    first = served.ask("rows", run=run, program="grpo", order="worst")["rows"][0]
    assert (first["prompt_text"], first["response"]) == ("0+1=", "says 0")
    whole = served.ask("row", run=run, n=first["n"])
    assert [part["who"] for part in whole["conversation"]] == ["prompt", "model"] and len(whole["others"]) == 2
    assert served.ask("tokens", run=run, n=first["n"])["count"] == 7
    group = served.ask("group", run=run, program="grpo", step=0, prompt="0")["rows"]
    assert [each["reward"] for each in group] == [0.0, 1.0] and group[0]["conversation"][1]["text"] == "says 0"
    prompts = served.ask("prompts", run=run, program="grpo")["prompts"]
    assert [(each["step"], each["text"], each["mean"]) for each in prompts[:2]] == [(2, "5+1=", 0.5), (2, "4+1=", 0.5)]
    assert served.ask("prompts", run=run, program="grpo", silent=1)["prompts"] == []
    assert served.ask("ledger", run=run, program="grpo")["lags"] == [[0, 3], [1, 3]]
    assert served.ask("events", run=run)["kinds"] == [["alarm", 1]]
    found = served.ask("lanes", run=run)
    assert len([bar for bar in found["bars"] if bar["rank"] < 0]) == 6 and set(found["memory"]) == {"driver", "rank 0"}
    assert found["waits"][0]["pool"] and found["programs"] == [{"program": "grpo", "first": 0, "last": 2}]
    near = served.ask("lanes", run=run, program="grpo", step=1)
    assert {bar["step"] for bar in near["bars"]} == {1} and near["from"] < 2.0 < near["to"]
    scored = next(bar for bar in near["bars"] if bar["node"] == "reward.score")
    told = served.ask("chain", run=run, at=scored["at"])["chain"]
    assert [bar["node"] for bar in told[:2]] == ["reward.score", "actor.generate"]
    assert served.ask("about", run=run)["record"]["script"] == "grpo.py"


def test_nobody_without_the_token_is_told_anything(serve: Any, tmp_path: Path) -> None:
    served = serve(run_folder(tmp_path / "grpo"))
    for token in ("", "wrong", "\u00e9"):
        for question in QUESTIONS:
            status, _, body = served.get(f"/api/{question}", token=token)
            assert status == 403 and b"grpo" not in body
    assert served.get(f"/api/runs?token={served.server.token}", token="")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8765", 200),
        ("localhost:8765", 200),
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("attacker.example:8765", 403),
        ("127.0.0.1.attacker.example", 403),
        ("localhost:8765@attacker.example", 403),
        ("", 403),
    ],
)
def test_a_page_of_another_name_gets_no_answer(serve: Any, tmp_path: Path, host: str, status: int) -> None:
    """DNS rebinding: a stranger's page may have its name point here, but its browser then says that name."""
    served = serve(run_folder(tmp_path / "grpo"))
    assert served.get("/api/runs", Host=host)[0] == status
    assert served.get("/", Host=host)[0] == status


def test_only_loopback_is_listened_on(serve: Any, tmp_path: Path) -> None:
    served = serve(run_folder(tmp_path / "grpo"))
    assert served.server.server_address[0] == "127.0.0.1"


def test_every_answer_forbids_foreign_scripts(serve: Any, tmp_path: Path) -> None:
    served = serve(run_folder(tmp_path / "grpo"))
    for path in ("/", "/page/page.js", "/page/graph.css", "/api/runs", "/nothing"):
        _, headers, _ = served.get(path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "/page/../server.py",
        "/page/%2e%2e/server.py",
        "/page//etc/passwd",
        "/page/uPlot.LICENSE",
        "/etc/passwd",
        "/page/",
    ],
)
def test_only_files_of_the_page_are_given(serve: Any, tmp_path: Path, path: str) -> None:
    assert serve(run_folder(tmp_path / "grpo")).get(path)[0] == 404


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ("names?run=nothing", 404),
        ("nothing", 404),
        ("row?run={run}&n=999", 404),
        ("row?run={run}", 404),
        ("rows?run={run}&program=grpo&order=sideways", 400),
        ("rows?run={run}&program=grpo&first=soon", 400),
        ("rows?run={run}&program=grpo&least=nan", 400),
        ("rows?run={run}&program=grpo&after=1&after=1e400", 400),
        ("rows?run={run}&program=grpo&min_tokens=1.5", 400),
        ("rows?run={run}&program=grpo&max_tokens=-1&min_tokens=0", 400),
        ("rows?run={run}&program=grpo&is.answer=7%27%20OR%201=1", 400),
        ("rows?run={run}&program=grpo&is.%00=%00", 400),
        ("rows?run={run}&program=grpo&lenght=3", 400),
        ("rows?run={run}&program=grpo&" + "is.answer=1&" * 150, 400),
        ("rows?run={run}&program=grpo&is.answer=1&is.answer=2", 200),
        ("prompts?run={run}&program=grpo&is.answer=x", 400),
        ("prompts?run={run}&program=grpo&page=-7", 200),
        ("prompts?run={run}&program=grpo&order=longest", 400),
        ("prompts?run={run}&program=grpo&order=worst", 200),
        ("prompts?run={run}&program=grpo&text=%22", 200),
        ("event?run={run}&at=7&size=-1", 404),
        ("lanes?run={run}&from=5&to=-5", 200),
        ("lanes?run={run}&program=grpo&step=99", 404),
        ("chain?run={run}&at=7", 200),
        ("rows?run={run}&program=nobody", 200),
        ("rows?run={run}&program=grpo&text=" + "%22" * 99, 200),
        ("rows?run={run}&program=grpo&text=AND+NEAR(%00", 200),
    ],
)
def test_strange_questions_have_an_answer(serve: Any, tmp_path: Path, question: str, status: int) -> None:
    served = serve(run_folder(tmp_path / "grpo"))
    assert served.get(f"/api/{question.format(run=served.id('grpo'))}")[0] == status
    assert served.get("/api/runs")[0] == 200


def test_rows_are_filtered_and_wrong_filters_are_told_in_words(serve: Any, tmp_path: Path) -> None:
    served = serve(run_folder(tmp_path / "grpo", labels=True))
    here = {"run": served.id("grpo"), "program": "grpo"}
    found = served.ask("rows", **here, **{"is.source": "code", "is.finish_reason": ["length", "stop"]}, order="oldest")
    assert found["count"] == 6 and [each["key"] for each in found["rows"]][:2] == ["[1, 0]", "[1, 1]"]
    assert found["labels"]["finish_reason"] == [["stop", 9], ["length", 3]]
    assert found["labels"]["source"] == [["code", 6], ["math", 6]] and "prompt" not in found["labels"]
    assert served.ask("rows", **here, min_tokens=4)["count"] == 0
    prompts = served.ask("prompts", **here, **{"is.finish_reason": "length"}, first=1, text="says")["prompts"]
    assert [(each["step"], each["prompt"], each["rows"]) for each in prompts] == [(2, "5", 2), (1, "3", 2)]
    address = urllib.parse.urlencode({**here, "is.finish_reason": "lenght"})
    status, _, body = served.get(f"/api/rows?{address}")
    said = json.loads(body)["error"]
    assert (status, said) == (400, "No row has 'lenght' as its finish_reason; there are stop, length.")


def test_how_much_is_indexed_is_told_while_it_grows(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.show.index_run.PORTION_BYTES", 4000)
    run = run_folder(tmp_path / "grpo", steps=0)
    served = serve(run)
    lines(run, "trajectories", *(row(step, step, 0) for step in range(100)))
    seen = []
    while served.follower.look():
        (short,) = served.ask("runs")["runs"]
        seen.append((short["rows"], short["rows_about"]))
    assert (0, None) in seen, "nobody knows how many there are before the first ones are read"
    assert len(seen) > 3 and [rows for rows, _ in seen] == sorted(rows for rows, _ in seen)
    assert all(90 < about < 110 and rows <= about for rows, about in seen if rows), seen
    (short,) = served.ask("runs")["runs"]
    assert (short["rows"], short["rows_about"], short["indexed"]) == (100, 100, 1.0)


def test_a_live_run_is_followed(serve: Any, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "grpo", status="running")
    served = serve(run)
    before = served.ask("runs")["runs"][0]
    lines(run, "metrics", {"program": "grpo", "step": 3, "reward": 0.7})
    lines(run, "trajectories", row(3, 6, 0))
    with (run / "trajectories.jsonl").open("a") as file:
        file.write('{"program": "grpo", "st')
    served.take_in()
    after = served.ask("runs")["runs"][0]
    assert (after["lines"], after["rows"], after["reward"], after["indexed"]) == (4, 13, 0.7, 1.0)
    assert before["revision"] != after["revision"]


def test_two_runs_of_one_name_are_told_apart(serve: Any, tmp_path: Path) -> None:
    for sweep in ("a", "b"):
        run_folder(tmp_path / sweep / "grpo")
    assert sorted(run["label"] for run in serve(tmp_path).ask("runs")["runs"]) == ["a/grpo", "b/grpo"]
    labels = [run.label for run in find_runs([tmp_path / "a", tmp_path / "b"])]
    assert len(set(labels)) == 2 and all(label.endswith("grpo") for label in labels)
    assert len(find_runs([tmp_path, tmp_path / "a", tmp_path / "a" / "grpo"])) == 2, "each once"


def test_a_run_that_begins_later_comes_to_the_page(serve: Any, tmp_path: Path) -> None:
    served = serve(run_folder(tmp_path / "runs" / "first").parent)
    run_folder(tmp_path / "runs" / "second")
    served.follower.find_new()
    served.take_in()
    assert [run["lines"] for run in served.ask("runs")["runs"]] == [3, 3]


def test_there_may_be_more_runs_than_files_that_can_be_open(serve: Any, tmp_path: Path) -> None:
    for name in range(20):
        run_folder(tmp_path / "runs" / str(name), steps=1)
    before = len(os.listdir("/proc/self/fd"))
    served = serve(tmp_path / "runs")
    assert len(os.listdir("/proc/self/fd")) < before + 10
    assert [run["lines"] for run in served.ask("runs")["runs"]] == [1] * 20


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), sqlite3.OperationalError("disk is full")])
def test_a_run_whose_index_cannot_be_made_is_tried_again(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    served = serve(run_folder(tmp_path / "runs" / "first").parent)
    run_folder(tmp_path / "runs" / "second")

    def fails(*words: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("flowrl.show.follow_runs.Store", fails)
        served.follower.find_new()
        assert len(served.follower.runs) == 1
        assert main(["show", str(tmp_path / "runs"), "--no-browser"]) == 2
        assert f"The index of a run cannot be made: {error}." in capsys.readouterr().err
    served.follower.find_new()
    assert len(served.follower.runs) == 2


def test_an_index_that_is_damaged_meanwhile_is_made_anew(serve: Any, tmp_path: Path) -> None:
    served = serve(run_folder(tmp_path / "grpo"))
    (run,) = served.follower.runs.values()
    whole = run.store.path.read_bytes()
    run.store.path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))
    status, _, body = served.get("/api/runs")
    assert status == 503 and b"malformed" in body
    served.take_in()
    assert served.ask("runs")["runs"][0]["lines"] == 3


def test_runs_of_which_little_is_there(serve: Any, tmp_path: Path) -> None:
    """One that has only begun, one whose record is damaged, one of an older flowrl, one whose files are cut off."""
    run_folder(tmp_path / "begun", steps=0, status="running")
    run_folder(tmp_path / "damaged")
    (tmp_path / "damaged" / "run.json").write_text("{")
    old = run_folder(tmp_path / "old", steps=0)
    lines(old, "metrics", {"program": "grpo", "step": 0, "reward": 1})
    lines(old, "timeline", {"program": "grpo", "step": 0, "node": "actor.update", "start": 1.0, "end": 2.0})
    lines(old, "trajectories", {"program": "grpo", "step": 0, "key": "0/1", "tokens": [1, 2], "rewards": 0.5})
    for name in ("traffic", "ledger", "events"):
        (old / f"{name}.jsonl").unlink(missing_ok=True)
    torn = run_folder(tmp_path / "torn")
    for path in torn.glob("*.jsonl"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    served = serve(tmp_path)
    runs = {run["label"]: run for run in served.ask("runs")["runs"]}
    assert [runs[label]["lines"] for label in ("begun", "damaged", "old", "torn")] == [0, 3, 1, 1]
    assert "is no JSON" in runs["damaged"]["note"] and runs["old"]["rows"] == 1
    for run in runs.values():
        for question in ("about", "names", "lanes", "events"):
            served.ask(question, run=run["id"])
        served.ask("curves", run=run["id"], program="grpo", name="reward")
        for question in ("rows", "prompts", "ledger", "group"):
            served.ask(question, run=run["id"], program="grpo")


def test_hostile_texts_come_as_data(serve: Any, tmp_path: Path) -> None:
    served = serve(hostile_folder(tmp_path / "run"))
    run, kept = served.id("run"), HOSTILE.encode(errors="replace").decode()
    assert served.ask("curves", run=run, program=kept, name=[kept])["curves"][kept][0]["count"] == 4
    assert served.ask("rows", run=run, program=kept)["labels"]["source"] == [[LABEL, 1], ["plain", 1]]
    assert served.ask("rows", run=run, program=kept, **{f"is.{LABEL}": LABEL})["count"] == 1
    rows = served.ask("rows", run=run, program=kept)["rows"]
    assert len(rows) == 2 and all(len(json.dumps(each)) < 5000 for each in rows), "a row of 10 MB is not sent"
    large = next(each for each in rows if each["size"] > 1 << 20)
    assert len(json.dumps(served.ask("row", run=run, n=large["n"]))) < 200_000
    status, headers, whole = served.get(f"/api/field?run={run}&n={large['n']}&field=response")
    assert status == 200 and len(whole) == 6 * 1_700_000 and headers["Content-Type"] == "text/plain; charset=utf-8"
    for question in ("lanes", "events", "about", "ledger"):
        served.ask(question, run=run, program=kept)


def test_a_port_in_use_is_refused_and_passed_over(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(run_folder(tmp_path / "grpo"))
    taken = served.server.server_address[1]
    with pytest.raises(UsageError, match=f"--port {taken} cannot be opened"):
        open_server(Answers(served.follower), taken)
    monkeypatch.setattr("flowrl.show.server.PORT", taken)
    other = open_server(Answers(served.follower))
    assert other.server_address[1] != taken
    other.server_close()
    with pytest.raises(UsageError, match="65536"):
        open_server(Answers(served.follower), 65536)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "flowrl show needs the folder of a run, or of several."),
        (["nowhere"], "nowhere is no folder."),
        (["."], ". holds no run."),
        ([".", "--prot", "1"], "'--prot' is no option here."),
        ([".", "--port", "x"], "argument --port: invalid int value: 'x'"),
    ],
)
def test_wrong_use_is_told(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["show", *words]) == 2
    assert capsys.readouterr().err.startswith(f"UsageError: {said}")


def test_the_command_serves_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def stopped(server: PageServer, poll_interval: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", stopped)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(Path(address[7:]).read_text()))
    run = run_folder(tmp_path / "grpo")
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert main(["show", str(run), "--port", "0"]) == 0
    out = capsys.readouterr().out
    assert "1 run" in out and "http://127.0.0.1:" in out
    assert len(opened) == 1 and out.split()[-1] in opened[0]
    assert main(["show", str(run), "--port", "0", "--no-browser"]) == 0 and len(opened) == 1
    assert {path: path.read_bytes() for path in run.iterdir()} == before, "nothing of the run is changed"


def test_numbers_that_json_has_not_are_shown_as_text(serve: Any, tmp_path: Path) -> None:
    said = {"max_kl": float("inf"), "least": [float("-inf"), float("nan")], "lr": 1e-5}
    served = serve(run_folder(tmp_path / "grpo", parameters={"grpo": said}))
    assert "Infinity" in (tmp_path / "grpo" / "run.json").read_text()
    shown = served.ask("about", run=served.id("grpo"))["record"]["parameters"]
    assert shown == {"grpo": {"max_kl": "inf", "least": ["-inf", "nan"], "lr": 1e-5}}


def test_an_answer_that_is_no_json_is_told_and_not_left_open(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(run_folder(tmp_path / "grpo"))
    monkeypatch.setitem(QUESTIONS, "about", lambda answers, words: {"record": object()})
    status, _, body = served.get("/api/about")
    assert status == 500 and "TypeError" in json.loads(body)["error"]
