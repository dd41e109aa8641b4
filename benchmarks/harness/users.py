"""Users of a run with the workflow ``live``: they talk to the policy with openai's client and reward it later.

A control plane that is away, or refuses for now, is asked again. A conversation that cannot be continued is given up.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import httpx
import openai

TIMEOUT_S, PAUSE_S = 30.0, 0.3
"""Of a request, and until it is repeated."""
ASKING = 4
"""Users who ask for a conversation at once: while no generator has room, the others do not ask."""


class Users(ABC):
    """Many users in one event loop. folder: of the run, whose control plane is on this machine.

    late_s: the shortest and the longest time until a reward. silent: share of the conversations that get none.
    """

    def __init__(self, folder: Path, seed: int, late_s: tuple[float, float] = (1.0, 60.0), silent: float = 0.0) -> None:
        self._folder, self._late_s, self._silent = folder, late_s, silent
        self.rng = random.Random(seed)
        self._numbers = itertools.count()
        self._asking = asyncio.Semaphore(ASKING)
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S)
        self._openai = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=8, timeout=TIMEOUT_S)

    @abstractmethod
    async def converse(self, client: openai.AsyncOpenAI, number: int) -> float:
        """Hold a conversation; return its reward."""

    @abstractmethod
    def note(self, kind: str, **data: Any) -> None:
        """Learn what happened. begun: id · talked: id (at its last answer) · given_up: id · rewarded: id, sent, counts
        (the reward that holds), changed · refused: id, status."""

    def again(self, value: float) -> float:
        """Return what is sent once the reward ``value`` is stored; it must change nothing."""
        return value

    async def talk(self, count: int) -> None:
        """Hold so many conversations at once, without end."""
        await asyncio.gather(*(self._live() for _ in range(count)))

    async def _live(self) -> None:
        while True:
            async with self._asking:
                begun = await self._post("/v1/episodes", {})
            id = begun["id"]
            self.note("begun", id=id)
            try:
                value = await self.converse(self._openai.with_options(base_url=begun["base_url"]), next(self._numbers))
            except openai.APIError:
                self.note("given_up", id=id)
                continue
            self.note("talked", id=id)
            if self.rng.random() >= self._silent:
                await asyncio.sleep(self.rng.uniform(*self._late_s))
                if await self._reward(id, value):
                    await self._reward(id, self.again(value))

    async def _reward(self, id: str, value: float) -> bool:
        found = await self._post(f"/v1/episodes/{id}/reward", {"reward": value})
        if "status" in found:
            self.note("refused", id=id, status=found["status"])
            return False
        self.note("rewarded", id=id, sent=value, counts=found["reward"], changed=found["changed"])
        return True

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, or the status of a final refusal."""
        while True:
            try:
                url = str(json.loads((self._folder / "control.json").read_text())["url"]).rstrip("/")
                key = (self._folder / "control_token").read_text().strip()
                answer = await self._http.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"})
                if answer.status_code == 200:
                    found: dict[str, Any] = answer.json()
                    return found
                if answer.status_code in (404, 409):
                    return {"status": answer.status_code}
            except (httpx.HTTPError, OSError, ValueError):
                pass  # it is away
            await asyncio.sleep(PAUSE_S * self.rng.uniform(0.5, 1.5))
