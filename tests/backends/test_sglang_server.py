"""The real server of SGLang, on a CPU: its rows are those of the reference engine, through aborts, pauses and publishes.

They need `make sglang`, and run by `make sglang-test`. SGLang supports no such CPU: see docs/engines.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from vllm_tiny import CONFIGS, EOS, PROMPTS, train, whole

import flowrl
from flowrl.backends import open_engine
from flowrl.backends.probe import TOLERANCE
from flowrl.backends.sglang.client import Client
from flowrl.backends.sglang.process import ENVIRONMENT, free_port
from flowrl.backends.sglang.serving import KEY, NEEDED
from flowrl.backends.stream import generate_streamed, stream_of
from flowrl.batch import Batch, Column
from flowrl.errors import NotFinite, RunError
from flowrl.workers.model_options import Build, Model, Sampling
from flowrl.workers.streaming import SampleRequest

PYTHON = Path(os.environ.get("SGLANG_PYTHON") or Path(__file__).parents[2] / ".venv-sglang/bin/python")
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="SGLang is not installed: make sglang"),
]
torch.set_num_threads(1)
CLOSE = 1e-4
MANY = [[2 + (7 * i + 3 * j * (i + 1)) % 70 for j in range(1 + i % 9)] for i in range(64)]
FEW = PROMPTS[:4]
HOW = [
    Sampling(12),
    Sampling(12, temperature=0.6),
    Sampling(12, temperature=1.4, top_k=7),
    Sampling(12, top_p=0.8, min_p=0.02, stop=(33, 34)),
    Sampling(12, temperature=1.2, top_p=0.9, repetition_penalty=1.3),
    Sampling(12, greedy=True, repetition_penalty=1.1),
]


@pytest.fixture(scope="module", params=["qwen2", "llama", "qwen3"])
def both(request):
    """SGLang with a server of its own, and the reference engine."""
    build = Build(Model(config=CONFIGS[request.param]), device="cpu", options={"python": str(PYTHON)})
    ours, theirs = open_engine("sglang", build), open_engine("hf", build)
    yield ours, theirs
    ours.close()


@pytest.fixture
def engines(both):
    """The two with the same weights, and no rows."""
    ours, theirs = both
    ours.calls.ask("/slow_down", {"forward_sleep_time": None})
    for call in dict.fromkeys(call for call, _ in ours.running()):
        ours.abort(call)
    vars(ours).pop("_stream", None)
    publish(ours, theirs, 1)
    ours.resume(0)
    return ours, theirs


def publish(ours, theirs, seed):
    train(theirs, seed)
    ours.take_weights(theirs.plain_weights())


def prompts(rows=FEW):
    return Column.of(rows, "prompt", "i32")


def seeds(count, first=0):
    return torch.arange(first, first + count) * 7919 - 3


def read(engine, prompt, ids):
    """Log-probabilities of a response, as a training engine reads them."""
    mask = Column.of([[True] * len(ids)], "response", "bool")
    batch = Batch.of(tokens=Column.of([prompt + list(ids)], "token", "i32"), response_mask=mask)
    return engine.logprobs(batch).to_list()[0]


def slow(engine, seconds: float | None = 0.1):
    """Have each token take so long: what happens in the middle of rows does so on any machine."""
    engine.calls.ask("/slow_down", {"forward_sleep_time": seconds})


def finish(engine):
    found = []
    while engine.running():
        found += engine.step()
    return found


@pytest.mark.parametrize("sampling", HOW, ids=lambda s: f"{s.temperature}-{s.top_k}-{s.top_p}-{s.greedy}")
def test_sampled_rows_are_those_of_the_reference_engine(engines, sampling):
    ours, _ = engines
    starts, mine = torch.arange(32) % 3, seeds(32, 100)  # logits that are 1e-5 off draw the same; not so with seeds(32)
    made, wanted = (e.generate(prompts(PROMPTS), 2, mine, sampling, starts) for e in engines)
    streamed = generate_streamed(ours, prompts(PROMPTS), 2, mine, sampling, starts)
    for found in (made, streamed):
        assert found.ids.equal(wanted.ids) and torch.equal(found.finished, wanted.finished)
        for name in ("rollout_logprobs", "sampling_logprobs"):
            assert torch.allclose(getattr(found, name).values, getattr(wanted, name).values, atol=CLOSE)


def test_greedy_rows_are_those_of_transformers_after_each_of_five_publishes(engines):
    ours, theirs = engines
    seen = set()
    for seed in range(5):
        publish(ours, theirs, seed)
        rows = ours.generate(prompts(MANY), 1, torch.arange(64), Sampling(16, greedy=True)).ids.to_list()
        assert rows == [whole(theirs, prompt, 16) for prompt in MANY]
        assert ours.published.gap < 2e-4 and ours.published.rows == 4
        seen.add(str(rows))
    assert len(seen) == 5, "each publish gives other rows"


def test_a_long_row_uses_all_positions_and_a_short_one_leaves_first(engines):
    ours, theirs = engines
    long = prompts([[2, 3, 4], [5] * 150])
    made, wanted = (e.generate(long, 1, seeds(2), Sampling(400, temperature=0.2)) for e in engines)
    assert made.ids.equal(wanted.ids) and made.ids.lengths.tolist() == wanted.ids.lengths.tolist()
    slow(ours, 0.02)
    call, left = ours.submit(SampleRequest(prompts(), 4, seeds(16), Sampling(40))), []
    while ours.running():
        left += ours.step()
    lengths = [len(row.ids) for row in left]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1], "short rows come first"
    assert {row.call for row in left} == {call}
    for row in left:
        assert (row.reason == "stop") == (row.ids[-1] == EOS) and row.versions == ((0, len(row.ids)),)
        assert row.rollout_logprobs == pytest.approx(read(theirs, FEW[row.row // 4], row.ids), abs=CLOSE)


def test_calls_share_a_batch_and_do_not_change_each_others_rows(engines):
    ours, theirs = engines
    calls = [(how, 100 * i) for i, how in enumerate(HOW)]
    wanted = [theirs.generate(prompts(), 2, seeds(8, first), how).ids.to_list() for how, first in calls]
    slow(ours, 0.02)
    numbers = [ours.submit(SampleRequest(prompts(), 2, seeds(8, first), how)) for how, first in calls]
    rows = {(row.call, row.row): list(row.ids) for row in finish(ours)}
    assert [[rows[call, i] for i in range(8)] for call in numbers] == wanted


def test_what_is_aborted_keeps_its_tokens_and_goes_on_from_them(engines):
    ours, theirs = engines
    wanted = theirs.generate(prompts(), 2, seeds(8), Sampling(100)).ids.to_list()
    slow(ours)
    call, early = ours.submit(SampleRequest(prompts(), 2, seeds(8), Sampling(100))), []
    while not any(row.ids for row in ours.calls.rows.values()):
        early += ours.step()
    time.sleep(1)
    some = ours.abort(call, [row for _, row in ours.running()][::2])
    parts = some + ours.abort(call)
    slow(ours, None)
    left = {row.row: row for row in early + parts + ours.step()}
    assert sorted(left) == list(range(8)) and not ours.running() and ours.abort(call) == []
    assert max(len(row.ids) for row in some) > 2, "more than was told of them before"
    for row in parts:
        assert list(row.ids) == wanted[row.row][: len(row.ids)]
        if row.reason == "stop":  # it ended by itself, as the rest of its call was ended
            assert list(row.ids) == wanted[row.row]
            continue
        assert row.reason == "aborted"
        prompt, tokens = FEW[row.row // 2], len(row.ids)
        assert row.rollout_logprobs == pytest.approx(read(theirs, prompt, row.ids), abs=CLOSE)
        longer, seed = prompts([prompt + list(row.ids)]), seeds(8)[row.row :][:1]
        more = ours.generate(longer, 1, seed, Sampling(100 - tokens), torch.tensor([tokens])).ids.to_list()[0]
        assert list(row.ids) + more == wanted[row.row]


@pytest.mark.parametrize("how", ["interrupt", "continue", "drain"])
def test_new_weights_while_rows_run(engines, how):
    ours, theirs = engines
    before = theirs.generate(prompts(), 2, seeds(8), Sampling(60, temperature=0.9)).ids.to_list()
    slow(ours, 0.05)
    stream = stream_of(ours)
    call = stream.submit(SampleRequest(prompts(), 2, seeds(8), Sampling(60, temperature=0.9)))
    rows = iter(call)
    first = next(rows)
    stream.publish(lambda: publish(ours, theirs, 5), 7, how)
    slow(ours, None)
    late = list(rows)
    assert sorted(row.row for row in [first, *late]) == list(range(8))
    crossed = [row for row in late if len(row.versions) == 2]
    assert bool(crossed) == (how != "drain")
    for row in late:
        old = row.versions[0][1]
        assert row.versions[0][0] == 0 and list(row.ids[:old]) == before[row.row][:old]
    for row in crossed:
        assert row.versions[1][0] == 7 and sum(tokens for _, tokens in row.versions) == len(row.ids)
        old = row.versions[0][1]
        now = read(theirs, FEW[row.row // 2], row.ids) if how == "interrupt" else None
        if now is not None:  # of a fresh pass under the new weights; read() has temperature 1
            logits = torch.tensor(row.rollout_logprobs[old:])
            assert logits.isfinite().all() and len(now) == len(row.ids)
    after, wanted = (e.generate(prompts(), 2, seeds(8), Sampling(20)).ids for e in engines)
    assert after.equal(wanted), "no row takes keys and values of the weights before"


def test_tokens_after_an_interrupt_are_those_of_a_fresh_pass_under_the_new_weights(engines):
    ours, theirs = engines
    slow(ours, 0.05)
    stream = stream_of(ours)
    call = stream.submit(SampleRequest(prompts(), 2, seeds(8), Sampling(60)))
    rows = iter(call)
    next(rows)
    stream.publish(lambda: publish(ours, theirs, 5), 1, "interrupt")
    slow(ours, None)
    crossed = [row for row in rows if len(row.versions) == 2]
    assert crossed
    for row in crossed:
        old = row.versions[0][1]
        now = read(theirs, FEW[row.row // 2], row.ids)
        assert row.rollout_logprobs[old:] == pytest.approx(now[old:], abs=CLOSE)


def test_a_prefix_that_is_kept_is_used_and_forgotten(engines):
    ours, theirs = engines
    long = prompts([[3 + i % 70 for i in range(100)] + [k] for k in (5, 6)])
    for seed in (3, 4):
        publish(ours, theirs, seed)
        for _ in range(2):
            made, wanted = (e.generate(long, 2, seeds(4), Sampling(8)) for e in engines)
            assert made.ids.equal(wanted.ids)


def test_a_row_that_is_not_finite_is_named_and_other_calls_go_on(engines):
    ours, theirs = engines
    with torch.no_grad():
        theirs.net.model.get_input_embeddings().weight[7] = torch.nan
    with pytest.raises(RunError, match="the probe is inf apart|not finite"):
        ours._probe = [[7, 8, 9]]
        ours.take_weights(theirs.plain_weights())
    bad = ours.submit(SampleRequest(prompts([[20], [7]]), 1, seeds(2), Sampling(4)))
    failed = []
    while not failed:
        failed = [each for each in ours.step() if hasattr(each, "error")]
    assert isinstance(failed[0].error, NotFinite)
    assert f"of call {bad}, token 0" in str(failed[0].error)  # row 1, or with a tied head all rows
    from flowrl.backends.probe import probe_rows

    ours._probe = probe_rows(80, ours.positions)
    publish(ours, theirs, 1)
    made, wanted = (e.generate(prompts(), 1, seeds(4), Sampling(4)) for e in engines)
    assert made.ids.equal(wanted.ids)


def test_asleep_there_is_no_server_and_awake_rows_go_on(engines):
    ours, theirs = engines
    asked, first = SampleRequest(prompts(MANY), 1, seeds(64), Sampling(100, stop=())), ours.server.process.pid
    call, found = ours.submit(asked), dict[int, list[int]]()

    def go_on() -> None:
        found.update({row.row: list(row.ids) for row in ours.step() if row.call == call})

    while not any(row.ids for row in ours.calls.rows.values()):
        go_on()
    assert ours.sleep() > 0 and ours.running() and not os.path.exists(f"/proc/{first}")
    ours.wake()
    while ours.running():
        go_on()
    wanted = theirs.generate(prompts(MANY), 1, seeds(64), Sampling(100, stop=())).ids.to_list()
    assert found == dict(enumerate(wanted)) and ours.server.process.pid != first


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_in_bf16_rows_are_those_of_the_trainer_but_for_rounding(kind):
    build = Build(Model(config=CONFIGS[kind]), dtype="bf16", device="cpu", options={"python": str(PYTHON)})
    ours, theirs = open_engine("sglang", build), open_engine("hf", build)
    try:
        for seed in range(3):
            publish(ours, theirs, seed)
            made = ours.generate(prompts(MANY), 1, seeds(64), Sampling(16))
            found = zip(MANY, made.ids.to_list(), made.rollout_logprobs.to_list(), strict=True)
            gaps = [
                abs(a - b) for prompt, ids, mine in found for a, b in zip(mine, read(theirs, prompt, ids), strict=True)
            ]
            assert sum(gaps) / len(gaps) < 0.05 and max(gaps) < 1, "some tokens are unlikely ones"
            assert ours.published.gap < TOLERANCE["bfloat16"] and ours.digest() == theirs.digest()
    finally:
        ours.close()


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The address of a server that somebody has started, as docs/engines.md says, with a model of its own weights."""
    monkeypatch.setenv(KEY, "a key")
    open_engine("hf", Build(Model(config=CONFIGS["qwen2"]), dtype="fp32", device="cpu")).save(str(tmp_path / "model"))
    (tmp_path / "flowrl").symlink_to(Path(flowrl.__file__).parent)
    port = free_port()
    words = [f"--model-path={tmp_path / 'model'}", f"--port={port}", "--api-key=a key", "--dtype=float32"]
    words += ["--device=cpu", "--attention-backend=torch_native", "--sampling-backend=pytorch", "--disable-cuda-graph"]
    words += ["--max-total-tokens=4096", "--skip-server-warmup", *NEEDED.values()]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "sglang.launch_server", *words],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tmp_path)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    client = Client(f"http://127.0.0.1:{port}", "a key", 60.0)
    try:
        for _ in range(300):
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            with suppress(OSError, RunError):
                client.ask("/model_info", seconds=5)
                break
            time.sleep(1)
        yield client.url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_that_somebody_has_started_takes_the_weights_and_keeps_running(started):
    build = Build(Model(config=CONFIGS["qwen2"]), dtype="fp32", device="cpu", options={"url": started})
    theirs = open_engine("hf", build)
    for seed in range(2):  # after one engine has ended, the next one has the server
        ours = open_engine("sglang", build)
        publish(ours, theirs, seed)
        made, wanted = (e.generate(prompts(PROMPTS), 2, seeds(32), Sampling(12)) for e in (ours, theirs))
        assert made.ids.equal(wanted.ids) and ours.published.gap < 2e-4
        ours.close()


def test_a_server_that_is_killed_is_named():
    build = Build(Model(config=CONFIGS["qwen2"]), device="cpu", options={"python": str(PYTHON), "patience": 20.0})
    ours = open_engine("sglang", build)
    try:
        ours.weights_written()
        slow(ours)
        call = ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(100)))
        os.killpg(ours.server.process.pid, 9)
        with pytest.raises(RunError, match=rf"is gone.*It had rows \(call.row\) {call}.0"):
            finish(ours)
    finally:
        ours.close()
