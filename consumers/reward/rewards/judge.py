"""A model as judge: any server with OpenAI's chat completions is asked what a sample is worth.

A sample whose answers can't be read or got is excluded, never rated 0. What it waits for its turn is not part of its
deadline, what it waits because the server refused it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import weakref
from collections import OrderedDict
from typing import Annotated, Any, Literal

from pydantic import Field

from consumers.reward.rewards.clock import CLOCK
from consumers.reward.rewards.http import Pace, check_url, key_headers, post_json, server
from consumers.reward.rewards.terms import Positive
from consumers.reward.rewards.verdicts import check_parse, combine, read_verdict

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_END_S = 0.5
"""Of several answers those count that are there so long before the deadline."""
_judges: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Judge]] = weakref.WeakKeyDictionary()


def _check(
    base_url: str,
    template: str,
    parse: dict[str, Any],
    requests_per_minute: float | None = None,
    samples: int = 1,
    request: dict[str, Any] | None = None,
    **_: Any,
) -> None:
    check_url("base_url", base_url)
    if "{completion}" not in template and "{messages}" not in template:
        raise ValueError("template must show the judge {completion} or {messages}")
    check_parse(parse)
    if requests_per_minute is not None and requests_per_minute < samples:
        raise ValueError(f"requests_per_minute {requests_per_minute:g} must be a number of {samples} (samples) or more")
    if request is not None and {"model", "messages", "stream", "n"} & request.keys():
        raise ValueError("request must be settings such as {temperature: 0}, without model, messages, stream and n")


@server(check=_check, concurrency=16)
async def judge(
    prompt: str,
    completion: str,
    *,
    base_url: str,
    model: str,
    template: str,
    parse: dict[str, Any],
    system: str | None = None,
    api_key_env: str | None = None,
    requests_per_minute: float | None = None,
    samples: Positive = 1,
    combine: Literal["mean", "majority"] = "mean",
    cache: Annotated[int, Field(ge=0)] = 10_000,
    request: dict[str, Any] | None = None,
    **data: Any,
) -> float:
    """Return the number that a model gives the sample, asked at ``base_url`` by OpenAI's chat completions.

    ``template`` is what it is asked, with {prompt}, {completion}, {answer}, {messages} or any other field of the data
    filled in; ``parse`` how its answer is read: ``regex`` with a group, or ``json``, a key; ``values`` for words;
    ``min`` and ``max``; ``scale`` to 0 to 1. Of ``samples`` answers more than half must be readable; ``combine`` is
    mean or majority. ``cache`` bounds how many answers are remembered, ``request`` has settings such as temperature.
    """
    loop = asyncio.get_running_loop()
    known = _judges.setdefault(loop, {})
    name = json.dumps([base_url, model, requests_per_minute, cache, api_key_env])
    if name not in known:
        known[name] = Judge(base_url, model, key_headers(api_key_env), requests_per_minute, cache)
    asked = fill_in(template, {**data, "prompt": prompt, "completion": completion})
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": asked}]
    return await known[name].rate({**(request or {}), "messages": messages}, parse, samples, combine)


class Judge:
    """A judge's server, its pace, and what it said. For one event loop."""

    def __init__(
        self, base_url: str, model: str, headers: dict[str, str], requests_per_minute: float | None, cache: int
    ) -> None:
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._model = model
        self._headers = headers
        self._pace = Pace(requests_per_minute)
        self._size = cache
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._asking: dict[bytes, asyncio.Lock] = {}

    async def rate(self, body: dict[str, Any], parse: dict[str, Any], samples: int, how: str) -> float:
        """Return the value of a sample. ValueError if too few answers can be read, or the judge gives none."""
        if samples == 1:
            return await self._ask(body, parse, 0)
        tasks = [asyncio.create_task(self._ask(body, parse, number)) for number in range(samples)]
        clock, pending = CLOCK.get(), set(tasks)
        try:
            while pending and (left := clock.left() - _END_S) > 0:
                _, pending = await asyncio.wait(pending, timeout=None if left == float("inf") else left)
        finally:
            for task in pending:
                task.cancel()
        ended = [task for task in tasks if task.done() and not task.cancelled()]
        values = [task.result() for task in ended if task.exception() is None]
        if 2 * len(values) <= samples:
            first = next((error for task in ended if (error := task.exception()) is not None), None)
            raise ValueError(f"{len(values)} of {samples} answers are readable: {first or 'the rest came too late'}")
        return combine(values, how)

    async def _ask(self, body: dict[str, Any], parse: dict[str, Any], number: int) -> float:
        """One answer's value; of the same question with the same number, the one that is known."""
        digest = hashlib.blake2b(json.dumps([body, parse, number], sort_keys=True).encode(), digest_size=16).digest()
        if not self._size:
            return await self._request(body, parse)
        lock = self._asking.setdefault(digest, asyncio.Lock())
        with CLOCK.get().stopped():
            await lock.acquire()
        try:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
            value = self._cache[digest] = await self._request(body, parse)
            if len(self._cache) > self._size:
                self._cache.popitem(last=False)
            return value
        finally:
            lock.release()
            self._asking.pop(digest, None)

    async def _request(self, body: dict[str, Any], parse: dict[str, Any]) -> float:
        with CLOCK.get().stopped():
            await self._pace.turn()
        whole = {"model": self._model, **body}
        answer = await post_json(self._url, whole, self._headers, repeatable=True, pace=self._pace)
        try:
            text = answer["choices"][0]["message"]["content"]
        except (TypeError, KeyError, IndexError):
            raise ValueError(f"{self._url} answers no chat completion: {json.dumps(answer)[:80]!r}") from None
        value = read_verdict(text, parse) if isinstance(text, str) else None
        if value is None:
            raise ValueError(f"the judge's answer cannot be read: {str(text)[-80:]!r}")
        return value


def fill_in(template: str, fields: dict[str, Any]) -> str:
    """Replace each {name} by the field's text. ValueError for a field that there is not; other braces stay."""

    def text(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in fields:
            raise ValueError(f"the template names {{{name}}}, the sample has {', '.join(sorted(fields))}")
        value = fields[name]
        if name == "messages" and isinstance(value, list):
            return "\n\n".join(f"{message.get('role')}: {_content(message)}" for message in value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return _FIELD.sub(text, template)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    calls = "".join(f"\n{json.dumps(call, ensure_ascii=False)}" for call in message.get("tool_calls") or [])
    return (content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)) + calls
