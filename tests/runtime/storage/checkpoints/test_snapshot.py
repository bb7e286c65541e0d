"""A copy of a worker's state is not what the worker goes on with; its memory is used again; there may be none."""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors.torch import load_file

from flowrl.runtime.storage.checkpoints import host_memory, snapshot
from flowrl.runtime.storage.checkpoints.snapshot import Copies, capture_state
from flowrl.workers.base import Worker
from flowrl.workers.weights.offloaded import Offloaded
from flowrl.workers.weights.weight_boxes import Shard


def shard(name: str, tensor: torch.Tensor, *, offset: int = 0, main: bool = True) -> Shard:
    return Shard(name, (8, *tensor.shape[1:]), (offset,) + (0,) * (tensor.dim() - 1), tensor, main)


class Keeper(Worker):
    """A worker of these shards and this record."""

    def __init__(self, shards: list[Shard], record: dict):
        self.given = shards, record

    def state_shards(self, of_engine=None):
        return of_engine or self.given


def test_what_is_written_is_what_was_captured(tmp_path):
    first, second, twin = torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)
    shards = [shard("w", first), shard("w", second, offset=2), shard("w", twin, main=False), shard("e", torch.ones(0))]
    record = {"steps": [1]}
    captured = capture_state(tmp_path, "actor", Keeper(shards, record), Copies())
    assert captured.lacking == 0
    for tensor in (first, second, twin):
        tensor.zero_()
    record["steps"].append(2)
    found = captured.write()
    assert set(found) == {p.name for p in tmp_path.iterdir()} == {"actor.json", "actor.0.boxes", "actor.0.safetensors"}
    assert [t.sum() for t in load_file(tmp_path / "actor.0.safetensors").values()] == [6, 6]
    assert (tmp_path / "actor.json").read_text() == '{"steps": [1]}'


def test_memory_is_used_again_where_it_fits():
    copies, tensors = Copies(), {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)}

    def take():
        found, lacking = copies.take(shard(n, t) for n, t in tensors.items())
        assert not lacking and all(s.tensor.equal(tensors[s.name]) for s in found)
        return {s.name: s.tensor.data_ptr() for s in found}

    first = take()
    tensors["a"] = torch.zeros(4)
    assert take() == first
    tensors["b"], tensors["d"] = torch.ones(6), torch.ones(2, dtype=torch.bfloat16)
    del tensors["c"]
    second = take()
    assert second["a"] == first["a"] and set(copies._memory) == {(n, (0,), False) for n in tensors}


def test_memory_is_there_before_the_first_copy(monkeypatch):
    monkeypatch.setattr(snapshot, "AT_A_TIME", 8)
    copies = Copies()
    shards = [shard("a", torch.arange(6.0)), shard("b", torch.arange(6.0).reshape(2, 3))]
    copies.reserve(shards)
    assert copies._reserving is not None
    copies._reserving.join()
    there = {place: memory.data_ptr() for place, memory in copies._memory.items()}
    found, lacking = copies.take(shards)
    assert {(s.name, tuple(s.offset), False): s.tensor.data_ptr() for s in found} == there and not lacking
    assert all(s.tensor.flatten().equal(torch.arange(6.0)) for s in found)


@pytest.mark.parametrize(("least", "free"), [(8, 47), (48, 1000)])
def test_memory_is_not_reserved_where_it_lacks_or_is_little(monkeypatch, least, free):
    monkeypatch.setattr(snapshot, "AT_A_TIME", least)
    monkeypatch.setattr(snapshot, "free_memory", lambda: free)
    copies, shards = Copies(), [shard(name, torch.ones(6)) for name in "ab"]
    copies.reserve(shards)
    assert copies._reserving is None and not copies._memory


def test_a_checkpoint_does_not_wait_until_all_memory_is_there(monkeypatch):
    monkeypatch.setattr(snapshot, "AT_A_TIME", 8)
    copies, real = Copies(), snapshot._memory_for
    begun = threading.Event()

    def memory_for(*what, **how):
        begun.set()
        assert copies._enough.wait(60)
        return real(*what, **how)

    monkeypatch.setattr(snapshot, "_memory_for", memory_for)
    copies.reserve([shard(name, torch.arange(6.0)) for name in "abc"])
    assert begun.wait(60)
    found, lacking = copies.take(shard(name, torch.arange(6.0)) for name in "abc")
    assert not lacking and [s.name for s in found] == ["a", "b", "c"] and all(s.tensor.sum() == 15 for s in found)


def test_what_has_made_way_is_written_from_where_it_is(tmp_path):
    """Also after it has come back and was trained."""
    weight = torch.arange(6.0).reshape(2, 3)
    away = Offloaded(state := ([shard("w", weight[1:])], {}))
    away.take([weight])
    captured = capture_state(tmp_path, "actor", Keeper(*state), copies := Copies(), offloaded=away)
    assert not copies._memory, "it was not copied again"
    away.bring_back()
    weight.zero_()
    captured.write()
    assert load_file(tmp_path / "actor.0.safetensors")["0"].tolist() == [[3, 4, 5]]


def test_without_memory_the_worker_itself_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "AT_A_TIME", 8)
    free = [100, 80, 10]  # others take it at the same time
    monkeypatch.setattr(snapshot, "free_memory", lambda: free.pop(0))
    tensors = [torch.ones(6) for _ in range(4)]
    copies = Copies()
    shards = [shard(str(i), t) for i, t in enumerate(tensors)]
    captured = capture_state(tmp_path, "actor", Keeper(shards, {}), copies)
    assert captured.lacking == 2 * 24 - 10 and not free and not copies._memory
    tensors[0].zero_()
    captured.write()
    assert sorted(t.sum() for t in load_file(tmp_path / "actor.0.safetensors").values()) == [0, 6, 6, 6]
    monkeypatch.setattr(snapshot, "free_memory", lambda: 1000)
    assert capture_state(tmp_path, "actor", Keeper(shards, {}), copies).lacking == 0, (
        "it is tried again at the next one"
    )


def test_free_memory_is_that_of_the_narrowest_container(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "_groups", lambda: iter(()))
    host = host_memory.free_memory()
    total = host_memory._table(host_memory.Path("/proc/meminfo"))["MemTotal:"] << 10
    assert 0 < host < 0.9 * total
    new, old, endless = tmp_path / "new", tmp_path / "old", tmp_path / "endless"
    for folder in (new, old, endless):
        folder.mkdir()
    (new / "memory.max").write_text("3000\n")
    (new / "memory.current").write_text("2000\n")
    (new / "memory.stat").write_text("anon 1500\ninactive_file 400\n")
    (old / "memory.limit_in_bytes").write_text("2000\n")
    (old / "memory.usage_in_bytes").write_text("100\n")
    (old / "memory.stat").write_text("total_inactive_file 0\n")
    (endless / "memory.max").write_text("max\n")
    for folders, wanted in (([new], 1100), ([old], 1700), ([old, new], 1100)):
        monkeypatch.setattr(host_memory, "_groups", lambda folders=folders: iter(folders))
        assert host_memory.free_memory() == wanted
    monkeypatch.setattr(host_memory, "_groups", lambda: iter([endless]))
    assert host_memory.free_memory() == pytest.approx(host, rel=0.5)
