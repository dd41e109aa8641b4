"""The interface by which the ranks of several machines meet over gloo.

gloo listens at the address of the machine's own name and tells the other ranks that number. Where the name is a
loopback address, as Debian writes it to /etc/hosts, ranks of other machines cannot connect.
"""

import os
import socket
from collections.abc import Mapping, MutableMapping

import psutil

_IFNAME = "GLOO_SOCKET_IFNAME"
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_OUTSIDE = "192.0.2.1"
"""An address of no machine (RFC 5737): the way to it is the default route."""


def choose_interface(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo listen where the trainer's other machines reach this one, unless the user has named an interface."""
    alone = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    if alone or _IFNAME in environment or "WORLD_SIZE" not in environment:
        return
    for there in (environment.get("MASTER_ADDR", "localhost"), _OUTSIDE):
        name = interface_to(there)
        if name is not None:
            environment[_IFNAME] = name
            return


def used_interface(environment: Mapping[str, str] = os.environ) -> tuple[str, str, int]:
    """Return name and address of the interface that ranks meet by, and its Mbit/s; "" without one, 0 if not known."""
    there = environment.get("MASTER_ADDR", "localhost")
    name = environment.get(_IFNAME, "").partition(",")[0] or interface_to(there) or ""
    addresses = [one.address for one in psutil.net_if_addrs().get(name, ()) if one.family in _INTERNET]
    speed = psutil.net_if_stats()[name].speed if addresses else 0
    return name, addresses[0].partition("%")[0] if addresses else "", speed


def interface_to(host: str) -> str | None:
    """Return the interface by which this machine reaches ``host``; None if that is loopback, or there is no way."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # This only looks up the way: nothing is sent.
            probe.connect(address)
            here = probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    interfaces = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == here for one in addresses):
            return None if "loopback" in interfaces[name].flags.split(",") else name
    return None
