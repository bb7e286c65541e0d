"""vLLM split over two ranks by tp: its rows and weights after each publish, and a part that did not arrive.

They need vLLM: `make vllm-test`.
"""

import multiprocessing
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from vllm_tiny import CONFIGS, EOS, FAULTS, PROMPTS, train, whole

from flowrl.backends import open_engine
from flowrl.batch import Column
from flowrl.errors import RunError
from flowrl.workers.model_options import Build, Model, Sampling
from flowrl.workers.streaming import SampleRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]
MANY = [[2 + (7 * i + 3 * j * (i + 1)) % 70 for j in range(1 + i % 9)] for i in range(64)]


def join(number, kind, folder):
    """Be one rank of two: vLLM split over them, the reference engine, and the file that says of a fault."""
    fault = Path(folder, f"fault{number}")
    fault.write_text("")
    os.environ.update(FAULT=str(fault), PYTHONPATH=f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", world_size=2, rank=number)
    model = Model(config=CONFIGS[kind])
    theirs = open_engine("hf", Build(model, dtype="fp32", device="cpu"))
    return open_engine("vllm", Build(model, dtype="fp32", device="cpu", axes={"tp": 2})), theirs, fault


def found_by(target, folder, *said):
    """What each of two ranks found."""
    (folder / "sitecustomize.py").write_text(FAULTS)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=target, args=(number, *said, str(folder), told), daemon=True)
        for number, (_, told) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, told in pipes:
        told.close()
    found = [heard.recv() for heard, _ in pipes]
    for process in processes:
        process.join(60)
    return found


def rank(number, kind, folder, told):
    """One rank: what it found, by name, after five publishes and one that did not arrive on the second rank."""
    ours, theirs, fault = join(number, kind, folder)
    prompts, seeds = Column.of(MANY, "prompt", "i32"), torch.arange(64)
    greedy, gaps, digests = [], [], []
    for publish in range(5):
        train(theirs, publish)
        ours.take_weights(theirs.plain_weights())
        rows = ours.generate(prompts, 1, seeds, Sampling(16, greedy=True)).ids.to_list()
        greedy.append(rows == [whole(theirs, prompt, 16) for prompt in MANY])
        gaps.append(ours.published.gap)
        digests.append(ours.digest() == theirs.digest())
    some = Column.of(PROMPTS, "prompt", "i32")
    how = Sampling(12, temperature=0.8, top_p=0.9, stop=(EOS,))
    mine, its = (e.generate(some, 2, torch.arange(2 * len(PROMPTS)), how) for e in (ours, theirs))
    train(theirs, 9)
    fault.write_text("nothing loaded" if number else "")
    try:
        ours.take_weights(theirs.plain_weights())
        said = ""
    except RunError as error:
        said = error.what
    fault.write_text("")
    ours.take_weights(theirs.plain_weights())
    sizes = {shard.name: (shard.shape, tuple(shard.tensor.shape)) for shard in ours.shards()}
    meta = all(weight.is_meta for weight in ours.mirror.net.model.parameters())
    told.send(
        {
            "greedy": greedy,
            "gaps": gaps,
            "digests": digests,
            "sampled": mine.ids.to_list() == its.ids.to_list(),
            "far": float((mine.sampling_logprobs.values - its.sampling_logprobs.values).abs().max()),
            "said": said,
            "sizes": sizes,
            "meta": meta,
            "bytes": ours.published.bytes,
            "whole": sum(w.nbytes for w in theirs.plain_weights().values()),
        }
    )
    ours.close()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [k for k in CONFIGS if k != "gemma"])
def test_two_ranks_answer_as_transformers_after_each_publish(kind, tmp_path):
    shared = set(os.listdir("/dev/shm"))
    found = found_by(rank, tmp_path, kind)
    for one in found:
        assert one["greedy"] == [True] * 5 and one["digests"] == [True] * 5 and one["sampled"]
        assert max(one["gaps"]) < 2e-4 and one["far"] < 1e-4
        shape, mine = one["sizes"]["model.layers.0.self_attn.o_proj.weight"]
        assert shape == (64, 64) and mine == (64, 32)
        assert one["meta"], "no rank keeps the whole"
        assert one["bytes"] < 0.75 * one["whole"]
    assert {name for name in os.listdir("/dev/shm") if "cpushm" in name} <= shared
    for one in found:  # both say what the second rank alone knows
        assert "publish 6 of random" in one["said"] and " on rank 1 of tp: the weights came whole" in one["said"]
        assert "as before this publish: " in one["said"]


def sleeper(number, kind, folder, told):
    """One rank that sleeps twice: what it had of memory, and whether rows and weights are right after it."""
    ours, theirs, _ = join(number, kind, folder)
    asked = Column.of(PROMPTS, "prompt", "i32"), 2, torch.arange(2 * len(PROMPTS)), Sampling(8)
    _, file, _, size = ours._memory.told["memory"]

    def held():
        return size if os.fstat(file).st_blocks else 0

    train(theirs, 1)
    ours.take_weights(theirs.plain_weights())
    whole, digest, publishes = ours.generate(*asked).ids, ours.digest(), ours.publishes
    found = {"held": held(), "freed": ours.sleep(), "asleep": held(), "twice": ours.sleep(), "refused": []}
    for call in (lambda: ours.generate(*asked), ours.weights_written):
        try:
            call()
        except RunError as error:
            found["refused"].append(error.what)
    found |= {
        "taken": ours.wake(),
        "awake": held(),
        "digest": ours.digest() == digest,
        "lazy": ours.publishes - publishes,
    }
    found["same"] = ours.generate(*asked).ids.equal(whole)
    found["published"] = ours.publishes - publishes
    ours.sleep()
    train(theirs, 5)
    ours.wake()
    ours.take_weights(theirs.plain_weights())
    found["new"] = ours.generate(*asked).ids.equal(theirs.generate(*asked).ids)
    found["gap"] = ours.published.gap
    told.send(found)
    ours.close()


@pytest.mark.nightly
def test_two_ranks_leave_their_memory_and_come_back(tmp_path):
    """Each empties its part and its process; what is published after it is that of both."""
    for one in found_by(sleeper, tmp_path, "qwen2"):
        assert one["held"] > one["asleep"] == one["twice"] == 0 and one["freed"] > one["held"]
        assert len(one["refused"]) == 2 and all("asleep" in what for what in one["refused"])
        assert one["taken"] == one["awake"] == one["held"] and one["digest"] and one["lazy"] == 0
        assert one["same"] and one["published"] == 1 and one["new"] and one["gap"] < 2e-4


def guarded(number, kind, folder, told):
    """One rank while rows run: what it says of weights that are written, and of the other rank."""
    ours, theirs, _ = join(number, kind, folder)
    ours.take_weights(theirs.plain_weights())
    found = {"alone": ours.any_rank(number == 1), "none": ours.any_rank(False), "ranks": ours.ranks, "said": []}
    asked = SampleRequest(Column.of(PROMPTS[:4], "prompt", "i32"), 1, torch.arange(4), Sampling(12))

    def says(*calls):
        try:
            for call in calls:
                call()
        except RunError as error:
            found["said"].append(error.what)

    call = ours.submit(asked)
    ours.step()
    says(ours.shards()[0].tensor.zero_, ours.step)
    says(lambda: ours.take_weights(theirs.plain_weights()))
    found["aborted"] = [len(row.ids) for row in ours.abort(call)]
    ours.take_weights(theirs.plain_weights())
    ours.submit(asked)
    rows = {row.row: list(row.ids) for _ in range(12) for row in ours.step()}
    found["same"] = [rows[i] for i in range(4)] == theirs.generate(
        asked.prompts, 1, asked.seeds, asked.sampling
    ).ids.to_list()
    found["alike"] = ours.any_rank(True)
    ours._drawn += number
    says(lambda: ours.any_rank(False))
    told.send(found)
    ours.close()


def test_two_ranks_find_weights_that_are_written_while_rows_run_and_rows_that_are_not_alike(tmp_path):
    for one in found_by(guarded, tmp_path, "qwen2"):
        assert (one["ranks"], one["alone"], one["none"], one["alike"]) == (2, True, False, True)
        assert one["aborted"] == [1] * 4 and one["same"]
        written, published, other = one["said"]
        assert "The weights were written while 4 rows were being sampled" in written == published
        assert "have drawn other tokens for the same rows" in other
