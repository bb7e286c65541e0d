"""Agents that know nothing of flowrl talk to a gateway, and what was sampled for them is trained as it was sampled."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections import Counter

import pytest
import torch
from letters import model_of
from talking_agent import Talks, chat, post, tokenizer

import flowrl as fl
from flowrl import rl
from flowrl.batch import CallInfo
from flowrl.environments import AgentEnvironment, reward
from flowrl.environments.gateway.agents import Task, run_program
from flowrl.environments.gateway.requests import Refused
from flowrl.environments.gateway.responses import with_whole_input
from flowrl.environments.gateway.sessions import Session
from flowrl.errors import ProgramError, RewardError, WorkerError
from flowrl.marks import values
from flowrl.workers.environment_waits import EnvironmentWaits, waits_counted_in

pytest.importorskip("h11", reason="the gateway needs the package h11")
pytestmark = pytest.mark.filterwarnings("ignore:.*rollout failed")


def letters(ids):
    return tokenizer().decode(ids).replace(" ", "")


def player(**how):
    engine = fl.testing.FakeEngine(vocab=8, stop=(1,), tokenizer=tokenizer())
    return fl.open(fl.Actor(model_of(), max_tokens=4, **how), name="actor", engine=engine)


def play(env, rows=4, **how):
    source = fl.data.rows([{"prompt": "ab", "answer": str(i)} for i in range(rows)], batch=rows, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer()).with_call(CallInfo(seed=3, op="talk.rollout"))
    worker = fl.open(env, name="talk")
    try:
        return worker.rollout(batch, policy=player(), **how)
    finally:
        worker.close()


def test_later_calls_extend_the_ids_of_earlier_ones():
    found = play(Talks(), n=2)
    assert len(found) == 8 and set(found.outcome.to_list()) == {"finished"}
    assert set(found.finish_reason.to_list()) == {"done"} and set(found.turns.to_list()) == {3}
    assert found.rewards.to_list() == [scores["length"] for scores in found.scores.to_list()]
    for tokens, ids, mask, turn_ids, scores in zip(
        *(found[name].to_list() for name in ("tokens", "response_ids", "response_mask", "turn_ids", "scores")),
        strict=True,
    ):
        assert letters(tokens[: len(tokens) - len(ids)]) == "caab"
        assert [t for t in turn_ids if t >= 0] == sorted(t for t in turn_ids if t >= 0) and max(turn_ids) == 2
        observed = [token for token, sampled in zip(ids, mask, strict=True) if not sampled and token != 1]
        assert letters(observed) == "adae"
        assert (scores["calls"], scores["forks"], scores["turns_seen"]) == (3, 0, 3)
    assert found.sampled_tokens.to_list() == [sum(mask) for mask in found.response_mask.to_list()]


def test_the_log_probabilities_are_those_of_the_row_as_a_whole():
    """An engine that is asked for the whole row gives the same numbers: the ids are those that it saw."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    actor = fl.open(fl.Actor(model_of(**sizes, num_key_value_heads=4), max_tokens=4), name="actor")
    source = fl.data.rows([{"prompt": "ab"}], batch=1, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer()).with_call(CallInfo(seed=3, op="talk.rollout"))
    worker = fl.open(Talks(), name="talk")
    found = worker.rollout(batch, policy=actor, n=3)
    worker.close()
    own = actor.logprobs(found).old_logprobs.to_list()
    for made, trained, mask in zip(found.rollout_logprobs.to_list(), own, found.response_mask.to_list(), strict=True):
        assert any(mask)
        for a, b, sampled in zip(made, trained, mask, strict=True):
            assert not sampled or a == pytest.approx(b, abs=1e-4)


class Forgets(Talks):
    """Asks two long questions and a third one that has forgotten them."""

    def agent(self, task):
        first = [{"role": "user", "content": "ab"}]
        answer = chat(task, first)["choices"][0]["message"]
        chat(task, [*first, answer, {"role": "user", "content": "d"}])
        chat(task, [*first, answer, {"role": "user", "content": "e"}])  # another way to go on
        chat(task, [{"role": "user", "content": "f"}])
        return "done"


def test_rewritten_history_forks_and_the_longest_branch_is_trained():
    found = play(Forgets(), rows=2)
    for tokens, mask, sampled, scores in zip(
        *(found[name].to_list() for name in ("tokens", "response_mask", "sampled_tokens", "scores")), strict=True
    ):
        assert (scores["calls"], scores["forks"]) == (4, 2) and sum(mask) <= sampled
        assert letters(tokens[:3]) == "aab"
    assert 0.3 < fl.open(Forgets(), name="x").outcomes(found)["delivered_fraction"] < 1


class Tidies(Talks):
    """Sends answers back with other white space around them, then once as it was."""

    def agent(self, task):
        messages = [{"role": "user", "content": "ab"}]
        for around in (" ", "\n", ""):
            answer = chat(task, messages)["choices"][0]["message"]
            said = {**answer, "content": f"{around}{answer['content'] or ''}{around}"}
            messages += [said, {"role": "user", "content": "d"}]
        chat(task, messages)
        return "done"


def test_answers_that_come_back_with_other_white_space_stay_as_they_were_sampled():
    found = play(Tidies(), rows=2)
    assert found.repairs.to_list() == [2, 2] and found.forks.to_list() == [0, 0]
    assert found.delivered_tokens.to_list() == found.sampled_tokens.to_list()
    assert play(Forgets(), rows=2).forks.to_list() == [2, 2]


def test_branches_are_rows_in_which_each_sampled_token_is_trained_once():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    actor = fl.open(fl.Actor(model_of(**sizes, num_key_value_heads=4), max_tokens=4), name="actor")
    source = fl.data.rows([{"prompt": "ab"}] * 2, batch=2, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer()).with_call(CallInfo(seed=3, op="talk.rollout"))
    worker = fl.open(Forgets(), name="talk")
    found = worker.rollout(batch, policy=actor, n=2, branches=True)
    worker.close()
    assert worker.outcomes(found)["delivered_fraction"] == 1
    rewards = fl.Column.of([1.0, 0.0, 0.5, 0.25], dtype="f32")
    found = rl.group_advantages(found.drop("rewards").with_columns({"rewards": rewards}), scale="none")
    rows = rl.branches(found)
    assert rows.keys == tuple((*key, branch) for key in found.keys for branch in range(3))  # three leaves of four calls
    for i, key in enumerate(found.keys):
        own = rows.take(range(3 * i, 3 * i + 3))
        assert int(own.response_mask.values.sum()) == found.sampled_tokens.to_list()[i], "each token is trained once"
        assert own.tokens.to_list()[0] == found.tokens.to_list()[i]
        wanted = (0.5, -0.5, 0.125, -0.125)[i]
        for advantages, mask in zip(own.advantages.to_list(), own.response_mask.to_list(), strict=True):
            assert advantages == [wanted * trained for trained in mask], key
        prompts = Counter(tuple(prompt) for prompt in own.prompt_ids.to_list())
        assert sorted(prompts.values()) == [1, 2], "one has forgotten what was asked first"
    recomputed = actor.logprobs(rows).old_logprobs.values
    mask = rows.response_mask.values
    torch.testing.assert_close(recomputed[mask], rows.rollout_logprobs.values[mask], atol=1e-4, rtol=0)
    assert not rows.rollout_logprobs.values[~mask].any()


class Stopped(Forgets):
    """Forgets, and has one answer end at a text, which may leave tokens behind it."""

    def agent(self, task):
        chat(task, [{"role": "user", "content": "ba"}], stop=["a", "c"])
        return super().agent(task)


def test_rows_and_branches_of_agents_have_what_could_be_drawn_in_their_tokens():
    """Each sampled token had three to be drawn from, and ratios of the weights that sampled are 1."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = model_of(**sizes, num_key_value_heads=4, initializer_range=0.3)
    actor = fl.open(fl.Actor(model, max_tokens=6), name="actor")
    source = fl.data.rows([{"prompt": "ab"}] * 3, batch=3, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer()).with_call(CallInfo(seed=3, op="talk.rollout"))
    worker = fl.open(Stopped(), name="talk")
    found = worker.rollout(batch, policy=actor, n=2, branches=True, support=True, top_k=3)
    worker.close()
    rows = rl.branches(rl.group_advantages(found, scale="none"))
    assert len(rows) > len(found)
    for some in (found, rows):
        mask = some.response_mask.values
        assert set(some.support_sizes.values[mask].tolist()) == {3} and not some.support_sizes.values[~mask].any()
        now = actor.logprobs(some, support=True).old_logprobs
        torch.testing.assert_close(now.values[mask], some.sampling_logprobs.values[mask], atol=5e-5, rtol=0)
        plain = actor.logprobs(some).old_logprobs.values[mask]
        assert float((plain - some.sampling_logprobs.values[mask]).abs().max()) > 0.01


def test_a_branch_that_kept_its_cache_through_a_publish_says_so_though_its_row_did_not():
    """The publish comes in the midst of the second call, which is in a branch beside the row."""
    engine = fl.testing.FakeEngine(vocab=8, stop=(1,), tokenizer=tokenizer(), lengths=lambda seed: 4)
    actor, step = fl.open(fl.Actor(model_of(), max_tokens=4), name="actor", engine=engine), engine.step
    actor.stream.publish(lambda: None, 0)
    actor.stream.follows = actor.stream.kept_cache = True

    def publishing():
        if engine.steps == 4 + 2:
            engine.pause()
            engine.resume(1, keep_cache=True)
        return step()

    engine.step = publishing
    source = fl.data.rows([{"prompt": "ab"}], batch=1, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer()).with_call(CallInfo(seed=3, op="talk.rollout"))
    worker = fl.open(Forgets(), name="talk")
    found = worker.rollout(batch, policy=actor, n=1, branches=True)
    worker.close()
    sampled = [
        [version for version, own in zip(versions, mask, strict=True) if own]
        for versions, mask in (
            (found.versions.to_list()[0], found.response_mask.to_list()[0]),
            *((branch["versions"], branch["response_mask"]) for branch in found.branches.to_list()[0]),
        )
    ]
    assert sampled == [[0] * 4 + [1] * 4, [0, 0, 1, 1], [1] * 4]
    assert values(found["versions"].marks, "cache") == {"kept"}
    advantages = found.with_columns(
        {"advantages": found.rollout_logprobs.with_values(found.rollout_logprobs.values * 0)}
    )
    assert values(rl.branches(advantages)["versions"].marks, "cache") == {"kept"}


def test_branches_whose_episode_has_no_one_advantage_are_refused():
    found = play(Forgets(), rows=1, branches=True)
    length = len(found.response_ids.to_list()[0])
    advantages = fl.Column.of([[float(i) for i in range(length)]], dim="response", dtype="f32")
    with pytest.raises(ProgramError, match=r"rl\.branches: row \(0, 0\) has \d+ different advantages"):
        rl.branches(found.with_columns({"advantages": advantages}))


class Varies(Forgets):
    @reward()
    def length(self, state):
        return sum(map(len, state.responses)) + 0.1 * len(set("".join(state.responses)))


def test_branches_train_in_a_program_and_a_resume_asks_no_agent_again(tmp_path):
    flow = fl.Flow("forgetful")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = model_of(**sizes, num_key_value_heads=4)
    model = fl.Model(config=model.config, tokenizer=tokenizer)
    actor = flow.worker(fl.Actor, model, lr=1e-2, max_tokens=4, name="actor")
    talk = flow.worker(Varies, name="talk")
    source = fl.data.rows([{"prompt": "ab"}, {"prompt": "ba"}], batch=2, shuffle=False)

    @flow.program
    def train(steps: int = 3):
        for step, batch in flow.steps(source, steps):
            batch = talk.rollout(batch, policy=actor, n=2, branches=True)
            ends = talk.outcomes(batch)
            batch = rl.branches(rl.group_advantages(batch, scale="none"))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), ends, reward=batch.rewards.mean())

    whole = flow.run(out=tmp_path / "whole", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["talk.rollout/forks"] == 8 and line["talk.rollout/delivered_fraction"] == 1 for line in lines)
    told = [{n.split("/")[-1]: v for n, v in line.items() if not n.startswith("talk.rollout/")} for line in lines]
    assert [(line["forks"], line["delivered_fraction"]) for line in told] == [(2, 1)] * 3
    assert all(line["gap_max"] < 1e-3 for line in told if line["gap_tokens"]) and told[0]["rows"] in (6, 12)
    flow.run(out=tmp_path / "parts", quiet=True, steps=2)
    assert flow.run(out=tmp_path / "parts", quiet=True, resume=True).weights_digest == whole.weights_digest


def test_the_time_from_an_answer_to_the_next_call_is_what_an_agent_takes():
    """Also where that call is a fork; not what comes behind the last answer."""

    class Thinks(Talks):
        def agent(self, task):
            for said in ("a", "b", "d"):
                chat(task, [{"role": "user", "content": said}])
                time.sleep(0.05)
            return "done"

    with waits_counted_in(EnvironmentWaits()) as waits:
        found = play(Thinks())
    assert found.forks.to_list() == [2] * 4 and waits.count == 4 * 2
    assert waits.mean is not None and 0.045 < waits.mean < 10


class Strict(Forgets):
    strict = True


def test_strict_refuses_forks():
    found = play(Strict(), rows=2, on_error="mark", max_failed=1.0)
    assert set(found.outcome.to_list()) == {"environment_failure"}
    assert "the agent has rewritten its history" in found.failed_why.to_list()[0]


def test_equal_questions_have_answers_of_their_own():
    class Votes(Talks):
        def agent(self, task):
            return [
                chat(task, [{"role": "user", "content": "ab"}])["choices"][0]["message"]["content"] for _ in range(8)
            ]

        @reward()
        def length(self, state):
            return len({*state.result})

    assert max(play(Votes(), rows=1, turns=8).rewards.to_list()) > 1


def test_limits_end_an_episode_and_it_is_graded():
    found = play(Talks(), rows=2, turns=2)
    assert set(found.outcome.to_list()) == {"truncated_turns"} and set(found.turns.to_list()) == {2}
    assert found.rewards.to_list() == [0.0, 0.0]
    found = play(Talks(), rows=2, turns=3)
    assert set(found.outcome.to_list()) == {"finished"}
    found = play(Talks(), rows=2, tokens=2)
    assert set(found.outcome.to_list()) == {"truncated_tokens"} and max(found.sampled_tokens.to_list()) <= 2


class Raises(Talks):
    def agent(self, task):
        chat(task, [{"role": "user", "content": "ab"}])
        raise (KeyError("lost") if task.row["answer"] == "0" else ConnectionError("no network"))


def test_what_an_agent_raises_is_a_failure_and_no_reward():
    found = play(Raises(), rows=2, on_error="mark", max_failed=1.0)
    assert found.outcome.to_list() == ["environment_failure", "infrastructure_failure"]
    assert found.failed_why.to_list() == ["KeyError: 'lost'", "ConnectionError: no network"]
    with pytest.raises(RewardError, match="talk.agent failed for row 0"):
        play(Raises(), rows=1)


def test_an_agent_that_hangs_fails_alone():
    class Hangs(Talks):
        timeout = 5.0

        def agent(self, task):
            import threading

            if task.row["answer"] == "0":
                threading.Event().wait(60)
            return super().agent(task)

    found = play(Hangs(), rows=2, on_error="mark", max_failed=1.0)
    assert found.outcome.to_list() == ["infrastructure_failure", "finished"]


def test_an_agent_may_be_async_and_may_not_ask_at_all():
    class Silent(Talks):
        async def agent(self, task):
            return "abc"

    with pytest.warns(UserWarning, match="agent of row .* has ended without an answer of the policy") as told:
        found = play(Silent(), rows=2)
    assert found.rewards.to_list() == [3.0, 3.0] and found.response_ids.to_list() == [[], []]
    assert len(told) == 1


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
def ask(path, key, body):
    head = {key: ("Bearer " if key == "Authorization" else "") + os.environ["OPENAI_API_KEY"]}
    return json.load(urllib.request.urlopen(urllib.request.Request(path, json.dumps(body).encode(), head), timeout=60))
messages = [{"role": "user", "content": row["prompt"]}]
said = ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", "Authorization", {"messages": messages})
messages += [said["choices"][0]["message"], {"role": "user", "content": "d"}]
again = ask(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", "x-api-key", {"messages": messages, "max_tokens": 9})
print(again["content"][0]["text"] + "|", end="")
"""


def test_a_program_that_is_started_as_its_episode_ends_is_ended_too():
    """It was left to run: what ends the programs of an episode had been gone through before it was told of."""
    session = Session()
    session.close("the episode of this session is over")
    task = Task({"prompt": "ab"}, 7, "http://127.0.0.1:1/v1", session.token, session)
    with pytest.raises(RuntimeError, match="ended with -9"):
        run_program([sys.executable, "-c", "import time; time.sleep(20)"], task)


def test_a_program_is_an_agent_and_may_speak_both_protocols():
    class Program(Talks):
        command = (sys.executable, "-c", PROGRAM)
        agent = AgentEnvironment.agent

    found = play(Program(), rows=2)
    assert set(found.turns.to_list()) == {2} and {s["forks"] for s in found.scores.to_list()} == {0}
    assert min(found.rewards.to_list()) >= 1

    class Fails(Program):
        command = (sys.executable, "-c", "import sys; sys.exit('no way')")

    found = play(Fails(), rows=1, on_error="mark", max_failed=1.0)
    assert found.failed_why.to_list()[0].endswith("ended with 1: no way")


def test_stops_cut_an_answer_at_a_token():
    class Stops(Talks):
        def agent(self, task):
            found = [chat(task, [{"role": "user", "content": "ab" * i}], stop=["c", "d"]) for i in range(1, 12)]
            return [each["choices"][0] for each in found]

        @reward()
        def length(self, state):
            assert all(choice["finish_reason"] in ("stop", "length") for choice in state.result)
            return float(not any(set("cd") & set(choice["message"]["content"] or "") for choice in state.result))

    found = play(Stops(), rows=1, turns=11)
    assert found.rewards.to_list() == [1.0]
    ids = found.response_ids.to_list()[0]
    assert not {4, 5} & set(ids[:-1])  # c and d end an answer


def test_a_text_that_stops_is_named_to_a_client_of_anthropic():
    class Stops(Talks):
        def agent(self, task):
            asked = {"max_tokens": 4, "stop_sequences": ["c", "d"]}
            asked = [{**asked, "messages": [{"role": "user", "content": "ab" * i}]} for i in range(1, 12)]
            found = [post(task, "/v1/messages", each) for each in asked]
            return [(each["stop_reason"], each["stop_sequence"]) for each in found]

        @reward()
        def length(self, state):
            assert set(state.result) >= {("stop_sequence", "c"), ("stop_sequence", "d")}
            return float({stop for reason, stop in state.result if reason != "stop_sequence"} <= {None})

    assert play(Stops(), rows=1, turns=11).rewards.to_list() == [1.0]


def test_an_agent_is_declared_with_what_it_runs():
    class Nothing(AgentEnvironment):
        def rows(self):
            return []

    with pytest.raises(WorkerError, match="Nothing has no agent"):
        fl.Flow("x").worker(Nothing)


def test_a_chat_that_is_streamed_says_the_same():
    class Streams(Talks):
        def agent(self, task):
            asked = [{"role": "user", "content": "ab"}]
            lines = chat(task, asked, stream=True, stream_options={"include_usage": True}).split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
            assert chunks[-1]["usage"]["completion_tokens"] > 0
            asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "d"}]
            body = {"messages": asked, "max_tokens": 3, "stream": True}
            events = post(task, "/v1/messages", body).split("\n\n")
            kinds = [event.split("\n")[0].removeprefix("event: ") for event in events[:-1]]
            assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds
            return "ab"

    found = play(Streams(), rows=2)
    assert {s["forks"] for s in found.scores.to_list()} == {0} and set(found.turns.to_list()) == {2}


class Calls(Talks):
    """Calls of a tool, which go back with what the tool gave, by each protocol in turn."""

    def agent(self, task):
        item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        first = {"input": "ab", "instructions": "c"}
        said = post(task, "/v1/responses", first)["output"][0]["content"][0]["text"]
        spoken = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": said}]
        again = [*spoken, {"role": "user", "content": "d"}]
        events = post(task, "/v1/responses", {**first, "input": again, "stream": True}).strip().split("\n\n")
        last = json.loads(events[-1].split("data: ", 1)[1])["response"]
        assert [int(json.loads(e.split("data: ", 1)[1])["sequence_number"]) for e in events] == [*range(len(events))]
        again += [last["output"][0], {"role": "user", "content": "e"}]
        found = chat(
            task, [{"role": "system", "content": "c"}, *({"role": m["role"], "content": said_in(m)} for m in again)]
        )
        assert found["choices"]
        call = {"input": [{"role": "user", "content": "f"}, item, {**item, "call_id": "2"}]}
        call["input"] += [{"type": "function_call_output", "call_id": each, "output": "b"} for each in "12"]
        post(task, "/v1/responses", call)
        return "ok"


def said_in(message):
    content = message["content"]
    return content if isinstance(content, str) else content[0]["text"]


def test_the_protocols_go_on_from_each_other():
    found = play(Calls(), rows=2)
    assert {(s["calls"], s["forks"]) for s in found.scores.to_list()} == {(4, 1)}  # the last one begins anew
    assert set(found.turns.to_list()) == {3}


class GoesOn(Talks):
    """Sends what is new alone, behind the response that it names: also twice behind one, and behind one not kept."""

    def agent(self, task):
        def ask(said, before=None, **more):
            new = said if isinstance(said, list) else [{"role": "user", "content": said}]
            body = {"input": new, "instructions": "c", "previous_response_id": before, **more}
            return post(task, "/v1/responses", body)["id"]

        first = ask("ab")
        second = ask("d", first)
        third = ask("e", second, store=False)
        for name in (third, "resp_of_nobody"):
            with pytest.raises(urllib.error.HTTPError) as error:
                ask("f", name)
            assert error.value.code == 400 and b"keeps no response" in error.value.read()
        return "ok" if self.twice is False else ask("f", first)

    twice = False


def test_a_response_goes_on_from_one_that_is_named():
    found = play(GoesOn(), rows=2)
    assert {(s["calls"], s["forks"]) for s in found.scores.to_list()} == {(3, 0)}
    for tokens, mask, count in zip(
        found.tokens.to_list(), found.response_mask.to_list(), found.sampled_tokens.to_list(), strict=True
    ):
        assert letters(tokens[:4]) == "caab" and sum(mask) == count, "instructions once, then what was said"
    again = GoesOn()
    again.twice = True
    assert {(s["calls"], s["forks"]) for s in play(again, rows=2).scores.to_list()} == {(4, 1)}


def test_the_oldest_responses_of_a_session_are_forgotten():
    session = Session()
    for number in range(300):
        session.keep(f"resp_{number}", [number])
    assert len(session.responses) == 256 and next(iter(session.responses)) == "resp_44"
    with pytest.raises(Refused, match="keeps no response 'resp_43'"):
        with_whole_input({"input": "x", "previous_response_id": "resp_43"}, session.responses)
    whole = with_whole_input({"input": "x", "previous_response_id": "resp_299"}, session.responses)
    assert whole["input"] == [299, {"role": "user", "content": "x"}]


def test_log_probabilities_are_told_where_they_are_asked_for():
    class Looks(Talks):
        def agent(self, task):
            told = chat(task, [{"role": "user", "content": "ab"}], logprobs=True)["choices"][0]["logprobs"]["content"]
            return [each["logprob"] for each in told]

        @reward()
        def length(self, state):
            return sum(state.result)

    found = play(Looks(), rows=2)
    sums = [sum(row) for row in found.sampling_logprobs.to_list()]
    assert found.rewards.to_list() == pytest.approx(sums, abs=1e-5)


def test_a_key_opens_its_own_session_alone():
    class Pries(Talks):
        def agent(self, task):
            said = []
            for key in ("", "x" * 43, "Bearer"):
                with pytest.raises(urllib.error.HTTPError) as error:
                    post(task, "/v1/chat/completions", {}, Authorization=f"Bearer {key}")
                said.append(error.value.code)
            return said

        @reward()
        def length(self, state):
            return float(state.result == [401, 401, 401])

    assert play(Pries(), rows=1).rewards.to_list() == [1.0]
