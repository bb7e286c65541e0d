"""A judge at an endpoint: limits, retries, what is kept, and failures that are no rewards."""

import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from letters import build_tokenizer

import flowrl as fl
from flowrl.environments import verify
from flowrl.errors import FieldError, UsageError


class Endpoint:
    """A server that answers as it is told to, and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked, self.headers = list(answers), [], []
        lock, endpoint = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    endpoint.asked.append(body)
                    endpoint.headers.append(dict(self.headers))
                    answer = endpoint.answers.pop(0) if len(endpoint.answers) > 1 else endpoint.answers[0]
                answer(self, body)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def says(text, status=200, **headers):
    def answer(handler, body):
        found = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
        handler.send_response(status)
        for name, value in {"Content-Length": len(found), **headers}.items():
            handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()
        handler.wfile.write(found)

    return answer


def drips(handler, body):
    """A byte now and then, for ever."""
    try:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            handler.wfile.write(b"x")
            handler.wfile.flush()
            threading.Event().wait(0.02)
    except OSError:
        pass


class DripsBody:
    """A body of which a byte comes now and then, after a head that says that the connection is closed with it."""

    def __init__(self):
        self.came_to_its_end = False

    def __call__(self, handler, body):
        try:
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            for _ in range(200):
                handler.wfile.write(b"x")
                handler.wfile.flush()
                threading.Event().wait(0.02)
            self.came_to_its_end = True
        except OSError:
            pass


@pytest.fixture
def endpoint():
    made = []

    def start(*answers):
        made.append(Endpoint(*answers))
        return made[-1]

    yield start
    for each in made:
        each.server.shutdown()
        each.server.server_close()


def test_a_judge_is_asked_with_the_columns_and_its_score_is_the_reward(endpoint, monkeypatch):
    server = endpoint(says("Good.\nScore: 7"))
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge = verify.Judge(
        server.url,
        "big",
        question="{prompt}|{response}|{answer}",
        system="Be strict.",
        key_variable="JUDGE_KEY",
        seed=3,
    )
    assert judge(prompt="1+1", response="2", answer="two") == 0.7
    assert server.asked == [
        {
            "model": "big",
            "temperature": 0,
            "seed": 3,
            "messages": [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "1+1|2|two"}],
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_a_reward_asks_for_the_columns_of_the_question():
    """A name that is wrong was an error of each row, when the endpoint was to be asked."""
    judge = verify.Judge("http://127.0.0.1:9", "m", question="{prompt} {response} {anwser[0]} {{}}")
    source = fl.data.rows([{"prompt": "1+2", "answer": "3", "response": "4"}], batch=1)
    batch = source.to_batch(source.cursor().draw(), 0, build_tokenizer())
    with pytest.raises(FieldError, match="Judge takes 'anwser', which is no column") as error:
        fl.open(fl.FunctionReward(judge)).score(batch)
    assert error.value.fix == "Write answer for anwser." and error.value.at.file == __file__


@pytest.mark.parametrize("question", ['Say {"score": 7}. {response}', "{} {response}", "{0}", "{response", "}"])
def test_a_question_that_cannot_be_filled_in_is_refused(question):
    with pytest.raises(UsageError, match="The question of a judge is no text to fill in"):
        verify.Judge("http://127.0.0.1:9", "m", question=question)


def test_what_fails_for_a_while_is_asked_again(endpoint, monkeypatch):
    waited = []
    monkeypatch.setattr("flowrl.environments.verify.judge.time.sleep", waited.append)
    server = endpoint(says("", 500), says("", 429, Retry_After=7), says("score: 10"))
    assert verify.Judge(server.url, "m")(response="x") == 1.0
    assert waited == [1.0, 7.0] and len(server.asked) == 3


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (says("", 401), "refused: status 401"),
        (says("", 503), "has not answered 2 times: status 503"),
        (lambda handler, body: handler.wfile.write(b"no http\r\n\r\n"), "has not answered 2 times: BadStatusLine"),
        (lambda handler, body: None, "has not answered 2 times: RemoteDisconnected"),
        (
            lambda handler, body: handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n<html>"),
            "has not answered 2 times: OSError: it is no chat completion: <html>",
        ),
        (drips, "has not answered 2 times: TimeoutError: it took longer than 0.5 s"),
    ],
)
def test_an_endpoint_that_fails_is_no_reward(endpoint, monkeypatch, answer, why):
    monkeypatch.setattr("flowrl.environments.verify.judge.time.sleep", lambda seconds: None)
    seconds = 0.5 if answer is drips else 60
    server = endpoint(answer)
    with pytest.raises(verify.VerifierFailed, match=why):
        verify.Judge(server.url, "m", retries=1, seconds=seconds)(response="x")


def test_time_is_up_in_the_midst_of_a_body_after_which_the_connection_is_closed(endpoint):
    server = endpoint(drips_body := DripsBody())
    with pytest.raises(verify.VerifierFailed, match="TimeoutError: it took longer than 0.3 s"):
        verify.Judge(server.url, "m", retries=0, seconds=0.3)(response="x")
    assert not drips_body.came_to_its_end


def test_a_key_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(verify.VerifierFailed, match="the environment variable NO_KEY has no key"):
        verify.Judge("http://127.0.0.1:9", "m", key_variable="NO_KEY")(response="x")


def test_equal_answers_are_asked_for_once_and_kept_in_a_file(endpoint, tmp_path):
    server = endpoint(says("Score: 4"))
    judge = verify.Judge(server.url, "m", cache=tmp_path / "judged.jsonl")
    found = []
    threads = [threading.Thread(target=lambda i=i: found.append(judge(response=f"answer {i % 2}"))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [0.4] * 8 and len(server.asked) == 2
    with (tmp_path / "judged.jsonl").open("a") as file:
        file.write('{"request": "cut')
    later = verify.Judge(server.url, "m", cache=tmp_path / "judged.jsonl")
    assert later(response="answer 1") == 0.4 and len(server.asked) == 2
    assert verify.Judge(server.url, "other", cache=tmp_path / "judged.jsonl")(response="answer 1") == 0.4
    assert len(server.asked) == 3


def test_an_answer_without_a_number_is_an_error_and_is_not_kept(endpoint):
    server = endpoint(says("I refuse."), says("Score: 2"))
    judge = verify.Judge(server.url, "m")
    with pytest.raises(ValueError, match="the judge said no number: 'I refuse.'"):
        judge(response="x")
    assert judge(response="x") == 0.2


def test_so_many_are_under_way_at_once(endpoint):
    reached, lock = threading.Barrier(2), threading.Lock()
    inside, most = 0, 0

    def slow(handler, body):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        reached.wait(60)
        with lock:  # before the answer is on its way, which makes room for the next
            inside -= 1
        says("Score: 1")(handler, body)

    server = endpoint(slow)
    judge = verify.Judge(server.url, "m", concurrency=2)
    threads = [threading.Thread(target=judge, kwargs={"response": str(i)}) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, len(server.asked)) == (2, 6)


def test_a_judge_goes_to_another_process():
    judge = pickle.loads(pickle.dumps(verify.Judge("http://127.0.0.1:9", "m", retries=1)))  # noqa: TID251
    assert (judge.model, judge.retries) == ("m", 1)


@pytest.mark.parametrize("wrong", [{"base_url": "file:///etc"}, {"concurrency": 0}, {"seconds": 0}, {"retries": -1}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(fl.errors.UsageError):
        verify.Judge(**{"base_url": "http://127.0.0.1/v1", "model": "m", **wrong})
