"""Ranks use the network by which their machine is reached."""

from __future__ import annotations

import os
import sys

import pytest

from flowrl.runtime.distributed.ray.node_network import NAMED, interface_of, take_network_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for as Linux has it")


def test_the_interface_of_an_address_is_found_and_that_of_another_machine_is_not():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") is None  # for documents: nobody has it


@pytest.mark.parametrize(("said", "wanted"), [(None, "lo"), ("eth7", "eth7")])
def test_what_the_user_has_named_stays(monkeypatch, said, wanted):
    monkeypatch.delenv(NAMED, raising=False)
    if said is not None:
        monkeypatch.setenv(NAMED, said)
    take_network_of("127.0.0.1")
    assert os.environ[NAMED] == wanted


def test_an_address_that_no_interface_has_changes_nothing(monkeypatch):
    monkeypatch.delenv(NAMED, raising=False)
    take_network_of("203.0.113.1")
    assert NAMED not in os.environ
