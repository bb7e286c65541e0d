"""A stream shows text while it is sampled, in each protocol, and who hangs up ends the sampling."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from letters import model_of
from policy_ranks import Near, PolicyRank, handle
from talking_agent import Talks, tokenizer

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.environments.gateway.server import _Connection

pytest.importorskip("h11", reason="the gateway needs the package h11")
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASKED = [{"role": "user", "content": "ab"}]
LENGTH = 40  # tokens of an answer


class Stops(fl.testing.FakeEngine):
    """Makes ``after`` tokens of a row, and goes on when it is told so."""

    def __init__(self, after=5, **how):
        super().__init__(**{"vocab": 8, "stop": (), "tokenizer": tokenizer(), **how})
        self.after, self.stands, self.go = after, threading.Event(), threading.Event()
        self.left = []

    def step(self):
        if any(len(row.ids) == self.after for row in self._rows.values()) and not self.go.is_set():
            self.stands.set()
            self.go.wait(0.02)  # it is looked at meanwhile who is gone
            return []
        found = super().step()
        self.left += [row for row in found if row.reason != "aborted"]
        return found


class Model:
    """The engine of a small model, which makes ``after`` tokens of a row, and goes on when it is told so."""

    def __init__(self, after=5):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = {**model_of(**sizes, num_key_value_heads=1).config, "eos_token_id": None}
        self.actor = fl.open(fl.Actor(fl.Model(config=config, tokenizer=tokenizer), max_tokens=LENGTH), name="actor")
        self.go, self.left, self._after = threading.Event(), [], after
        self._engine, self._step = self.actor.engine, self.actor.engine.batch.step
        self._engine.batch.step = self.step

    def step(self):
        if any(len(row.ids) == self._after for row in self._engine.batch._rows.values()) and not self.go.is_set():
            self.go.wait(0.02)
            return []
        found = self._step()
        self.left += found
        return found


def play(agent, engine=None, rows=1, policy=None, **how):
    """Episodes of an agent; what it is given, besides the task, is the engine."""
    made = engine or Stops()
    kind = type("Asks", (Talks,), {"agent": lambda self, task: agent(task, made), "timeout": 30.0})
    source = fl.data.rows([{"prompt": "ab", "answer": str(i)} for i in range(rows)], batch=rows, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer()).with_call(CallInfo(seed=3, op="talk.rollout"))
    actor = fl.open(fl.Actor(model_of(), max_tokens=LENGTH), name="actor", engine=made)
    worker = fl.open(kind(), name="talk")
    try:
        return worker.rollout(batch, policy=policy or actor, **how)
    finally:
        worker.close()


class Peer:
    """A connection to the gateway, on which a request was sent."""

    def __init__(self, task, path, body):
        url = urlsplit(task.base_url)
        self.socket = socket.create_connection((url.hostname, url.port), timeout=60)
        sent = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {task.api_key}\r\n"
        self.socket.sendall(f"{head}Connection: close\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
        self.file = self.socket.makefile("rb")

    def status(self):
        found = int(self.file.readline().split()[1])
        while self.file.readline().strip():
            pass
        return found

    def events(self):
        """The data of events as they come."""
        for line in self.file:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])

    def close(self):
        self.file.close()
        self.socket.close()


def text_of(event):
    """What an event of any protocol adds to the text."""
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if event["type"] == "content_block_delta":
        return event["delta"].get("text", "")
    return event["delta"] if event["type"] == "response.output_text.delta" else ""


BODIES = {
    CHAT: {"messages": ASKED, "stream": True},
    MESSAGES: {"messages": ASKED, "max_tokens": 100, "stream": True},
    RESPONSES: {"input": "ab", "stream": True},
}


def test_text_of_a_model_comes_while_its_engine_stands():
    """An engine with a net tells its tokens as the fake one does."""
    made, seen = Model(), []

    def agent(task, engine):
        peer = Peer(task, CHAT, BODIES[CHAT])
        assert peer.status() == 200
        for event in peer.events():
            if text_of(event) and not engine.go.is_set():
                seen.append((text_of(event), len(engine.left)))
                engine.go.set()
        peer.close()
        return "done"

    found = play(agent, made, policy=made.actor)
    assert found.outcome.to_list() == ["finished"] and [left for _, left in seen] == [0]
    assert len(seen[0][0]) <= 5 and tokenizer().decode(found.response_ids.to_list()[0]).startswith(seen[0][0])


def on_a_rank(engine):
    """The policy on another rank, with the same engine."""
    rank = PolicyRank(engine)
    rank.workers["actor", False] = fl.open(fl.Actor(model_of(), max_tokens=LENGTH), name="actor", engine=engine)
    return handle(Near({0: rank}))


@pytest.mark.parametrize("where", ["here", "on a rank"])
@pytest.mark.parametrize("path", BODIES)
def test_text_comes_while_the_engine_stands(path, where):
    """Half of the answer is not sampled before the agent has read the first of it."""
    seen, made = {}, Stops()

    def agent(task, engine):
        peer = Peer(task, path, BODIES[path])
        assert peer.status() == 200
        seen["events"] = []
        for event in peer.events():
            seen["events"].append(event)
            if not engine.go.is_set() and text_of(event):
                seen["ended"] = len(engine.left)
                engine.go.set()
        peer.close()
        return "".join(map(text_of, seen["events"]))

    found = play(agent, made, policy=on_a_rank(made) if where == "on a rank" else None)
    assert seen["ended"] == 0 and set(found.outcome.to_list()) == {"finished"}
    [ids] = found.response_ids.to_list()
    said = tokenizer().decode(
        [i for i, m in zip(ids, found.response_mask.to_list()[0], strict=True) if m], skip_special_tokens=True
    )
    assert "".join(map(text_of, seen["events"])) == said and len(ids) == LENGTH
    assert sum(bool(text_of(event)) for event in seen["events"]) >= 2
    if path == RESPONSES:
        assert [event["sequence_number"] for event in seen["events"]] == [*range(len(seen["events"]))]
        last = seen["events"][-1]["response"]
        assert last["output"][0]["content"][0]["text"] == said
        kinds = [event["type"] for event in seen["events"]]
        assert [k for k in dict.fromkeys(kinds) if k != "response.output_text.delta"] == [
            "response.created",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
    if path == MESSAGES:
        assert [*dict.fromkeys(event["type"] for event in seen["events"])] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert seen["events"][0]["message"]["usage"]["input_tokens"] > 0
    if path == CHAT:
        assert len({event["id"] for event in seen["events"]}) == 1
        assert [event["choices"][0]["finish_reason"] for event in seen["events"]][-1] == "length"


def test_a_stream_has_all_log_probabilities_in_the_end():
    def agent(task, engine):
        engine.go.set()
        peer = Peer(task, CHAT, {**BODIES[CHAT], "logprobs": True})
        assert peer.status() == 200
        told = [c["logprobs"]["content"] for e in peer.events() for c in e["choices"] if c.get("logprobs")]
        peer.close()
        return [each["logprob"] for part in told for each in part]

    kept = []
    found = play(lambda *given: kept.append(agent(*given)) or "done")
    assert kept[0] == pytest.approx(found.sampling_logprobs.to_list()[0], abs=1e-6) and len(kept[0]) == LENGTH


def test_a_text_that_stops_is_not_shown_and_ends_a_stream():
    said = []

    def agent(task, engine):
        engine.go.set()
        whole = Peer(task, CHAT, BODIES[CHAT])
        whole.status()
        text = "".join(map(text_of, whole.events()))
        stop = text[6:9]
        again = Peer(task, CHAT, {**BODIES[CHAT], "stop": [stop]})
        again.status()
        events = [*again.events()]
        said.append((stop, "".join(map(text_of, events)), events[-1]["choices"][0]))
        return "done"

    play(agent)
    (stop, text, last) = said[0]
    assert stop not in text and last["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_ends_the_sampling_and_may_ask_again(path, stream):
    """The row leaves the batch with the tokens that it has, which are in no row; what is asked then is answered."""
    kept = []

    def agent(task, engine):
        peer = Peer(task, path, {**BODIES[path], "stream": stream})
        if stream:
            assert peer.status() == 200
            next(event for event in peer.events() if text_of(event))
        assert engine.stands.wait(60)
        kept.append(engine)
        peer.close()
        for _ in range(6000):
            if not engine.running():
                break
            threading.Event().wait(0.01)
        assert engine.running() == [] and engine.left == [], "it stands, so that nothing ends by itself"
        engine.go.set()
        again = Peer(task, path, {**BODIES[path], "stream": False})
        assert again.status() == 200
        return "done"

    found = play(agent)
    assert found.outcome.to_list() == ["finished"] and found.turns.to_list() == [1] and found.forks.to_list() == [0]
    assert sum(found.response_mask.to_list()[0]) == LENGTH and found.sampled_tokens.to_list() == [LENGTH + 5]


@pytest.mark.parametrize("steps", range(8))
def test_who_hangs_up_as_something_is_written_is_noticed(steps):
    """``asyncio.wait_for`` of Python 3.11 forgets that it is cancelled as what it waits for ends: the row was sampled on
    and on."""

    async def drain():
        await asyncio.sleep(0)

    writer = SimpleNamespace(write=lambda data: None, drain=drain)
    connection = SimpleNamespace(
        _http=SimpleNamespace(send=bytes), _writer=writer, _gateway=SimpleNamespace(_idle=60.0)
    )

    async def answers():
        await _Connection._write(connection, b"a piece")
        await asyncio.Event().wait()  # for the next one

    async def hangs_up():
        answering = asyncio.ensure_future(answers())
        for _ in range(steps):
            await asyncio.sleep(0)
        answering.cancel()
        await asyncio.wait({answering}, timeout=10)
        return answering.cancelled()

    assert asyncio.run(hangs_up())


def test_who_hangs_up_ends_the_sampling_on_another_rank_too():
    engine, said = Stops(after=2), []

    def agent(task, engine):
        peer = Peer(task, CHAT, BODIES[CHAT])
        assert engine.stands.wait(30)
        peer.close()
        for _ in range(3000):
            if not engine.running():
                break
            threading.Event().wait(0.01)
        assert engine.running() == [] and engine.left == []
        engine.go.set()
        again = Peer(task, CHAT, BODIES[CHAT])
        assert again.status() == 200
        said.append("".join(map(text_of, again.events())))
        return "done"

    found = play(agent, engine, policy=handle(Near({0: PolicyRank(engine)})))
    assert found.outcome.to_list() == ["finished"] and found.turns.to_list() == [1]
    assert sum(found.response_mask.to_list()[0]) == 3 and found.sampled_tokens.to_list() == [5] and said[0]


def test_agents_that_hang_up_have_so_many_calls_at_most():
    def agent(task, engine):
        for _ in range(3):
            engine.stands.clear()
            peer = Peer(task, CHAT, BODIES[CHAT])
            assert engine.stands.wait(60)
            peer.close()
            while engine.running():
                threading.Event().wait(0.01)
        peer = Peer(task, CHAT, BODIES[CHAT])
        return str(peer.status())

    found = play(agent, turns=3)
    assert found.outcome.to_list() == ["truncated_turns"] and found.sampled_tokens.to_list() == [15]
    assert found.response_ids.to_list() == [[]]


def test_a_limit_in_the_midst_of_a_stream_is_an_error_in_it():
    """Its time is up while the engine stands: the status was sent, and the stream says why it ends."""
    for path in BODIES:
        last = []

        def agent(task, engine, path=path, last=last):
            peer = Peer(task, path, BODIES[path])
            last.append(peer.status())
            last.extend(peer.events())
            return "done"

        found = play(agent, seconds=3.0)
        assert found.outcome.to_list() == ["truncated_wall"], path
        for _ in range(6000):
            if "error" in json.dumps(last[-1]):
                break
            threading.Event().wait(0.01)
        assert last[0] == 200 and "the episode of this session is over" in json.dumps(last[-1]), path
