"""Penalties by length and rewards made of other rewards, against the equations."""

import math

import pytest
import torch

from flowrl.batch import Batch, Column
from flowrl.errors import FlowError
from flowrl.rl.rewards import clipped_rewards, length_penalty, overlong_penalty, whitened_rewards

torch.set_num_threads(1)


def rows(masks, rewards=None, keys=None):
    masks = Column.of([[bool(m) for m in mask] for mask in masks], dim="response", dtype="bool")
    rewards = torch.zeros(len(masks)) if rewards is None else rewards
    return Batch.of(keys or len(masks), response_mask=masks, rewards=Column.of(rewards))


def test_the_overlong_penalty_is_equation_13():
    masks = [[1] * n + [0] * (n % 3) for n in range(15)]  # observations are no length
    batch = overlong_penalty(rows(masks), longest=12, buffer=5)
    assert batch.overlong_penalty.type == "f32[]"
    for n, found in enumerate(batch.overlong_penalty.values.tolist()):
        wanted = 0.0 if n <= 7 else (7 - n) / 5 if n <= 12 else -1.0
        assert found == pytest.approx(wanted, abs=1e-6)


def slow_length_penalty(lengths, rewards, keys, correct):
    found = []
    for n, reward, key in zip(lengths, rewards, keys, strict=True):
        group = [m for m, other in zip(lengths, keys, strict=True) if other[0] == key[0]]
        if max(group) == min(group):
            found.append(0.0)
            continue
        place = 0.5 - (n - min(group)) / (max(group) - min(group))
        found.append(place if reward >= correct else min(0.0, place))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_length_penalty_is_that_of_the_paper(seed):
    draw = torch.Generator().manual_seed(seed)
    keys = [(i % 4, i) for i in range(12)] + [(9, 0)]  # the last is alone
    lengths = torch.randint(0, 6, (13,), generator=draw).tolist()
    masks = [[1, 0] * n for n in lengths]
    rewards = torch.rand(13, dtype=torch.float64, generator=draw)
    batch = rows(masks, rewards, keys)
    found = length_penalty(batch)
    wanted = slow_length_penalty(lengths, rewards.tolist(), keys, 0.5)
    assert found.length_penalty.values.tolist() == pytest.approx(wanted, abs=1e-6)
    assert found.length_penalty.values[-1] == 0
    turned = length_penalty(batch.take(list(range(13))[::-1])).sort()
    assert turned.length_penalty.equal(found.sort().length_penalty)


def test_what_is_correct_can_be_said():
    batch = rows([[1], [1, 1]], rewards=[-1.0, 1.0], keys=[(0, 0), (0, 1)])
    assert length_penalty(batch).length_penalty.values.tolist() == [0.0, -0.5]
    assert length_penalty(batch, correct=-1).length_penalty.values.tolist() == [0.5, -0.5]


def grades(numbers):
    return Batch.of(len(numbers), grades=Column.of(torch.tensor(numbers, dtype=torch.float64)))


def test_clipped_rewards_stay_within_their_bounds():
    found = clipped_rewards(grades([-3.0, 0.5, 9.0]), of="grades", low=-1, high=2.0)
    assert found.rewards.type == "f32[]"
    assert found.rewards.values.tolist() == [-1.0, 0.5, 2.0]


@pytest.mark.parametrize("shift", [True, False])
def test_whitened_rewards_have_std_1(shift):
    numbers = [0.3, -1.2, 4.0, 0.3, 2.2]
    mean = sum(numbers) / 5
    std = math.sqrt(sum((x - mean) ** 2 for x in numbers) / 5)
    found = whitened_rewards(grades(numbers), of="grades", shift=shift).rewards
    assert found.type == "f32[]"
    wanted = [(x - mean) / std + (0 if shift else mean) for x in numbers]
    assert found.values.tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_equal_rewards_are_whitened_to_0(count):
    batch = grades([0.1] * count)
    assert whitened_rewards(batch, of="grades").rewards.values.tolist() == [0.0] * count
    kept = whitened_rewards(batch, of="grades", shift=False).rewards.values.tolist()
    assert kept == pytest.approx([0.1] * count)


def test_only_whitening_looks_at_other_prompts():
    def in_pieces(op, **said):
        return op.in_pieces({}, op.bind((grades([1.0]),), said))

    assert in_pieces(length_penalty) and in_pieces(overlong_penalty, longest=4, buffer=2)
    assert in_pieces(clipped_rewards, of="grades", low=0, high=1)
    assert not in_pieces(whitened_rewards, of="grades")


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda: overlong_penalty(rows([[1]]), longest=8, buffer=0), "Give buffer= a number from 1 to 8."),
        (lambda: overlong_penalty(rows([[1]]), longest=8, buffer=9), "Give buffer= a number from 1 to 8."),
        (lambda: clipped_rewards(grades([1.0]), of="grades", low=2, high=1), "Write low=1, high=2."),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_runs(call, fix):
    with pytest.raises(FlowError) as error:
        call()
    assert error.value.fix == fix
    assert error.value.at.file == __file__


def test_a_field_that_is_not_there_is_named():
    with pytest.raises(FlowError, match="grade"):
        clipped_rewards(grades([1.0]), of="grade", low=0, high=1)
