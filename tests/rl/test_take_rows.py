"""Rows by their numbers: what each gets of the gradient is added up in one order, however many threads there are."""

from __future__ import annotations

import torch

from flowrl.rl.take_rows import take_rows

ROWS, TAKEN, SIZE = 64, 600, 192  # far more numbers than torch lets one thread do alone


def test_a_gradient_is_added_up_in_the_order_of_the_numbers():
    """With ``values[at]`` each of 200 gradients of this size was another one, by rounding."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, SIZE, generator=generator)
    at = torch.randint(0, ROWS, (TAKEN,), generator=generator)
    pulled = torch.randn(TAKEN, SIZE, generator=generator)
    wanted = torch.zeros(ROWS, SIZE)
    for number, row in zip(at.tolist(), pulled, strict=True):
        wanted[number] += row
    for _ in range(20):
        leaf = values.clone().requires_grad_()
        found = take_rows(leaf, at)
        assert torch.equal(found, values[at])
        found.backward(pulled)
        assert torch.equal(leaf.grad, wanted)


def test_numbers_by_row_are_spread_over_tokens():
    rows = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    found = take_rows(rows, torch.tensor([0, 0, 2, 2, 2]))
    assert found.tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]
    found.sum().backward()
    assert rows.grad.tolist() == [2.0, 0.0, 3.0]
    assert take_rows(rows, torch.tensor([], dtype=torch.int64)).shape == (0,)
