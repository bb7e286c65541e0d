"""What leaves memory comes back bit for bit; memory that another process reads stays, with an error."""

from __future__ import annotations

import pytest
import torch

from flowrl.errors import RunError
from flowrl.runtime.transfer.slots import HostMemory
from flowrl.workers.weights.offloaded import Offloaded


def test_weights_come_back_into_the_tensors_that_they_left():
    weight = torch.arange(12.0).reshape(3, 4)
    view, wanted = weight[1:], weight.clone()
    away = Offloaded()
    assert away.take([weight, view]) == 48 and weight.untyped_storage().nbytes() == 0
    away.bring_back()
    assert torch.equal(weight, wanted) and torch.equal(view, wanted[1:])


def test_memory_that_another_process_reads_stays_and_the_error_says_what_to_do():
    own, lent = torch.ones(4), HostMemory().make(64)
    away = Offloaded()
    with pytest.raises(RunError, match="cannot leave their memory") as raised:
        away.take([own, lent])
    assert raised.value.fix is not None and "a pool of its own" in raised.value.fix
    assert own.tolist() == [1.0] * 4 and not away.kept
