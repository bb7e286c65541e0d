"""Products by oneDNN, wherever the tests run: those of torch, with their gradients, for any number of rows."""

import pytest
import torch

from flowrl.backends.hf import products
from flowrl.backends.hf.generation.fused import Joined


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def used(request, monkeypatch):
    """By which of the two they are made."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "_torch_is_slow", lambda: request.param)
    return request.param


@pytest.mark.parametrize("rows", [0, 1, 4, 17, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_numbers_and_gradients_are_those_of_torch(used, rows, bias):
    parts = [torch.nn.Linear(24, size, bias=bias) for size in (40, 8)]
    hidden = torch.randn(1, rows, 24, requires_grad=True)
    joined = Joined(parts)
    with torch.no_grad():
        alone = joined(hidden)
    found, wanted = joined(hidden), torch.cat([part(hidden) for part in parts], -1)
    assert torch.allclose(alone, found, atol=1e-5) and torch.allclose(found, wanted, atol=1e-5)
    seen, weights = torch.randn(found.shape), [w for part in parts for w in part.parameters()]
    for one, other in zip(
        *(torch.autograd.grad((each * seen).sum(), [hidden, *weights]) for each in (found, wanted)), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-4)


def test_there_are_few_numbers_of_rows():
    counts = {len(products.rounded_up(torch.ones(n, 2))) for n in range(1, 4097)}
    assert len(counts) < 90 and all(n <= len(products.rounded_up(torch.ones(n, 2))) <= 1.13 * n for n in range(1, 600))
    assert products.rounded_up(torch.ones(17, 2))[17:].eq(0).all()


def test_other_numbers_than_fp32_are_left_to_torch(used):
    linear, hidden = torch.nn.Linear(16, 8, dtype=torch.float64), torch.randn(20, 16, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(products.multiply(hidden, linear.weight, linear.bias), linear(hidden))


@pytest.mark.parametrize(
    ("vendor", "family", "wide"),
    [
        ("AuthenticAMD", "26", True),
        ("AuthenticAMD", "27", True),
        ("AuthenticAMD", "25", False),
        ("AuthenticAMD", "", False),
        ("GenuineIntel", "26", False),
    ],
)
def test_the_cpus_on_which_torch_takes_twice_as_long_are_known_by_their_family(vendor, family, wide):
    first = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\n"
    assert products.is_wide_amd(f"{first}\nprocessor\t: 1\nvendor_id\t: other\n") is wide
    assert not products.is_wide_amd("Processor : AArch64")
