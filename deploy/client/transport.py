"""How a client's requests reach a control plane: a transport, and the one over HTTP."""

from collections.abc import Callable, Mapping
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from schemas.errors import InfraError

Transport = Callable[[str, str, Mapping[str, str], bytes | None, float], tuple[int, bytes]]
"""Sends method, URL, headers, body and deadline in seconds; returns the status and the body of the answer."""


class NoControlPlane(InfraError):
    """No control plane of the run is known, or none answers."""


def over_http(
    method: str, url: str, headers: Mapping[str, str], data: bytes | None, timeout_s: float
) -> tuple[int, bytes]:
    """Send a request to a control plane; NoControlPlane if it does not answer."""
    request = Request(url, data, dict(headers), method=method)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()
    except (URLError, OSError, HTTPException, ValueError) as error:
        where = url.partition("/v1/")[0]
        raise NoControlPlane(f"cannot reach the control plane at {where}: {getattr(error, 'reason', error)}") from error
