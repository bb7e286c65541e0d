"""Teams: the ranks that share rows, on meshes with axes that do not split them."""

import pytest
import torch
from ranks import run

from flowrl.backends.messages import broadcast_json, gather_json
from flowrl.backends.team import Ranks, Team, open_team
from flowrl.errors import PlanError, ProgramError


def test_one_process_is_a_team():
    team = open_team({"dp": 1})
    assert type(team) is Team and (team.data, team.place) == (1, 0)
    assert team.most(3) == 3 and team.gather(["a"]) == [["a"]]
    assert float(team.sum(torch.tensor(2.0))) == 2.0


def test_a_mesh_needs_its_ranks():
    with pytest.raises(ProgramError, match="dp=2 needs 2 ranks, and this process is in no process group"):
        Ranks.of({"dp": 2})


def on_a_rank():
    found = []
    with pytest.raises(PlanError, match="dp=3 needs 3 ranks, and there are 4"):
        Ranks.of({"dp": 3})
    for axes in ({"tp": 2, "fsdp": 2}, {"dp": 2, "fsdp": 2}, {"pp": 4}, {"ep": 2, "cp": 2}):
        team = open_team(axes)
        value = torch.tensor([team.place + 1.0])
        total = team.sum(value)
        assert value.item() == team.place + 1.0, "out of place"
        said = team.gather({"from": team.place, "more": "x" * team.place})
        found.append([team.data, team.place, float(total), team.most(10 * team.place), [s["from"] for s in said]])
    return found


def test_ranks_that_differ_along_data_axes_are_a_team():
    zero, one, two, three = run(on_a_rank, 4)
    pair = [2, 0, 3.0, 10, [0, 1]], [2, 1, 3.0, 10, [0, 1]]
    alone = [1, 0, 1.0, 0, [0]]
    every = [[4, place, 10.0, 30, [0, 1, 2, 3]] for place in range(4)]
    assert zero == [pair[0], every[0], alone, pair[0]]
    assert one == [pair[0], every[1], alone, pair[1]]
    assert two == [pair[1], every[2], alone, pair[0]]
    assert three == [pair[1], every[3], alone, pair[1]]


def tells():
    every = broadcast_json({"loss": 0.1 + 0.2, "pair": (1, None), "nan": float("nan")}, 1)
    assert every["loss"] == 0.1 + 0.2 and every["pair"] == [1, None] and every["nan"] != every["nan"]
    assert broadcast_json("" if torch.distributed.get_rank() == 2 else object(), 2) == ""
    group = torch.distributed.new_group([1, 2])
    rank = torch.distributed.get_rank()
    return gather_json("ü" * rank), gather_json(rank, group) if rank else []


def test_ranks_tell_each_other_what_json_can_say():
    everybody = ["", "ü", "üü"]
    assert run(tells, 3) == [(everybody, []), (everybody, [1, 2]), (everybody, [1, 2])]


def fails():
    assert torch.distributed.get_rank() == 0, "the reason"
    torch.distributed.barrier()


def hangs():
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    else:
        while True:
            pass


def test_the_helper_of_these_tests_says_who_failed_and_who_hangs():
    with pytest.raises(AssertionError, match="rank 1:[^$]*the reason"):
        run(fails, 2)
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] are not done in time"):
        run(hangs, 2, timeout=8)
