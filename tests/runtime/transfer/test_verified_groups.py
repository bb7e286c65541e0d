"""A stranger who is faster than a rank takes its place in no group: the ranks show each other that they know a secret."""

from __future__ import annotations

import os
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import copies

from flowrl.runtime.transfer import verified_groups as known
from flowrl.runtime.transfer.rendezvous import forget_meetings, meet, new_meeting

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks for sockets in /proc")


def listening(pids) -> set[tuple[str, int]]:
    """Where these processes listen."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = (row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes)
    return {(socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)) for host, port in found}


def rank(me, size, meeting, faster, pipe):
    """Form two groups, as training does; with ``faster``, the stranger is the first to connect at the first attempt."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    made, devices = [], known._devices

    def slow():
        made.append(devices())
        pipe.send("listening")
        if len(made) <= faster:
            pipe.recv()
        return made[-1]

    known._devices = slow
    known._PATIENCE = 1.0
    known.know_groups()
    store = meet(meeting, size)
    dist.init_process_group("gloo", store=store, rank=me, world_size=size, timeout=timedelta(seconds=90))
    group = dist.new_group(list(range(size)))
    total = torch.tensor([float(me + 1)])
    dist.all_reduce(total)
    dist.all_reduce(total, group=group)
    assert dist.get_backend(group) == "gloo"
    pipe.send(("done", float(total), len(made)))
    pipe.recv()
    os._exit(0)


def attack(place, held):
    """Come in as whatever rank is waited for, and say what a rank would: garbage, and that more will come than there is."""
    for number in range(4):
        one = socket.create_connection(place, timeout=5)
        one.sendall(struct.pack("<q", number) + struct.pack("<QQ", 1 << 62, 1 << 62) + os.urandom(64) * (number % 2))
        held.append(one)


@pytest.mark.parametrize("faster", [1, 2])
def test_a_stranger_who_is_faster_is_not_taken_for_a_rank(tmp_path, faster):
    size, meeting, held = 3, new_meeting(tmp_path), []
    context = copies()
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(target=rank, args=(me, size, meeting, faster, pipes[me][1]), daemon=True) for me in range(size)
    ]
    for one in ranks:
        one.start()
    try:
        for _ in range(faster):
            for ours, _ in pipes:
                assert ours.poll(100) and ours.recv() == "listening"
            for place in listening([one.pid for one in ranks]):
                attack(place, held)
            time.sleep(0.2)  # what was sent is read
            for ours, _ in pipes:
                ours.send("go on")
        for ours, _ in pipes:
            said = "listening"
            while said == "listening":
                assert ours.poll(100)
                said = ours.recv()
            assert said == ("done", 18.0, faster + 2), "each attack costs one attempt; the second group needs one"
    finally:
        for one in ranks:
            one.kill()
            one.join()
        for one in held:
            one.close()


def test_the_interface_is_the_one_that_the_environment_names(monkeypatch):
    before = listening([os.getpid()])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    held = known._devices()
    there = listening([os.getpid()]) - before
    assert len(held) == len(there) == 2 and {host for host, _ in there} == {"127.0.0.1"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    with pytest.raises(RuntimeError, match="nowhere7"):
        known._devices()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert len(known._devices()) == 1


def test_a_meeting_is_kept_to_its_user_and_leaves_nothing(tmp_path):
    before = os.umask(0)
    try:
        meetings = [new_meeting(tmp_path), new_meeting(tmp_path)]
        meet(meetings[0], 1).set("secret", "word")
    finally:
        os.umask(before)
    folder = Path(meetings[0]).parent
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700 and len(set(meetings)) == 2
    assert not list(folder.iterdir()), "the last who forgets it removes it"
    meet(meetings[1], 1).set("a", "b")
    forget_meetings(tmp_path)
    assert not folder.exists()
    forget_meetings(tmp_path)
