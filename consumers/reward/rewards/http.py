"""Requests of rewards to other servers: what may be repeated, until when, and how many a minute.

A request is repeated only where that does no harm. A server that could not be reached has not seen it, and one that
answers 429 or 503 has refused it, before it did anything. After any other failure it may have done its work, so that
only a request that does no harm twice is repeated. Waiting, as ``Retry-After`` asks for it, is part of the deadline of
the call that was refused, and of no other.
"""

import asyncio
import email.utils
import os
import random
import time
import weakref
from functools import partial
from typing import Any

import httpx

from consumers.reward.rewards.clock import CLOCK
from consumers.reward.rewards.terms import reward

REFUSED = frozenset({429, 503})
"""Answers of a server that has not begun with the request."""
DOUBTFUL = frozenset({408, 500, 502, 504})
"""Answers that don't tell whether the request was done; a gateway gives some of them for a server."""
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_IDLE_S = 1.0
"""How long an unused connection is kept: a server that closes it at the same moment leaves a request in doubt."""
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()


class Pace:
    """Lets through so many requests a minute, evenly, in the order in which they come."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap_s = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Wait for the next turn."""
        now = time.monotonic()
        at = max(now, self._next)
        self._next = at + self._gap_s
        await asyncio.sleep(at - now)


async def post_json(
    url: str, body: dict[str, Any], headers: dict[str, str], *, repeatable: bool, pace: Pace | None = None
) -> Any:
    """Send an object and return what the answer's JSON says, within the deadline of the running call.

    repeatable: whether the request does no harm when it is done twice. pace: which a repetition waits for as well.
    ValueError for an answer that is an error or no JSON, TimeoutError when waiting is of no use, OSError when the
    connection is lost.
    """
    clock, waited = CLOCK.get(), _FIRST_WAIT_S
    while True:
        if (left := clock.left()) <= 0:
            raise TimeoutError("its deadline has passed")
        limit_s = None if left == float("inf") else left
        try:
            response = await _client().post(url, json=body, headers=headers, timeout=limit_s)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            reason, asked = f"{url} cannot be reached: {error or type(error).__name__}", 0.0
        except httpx.TransportError as error:
            reason, asked = f"the connection to {url} was lost: {error or type(error).__name__}", 0.0
            if not repeatable:
                raise OSError(reason) from None
        else:
            if response.is_success:
                try:
                    return response.json()
                except ValueError:
                    raise ValueError(f"{response.url} answers what is no JSON: {response.text[:80]!r}") from None
            reason = f"{url} answers {response.status_code}: {response.text[:200]!r}"
            if response.status_code not in (REFUSED | DOUBTFUL if repeatable else REFUSED):
                raise ValueError(reason)
            asked = _retry_after_s(response)
        wait = max(asked, waited * random.uniform(0.75, 1.25))
        if wait >= clock.left():
            raise TimeoutError(f"{reason}; to try again in {wait:.1f} s would be too late")
        waited = min(2 * waited, _LONGEST_WAIT_S)
        await asyncio.sleep(wait)
        if pace is not None:
            await pace.turn()


def key_headers(api_key_env: str | None) -> dict[str, str]:
    """Return the header with the key that is in an environment variable. ValueError if it is not set."""
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise ValueError(f"the environment variable {api_key_env} is not set")
    return {"Authorization": f"Bearer {key}"}


server = partial(
    reward,
    needs=("httpx", "reward"),
    settings=True,
    secrets=lambda api_key_env=None, **_: [api_key_env] if api_key_env else [],
)
"""Declares a reward function that asks a server, whose key is in the variable that ``api_key_env`` names."""


def check_url(name: str, url: Any) -> None:
    """Raise ValueError unless this is the address of a server."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ValueError(f"{name} {url!r} must begin with http:// or https://")


def _client() -> httpx.AsyncClient:
    """Return the client of the running event loop; calls in flight are bounded by the term's concurrency."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S)
        _clients[loop] = httpx.AsyncClient(limits=limits)
    return _clients[loop]


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds that the server asks to wait: a number, or a date; 0 if it says nothing that can be read."""
    text = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0
