"""By which network the ranks of several machines reach each other: the one that Ray reaches their machines by."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

NAMED = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux


def take_network_of(address: str) -> None:
    """Have gloo of this process use the network that has an address of this machine, unless the user has named one.

    Gloo takes the address that the name of the machine leads to, which on many machines is one of loopback.
    """
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault(NAMED, name)


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address; None where none has it, or outside of Linux.

    >>> interface_of("203.0.113.1")  # none has this one, which is for documents
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(asked.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
