"""Addresses of servers: for display without users and passwords, and whether only this machine reaches them."""

import ipaddress
import re
from urllib.parse import unquote

_OPTION = re.compile(r"([^?&]*)=([^&]*)")
_SECRET = ("password", "username")


def hide_password(text: str) -> str:
    """Return a URL, or a text with one, without user and password, for messages.

    They are before the last ``@``, or options of redis-py: ``?username=``, ``?password=``, ``?ssl_password=``.
    """
    shown = _OPTION.sub(_hide_option, text)
    begin = shown.find("://") + 3 if "://" in shown else 0
    _, at, place = shown[begin:].rpartition("@")
    return f"{shown[:begin]}{'***@' if at else ''}{place}"


def _hide_option(option: re.Match[str]) -> str:
    name, value = option.groups()
    return f"{name}={'***' if any(word in unquote(name).lower() for word in _SECRET) else value}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
