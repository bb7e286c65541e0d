"""SGLang over its HTTP protocol, against a server that speaks it as the real one was seen to, and goes wrong as it is told.

`tests/backends/test_sglang_server.py` holds the real server to the same, by `make sglang-test`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sglang_scripted import Scripted, stand_in
from vllm_tiny import CONFIGS, POSITIONS, PROMPTS, train

from flowrl.backends import open_engine
from flowrl.backends.sglang.answers import AskedRow
from flowrl.backends.sglang.draw import LOGPROBS
from flowrl.backends.sglang.serving import KEY
from flowrl.batch import Column
from flowrl.errors import DataError, ModelError, NotFinite, RunError
from flowrl.workers.model_options import Build, Lora, Model, Sampling
from flowrl.workers.streaming import FailedCall, SampleRequest

torch.set_num_threads(1)
FEW = PROMPTS[:4]
SHAPED = Sampling(12, temperature=1.2, top_k=30, top_p=0.9, repetition_penalty=1.3, min_p=0.02, stop=(33, 34))


def build(kind="qwen2", **options):
    return Build(Model(config=CONFIGS[kind]), device="cpu", options=options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The configuration of a model, as a server is started with it."""
    return saved(tmp_path_factory.mktemp("model"), "qwen2")


def saved(path, kind):
    config = open_engine("hf", build(kind)).net.model.config
    config.architectures = ["LlamaForCausalLM" if kind == "llama" else "Qwen2ForCausalLM"]
    config.save_pretrained(path)
    return path


@pytest.fixture
def server(folder):
    scripted = Scripted(folder, auto=False)
    yield scripted
    scripted.fault = ""
    scripted.close()


@pytest.fixture
def engines(server):
    """SGLang, and the reference engine with the same weights."""
    theirs = open_engine("hf", build())
    train(theirs, 1)
    ours = open_engine("sglang", build(url=server.url, patience=300.0))
    ours.take_weights(theirs.plain_weights())
    yield ours, theirs
    server.fault = ""
    ours.close()


def prompts(rows=FEW):
    return Column.of(rows, "prompt", "i32")


def seeds(count, first=0):
    return torch.arange(first, first + count) * 7919 - 3


def until(engine, done):
    """What leaves until ``done``: messages need a moment on their way."""
    found, end = [], time.monotonic() + 60
    while not done(found):
        found += engine.step()
        assert time.monotonic() < end, f"nothing came: {engine.running()}"
    return found


def rows_there(server, count):
    """Wait until the server has so many rows."""
    end = time.monotonic() + 60
    while len(server.requests) < count:
        assert time.monotonic() < end, "rows are on their way"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "sampling", [Sampling(12), SHAPED, Sampling(9, greedy=True)], ids=["plain", "shaped", "greedy"]
)
def test_rows_are_those_of_the_reference_engine(server, engines, sampling):
    ours, theirs = engines
    server.auto = True
    starts = torch.arange(8) % 3
    made, wanted = (e.generate(prompts(), 2, seeds(8), sampling, starts) for e in (ours, theirs))
    assert made.ids.equal(wanted.ids) and torch.equal(made.finished, wanted.finished)
    for name in ("rollout_logprobs", "sampling_logprobs"):
        assert torch.allclose(getattr(made, name).values, getattr(wanted, name).values, atol=1e-4)
    asked = next(said for path, said in server.asked if path == "generate" and said.get("stream"))
    assert asked["extra_key"] == server.version, "no row takes keys and values of other weights"
    assert ours.generate(prompts([]), 2, seeds(0), sampling).ids.lengths.tolist() == []


def test_rows_come_one_by_one_and_calls_share_a_batch(server, engines):
    ours, theirs = engines
    wanted = [theirs.generate(prompts(), 2, seeds(8, first), Sampling(16)).ids.to_list() for first in (0, 100)]
    one = ours.submit(SampleRequest(prompts(), 2, seeds(8), Sampling(16)))
    rows_there(server, 8)
    left, ended = [], 0
    for _ in range(3):
        ended += server.step()
    two = ours.submit(SampleRequest(prompts(), 2, seeds(8, 100), Sampling(16)))
    rows_there(server, 16 - ended)
    while server.requests:
        ended += server.step()
        left += until(ours, lambda found, due=ended - len(left): len(found) == due)
    rows = {(row.call, row.row): list(row.ids) for row in left}
    assert [[rows[call, i] for i in range(8)] for call in (one, two)] == wanted and not ours.running()
    assert {row.versions for row in left} == {((0, len(row.ids)),) for row in left}


def test_aborted_rows_keep_their_tokens_and_go_on_from_them(server, engines):
    ours, theirs = engines
    whole = theirs.generate(prompts(), 2, seeds(8), Sampling(40, stop=())).ids.to_list()
    call = ours.submit(SampleRequest(prompts(), 2, seeds(8), Sampling(40)))
    rows_there(server, 8)
    for _ in range(5):
        server.step()
    some = [row for _, row in ours.running()][::2]
    gone = ours.abort(call, some)
    rest = ours.abort(call)
    aborted = {row.row: row for row in gone + rest if row.reason == "aborted"}  # some may end with a stop token
    for row in aborted.values():
        assert 0 < len(row.ids) == len(row.rollout_logprobs) <= 40
        assert list(row.ids) == whole[row.row][: len(row.ids)]
    assert {len(row.ids) for row in aborted.values()} == {5} and len(gone) > 1 and ours.abort(call) == []
    server.auto = True
    one = gone[0]
    longer = prompts([FEW[one.row // 2] + list(one.ids)])
    more = ours.generate(longer, 1, seeds(8)[one.row :][:1], Sampling(40 - len(one.ids)), torch.tensor([len(one.ids)]))
    assert list(one.ids) + more.ids.to_list()[0] == whole[one.row]
    late = ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(4)))  # these may not have come to the server yet
    found = ours.abort(late) + until(ours, lambda rows: not ours.running())
    assert len([row for row in found if row.call == late]) == 4


def test_nothing_is_told_of_a_call_that_was_aborted_as_rows_of_it_ended(server, engines):
    """The next step told of them, and a run that went back to a checkpoint knew no such call."""
    ours, theirs = engines
    wanted = theirs.generate(prompts(), 1, seeds(4), Sampling(3, stop=())).ids.to_list()
    call = ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(3, stop=())))
    rows_there(server, 4)
    for _ in range(3):
        server.step()
    made = [*ours.abort(call, [2]), *ours.abort(call)]
    assert {row.row: list(row.ids) for row in made} == dict(enumerate(wanted))
    assert "aborted" not in {row.reason for row in made}
    assert ours.running() == [] == ours.step()


@pytest.mark.parametrize("how", ["interrupt", "continue"])
def test_new_weights_in_the_middle_of_rows(server, engines, how):
    ours, theirs = engines
    before = theirs.generate(prompts(), 1, seeds(4), Sampling(16)).ids.to_list()
    call = ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(16)))
    rows_there(server, 4)
    for _ in range(4):
        server.step()
    ours.pause()
    assert ours.step() == [] and ("pause_generation", {"mode": "in_place"}) in server.asked
    train(theirs, 2)
    ours.take_weights(theirs.plain_weights())
    held = ours.submit(SampleRequest(prompts([[20]]), 1, seeds(1), Sampling(3)))
    assert (held, 0) in ours.running() and len(server.requests) <= 4, "it waits for the end of the pause"
    ours.resume(7, keep_cache=how == "continue")
    modes = [said["mode"] for path, said in server.asked if path == "pause_generation"]
    assert modes == (["in_place", "retract"] if how == "interrupt" else ["in_place"])
    server.auto = True
    found = until(ours, lambda rows: not ours.running())
    for row in found:
        if row.call == call:
            assert row.versions[0] == (0, min(4, len(row.ids))) and list(row.ids[:4]) == before[row.row][:4]
            assert [v for v, _ in row.versions] == [0, 7][: len(row.versions)]
        else:
            assert row.versions == ((7, len(row.ids)),)
    assert any(len(row.versions) == 2 for row in found) and ours.published.rows == 4


def test_a_row_has_the_versions_of_all_publishes_that_came_while_it_ran(server, engines):
    ours, theirs = engines
    call = ours.submit(SampleRequest(prompts(FEW[:1]), 1, seeds(1), Sampling(9, stop=())))
    rows_there(server, 1)
    for version in (4, 5, 6):
        server.step()
        server.step()
        ours.pause()
        train(theirs, 1)
        ours.take_weights(theirs.plain_weights())
        ours.resume(version, keep_cache=True)
    server.auto = True
    (row,) = until(ours, lambda rows: not ours.running())
    assert row.call == call and row.versions == ((0, 2), (4, 2), (5, 2), (6, 3))
    ours.take_weights(theirs.plain_weights())
    assert list(ours.calls.labels.values()) == [6]


def test_rows_that_are_aborted_in_a_pause_have_what_is_known_of_them(server, engines):
    ours, theirs = engines
    whole = theirs.generate(prompts(), 1, seeds(4), Sampling(60)).ids.to_list()
    call = ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(60)))
    rows_there(server, 4)
    for _ in range(35):  # the first 33 of each are told
        server.step()
    long = [row for row in range(4) if len(whole[row]) > 35]
    assert len(long) > 1
    until(ours, lambda rows: all(ours.calls.rows[call, row].ids for row in long))
    deadline = time.monotonic() + 60
    while any(len(ours.calls.rows[call, row].ids) < 33 for row in long):
        ours.step()
        assert time.monotonic() < deadline
    ours.pause()
    held = ours.submit(SampleRequest(prompts([[20]]), 1, seeds(1), Sampling(3)))
    assert [row.ids for row in ours.abort(held)] == [()]
    (first,) = ours.abort(call, long[:1])
    assert list(first.ids) == whole[first.row][:33] and first.versions == ((0, 33),)
    train(theirs, 2)
    ours.take_weights(theirs.plain_weights())
    ours.resume(3)
    server.auto = True
    rest = until(ours, lambda rows: not ours.running())
    assert first.row not in {row.row for row in rest} and len(rest) >= len(long) - 1


WRONG = {
    "too few rows": "answered 3 of the 4 rows of call 1; row 3",
    "no draw": "row 0 of call 1 has .* flowrl's processor did not draw them",
    "not of the vocabulary": "row 0 of call 1 has tokens that are not of the vocabulary",
    "too many tokens": "row 0 of call 1 has .* tokens, which do not go on",
    "other weights": "row 0 of call 1 was made by weights '9'",
    "versions of half": "row 0 of call 1 has .* tokens, and versions of 0",
    "other stop": "row 0 of call 1 was stopped at token .*, which is no stop token here",
    "aborted": "row 0 of call 1 was ended by the server: out of memory",
    "odd reason": "row 0 of call 1 ended for a reason that is not known: .*tired",
    "no room": "was ended after 2 of 12 tokens: the server has no room",
    "another place": "refuses a row of call 1",
    "400 generate": "Call 1: SGLang refuses /generate with status 400: the server does not like it",
}


@pytest.mark.parametrize("fault", WRONG)
def test_an_answer_that_is_not_right_fails_its_call_and_names_the_row(server, engines, fault):
    ours, theirs = engines
    server.fault, server.auto = fault, True
    with pytest.raises(RunError, match=WRONG[fault]):
        ours.generate(prompts(), 1, seeds(4), Sampling(12))
    assert ours.running() == []
    server.fault = ""
    wanted = theirs.generate(prompts(), 1, seeds(4), Sampling(12)).ids.to_list()
    assert ours.generate(prompts(), 1, seeds(4), Sampling(12)).ids.to_list() == wanted, "other calls go on"


def test_log_probabilities_that_are_not_finite_fail_the_call_and_no_other(server, engines):
    ours, _ = engines
    bad = ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(3)))
    rows_there(server, 4)
    server.fault, server.auto = "nan", True
    (failure,) = [each for each in until(ours, lambda rows: not ours.running()) if isinstance(each, FailedCall)]
    assert failure.call == bad and isinstance(failure.error, NotFinite)
    assert f"row 0 of call {bad}, token" in str(failure.error)


def test_a_row_that_is_answered_twice_is_an_error(server, engines):
    ours, _ = engines
    server.fault, server.auto = "twice", True
    call = ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(3)))
    found = until(ours, lambda rows: any(isinstance(each, FailedCall) for each in rows))
    assert f"of call {call} was answered twice" in str(found[-1].error)


def test_a_connection_that_ends_too_early_is_an_error_with_the_rows(server, engines):
    ours, theirs = engines
    server.fault, server.auto = "no end", True
    for _ in range(2):  # all rows are there
        made, wanted = (e.generate(prompts(), 1, seeds(4), Sampling(12)).ids for e in (ours, theirs))
        assert made.equal(wanted)
    server.fault = "dies with rows"
    ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(12)))
    with pytest.raises(RunError, match=r"is gone .*It had rows \(call.row\) 3.0, 3.1"):
        until(ours, lambda rows: False)


@pytest.mark.parametrize("fault", ["silent", "hang", "dies health_generate"])
def test_a_server_that_does_not_go_on_is_named_within_its_bound(folder, fault):
    server = Scripted(folder, auto=True)
    ours = open_engine("sglang", build(url=server.url, patience=300.0))
    ours.weights_written()
    ours.calls.client.patience = 1.0
    try:
        with server.changed:
            ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(12)))
            server.auto = False
            server.fault = fault
        if fault == "hang":
            server.fault = "hang health_generate"
            ours.calls.client.ask = bounded(ours.calls.client.ask)
        with pytest.raises(RunError, match="does not answer within 1 s .*nothing came of its rows"):
            until(ours, lambda rows: False)
    finally:
        server.fault = ""
        server.close()
        ours.close()


def bounded(ask):
    """The same with a second for the health, in place of 30."""
    return lambda path, said=None, **how: ask(path, said, seconds=1.0)


def test_a_server_that_is_silent_and_well_is_waited_for(folder):
    server = Scripted(folder, auto=False)
    ours = open_engine("sglang", build(url=server.url, patience=300.0))
    try:
        ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(3)))
        ours.calls.client.patience = 1.0
        rows_there(server, 4)
        until(ours, lambda rows: ("health_generate", None) in server.asked)
        server.auto = True
        assert len(until(ours, lambda rows: len(rows) == 4)) == 4
    finally:
        server.close()
        ours.close()


PUBLISHES = {
    "400 update_weights_from_disk": "publish 2 .*failed. SGLang refuses .* the server does not like it",
    "nothing loaded": "other weights than were published. as before this publish: lm_head|as before this publish: model.embed",
    "k not given": "other weights than were published. other numbers: model.layers.0.self_attn.qkv_proj.weight",
    "q and k swapped": "other numbers: model.layers.0.self_attn.qkv_proj.weight",
    "stale head": "computes something else .*token 1 in row . of the probe is 0.5 apart",
    "nan probe": "token 2 in row . of the probe is inf apart",
    "label moved": "answers with weights 'moved'",
    "dies update_weights_from_disk": "failed. The server of SGLang at .* is gone",
}


@pytest.mark.parametrize("fault", PUBLISHES)
def test_a_publish_that_did_not_arrive_is_named_with_its_cause(server, engines, fault):
    ours, theirs = engines
    server.fault = fault
    train(theirs, 2)
    with pytest.raises(RunError, match=PUBLISHES[fault]):
        ours.take_weights(theirs.plain_weights())


def test_sums_are_those_that_the_real_server_gave(tmp_path):
    """Recorded from SGLang 0.5.23 on a CPU, for weights that count up."""
    from flowrl.backends.sglang.proof import sums
    from flowrl.placement.backends import backend

    engine = open_engine("hf", build("llama"))
    weights = {
        name: (torch.arange(w.numel()) % 251 * 0.001 - 0.1).float().view(w.shape) + 0.001 * i
        for i, (name, w) in enumerate(sorted(engine.plain_weights().items()))
    }
    assert sums(weights, backend("sglang").layout.fused) == RECORDED


def test_nothing_of_a_call_is_left_when_the_engine_is_closed(server, engines):
    ours, _ = engines
    ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(12)))
    rows_there(server, 4)
    until(ours, lambda rows: ours.calls._streams)
    ours.close()
    until(ours, lambda rows: not ours.calls._streams)


def test_weights_are_not_written_while_rows_run(server, engines):
    ours, _ = engines
    ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(12)))
    with pytest.raises(RunError, match="written while 4 rows were being sampled"):
        ours.weights_written()


def test_what_a_server_would_die_of_does_not_come_to_it(server, engines):
    ours, _ = engines
    for rows, said in (
        ([[3], []], "The prompt of row 1 is empty"),
        ([[3], [80]], "The prompt of row 1 has the token 80; the model has 80"),
        ([[3], [-1]], "The prompt of row 1 has the token -1"),
        ([[3] * POSITIONS], f"row 0 has {POSITIONS} tokens"),
    ):
        with pytest.raises(DataError, match=said):
            ours.submit(SampleRequest(prompts(rows), 1, seeds(len(rows)), Sampling(4)))
    with pytest.raises(RunError, match="does not record which tokens could be drawn"):
        ours.generate(prompts(), 1, seeds(4), replace(Sampling(4), support=True))
    ours.pause()
    with pytest.raises(RunError, match="paused"):
        ours.generate(prompts(), 1, seeds(4), Sampling(4))
    assert ours.running() == []


@pytest.fixture
def saving(folder):
    """A server that gives its memory back, SGLang on it, and the reference engine with the same weights."""
    scripted = Scripted(folder, enable_memory_saver=True)
    theirs = open_engine("hf", build())
    train(theirs, 1)
    ours = open_engine("sglang", build(url=scripted.url, patience=60.0))
    ours.take_weights(theirs.plain_weights())
    yield scripted, ours, theirs
    scripted.fault = ""
    ours.close()
    scripted.close()


def paths_of(server):
    return [path for path, _ in server.asked]


@pytest.mark.parametrize("paused", [False, True])
def test_asleep_a_server_has_no_rows_and_no_weights_and_awake_rows_go_on(saving, paused):
    """Rows that run, and one that came in the pause: they are those of a run without sleep, of the version they had."""
    server, ours, theirs = saving
    wanted = theirs.generate(prompts(), 1, seeds(4), Sampling(48, stop=())).ids.to_list()
    server.auto = False
    call = ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(48, stop=())))
    rows_there(server, 4)
    for _ in range(35):  # it tells of rows after 1 and 33 tokens
        server.step()
    early = until(ours, lambda rows: all(len(row.ids) == 33 for row in ours.calls.rows.values()))
    going = len(ours.running())
    assert going, "some rows are longer than that"
    if paused:
        ours.pause()
        late = ours.submit(SampleRequest(prompts([[20]]), 1, seeds(1), Sampling(3, stop=())))
    server.auto = True
    ours.sleep()
    paths = paths_of(server)
    assert paths[-1] == "release_memory_occupation" and server.released and not server.requests
    assert ours.step() == [] and len(ours.running()) == going + paused
    if paused:
        ours.resume()
    assert ours.wake() > 0 and paths_of(server) == paths, "it comes back before the next token"
    found = [*early, *until(ours, lambda rows: not ours.running())]
    assert [list(r.ids) for r in sorted(found, key=lambda r: (r.call, r.row)) if r.call == call] == wanted
    assert all(row.versions == ((0, len(row.ids)),) for row in found) and not server.released
    if paused:
        (row,) = [row for row in found if row.call == late]
        assert list(row.ids) == theirs.generate(prompts([[20]]), 1, seeds(1), Sampling(3, stop=())).ids.to_list()[0]


def test_a_publish_while_it_was_away_is_what_it_computes_with(saving):
    server, ours, theirs = saving
    ours.sleep()
    with pytest.raises(RunError, match="is asleep"):
        ours.weights_written()
    train(theirs, 5)
    ours.wake()
    ours.take_weights(theirs.plain_weights())
    made, publishes = ours.generate(prompts(), 2, seeds(8), Sampling(12)), ours.publishes
    assert made.ids.equal(theirs.generate(prompts(), 2, seeds(8), Sampling(12)).ids) and ours.published.rows == 4
    ours.sleep()
    ours.wake()
    assert ours.sleep() > 0 and ours.wake() > 0, "also where no server came back between"
    assert paths_of(server).count("release_memory_occupation") == 2
    assert ours.generate(prompts(), 2, seeds(8), Sampling(12)).ids.equal(made.ids) and ours.publishes == publishes + 1


def test_rows_are_ended_and_kept_ones_told_while_it_sleeps(saving):
    server, ours, theirs = saving
    server.auto = False
    call = ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(9, stop=())))
    rows_there(server, 4)
    server.step()
    until(ours, lambda rows: all(row.ids for row in ours.calls.rows.values()))
    ours.sleep()
    ended = ours.abort(call, [1, 3])
    assert [(row.row, len(row.ids), row.reason) for row in ended] == [(1, 1, "aborted"), (3, 1, "aborted")]
    ours.wake()
    server.auto = True
    found = until(ours, lambda rows: not ours.running())
    wanted = theirs.generate(prompts(), 1, seeds(4), Sampling(9, stop=())).ids.to_list()
    assert {row.row: list(row.ids) for row in found} == {0: wanted[0], 2: wanted[2]}


def test_a_server_that_keeps_its_memory_is_told_of(engines):
    ours, _ = engines
    with pytest.raises(RunError, match=r"(?s)keeps its memory.*--enable-memory-saver"):
        ours.sleep()
    assert ours.offloaded is None


@pytest.mark.parametrize("path", ["release_memory_occupation", "resume_memory_occupation"])
def test_a_server_that_does_not_sleep_or_wake_is_an_error(saving, path):
    server, ours, _ = saving
    server.fault = f"400 {path}"
    with pytest.raises(RunError, match=f"refuses /{path} with status 400"):
        ours.sleep()
        ours.wake()
        ours.generate(prompts(), 1, seeds(4), Sampling(6))


@pytest.mark.parametrize(
    ("said", "options", "info"),
    [
        ("is no server of this host", {"url": "http://10.0.0.1:30000"}, {}),
        ("is no server of this host", {"url": "https://127.0.0.1:30000"}, {}),
        ("SGLang 0.4.9 is there; flowrl supports 0.5.23", {}, {"version": "0.4.9"}),
        (
            "runs without what flowrl needs.*\n.*--enable-custom-logit-processor",
            {},
            {"enable_custom_logit_processor": False},
        ),
        ("runs without what flowrl needs.*\n.*--disable-overlap-schedule", {}, {"disable_overlap_schedule": False}),
    ],
)
def test_a_server_that_does_not_fit_is_refused(folder, said, options, info):
    server = Scripted(folder, **info)
    try:
        with pytest.raises(ModelError, match=said):
            open_engine("sglang", build(**{"url": server.url, **options}))
    finally:
        server.close()


def test_a_key_is_asked_for_and_another_model_is_refused(folder, monkeypatch):
    server = Scripted(folder, key="secret")
    try:
        with pytest.raises(ModelError, match=f"status 401: Unauthorized.*\n.*{KEY}"):
            open_engine("sglang", build(url=server.url))
        monkeypatch.setenv(KEY, "secret")
        open_engine("sglang", build(url=server.url)).close()
        with pytest.raises(ModelError, match="has a model of .*Qwen2.*here it is .*Llama"):
            open_engine("sglang", build("llama", url=server.url))
    finally:
        server.close()
    with pytest.raises(ModelError, match="does not answer: "):
        open_engine("sglang", build(url=server.url))


def test_what_it_does_not_do_is_refused():
    for wrong, said in (
        (replace(build(), head="scalar"), "scalar head"),
        (replace(build(), lora=Lora(r=2)), "adapters"),
        (build(), "needs a Python with SGLang, and .* does not have it"),
        (build(python="/nowhere/python"), "needs a Python with SGLang, and /nowhere/python is no Python"),
        (build("gemma", url="http://127.0.0.1:1"), "does not know models of the kind 'gemma'"),
    ):
        with pytest.raises(ModelError, match=said):
            open_engine("sglang", wrong)


# -- a server that is started -------------------------------------------------------------------------------------------


def test_a_server_is_started_in_another_python_and_ended(tmp_path):
    """A stand-in under the name of SGLang: its own process, its arguments, its key, and its end."""
    ours = open_engine(
        "sglang", build(python=stand_in(tmp_path), rows=8, prefix_cache=False, context=64, patience=300.0)
    )
    theirs = open_engine("hf", build())
    train(theirs, 1)
    ours.take_weights(theirs.plain_weights())
    made = ours.generate(prompts(), 1, seeds(4), Sampling(6)).ids.to_list()
    assert made == theirs.generate(prompts(), 1, seeds(4), Sampling(6)).ids.to_list()
    said = ours.server.info["arguments"]
    assert said["max-running-requests"] == "8" and said["context-length"] == "72" and "disable-radix-cache" in said
    assert said["host"] == "127.0.0.1" and len(said["api-key"]) == 32
    line = Path(f"/proc/{ours.server.process.pid}/cmdline").read_text()
    assert said["api-key"] not in line and said["api-key"] not in str(list(os.environ.values()))
    os.kill(ours.server.process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="(?s)is gone.*ended with status -9.*serving"):
        ours.generate(prompts(), 1, seeds(4), Sampling(6))
    ours.close()
    assert not os.path.exists(f"/proc/{ours.server.process.pid}")


def test_a_server_of_its_own_ends_for_a_sleep_and_another_one_goes_on(tmp_path):
    ours = open_engine("sglang", build(python=stand_in(tmp_path), patience=300.0))
    theirs = open_engine("hf", build())
    train(theirs, 1)
    ours.take_weights(theirs.plain_weights())
    call, first = ours.submit(SampleRequest(prompts(), 1, seeds(4), Sampling(40, stop=()))), ours.server.process.pid
    until(ours, lambda rows: any(row.ids for row in ours.calls.rows.values()))
    ours.sleep()
    assert not os.path.exists(f"/proc/{first}"), "all of its memory is free"
    assert ours.wake() > 0 and ours.sleep() > 0 and ours.wake() > 0
    left = {number for _, number in ours.running()}
    found = {row.row: list(row.ids) for row in until(ours, lambda rows: not ours.running()) if row.call == call}
    wanted = theirs.generate(prompts(), 1, seeds(4), Sampling(40, stop=())).ids.to_list()
    assert found == {row: wanted[row] for row in left} and ours.server.process.pid != first
    ours.close()
    assert not os.path.exists(f"/proc/{ours.server.process.pid}")


def test_a_server_that_does_not_start_says_why(tmp_path):
    python = stand_in(tmp_path)
    (tmp_path / "stub" / "sglang" / "launch_server.py").write_text("raise ValueError('no such card')\n")
    with pytest.raises(ModelError, match="(?s)SGLang does not start.*status 1.*ValueError: no such card"):
        open_engine("sglang", build(python=python))


def test_no_file_beside_the_user_is_taken_for_a_library(tmp_path, monkeypatch):
    python = stand_in(tmp_path)
    (tmp_path / "stub" / "sglang" / "launch_server.py").write_text("raise ValueError('it has come so far')\n")
    beside = tmp_path / "beside"
    beside.mkdir()
    for name in ("json", "importlib"):
        (beside / f"{name}.py").write_text("raise SystemExit('this is no library')\n")
    monkeypatch.chdir(beside)
    with pytest.raises(ModelError, match="(?s)SGLang does not start.*ValueError: it has come so far"):
        open_engine("sglang", build(python=python))


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    """However that ended."""
    script = tmp_path / "starts.py"
    script.write_text(
        "import sys, time\n"
        "from flowrl.backends.sglang.process import ServerProcess\n"
        "it = ServerProcess(sys.argv[1], {'folder': sys.argv[2], 'port': 1})\n"
        "print(it.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    python = tmp_path / "python"
    (tmp_path / "stub" / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "stub" / "sglang" / "__init__.py").write_text("")
    (tmp_path / "stub" / "sglang" / "launch_server.py").write_text("import time\ntime.sleep(600)\n")
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path / "stub"}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, str(script), str(python), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as it:
        assert it.stdout is not None
        server = int(it.stdout.readline())
        assert os.path.exists(f"/proc/{server}")
        it.kill()
    end = time.monotonic() + 60
    while is_running(server):
        assert time.monotonic() < end, "the server is still there"
        time.sleep(0.1)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


RECORDED = {
    "model.embed_tokens.weight": "163aca3348906c0f",
    "model.layers.0.self_attn.qkv_proj.weight": "ebf50a95f08d3b79",
    "model.layers.0.self_attn.o_proj.weight": "e4d65316e0e84ff8",
    "model.layers.0.mlp.gate_up_proj.weight": "2e8ad5f3c86c4426",
    "model.layers.0.mlp.down_proj.weight": "5c4301ebe7188bcc",
    "model.layers.0.input_layernorm.weight": "655222cf24bc9db3",
    "model.layers.0.post_attention_layernorm.weight": "c3862c4f0022a1fe",
    "model.layers.1.self_attn.qkv_proj.weight": "3f627b937db0542e",
    "model.layers.1.self_attn.o_proj.weight": "1d06e5cc1884b313",
    "model.layers.1.mlp.gate_up_proj.weight": "ab0ad609d41a48c9",
    "model.layers.1.mlp.down_proj.weight": "d9181ea050c5f1d0",
    "model.layers.1.input_layernorm.weight": "f4f74e081b7e8310",
    "model.layers.1.post_attention_layernorm.weight": "b6c974700fb42990",
    "model.norm.weight": "81b51bc500634a4c",
    "lm_head.weight": "f40f0a00686ef3b9",
}


@pytest.mark.parametrize(
    ("ids", "reason"), [([4, 2], "stop"), ([4, 4, 4], "length"), ([4, 4], "aborted"), ([], "aborted")]
)
def test_a_row_that_has_ended_as_it_was_aborted_does_not_go_on(ids, reason):
    """The server says that it was aborted, whatever its last token is."""
    row = AskedRow(1, 0, (5,), 7, 0, 3, frozenset({2}), Sampling(3), label="new", aborting=True)
    versions = [{"version": "new", "start": 0, "end": len(ids)}]
    meta = {LOGPROBS: [[-1.0, -1.0]] * len(ids), "finish_reason": {"type": "abort"}, "weight_versions": versions}
    row.take({"output_ids": ids, "meta_info": meta}, vocab=9, labels=["new"])
    assert row.reason == reason and row.ids == tuple(ids)
