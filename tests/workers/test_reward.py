"""Rewards by function: what the function is given, how many of its calls run at once, and what becomes of its failures."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import sys
import threading
import time
from queue import SimpleQueue

import pytest
import torch
from ten_letters import build_tokenizer

import flowrl as fl
from flowrl.errors import FieldError, ModelError, RewardError, RunError, WorkerError
from flowrl.graph.stand_ins import current_session as sessions
from flowrl.workers.user_code.run_rows import run_rows

pytestmark = pytest.mark.filterwarnings("ignore:reward.score")  # what a worker outside of a flow has to tell

RESPONSES = ["b;", "bc;", "", "cab;", "ab", "j;"]


def batch(rows: int = 6, keys=None, **columns):
    """Prompts "a", "ab", ... with RESPONSES as their responses."""
    tokenizer = build_tokenizer()
    prompts = ["abcdefghij"[: 1 + i % 10] for i in range(rows)]
    responses = [RESPONSES[i % len(RESPONSES)] for i in range(rows)]

    def ids(texts, dim):
        return fl.Column.of([tokenizer.encode(t, add_special_tokens=False) for t in texts], dim=dim, dtype="i32")

    return fl.Batch.of(
        keys or rows,
        prompt_ids=ids(prompts, "prompt"),
        response_ids=ids(responses, "response"),
        **{n: fl.Column.of(v, dtype="any") if isinstance(v, list) else v for n, v in columns.items()},
    )


def score(fn, rows=None, **how):
    """The rewards of a function for a batch."""
    reward = fl.open(fl.FunctionReward(fn, tokenizer=build_tokenizer, **how), name="reward")
    return reward.score(batch() if rows is None else rows).rewards


def length(prompt: str, response: str) -> float:
    return 10.0 * len(prompt) + len(response)


LENGTHS = [11, 22, 30, 43, 52, 61]


# -- what it is given ------------------------------------------------------------------------------


def test_a_plain_function_is_given_texts():
    rewards = score(length)
    assert rewards.type == "f32[]" and rewards.to_list() == LENGTHS


def test_an_async_function():
    async def fn(prompt: str, response: str) -> float:
        await asyncio.sleep(0.001 * (7 - len(prompt)))
        return length(prompt, response)

    assert score(fn).to_list() == LENGTHS


def test_an_async_function_where_an_event_loop_runs_already():
    async def fn(response: str) -> float:
        return len(response)

    async def notebook():
        return score(fn).to_list()

    assert asyncio.run(notebook()) == [1, 2, 0, 3, 2, 1]


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor], ids=["list", "tuple", "tensor"])
def test_a_batched_function_is_given_lists(kind):
    def fn(prompt: list[str], response: list[str], weight: list[float]):
        assert type(prompt) is type(response) is type(weight) is list
        return kind([w * length(p, r) for p, r, w in zip(prompt, response, weight, strict=True)])

    rewards = score(fn, batch(weight=[2.0] * 6), batched=True)
    assert rewards.to_list() == [2 * x for x in LENGTHS]


def test_an_async_batched_function():
    async def fn(response):
        await asyncio.sleep(0.001)
        return [len(r) for r in response]

    assert score(fn, batched=True).to_list() == [1, 2, 0, 3, 2, 1]


class Judge:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, response):
        return self.scale * len(response)


class AsyncJudge(Judge):
    async def __call__(self, response):
        return self.scale * len(response)


@pytest.mark.parametrize(
    "fn",
    [
        Judge(2),
        AsyncJudge(2),
        functools.partial(lambda response, scale: scale * len(response), scale=2),
        Judge(2).__call__,
    ],
    ids=["object", "async object", "partial", "method"],
)
def test_whatever_can_be_called(fn):
    assert score(fn).to_list() == [2, 4, 0, 6, 4, 2]


def test_columns_by_name():
    def fn(response: str, answer: str, score: int) -> float:
        return float(response == answer) + score

    rows = batch(answer=["b", "x", "", "x", "ab", "x"], score=[0, 0, 0, 5, 0, 0])
    assert score(fn, rows).to_list() == [1, 0, 1, 5, 1, 0]


def test_defaults_stand_in_for_columns_that_are_not_there():
    def fn(response: str, bonus: float = 0.5) -> float:
        return bonus

    assert score(fn).to_list() == [0.5] * 6
    assert score(fn, batch(bonus=[1, 2, 3, 4, 5, 6])).to_list() == [1, 2, 3, 4, 5, 6]


def test_a_column_that_is_not_there_is_named():
    def fn(response: str, answers: str) -> float:
        return 0.0

    with pytest.raises(FieldError, match="fn takes 'answers', which is no column") as caught:
        score(fn, batch(answer=["x"] * 6))
    assert caught.value.have == "answer, prompt, response" and caught.value.fix == "Write answer for answers."
    assert caught.value.at.text == "def fn(response: str, answers: str) -> float:"


class Grader:
    def __call__(self, respnse: str) -> float:
        return 0.0

    def grade(self, respnse: str) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("fn", "line"),
    [
        (Grader(), "def __call__("),
        (Grader().grade, "def grade("),
        (functools.partial(Grader().grade), "def grade("),
        (lambda respnse: 0.0, "(lambda respnse"),
    ],
    ids=["object", "method", "partial", "lambda"],
)
def test_a_misspelt_parameter_is_named_at_the_line_of_the_function(fn, line):
    with pytest.raises(FieldError, match="takes 'respnse', which is no column of the batch: a reward is fn") as caught:
        score(fn)
    assert caught.value.fix == "Write response for respnse." and line in caught.value.at.text


def test_all_parameters_that_no_column_has_the_name_of_are_named():
    def fn(respnse: str, completions: list[str], truth: str) -> float:
        return 0.0

    with pytest.raises(FieldError, match="fn takes 'respnse', 'completions' and 'truth', which are no col") as caught:
        score(fn)
    parts = [
        "Write response for respnse.",
        "Write response for completions:",
        "Have the data, or an op before the reward, give truth; or",
    ]
    assert all(part in caught.value.fix for part in parts)


def test_of_a_standard_field_it_is_said_that_no_op_adds_it():
    with pytest.raises(FieldError, match="reward.score reads 'ref_logprobs', which no op before it adds"):
        score(lambda ref_logprobs: 0.0)


def test_all_columns_of_the_data():
    seen = []

    def fn(**columns):
        seen.append(columns)
        return 1.0

    rows = batch(answer=["x"] * 6, difficulty=[1, 2, 3, 4, 5, 6])
    score(fn, rows, concurrency=1)
    assert [s["difficulty"] for s in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[1] == {"prompt": "ab", "response": "bc", "answer": "x", "difficulty": 2}


def test_a_function_of_nothing():
    assert score(lambda: 3).to_list() == [3] * 6


def test_token_fields_are_lists_of_numbers():
    def fn(response: str, response_ids: list[int]) -> float:
        assert type(response_ids) is list
        return sum(response_ids)

    assert score(fn).to_list() == [2 + 11, 2 + 3 + 11, 0, 3 + 1 + 2 + 11, 3, 10 + 11]


def test_the_prompt_column_goes_before_decoded_tokens():
    """The text of the data, as it was: decoding leaves out what a chat template put around it."""
    told = score(lambda prompt, response: float(prompt == "What is it?"), batch(prompt=["What is it?"] * 6))
    assert told.to_list() == [1] * 6


def test_chats_come_with_their_messages():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }};{% endfor %}a"
    source = fl.data.rows(
        [{"prompt": [{"role": "user", "content": "bcd"}], "answer": "x"}], batch=1, system="be", repeat=False
    )
    rows = source.to_batch(source.cursor().draw(), 0, tokenizer)
    rows = rows.with_columns({"response_ids": fl.Column.of([[2, 11]], dim="response", dtype="i32")})
    seen = []

    def fn(prompt: str, response: str, messages: list[dict[str, str]]) -> float:
        seen.append((prompt, response, [m["content"] for m in messages]))
        return 1.0

    reward = fl.open(fl.FunctionReward(fn, tokenizer=tokenizer))
    assert reward.score(rows).rewards.to_list() == [1.0]
    assert seen == [("sbe;ubcd;a", "b", ["be", "bcd"])]
    decoded = fl.open(fl.FunctionReward(lambda prompt: float(prompt == "?be?bcda"), tokenizer=tokenizer))
    assert decoded.score(rows.drop("prompt")).rewards.to_list() == [1.0]


def test_rewards_stand_in_the_order_of_rows_and_flow_on_with_them():
    keys = [(9, 1), (2, 0), (9, 0), (4, 7), (0, 0), (3, 3)]

    def fn(prompt, response):
        time.sleep(0.004 * (6 - len(prompt)))  # the first is the last to be done
        return length(prompt, response)

    rows = batch(keys=keys, answer=["x"] * 6)
    scored = fl.open(fl.FunctionReward(fn, tokenizer=build_tokenizer)).score(rows)
    assert scored.keys == tuple(keys) and scored.rewards.to_list() == LENGTHS
    assert set(scored.fields) == {*rows.fields, "rewards"}


def test_no_rows_call_nothing():
    def fn(prompt, response):
        raise AssertionError("called")

    none = batch().filter([False] * 6)
    for batched in (False, True):
        assert len(score(fn, none, batched=batched)) == 0


# -- how many at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_as_many_calls_run_at_once_as_are_allowed(asynchronous, concurrency):
    """Each waits until as many are there; more than that never are."""
    now, most, lock = [0], [0], threading.Lock()
    barrier, async_barrier = threading.Barrier(concurrency, timeout=20), asyncio.Barrier(concurrency)

    def enter(by):
        with lock:
            now[0] += by
            most[0] = max(most[0], now[0])

    def plain(response):
        enter(1)
        barrier.wait()
        time.sleep(0.005)
        enter(-1)
        return 1.0

    async def waiting(response):
        enter(1)
        await async_barrier.wait()
        await asyncio.sleep(0.005)
        enter(-1)
        return 1.0

    fn = waiting if asynchronous else plain
    assert score(fn, batch(16), concurrency=concurrency, timeout=20).to_list() == [1] * 16
    assert most[0] == concurrency


def test_rows_wait_together():
    start = time.perf_counter()
    score(lambda response: time.sleep(0.3) or 1.0, batch(32), concurrency=32)
    assert time.perf_counter() - start < 32 * 0.3 / 4


# -- failures --------------------------------------------------------------------------------------


KEYS = [(5, 0), (5, 1), (5, 2), (8, 0), (8, 1), (8, 2)]


def on_row_three(do):
    """A function that fails for the prompt "abcd", the row (8, 0)."""

    def fn(prompt, response):
        return do() if prompt == "abcd" else 1.0

    return fn


def fail():
    raise ValueError("no such answer")


def test_an_exception_names_the_row():
    with pytest.raises(
        RewardError, match=r"reward.score: fn failed for row 8, sample 0: ValueError: no such answer"
    ) as caught:
        score(on_row_three(fail), batch(keys=KEYS))
    assert isinstance(caught.value.__cause__, ValueError)
    assert 'on_error="mark"' in caught.value.fix


def test_an_exception_of_an_async_function_names_the_row():
    async def fn(prompt, response):
        return fail() if prompt == "abcd" else 1.0

    with pytest.raises(RewardError, match="row 8, sample 0: ValueError: no such answer"):
        score(fn, batch(keys=KEYS))


def test_a_batched_function_fails_for_all_its_rows():
    with pytest.raises(
        RewardError, match="failed for all 6 rows, 5, sample 0 to 8, sample 2: ValueError: no such answer"
    ):
        score(lambda prompt, response: fail(), batch(keys=KEYS), batched=True)


class Odd:
    """No number, and it says so in its own way."""

    def __float__(self):
        raise KeyError("float")


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda: None, "it returned None, which is no number"),
        (Odd, "it returned a Odd, which is no number"),
        (lambda: math.nan, "it returned nan"),
        (lambda: math.inf, "it returned inf"),
        (lambda: "good", "it returned 'good', which is no number"),
        (lambda: [1.0, 2.0], r"it returned \[1.0, 2.0\], which is no number"),
        (lambda: sys.exit("gone"), "SystemExit: gone"),
        (lambda: (_ for _ in ()).throw(TimeoutError("the judge is away")), "TimeoutError: the judge is away"),
    ],
    ids=["None", "an object that raises", "nan", "inf", "text", "list", "exit", "a TimeoutError of its own"],
)
def test_what_is_no_reward_names_the_row(do, said):
    with pytest.raises(RewardError, match=rf"row 8, sample 0: (\w+: )?{said}"):
        score(on_row_three(do), batch(keys=KEYS))
    with pytest.warns(UserWarning, match="row 8, sample 0") as told:
        assert score(on_row_three(do), batch(keys=KEYS), on_error=-1.0).to_list() == [1, 1, 1, -1, 1, 1]
    assert sum("row 8, sample 0" in str(w.message) for w in told) == 1


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
def test_a_row_that_cannot_be_told_has_failed_and_holds_up_no_other(asynchronous):
    """As where no thread can be started for the journal: whoever waits for the rows hears of it at once."""

    async def waiting(x):
        return x

    def tell(place, outcome):
        if place == 1:
            raise RuntimeError("can't start new thread")

    fn = waiting if asynchronous else lambda x: x
    rows, found = [{"x": i} for i in range(3)], []
    thread = threading.Thread(
        target=lambda: found.extend(run_rows(fn, rows, concurrency=2, timeout=None, tell=tell)), daemon=True
    )
    thread.start()
    thread.join(30)
    assert [str(outcome) for outcome in found] == ["0", "can't start new thread", "2"]


def test_an_own_timeout_of_an_async_function_is_no_timeout_of_the_row():
    async def fn(prompt, response):
        raise TimeoutError("the judge is away")

    with pytest.raises(RewardError, match="TimeoutError: the judge is away"):
        score(fn)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0] * 5, "it returned 5 rewards for 6 rows"),
        ([1.0] * 7, "it returned 7 rewards for 6 rows"),
        (1.0, "it returned 1.0, not a list with a reward for each row"),
        (None, "it returned None, not a list"),
    ],
)
def test_a_wrong_count_of_rewards(returned, said):
    with pytest.raises(RewardError, match=said):
        score(lambda response: returned, batched=True)
    assert score(lambda response: returned, batched=True, on_error=0.25).to_list() == [0.25] * 6


def test_one_bad_reward_of_a_batched_function_names_its_row():
    with pytest.raises(RewardError, match="row 8, sample 1: ValueError: it returned nan"):
        score(lambda response: [1, 1, 1, 1, math.nan, 1], batch(keys=KEYS), batched=True)
    rewards = score(lambda response: [1, 1, 1, 1, None, 1], batch(keys=KEYS), batched=True, on_error=0.0)
    assert rewards.to_list() == [1, 1, 1, 1, 0, 1]


# -- timeouts --------------------------------------------------------------------------------------


def test_a_row_of_a_plain_function_that_takes_too_long_is_left_behind():
    gate = threading.Event()
    fn = on_row_three(lambda: gate.wait(20) and 1.0)
    start = time.perf_counter()
    with pytest.raises(RewardError, match="fn failed for row 8, sample 0: it took longer than 0.05 s"):
        score(fn, batch(keys=KEYS), timeout=0.05, concurrency=1)
    rewards = score(fn, batch(keys=KEYS), timeout=0.05, concurrency=1, on_error=0.0)
    assert rewards.to_list() == [1, 1, 1, 0, 1, 1], "the rows after it were called"
    assert time.perf_counter() - start < 10
    gate.set()


def test_a_row_of_an_async_function_that_takes_too_long_is_cancelled():
    cancelled = []

    async def fn(prompt, response):
        try:
            await asyncio.sleep(20 if prompt == "abcd" else 0)
        except asyncio.CancelledError:
            cancelled.append(prompt)
            raise
        return 1.0

    with pytest.raises(RewardError, match="fn failed for row 8, sample 0: it took longer than 0.05 s"):
        score(fn, batch(keys=KEYS), timeout=0.05)
    assert score(fn, batch(keys=KEYS), timeout=0.05, on_error=0.5).to_list() == [1, 1, 1, 0.5, 1, 1]
    assert cancelled == ["abcd", "abcd"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
def test_a_batched_function_has_the_time_of_a_whole_call(asynchronous):
    gate = threading.Event()

    def plain(response):
        gate.wait(20)
        return [1.0] * 6

    async def waiting(response):
        await asyncio.sleep(20)

    fn = waiting if asynchronous else plain
    with pytest.raises(RewardError, match="for all 6 rows, 0 to 5: it took longer than 0.05 s"):
        score(fn, batched=True, timeout=0.05)
    assert score(fn, batched=True, timeout=0.05, on_error=2.0).to_list() == [2.0] * 6
    gate.set()


def test_the_time_is_that_of_one_row_and_not_of_all():
    assert len(score(lambda response: time.sleep(0.02) or 1.0, batch(20), timeout=0.3, concurrency=1)) == 20


def test_many_rows_that_all_take_too_long():
    gate = threading.Event()
    rewards = score(
        lambda response: gate.wait(20), batch(40), timeout=0.05, concurrency=8, on_error=0.0, max_failed=1.0
    )
    assert rewards.to_list() == [0.0] * 40
    gate.set()


# -- declared wrongly ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "how", "said"),
    [
        (3, {}, "A reward is one function, not int 3"),
        (length, {"on_error": "zero"}, "neither 'raise' nor 'mark' nor a number"),
        (length, {"concurrency": 0}, "concurrency=0"),
        (lambda response, /: 1.0, {}, "parameter 'response' is positional-only"),
    ],
)
def test_mistakes_are_found_where_the_worker_is_declared(fn, how, said):
    with pytest.raises(WorkerError, match=said):
        fl.FunctionReward(fn, **how)
    with pytest.raises(WorkerError, match=said) as caught:
        fl.Flow("f").worker(fl.FunctionReward, fn, **how)
    assert caught.value.at.file == __file__


@pytest.mark.parametrize("said", ["function", "tokenizer", "folder", "actor"])
def test_a_tokenizer_may_be_said_in_several_ways(said, tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    model = fl.Model(config={"model_type": "qwen2", "vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 1,
                             "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8},
                     tokenizer=build_tokenizer)  # fmt: skip
    given = {
        "function": lambda: build_tokenizer,
        "tokenizer": lambda: tokenizer,
        "folder": lambda: str(tmp_path),
        "actor": lambda: fl.open(fl.Actor(model)),
    }[said]()
    reward = fl.open(fl.FunctionReward(length, tokenizer=given))
    assert reward.score(batch()).rewards.to_list() == LENGTHS


def test_a_reward_outside_of_a_flow_has_no_actor_to_ask():
    with pytest.raises(ModelError, match="no actor whose tokenizer") as caught:
        fl.open(fl.FunctionReward(length)).score(batch())
    assert "tokenizer=" in caught.value.fix


# -- in a run --------------------------------------------------------------------------------------


class Speaker(fl.Worker):
    """Answers every prompt with its own letters, turned round; counts its updates."""

    keeps = ("updates",)

    def __init__(self):
        self.updates = 0

    @fl.op(reads="prompt_ids", adds="response_ids: i32[*response]", cost="generate")
    def speak(self, batch):
        return {"response_ids": fl.Column.of([row.flip(0) for row in batch.prompt_ids], dim="response", dtype="i32")}

    @fl.op(reads="rewards", updates="updates", cost="train")
    def update(self, batch) -> fl.Metrics:
        if self.updates == STOP_AT[0]:
            raise KeyError("stopped on purpose")
        self.updates += 1
        return fl.Metrics(reward=batch.rewards.mean())

    def digest(self):
        return str(self.updates)


STOP_AT = [-1]
CALLS: SimpleQueue[str] = SimpleQueue()  # a list would be as it was at the checkpoint in a resumed run


def counted(prompt: str, response: str, number: int) -> float:
    CALLS.put(f"{number}")
    if number % 5 == 3:
        raise ValueError(f"number {number}")
    return number + len(response)


def make_flow(**how):
    """A flow of a speaker and a reward over numbered prompts."""
    flow = fl.Flow("talk")
    speaker = flow.worker(Speaker, name="speaker")
    reward = flow.worker(fl.FunctionReward, counted, tokenizer=build_tokenizer, name="reward", **how)
    source = fl.data.generated(lambda i: {"prompt": "ab"[: 1 + i % 2], "number": i}, batch=3, tokenizer=build_tokenizer)

    @flow.program
    def talk(steps: int = 6):
        for step, batch in flow.steps(source, steps):
            batch = speaker.speak(batch)
            batch = reward.score(batch)
            flow.log(step, speaker.update(batch))

    assert sessions.current() is None
    return flow


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def calls():
    """Gives the numbers that have been asked for since it was called last, sorted."""

    def taken():
        return sorted(CALLS.get() for _ in range(CALLS.qsize()))

    taken()
    STOP_AT[0] = -1
    return taken


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_a_failure_stops_the_run_at_the_drivers_line(calls, tmp_path, runtime):
    with pytest.raises(RewardError, match="counted failed for row 3: ValueError: number 3") as caught:
        make_flow().run(out=tmp_path, runtime=runtime, quiet=True)
    assert caught.value.at.text == "batch = reward.score(batch)"
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0]
    assert lines(tmp_path / "events.jsonl")[-1]["kind"] == "failed"


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_a_run_that_was_told_so_goes_on_and_writes_the_failures_down(calls, tmp_path, runtime):
    outcome = make_flow(on_error=-2.0).run(out=tmp_path, runtime=runtime, quiet=True)
    assert outcome.status == "done"
    warnings = [e["text"] for e in lines(tmp_path / "events.jsonl") if e["kind"] == "warning"]
    assert warnings == [
        f"reward.score of step {s}: counted failed for row {n}: ValueError: number {n}"
        for s, n in ((1, 3), (2, 8), (4, 13))
    ]
    expected = [[n + 1 + n % 2 if n % 5 != 3 else -2.0 for n in range(3 * s, 3 * s + 3)] for s in range(6)]
    assert [line["reward"] for line in lines(tmp_path / "metrics.jsonl")] == pytest.approx(
        [sum(e) / 3 for e in expected]
    )


@pytest.mark.parametrize("every", [1, 2, 50])
def test_a_resumed_run_asks_no_reward_again(calls, tmp_path, every):
    whole = make_flow(on_error=0.0).run(out=tmp_path / "whole", quiet=True)
    expected = calls()
    STOP_AT[0] = 3
    with pytest.raises(RunError, match="stopped on purpose"):
        make_flow(on_error=0.0).run(out=tmp_path / "run", quiet=True, checkpoint_every=every)
    first = calls()
    assert len(first) == 12, "the reward of the step that died was there already"
    STOP_AT[0] = -1
    again = make_flow(on_error=0.0).run(out=tmp_path / "run", quiet=True, checkpoint_every=every, resume=True)
    assert sorted([*first, *calls()]) == expected and len(set(expected)) == 18
    assert again.weights_digest == whole.weights_digest
    told = [[{**line, "seconds": 0} for line in lines(tmp_path / run / "metrics.jsonl")] for run in ("run", "whole")]
    assert told[0] == told[1]
