"""Who waits for a row makes the steps: threads, tasks, publishes and failures, on an engine without a model."""

import asyncio
import random
import threading

import pytest
import torch

from flowrl.backends.draw import uniforms
from flowrl.backends.stream import Stream, stream_of
from flowrl.batch import Column
from flowrl.errors import DataError, RunError
from flowrl.testing import FakeEngine
from flowrl.workers.model_options import Sampling
from flowrl.workers.streaming import SampleRequest

WAIT = 60  # seconds, far more than any of this takes


def prompts(rows=((3,), (5, 1))):
    return Column.of([list(row) for row in rows], dim="prompt", dtype="i32")


def submitted(engine, rows=((3,), (5, 1)), n=1, seed=0, tokens=8):
    column = prompts(rows)
    return stream_of(engine).submit(
        SampleRequest(column, n, torch.arange(seed, seed + len(rows) * n), Sampling(max_tokens=tokens))
    )


def test_an_engine_has_one_stream():
    engine, other = FakeEngine(), FakeEngine()
    assert stream_of(engine) is stream_of(engine) is engine.stream is not stream_of(other)
    assert isinstance(engine.stream, Stream)


def test_only_what_is_asked_for_is_computed_and_others_rows_are_kept():
    engine = FakeEngine(stop=())
    long, short = submitted(engine, tokens=30), submitted(engine, tokens=4)
    assert engine.steps == 0
    assert len(list(short)) == 2 and engine.steps == 4
    third = submitted(engine, tokens=2)
    assert len(list(long)) == 2 and engine.steps == 30
    assert [row.call for row in third] == [third.number] * 2 and engine.steps == 30
    assert list(long) == list(third) == [] and engine.stream._calls == {}


def test_a_call_that_joins_waits_for_no_row():
    engine = FakeEngine(stop=(), rows=2, token_seconds=1.0)
    first, second = submitted(engine, tokens=5), submitted(engine, tokens=3)
    assert len(list(second)) == 2 and engine.clock.now() == 8.0, "two rows have places, and others take turns"
    assert len(list(first)) == 2 and engine.clock.now() == 8.0


def test_some_rows_are_aborted_while_others_are_waited_for():
    engine = FakeEngine(stop=(), token_seconds=1.0)
    call = submitted(engine, n=4, tokens=9)
    short = submitted(engine, tokens=3)
    list(short)
    ended = call.abort([0, 5])
    assert [(row.row, len(row.ids), row.reason) for row in ended] == [(0, 3, "aborted"), (5, 3, "aborted")]
    assert sorted(row.row for row in call) == [1, 2, 3, 4, 6, 7]
    made = call.sampled()
    assert made.ids.lengths.tolist() == [3, 9, 9, 9, 9, 3, 9, 9] and call.abort() == []
    assert not any(made.finished.tolist())
    gone = submitted(engine, tokens=9)
    assert len(gone.abort()) == 2 and list(gone) == [] and engine.stream._calls == {}


def test_rows_of_several_calls_are_ended_at_once_those_too_that_are_ready():
    engine = FakeEngine(stop=(), token_seconds=1.0)
    stream, long, short = engine.stream, submitted(engine, tokens=9), submitted(engine, tokens=2)
    for _ in range(2):
        stream.step()
    assert stream.has_news([short]) and not stream.has_news([long]) and (long.open, short.open) == (2, 2)
    ended = stream.abort_rows({long: [1], short: None})
    assert sorted((row.call, row.row, row.reason) for row in ended) == [
        (1, 1, "aborted"), (2, 0, "length"), (2, 1, "length"),
    ]  # fmt: skip
    assert short.is_over and stream.take([long, short]) == [] and long.open == 1
    assert [row.row for row in stream.leave([long])] == [0] and engine.running() == [] and stream._calls == {}
    assert stream.abort_rows({}) == []


def test_calls_begin_together_or_not_at_all():
    engine = FakeEngine(vocab=8, stop=())
    stream, sampling = engine.stream, Sampling(max_tokens=3)
    good, wrong = prompts([[3]]), prompts([[9]])
    calls = stream.submit_all([SampleRequest(good, 1, torch.tensor([seed]), sampling) for seed in range(3)])
    assert [len(call.sampled().ids) for call in calls] == [1, 1, 1] and engine.steps == 3
    with pytest.raises(DataError, match="has the token 9"):
        stream.submit_all([SampleRequest(each, 1, torch.tensor([0]), sampling) for each in (good, wrong)])
    assert engine.running() == []


def test_tokens_of_rows_that_run_are_told_by_call():
    engine = FakeEngine(vocab=8, stop=())
    first, second = submitted(engine, n=2, tokens=3), submitted(engine, n=2, seed=50, tokens=9)
    stream = engine.stream
    assert stream.tokens_since({}) == [] == stream.tokens_since({first: {}})
    stream.step()
    stream.step()
    told = {(row.call, row.row): row for row in stream.tokens_since({second: {1: 1}, first: {0: 2}})}
    whole = {row.row: row for row in second}
    assert set(told) == {
        (first.number, 1),
        (first.number, 2),
        (first.number, 3),
        *((second.number, i) for i in range(4)),
    }
    for row in range(4):
        part = told[second.number, row]
        assert part.ids == whole[row].ids[1 if row == 1 else 0 : 2] and len(part.rollout_logprobs) == len(part.ids)
    assert stream.tokens_since({second: {}}) == [], "they have left"


def test_rows_are_handed_out_once_whoever_makes_the_steps():
    """Threads that wait for the rows of some calls, while others end rows of these: none is lost, none is there twice."""
    engine = FakeEngine(stop=())
    calls = [submitted(engine, seed=2 * i, tokens=1 + i % 7) for i in range(60)]
    found = {number: [] for number in range(4)}

    def take(number):
        mine = calls[number::4]
        while any(not call.is_over for call in mine):
            found[number] += engine.stream.rows_of(mine)

    threads = [threading.Thread(target=take, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    rows = [(row.call, row.row) for each in found.values() for row in each]
    assert sorted(rows) == [(call.number, row) for call in calls for row in (0, 1)]


def test_what_the_engine_raises_reaches_all_that_wait():
    class Breaks(FakeEngine):
        def step(self):
            raise RunError("the process is gone")

    engine = Breaks()
    calls = [submitted(engine), submitted(engine)]
    with pytest.raises(RunError, match="the process is gone"):
        calls[0].sampled()
    with pytest.raises(RunError, match="The engine of this call has failed") as info:
        calls[1].sampled()
    assert str(info.value.__cause__) == "the process is gone"
    with pytest.raises(RunError, match="has failed"):
        submitted(engine)


def test_rows_that_an_engine_loses_are_named():
    class Loses(FakeEngine):
        def step(self):
            super().step()
            return []

    call = submitted(Loses(stop=()), tokens=2)
    with pytest.raises(RunError, match=r"Loses has lost rows \(call.row\): 1.0, 1.1"):
        call.sampled()


def test_rows_are_looked_for_while_another_thread_hands_some_out():
    """The calls were gone through as one was forgotten, which left an engine that has lost nothing of no use."""
    engine, found = FakeEngine(stop=()), []
    first, second = submitted(engine, tokens=2), submitted(engine, tokens=2)
    while engine.running():
        engine.stream.step()

    class Left(set):
        def __iter__(self):
            taking = threading.Thread(target=lambda: found.extend(second))
            taking.start()
            taking.join(WAIT)
            return super().__iter__()

    first._left = Left(first._left)
    engine.stream.step()  # there is none to make any more
    assert len(found) == len(list(first)) == 2 and engine.stream._calls == {}
    assert len(list(submitted(engine, tokens=2))) == 2


def test_a_publish_that_fails_leaves_an_engine_of_no_use():
    engine = FakeEngine(stop=())
    call = submitted(engine, tokens=5)

    def install():
        raise RunError("half of it is written")

    with pytest.raises(RunError, match="half of it is written"):
        engine.stream.publish(install, 1, "interrupt")
    with pytest.raises(RunError, match="has failed"):
        call.sampled()


def test_a_publish_comes_between_the_steps_of_others_and_calls_wait_for_it():
    engine = FakeEngine(stop=(), vocab=8)
    began, go = threading.Event(), threading.Event()
    found = {}

    def install():
        began.set()
        assert go.wait(WAIT)

    running = submitted(engine, tokens=6)
    publisher = threading.Thread(target=lambda: engine.stream.publish(install, 4, "drain"))
    publisher.start()
    assert began.wait(WAIT)
    assert not engine.running(), "running rows were ended first"
    late = threading.Thread(target=lambda: found.update(late=submitted(engine, tokens=6).sampled()))
    late.start()
    assert [row.versions for row in running] == [((0, 6),)] * 2, "rows that have ended are handed out meanwhile"
    assert not engine.running() and "late" not in found
    go.set()
    publisher.join(WAIT)
    late.join(WAIT)
    assert found["late"].ids.lengths.tolist() == [6, 6]
    assert [row.versions for row in submitted(engine, tokens=3)] == [((4, 3),)] * 2


def test_somebody_who_is_interrupted_in_the_line_leaves_it():
    engine = FakeEngine(stop=())
    call = submitted(engine, tokens=3)
    before_me = object()
    engine.stream._line.append(before_me)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), engine.stream._turn(interrupt):
        pass
    assert list(engine.stream._line) == [before_me]
    engine.stream._line.clear()
    assert len(list(call)) == 2


def test_many_threads_share_the_steps():
    engine = FakeEngine(stop=(), token_seconds=1.0)
    alone = {seed: submitted(FakeEngine(stop=()), seed=seed, tokens=5).sampled().ids.to_list() for seed in range(12)}
    calls = {seed: submitted(engine, seed=seed, tokens=5) for seed in range(12)}
    found = {}
    threads = [threading.Thread(target=lambda s=s: found.update({s: calls[s].sampled().ids.to_list()})) for s in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert found == alone and engine.steps == 5


@pytest.mark.parametrize(
    "look",
    [
        lambda call: [row.row for row in call] == [0],
        lambda call: call.sampled().ids.lengths.tolist() == [2],
        lambda call: not call.is_over,
        lambda call: call.open == 1,
    ],
    ids=["iterated", "sampled", "is over", "open"],
)
def test_a_row_that_the_step_of_another_hands_over_is_not_missed(look):
    """It was in no place for a moment: whoever looked then took the call for over, and went on without the row."""
    engine, under_way, looked = FakeEngine(stop=()), threading.Event(), threading.Event()
    call = submitted(engine, [(3,)], tokens=2)

    class Left(set):
        def discard(self, row):
            super().discard(row)
            under_way.set()
            looked.wait(0.2)  # somebody looks now, unless they wait

    def step():
        while engine.running():
            engine.stream.step()

    call._left = Left(call._left)
    steps = threading.Thread(target=step)
    steps.start()
    assert under_way.wait(WAIT)
    found = look(call)
    looked.set()
    steps.join(WAIT)
    assert found


def test_tasks_share_the_steps_and_each_goes_on_when_its_row_has_ended():
    engine, order = FakeEngine(stop=(), token_seconds=1.0), []

    async def agent(turns):
        tokens = [3]
        for _ in range(turns):
            async for row in submitted(engine, [tokens], tokens=2):
                tokens += row.ids
        order.append(turns)
        return tokens

    async def all_of_them():
        return await asyncio.gather(*map(agent, (7, 2, 40, 1)))

    found = asyncio.run(all_of_them())
    assert [len(tokens) for tokens in found] == [15, 5, 81, 3] and order == [1, 2, 7, 40]
    assert engine.steps == 80, "agents wait for the longest of them, not for each other"


def test_a_task_that_is_cancelled_loses_no_row_of_others():
    engine = FakeEngine(stop=())

    async def both():
        first, second = submitted(engine, tokens=50), submitted(engine, tokens=60)
        waits = asyncio.ensure_future(anext(aiter(first)))
        await asyncio.sleep(0)
        waits.cancel()
        rows = [row async for row in second]
        return rows, [row async for row in first]

    second, first = asyncio.run(both())
    assert [len(row.ids) for row in second] == [60] * 2 and [len(row.ids) for row in first] == [50] * 2


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_calls_aborts_and_publishes_loses_nothing_and_says_what_made_each_token(seed):
    chance, vocab = random.Random(seed), 9
    engine = FakeEngine(vocab=vocab, rows=chance.choice([None, 3, 7]), stop=(0,))
    tables, asked, found = [engine.table.clone()], {}, []
    for _ in range(150):
        do = chance.choice(["submit", "abort", "publish", *["step"] * 6])
        if do == "submit":
            rows, n, first = [[chance.randrange(1, vocab)]] * chance.randrange(1, 4), chance.randrange(1, 4), len(asked)
            sampling = Sampling(chance.randrange(1, 15), temperature=chance.choice([0.5, 1.0]))
            call = engine.submit(
                SampleRequest(prompts(rows), n, torch.arange(100 * first, 100 * first + len(rows) * n), sampling)
            )
            asked[call] = rows[0][0], len(rows) * n, 100 * first, sampling
        elif do == "abort" and engine.running():
            call, row = chance.choice(engine.running())
            found += engine.abort(call, [row]) if chance.random() < 0.8 else engine.abort(call)
        elif do == "publish":
            engine.pause()
            tables.append(2 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(len(tables))).double())
            engine.table.copy_(tables[-1])
            engine.resume(len(tables) - 1, keep_cache=chance.random() < 0.5)
        else:
            found += engine.step()
    while engine.running():
        found += engine.step()
    assert sorted((row.call, row.row) for row in found) == [(c, i) for c, said in asked.items() for i in range(said[1])]
    crossed = 0
    for row in found:
        last, _, first, sampling = asked[row.call]
        versions = row.token_versions
        assert list(versions) == sorted(versions) and len(versions) == len(row.ids)
        assert [v for v, _ in row.versions] == sorted(set(versions))
        crossed += len(row.versions) > 1
        for t, (token, version, logprob) in enumerate(zip(row.ids, versions, row.rollout_logprobs, strict=True)):
            read = (tables[version][last] / sampling.temperature).log_softmax(-1)
            goal = float(uniforms(torch.tensor([first + row.row]), torch.tensor([t])))
            assert logprob == pytest.approx(float(read[token]), abs=1e-6)
            assert token == next(u for u, total in enumerate(read.exp().cumsum(0).tolist()) if total > goal)
            last = token
        whole = row.ids[-1:] == (0,) or len(row.ids) == sampling.max_tokens
        assert (row.reason == "stop") == (row.ids[-1:] == (0,)) and whole == (row.reason != "aborted")
    assert crossed and {row.reason for row in found} >= {"stop", "aborted"}


def test_nobody_makes_a_step_while_a_stream_is_held():
    engine, found = FakeEngine(stop=()), {}
    call = submitted(engine, tokens=3)
    engine.stream.hold()
    engine.stream.hold()  # a publish that is made again
    waiting = threading.Thread(target=lambda: found.update(rows=call.sampled()))
    waiting.start()
    while len(engine.stream._line) < 2:
        waiting.join(0.001)
    assert engine.steps == 0 and not found
    engine.stream.let_go()
    waiting.join(WAIT)
    assert found["rows"].ids.lengths.tolist() == [3, 3]
    engine.stream.let_go()
    with engine.stream.held():
        assert len(engine.stream._line) == 1
    assert len(list(submitted(engine, tokens=2))) == 2


@pytest.mark.parametrize("end", [Stream.give_up, Stream.let_go], ids=["given up", "let go"])
def test_who_waits_for_a_stream_to_stand_still_does_so_no_more_once_it_is_let_go(end):
    """A publish that failed elsewhere left the thread of the next ones in the line, in which it had no place."""
    under_way, go, found = threading.Event(), threading.Event(), []

    class Slow(FakeEngine):
        def step(self):
            under_way.set()
            assert go.wait(WAIT)
            return super().step()

    def hold():
        with pytest.raises(RunError, match="nobody waits any more"):
            engine.stream.hold()
        found.append("told")

    engine = Slow(stop=())
    call = submitted(engine, tokens=2)
    steps = threading.Thread(target=engine.stream.step)
    steps.start()
    assert under_way.wait(WAIT)
    holds = threading.Thread(target=hold)
    holds.start()
    while not engine.stream.is_held:
        holds.join(0.001)
    end(engine.stream)
    holds.join(5)
    told = list(found)
    go.set()
    steps.join(WAIT)
    assert told == ["told"]
    engine.stream.let_go()
    assert len(list(call)) == 2
