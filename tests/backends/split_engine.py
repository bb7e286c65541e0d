"""A model that two processes split, as one engine: what a test asks of it each rank is asked, in one order."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading

import torch

#: What each rank is asked, and those of them whose answers depend on its clock or are its own.
CALLS = ("generate", "submit", "step", "running", "abort", "pause", "resume", "tokens_since", "prefix_tokens",
         "take_weights", "take_passes", "sleep", "wake", "any_rank", "held")  # fmt: skip
OWN = ("tokens_since", "take_passes", "sleep", "wake", "held")


def be_rank(number, build, folder, pipe):
    """Be one rank: open its part, and answer what comes."""
    from flowrl.backends import open_engine

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", world_size=2, rank=number)
    engine = open_engine("vllm", build)
    _, file, _, size = engine._memory.told["memory"]
    engine.held = lambda: size if os.fstat(file).st_blocks else 0
    pipe.send((True, (engine.positions, engine.publish_modes, engine.child.pid)))
    while (asked := pipe.recv()) is not None:
        name, said, how = asked
        try:
            pipe.send((True, getattr(engine, name)(*said, **how)))
        except Exception as error:
            pipe.send((False, error))
    engine.close()


class SplitEngine:
    """``SplitEngine(Build(model, axes={"tp": 2}))``: its answers are the first rank's, and the second has the same."""

    def __init__(self, build):
        self.build, self._lock = build, threading.Lock()
        context, self._folder = multiprocessing.get_context("spawn"), tempfile.TemporaryDirectory()
        both = [context.Pipe() for _ in range(2)]
        self._pipes = [here for here, _ in both]
        self.ranks = [
            context.Process(target=be_rank, args=(number, build, self._folder.name, there), daemon=True)
            for number, (_, there) in enumerate(both)
        ]
        for rank in self.ranks:
            rank.start()
        for _, there in both:
            there.close()
        found = [pipe.recv()[1] for pipe in self._pipes]
        self.positions, self.publish_modes, _ = found[0]
        self.children = [pid for _, _, pid in found]

    def each(self, name, *said, **how):
        """What each rank says, or raises."""
        with self._lock:
            for pipe in self._pipes:
                pipe.send((name, said, how))
            return [pipe.recv() for pipe in self._pipes]

    def close(self):
        for pipe in self._pipes:
            pipe.send(None)
        for rank in self.ranks:
            rank.join(60)
        self._folder.cleanup()


def _asking(name):
    def ask(self, *said, **how):
        (right, found), (too, other) = self.each(name, *said, **how)
        assert right == too, f"one rank says {found!r}, the other one {other!r}"
        if not right:
            assert type(found) is type(other) and str(found) == str(other)
            raise found
        assert name in OWN or _plain(found) == _plain(other), "the ranks have the same"
        return found

    return ask


def _plain(found):
    """An answer as it is compared: of whole calls the ids."""
    if isinstance(found, list):
        return [(f.call, str(f.error)) if hasattr(f, "error") else f for f in found]
    return found.ids.to_list() if hasattr(found, "ids") and hasattr(found, "finished") else found


for _name in CALLS:
    setattr(SplitEngine, _name, _asking(_name))
