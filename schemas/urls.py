"""Addresses of servers: hides users and passwords, tells whether only this machine reaches one, and listens at one."""

import ipaddress
import re
import socket
from urllib.parse import unquote

_OPTION = re.compile(r"([^?&]*)=([^&]*)")
_SECRET = ("password", "username")


def hide_password(text: str) -> str:
    """Return a URL, or a text with one, without user and password, for messages.

    They are before the last ``@``, or redis-py's options ``?username=``, ``?password=`` and ``?ssl_password=``.
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


def open_listener(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens at the address; OSError or OverflowError if the address can't be used."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Otherwise the second of an answer's two writes waits 40 ms for the first.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(256)
    except BaseException:
        listener.close()
        raise
    return listener
