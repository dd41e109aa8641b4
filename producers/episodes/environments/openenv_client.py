"""Environments of OpenEnv servers, over their WebSocket; the package openenv is not needed. Needs websockets."""

from __future__ import annotations

import json
from typing import Any


class OpenEnvClient:
    """One session of a server. A connection that is lost, or an error of the server, fails the sample.

    url: of the server. action: field of its action that the policy's answer is. observation: field of what comes back
    that the policy reads, by default all of it as JSON. reset: what it is reset with, besides a seed.
    """

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str | None = None,
        reset: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        from websockets.sync.client import connect

        address = url.rstrip("/").replace("http", "ws", 1) if url.startswith("http") else url.rstrip("/")
        self._action, self._observation, self._reset = action, observation, reset or {}
        self._timeout_s = timeout_s
        # The proxies of the environment are for the internet.
        self._socket = connect(f"{address}/ws", open_timeout=timeout_s, max_size=1 << 26, proxy=None)

    def reset(self, task: dict[str, Any]) -> str:
        observation, _, _ = self._ask({"type": "reset", "data": {"seed": task["seed"], **self._reset}})
        return observation

    def step(self, text: str) -> tuple[str, float | None, bool]:
        return self._ask({"type": "step", "data": {self._action: text}})

    def close(self) -> None:
        try:
            self._socket.send(json.dumps({"type": "close"}))
        finally:
            self._socket.close()

    def _ask(self, message: dict[str, Any]) -> tuple[str, float | None, bool]:
        self._socket.send(json.dumps(message))
        said = json.loads(self._socket.recv(timeout=self._timeout_s))
        data = said.get("data", {})
        if said.get("type") == "error":
            raise ConnectionError(f"the server says: {data.get('message')} ({data.get('code')})")
        seen = data.get("observation", {})
        if self._observation is not None:
            if self._observation not in seen:
                raise ValueError(f"the observation has no field {self._observation!r}; it has {', '.join(seen)}")
            seen = seen[self._observation]
        reward = data.get("reward")
        shown = seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)
        return shown, None if reward is None else float(reward), bool(data.get("done"))
