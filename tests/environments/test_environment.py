"""Environments of messages: replies, stops, tools and grades, on the tokens that were sampled."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, cast

import pytest
import torch
from chat_templates import CHATML, FORGETS, REFUSES, REWRITES, chat_tokenizer
from letters import build_tokenizer, model_of

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.environments import AgentEnvironment, Environment, State, group_reward, metric, reward, stop
from flowrl.errors import ModelError, RewardError, WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:.*rollout failed")


def player(**how):
    engine = fl.testing.FakeEngine(vocab=8, stop=(1,), tokenizer=build_tokenizer())
    return fl.open(fl.Actor(model_of(), max_tokens=3, **how), name="actor", engine=engine)


def played(env, rows=None, **how):
    rows = [{"prompt": "ab", "answer": str(i)} for i in range(6)] if rows is None else rows
    source = fl.data.rows(rows, batch=len(rows), shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, build_tokenizer()).with_call(CallInfo(seed=3, op="talk.rollout"))
    return fl.open(env, name="talk").rollout(batch, policy=player(), **how)


class Talk(Environment):
    """Says what the policy said last, three times at most."""

    turns = 3

    def respond(self, state):
        return "c" + state.response[-1:]

    @stop
    def nothing_said(self, state):
        return state.response == ""

    @reward(weight=2.0)
    def long(self, responses, answer):
        return len("".join(responses)) + int(answer)

    @metric
    def said(self, state):
        return state.turn


def test_replies_stops_rewards_and_metrics():
    found = played(Talk(), n=2)
    tokenizer = build_tokenizer()
    for row in range(12):
        ids, numbers = found.response_ids[row].tolist(), found.turn_ids[row].tolist()
        count = found.turns.to_list()[row]
        turns = [[i for i, n in zip(ids, numbers, strict=True) if n == turn] for turn in range(count)]
        said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in turns]
        expected = len("".join(said)) + row // 2
        assert found.scores[row] == {"long": expected, "said": count}
        assert found.rewards.to_list()[row] == 2 * expected
        silent = said[-1] == ""
        reasons = ("nothing_said",) if silent else ("turns", "length")
        assert found.finish_reason[row] in reasons and (found.outcome[row] == "finished") == silent
        observed = [i for i, n in zip(ids, numbers, strict=True) if n < 0]
        replies = said[:-1] if silent else said
        assert observed == tokenizer.encode("".join("c" + text[-1:] for text in replies))
    assert set(found.finish_reason.to_list()) == {"nothing_said", "length"}


def test_the_episodes_of_a_task_share_a_seed_and_have_one_of_their_own():
    class Seeds(Talk):
        @metric
        def shared(self, state):
            return state.row["task_seed"] % 2**50

        @metric
        def own(self, state):
            return state.seed % 2**50

    def seeds(name, **how):
        return [scores[name] for scores in played(Seeds(), n=4, **how).scores]

    shared, own = seeds("shared"), seeds("own")
    assert len(set(own)) == 24 and len(set(shared)) == 6
    assert shared == [seed for seed in shared[::4] for _ in range(4)]
    assert shared == seeds("shared"), "the same call, the same seeds"
    rows = [{"prompt": "ab", "answer": "1", "task_seed": 7}]
    assert seeds("shared", rows=rows) == [7.0] * 4, "a column of the data comes first"


def test_an_episode_has_the_lists_and_dicts_of_its_row_to_itself():
    """Each episode of the group empties them, and fails once: it sees them whole all the same."""
    failed: set[tuple[str, int]] = set()

    class Takes(Talk):
        def setup(self, state):
            assert (state.row["items"], state.row["db"]) == ([1, 2], {"users": [{"name": "a"}]})

        def respond(self, state):
            state.row["items"].pop()
            state.row["db"]["users"][0]["name"] += "b"
            if (attempt := (state.row["answer"], state.seed)) not in failed:
                failed.add(attempt)
                raise OSError("down")
            return "c"

    rows = [{"prompt": "ab", "answer": str(i), "items": [1, 2], "db": {"users": [{"name": "a"}]}} for i in range(2)]
    found = played(Takes(), rows, n=3, turns=2, retries=1, backoff=0)
    assert len(failed) == 6 and found["items"].to_list() == [[1, 2]] * 6
    assert found["db"].to_list() == [{"users": [{"name": "a"}]}] * 6 and rows[0]["db"] == {"users": [{"name": "a"}]}


def test_equal_short_replies_are_encoded_once_and_long_ones_each_time(monkeypatch):
    from flowrl.environments import environment

    encoded: list[tuple[str, int | None]] = []

    def count(messages, tokenizer, *, last, more):
        encoded.append((messages[0]["content"], last))
        return ids_behind(messages, tokenizer, last=last, more=more)

    ids_behind = environment.ids_behind
    monkeypatch.setattr(environment, "ids_behind", count)
    found = played(Talk(), n=8)
    assert len(encoded) == len(set(encoded)) < found.turns.values.sum() - 48
    once = len(encoded)

    class Long(Talk):
        def respond(self, state):
            return "c" * 201

    encoded.clear()
    played(Long(), n=8)
    assert len(encoded) > len(set(encoded)) and len(encoded) > once


def test_async_functions_give_what_plain_ones_give():
    class Async(Talk):
        async def setup(self, state):
            await asyncio.sleep(0)

        async def respond(self, state):
            await asyncio.sleep(0)
            return Talk.respond(self, state)

        @metric
        async def said(self, state):
            await asyncio.sleep(0)
            return state.turn

    plain, found = played(Talk(), n=2), played(Async(), n=2)
    assert found.response_ids.equal(plain.response_ids) and found.rewards.equal(plain.rewards)
    assert found.scores.to_list() == plain.scores.to_list()


def test_without_a_reply_an_answer_is_the_end():
    class Single(Environment):
        @reward()
        def right(self, response, answer):
            return float(response == answer)

    found = played(Single())
    assert found.turns.to_list() == [1] * 6 and set(found.finish_reason.to_list()) == {"done"}


def test_what_limits_cut_off_is_graded_as_far_as_it_came():
    found = played(Talk(), turns=1)
    assert "truncated_turns" in found.outcome.to_list() or "truncated_tokens" in found.outcome.to_list()
    assert all(scores["said"] == 1 for scores in found.scores.to_list())


def test_rewards_take_columns_by_default_and_all_of_them():
    """A parameter with a default was never given: the reward counted with the default, and said nothing."""

    class Takes(Talk):
        @reward()
        def long(self, response, answer="none", bonus=0.5, **columns):
            assert columns["prompt"] == "ab" and "state" in columns and "task_seed" in columns
            return int(answer) + bonus

        @metric
        def said(self, answer="none", other=2.0):
            return int(answer) + other

    found = played(Takes())
    assert found.rewards.to_list() == [i + 0.5 for i in range(6)]
    assert [scores["said"] for scores in found.scores.to_list()] == [i + 2.0 for i in range(6)]


def test_a_group_is_graded_together():
    class Group(Talk):
        @group_reward(weight=10.0)
        def shortest(self, states):
            least = min(len(state.response) for state in states)
            return [float(len(state.response) == least) for state in states]

    plain, found = played(Talk(), n=3), played(Group(), n=3)
    assert found.response_ids.equal(plain.response_ids)
    for prompt in range(6):
        rows = range(3 * prompt, 3 * prompt + 3)
        given = [found.scores[row]["shortest"] for row in rows]
        assert max(given) == 1.0
        for row, value in zip(rows, given, strict=True):
            assert found.rewards.to_list()[row] == plain.rewards.to_list()[row] + 10 * value


def test_what_async_functions_keep_on_self_is_there_in_later_rollouts():
    """A lock or a client belongs to the event loop it was used in: each rollout had another, and so had group rewards."""

    class Locked(Talk):
        def __init__(self):
            self.lock = asyncio.Lock()

        async def respond(self, state):
            async with self.lock:
                await asyncio.sleep(0.001)
            return super().respond(state)

        @group_reward()
        async def alike(self, states):
            async with self.lock:
                await asyncio.sleep(0.001)
            return [0.0] * len(states)

    env = fl.open(Locked(), name="talk")
    source = fl.data.rows([{"prompt": "ab", "answer": str(i)} for i in range(6)], batch=6, shuffle=False)
    for step in range(2):
        batch = source.to_batch(source.cursor().draw(), 0, build_tokenizer()).with_call(
            CallInfo(seed=3, step=step, op="talk.rollout")
        )
        found = env.rollout(batch, policy=player(), n=2, on_error="mark")
        assert set(found.failed_why.to_list()) == {""}


# -- failures -------------------------------------------------------------------------------------------------------


class Fails(Talk):
    def __init__(self, where, error):
        self.where, self.error = where, error

    def fails(self, where, number):
        if where == self.where and number == "3":
            raise self.error

    def setup(self, state):
        self.fails("setup", state.row["answer"])

    def respond(self, state):
        self.fails("respond", state.row["answer"])
        return super().respond(state)

    @stop
    def nothing_said(self, state):
        self.fails("stop", state.row["answer"])
        return Talk.nothing_said(self, state)

    @metric
    def said(self, state):
        self.fails("metric", state.row["answer"])
        return state.turn

    @group_reward()
    def alike(self, states):
        self.fails("group", states[0].row["answer"])
        return [0.0] * len(states)


@pytest.mark.parametrize(
    ("where", "outcome"),
    [
        ("setup", "environment_failure"),
        ("stop", "environment_failure"),
        ("respond", "environment_failure"),
        ("metric", "grader_failure"),
        ("group", "grader_failure"),
    ],
)
def test_a_failure_is_of_the_environment_or_the_grader(where, outcome):
    found = played(Fails(where, KeyError("lost")), n=2, on_error="mark")
    assert [o == outcome for o in found.outcome.to_list()] == [i // 2 == 3 for i in range(12)]
    assert found.failed.to_list() == [i // 2 == 3 for i in range(12)]
    assert math.isnan(found.rewards.to_list()[6]) and "KeyError: 'lost'" in found.failed_why[6]
    with pytest.raises(RewardError, match="failed for row 3, sample 0: .*KeyError") as error:
        played(Fails(where, KeyError("lost")), n=2)
    assert "test_environment.py:" in error.value.fix, "the function of the user, and not that of flowrl which calls it"


def test_a_grader_that_does_not_reach_its_service_is_infrastructure():
    found = played(Fails("metric", ConnectionError("down")), on_error="mark")
    assert found.outcome[3] == "infrastructure_failure" and found.outcome.to_list().count("infrastructure_failure") == 1


def test_a_group_whose_first_episode_failed_is_graded():
    """It waited for ever: the answer was that of the first row that is graded, which nobody waited for."""

    class First(Talk):
        begun = 0

        def setup(self, state):
            self.begun += 1
            if self.begun == 1:
                raise ConnectionError("down")

        @group_reward()
        def many(self, states):
            return [float(len(states))] * len(states)

    found = played(First(), n=3, on_error="mark")
    assert found.failed.to_list() == [True] + 17 * [False]
    assert [scores["many"] for scores in found.scores.to_list()[1:]] == 2 * [2.0] + 15 * [3.0]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (5, "respond returned 5"),
        ([{"role": "user"}], "respond returned"),
        ({"role": "assistant", "content": "I"}, "a message of the assistant"),
    ],
)
def test_a_reply_that_is_none_is_a_failure(reply, said):
    class Odd(Environment):
        def respond(self, state):
            return reply

    found = played(Odd(), on_error="mark", max_failed=1.0)
    assert set(found.outcome.to_list()) == {"environment_failure"} and said in found.failed_why[0]
    with pytest.raises(RewardError) as error:
        played(Odd())
    assert re.fullmatch(r"Mend Odd, .*test_environment\.py\.", error.value.fix or "")


@pytest.mark.parametrize("value", [None, "0.5", math.nan, [1.0], 10**400])
def test_a_grade_that_is_no_number_is_named(value):
    class Odd(Environment):
        @reward()
        def right(self):
            return value

    found = played(Odd(), on_error="mark", max_failed=1.0)
    assert set(found.outcome.to_list()) == {"grader_failure"}
    assert f"right returned {value!r}, which is no finite number" in found.failed_why[0]


def test_history_that_is_rewritten_is_refused():
    """The tokens of what was said are sampled already: another text would train on what nobody saw."""

    class Rewrites(Environment):
        def respond(self, state):
            if state.turn == 2:
                state.messages[0] = {"role": "user", "content": "other"}
            return "c"

    found = played(Rewrites(), turns=4, on_error="mark", max_failed=1.0)
    assert all("rewritten state.messages" in why for why in found.failed_why.to_list())


@pytest.mark.parametrize("value", [math.nan, "1.0", None])
def test_a_grade_that_is_no_number_is_a_failure(value):
    class Odd(Environment):
        @reward()
        def odd(self, state):
            return value

    found = played(Odd(), on_error="mark", max_failed=1.0)
    assert set(found.outcome.to_list()) == {"grader_failure"}


def test_a_grade_that_asks_for_no_column_is_named():
    class Odd(Environment):
        @reward()
        def odd(self, solution):
            return 1.0

    with pytest.raises(RewardError, match="odd asks for 'solution', which is no column of the data; there are state"):
        played(Odd())


class Asks(Environment):
    def rows(self):
        return [{"prompt": "1+2?", "solution": "3"}]

    @reward()
    def right(self, state, response, solution, task_seed, prompt, hint=None):
        return float(response == solution)

    @metric
    def near(self, response, soluton):
        return 0.0


class AsksWhatSetupGives(Asks):
    def setup(self, state):
        state.row = {**state.row, "soluton": "3"}


class AsksWhatRespondGives(Asks):
    def respond(self, state):
        state.row["soluton"] = "3"


class AsksWhatStopGives(Asks):
    @stop
    def solved(self, state):
        state.row["soluton"] = "3"
        return True


def look_up(state: Any, word: str) -> str:
    """Look a word up."""
    state.row["soluton"] = word
    return word


def double(word: str) -> str:
    """Double a word."""
    return word + word


class AsksWhatAToolGives(Asks):
    tools = (double, look_up)


class HasAToolWithoutState(Asks):
    tools = (double,)


class AsksWhatAnAgentGives(Asks, AgentEnvironment):
    def agent(self, task):
        task.row["soluton"] = "3"


class HasAProgram(Asks, AgentEnvironment):
    command = ("python", "agent.py")


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Asks, True),
        (HasAToolWithoutState, True),
        (HasAProgram, True),
        (AsksWhatSetupGives, False),
        (AsksWhatRespondGives, False),
        (AsksWhatStopGives, False),
        (AsksWhatAToolGives, False),
        (AsksWhatAnAgentGives, False),
    ],
)
def test_a_check_names_a_grade_that_asks_for_no_column(kind, wrong):
    flow = fl.Flow("asks")
    actor, env = flow.worker(fl.Actor, model_of(), lr=None), flow.worker(kind)
    tasks = kind().source(batch=1)

    @flow.program
    def asks(steps: int = 1):
        for step, batch in flow.steps(tasks, steps):
            flow.log(step, reward=env.rollout(batch, policy=actor).rewards.mean())

    errors = flow.check("asks").errors
    assert len(errors) == wrong
    for error in errors:
        assert error.what == f"{kind.__name__}.near asks for 'soluton', which is no column of the data."
        assert error.fix == "Did you mean 'solution'?" and "def near" in error.at.text
        assert error.have == "prompt, response, responses, solution, state"


def test_marks_on_functions_that_cannot_be_called_are_refused():
    with pytest.raises(WorkerError, match="is asked with the state alone"):
        stop(lambda self, answer: True)
    with pytest.raises(WorkerError, match=r"Write @reward\(\)|without a weight"):
        reward(cast(Any, lambda self: 1.0))
    for marks, weight in ((reward, "2"), (group_reward, math.nan), (reward, None), (group_reward, True)):
        with pytest.raises(WorkerError, match="a weight is a number"):
            marks(weight=cast(Any, weight))
    with pytest.raises(WorkerError, match="states of a prompt's episodes"):
        group_reward()(lambda self, state: [])
    with pytest.raises(WorkerError, match="cannot be given by name"):
        metric(lambda self, *state: 0.0)


# -- tools ----------------------------------------------------------------------------------------------------------


def calculate(expression: str) -> float:
    """Compute.

    Args:
        expression: such as 1+2
    """
    return eval(expression, {"__builtins__": {}})


def remember(state: State, key: str, value: int = 0) -> str:
    """Keep a number."""
    vars(state)["kept"] = {**vars(state).get("kept", {}), key: value}
    return "ok"


def down() -> str:
    """Ask a service."""
    raise ConnectionError("no route")


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Tools(Environment):
    tools = (calculate, remember, down)


def begun():
    env = Tools()
    state, said = env.reset({"prompt": "x"}, 0)
    assert said == ""
    return env, state


def test_tools_are_called_and_told():
    env, state = begun()
    _, said, given, over = env.step(state, "think " + call("calculate", expression="2+3") + call("remember", key="a"))
    assert [m["content"] for m in cast(Any, said).messages] == ["5", "ok"] and (given, over) == (0.0, False)
    assert vars(state)["kept"] == {"a": 0} and [m["role"] for m in state.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    assert env.step(state, "it is 5")[1:] == ("", 0.0, True), "an answer without a call is the last"
    assert env.grade(state) == (0.0, {"tool_calls": 2.0, "bad_tool_calls": 0.0})


@pytest.mark.parametrize(
    ("text", "said", "bad"),
    [
        (call("calculate", expression="1/0"), "error: ZeroDivisionError: division by zero", 0),
        (call("calculate", expression=5), "error: the argument 'expression' of calculate is 5, which is no string", 1),
        (call("calculate"), "error: calculate needs the argument 'expression'", 1),
        (call("calculate", expression="1", more=2), "error: calculate has no argument 'more'; it has expression", 1),
        (call("remember", key="a", value=True), "error: the argument 'value' of remember is True", 1),
        (call("remember", state={}, key="a"), "error: remember has no argument 'state'", 1),
        (call("other"), "error: there is no tool 'other'; there are calculate, remember, down", 1),
        ("<tool_call>{'name': 1}</tool_call>", "error: the call is no JSON", 1),
        ("<tool_call>[]</tool_call>", 'error: the call is no object with a "name"', 1),
        ('<tool_call>{"name": "calculate", "arguments": [1]}</tool_call>', "error: the arguments of calculate", 1),
        ('<tool_call>{"name": "calculate"', "error: the call has no </tool_call>", 1),
    ],
)
def test_a_wrong_call_is_told_to_the_model(text, said, bad):
    env, state = begun()
    _, told, _, over = env.step(state, text)
    assert told.startswith(said) and not over
    assert (state.tool_calls, state.bad_tool_calls) == (1, bad)


def test_a_tool_that_does_not_reach_its_service_fails_the_episode():
    env, state = begun()
    with pytest.raises(ConnectionError):
        env.step(state, call("down"))


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(WorkerError, match="is the name of two tools"):
        fl.Flow("f").worker(type("Twice", (Environment,), {"tools": (calculate, calculate)}))


# -- chat templates -------------------------------------------------------------------------------------------------


class Chat(Environment):
    def respond(self, state):
        return "why?"


def chatted(template, env=None, *, says="", **how):
    """Episodes of a chat; ``says`` is the text of each answer, else it is drawn."""
    tokenizer, table = chat_tokenizer(template), None
    if says:
        tokenizer.add_tokens([says])
        table = torch.zeros(len(tokenizer), len(tokenizer)).index_fill_(1, torch.tensor(len(tokenizer) - 1), 100.0)
        table[-1] = torch.zeros(len(tokenizer)).index_fill_(0, torch.tensor(1), 100.0)
    engine = fl.testing.FakeEngine(vocab=len(tokenizer), table=table, stop=(1,), tokenizer=tokenizer)
    actor = fl.open(fl.Actor(model_of(), max_tokens=6), name="actor", engine=engine)
    source = (env or Chat()).source(batch=4, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer).with_call(CallInfo(seed=1, op="chat.rollout"))
    return fl.open(env or Chat()).rollout(batch, policy=actor, turns=3, **how), tokenizer


class Asked(Chat):
    def rows(self):
        return [{"prompt": f"{i}?"} for i in range(4)]


@pytest.mark.parametrize("template", [CHATML, FORGETS], ids=["chatml", "forgets"])
def test_a_turn_goes_on_from_the_tokens_of_the_one_before(template):
    """Read as text, the row is the conversation; each end of a turn is there once, whether it was sampled or not."""
    found, tokenizer = chatted(template, Asked())
    for prompt, ids, numbers in zip(
        found.prompt_ids.to_list(), found.response_ids.to_list(), found.turn_ids.to_list(), strict=True
    ):
        text = tokenizer.decode(prompt + ids)
        assert text.startswith("<|im_start|>user\n") and text.count("<|im_start|>user\nwhy?<|im_end|>\n") == 3
        assert "<|im_end|><|im_end|>" not in text.replace(" ", "")
        between = [tokenizer.decode([i for i, n in zip(ids, numbers, strict=True) if n < 0])]
        assert between[0].replace("<|im_end|>", "").count("<|im_start|>assistant\n") == 3


def look() -> str:
    """Look around: there is nothing."""
    return ""


class Looks(Environment):
    rows = Asked.rows
    tools = (look,)


class Silent(Environment):
    rows = Asked.rows

    def respond(self, state):
        return ""


@pytest.mark.parametrize(("env", "role"), [(Looks, "tool"), (Silent, "user")])
def test_what_has_no_text_is_a_turn_all_the_same(env, role):
    says = call("look")
    found, tokenizer = chatted(CHATML, env(), says=says)
    assert set(found.turns.to_list()) == {3}
    for ids in found.response_ids.to_list():
        text = tokenizer.decode(ids).removeprefix(f"{says}<|im_end|>")
        assert text.startswith(f"\n<|im_start|>{role}\n<|im_end|>\n<|im_start|>assistant\n{says}<|im_end|>")
    plain = played(type("Mute", (Talk,), {"respond": lambda self, state: ""})())
    assert all(mask == [True] * len(mask) for mask in plain.response_mask.to_list()), "without a template it is nothing"


def test_an_end_that_was_sampled_is_not_written_again():
    from flowrl.environments.chat import ids_behind

    tokenizer = chat_tokenizer(CHATML)
    reply = [{"role": "user", "content": "ok"}]
    cut = ids_behind(reply, tokenizer, last=None)
    ended = ids_behind(reply, tokenizer, last=tokenizer.eos_token_id)
    assert cut[0] == tokenizer.eos_token_id and cut[1:] == ended
    assert tokenizer.decode(ended) == "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "said"), [(REWRITES, "writes an answer anew"), (REFUSES, "refuses messages of tool after an answer")]
)
def test_a_template_that_cannot_go_on_is_named(template, said):
    from flowrl.environments.chat import ids_behind

    with pytest.raises(ModelError, match=said):
        ids_behind([{"role": "tool", "content": "5"}], chat_tokenizer(template), last=None)


class Calls(Asked):
    tools = (calculate,)


@pytest.mark.parametrize(
    ("template", "env", "said"),
    [
        (REWRITES, Asked, "writes an answer anew"),
        (REWRITES, Calls, "writes an answer anew"),
        (REFUSES, Calls, "refuses messages of tool after an answer"),
    ],
)
def test_a_template_that_cannot_go_on_is_found_before_anything_is_sampled(template, env, said, monkeypatch):
    monkeypatch.setattr(fl.testing.FakeEngine, "submit", lambda *given: pytest.fail("a row was sampled"))
    monkeypatch.setattr(fl.testing.FakeEngine, "generate", lambda *given: pytest.fail("a row was sampled"))
    with pytest.raises(ModelError, match=said):
        chatted(template, env())


def test_a_template_that_rewrites_answers_will_do_where_nothing_follows_them():
    class Once(Environment):
        rows = Asked.rows

    found, _ = chatted(REWRITES, Once())
    assert set(found.turns.to_list()) == {1}


def test_tools_are_shown_in_the_prompt():
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML

    class Calculator(Tools):
        system = "Compute."

        def rows(self):
            return [{"prompt": "1+2?"}] * 4

    source = Calculator().source(batch=2)
    [first, _] = source.to_batch(source.cursor().draw(), 0, chat_tokenizer(shown)).prompt_ids.to_list()
    text = chat_tokenizer(shown).decode(first)
    assert '"expression"' in text and "such as 1+2" in text and '"state"' not in text
    assert "<|im_start|>system\nCompute.<|im_end|>" in text


def test_a_conversation_begins_with_the_system_message_and_is_learned_from_as_it_was_played():
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML

    class Polite(Tools):
        system = "Be kind."

        def rows(self):
            return [
                {"prompt": "Hi?"},
                {"prompt": [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi?"}]},
            ]

    env, tokenizer = Polite(), chat_tokenizer(shown)
    (text, _), (own, _) = env.reset({"prompt": "Hi?"}, seed=0), env.reset({"messages": env.rows()[1]["prompt"]}, seed=0)
    assert [message["content"] for message in text.messages] == ["Be kind.", "Hi?"]
    assert [message["content"] for message in own.messages] == ["Own.", "Hi?"]
    env.step(text, "Hello.")

    tasks, talks = env.source(batch=2, shuffle=False), [{"talk": text.messages}]
    learned = env.source_of(fl.data.rows, talks, batch=1, messages="talk")
    [played, _] = tasks.to_batch(tasks.cursor().draw(), 0, tokenizer).prompt_ids.to_list()
    [prompt] = learned.to_batch(learned.cursor().draw(), 0, tokenizer).prompt_ids.to_list()
    assert tokenizer.decode(prompt) == tokenizer.decode(played) and '"expression"' in tokenizer.decode(prompt)


def test_a_prompt_of_setup_is_for_tokenizers_without_a_chat_template():
    class Begins(Asked):
        def setup(self, state):
            return "c"

    with pytest.raises(WorkerError, match="ends where the answer begins"):
        chatted(CHATML, Begins())
    found = played(type("Plain", (Talk,), {"setup": lambda self, state: "c"})())
    assert all(ids[0] == build_tokenizer().encode("c")[0] for ids in found.response_ids.to_list())


def test_it_trains_in_a_program(tmp_path):
    from flowrl import rl

    class Game(Talk):
        chat = False

        def rows(self):
            return [{"prompt": "ab", "answer": str(i)} for i in range(8)]

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    flow = fl.Flow("talks")
    actor = flow.worker(fl.Actor, model_of(**sizes), lr=1e-2, max_tokens=3, name="actor")
    game = flow.worker(Game, name="game")

    @flow.program
    def train(steps: int = 2):
        for step, batch in flow.steps(Game().source(batch=4), steps):
            batch = rl.group_advantages(game.rollout(batch, policy=actor, n=4))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), game.outcomes(batch), reward=batch.rewards.mean())

    torch.set_num_threads(1)
    first = flow.run(out=tmp_path / "a", quiet=True)
    assert flow.run(out=tmp_path / "b", runtime="eager", quiet=True).weights_digest == first.weights_digest
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    wanted = {"finished", "said", "long", "delivered_fraction"}
    assert all(wanted <= {name.split("/")[-1] for name in line} for line in lines)
