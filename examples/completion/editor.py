"""Users of an editor, imitated: each asks for a completion, and keeps or drops it seconds later::

    python examples/completion/editor.py runs/completion --conversations 2000

The run may live on any machine: ``--url`` and ``--token`` name its control plane. The editor's own part is `propose`,
which uses OpenAI's client as any editor would, and `tell`, which a real one calls once it knows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import lines
import openai

SECONDS = (1.0, 10.0)
"""Until a user knows whether a proposal is of use."""


class Editor:
    """Asks the policy, and reports what became of its proposals. kept: of each one that was reported, in order."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60)
        self._asking = asyncio.Semaphore(4)
        self.kept: list[bool] = []

    async def propose(self, line: str) -> tuple[str, str]:
        """Return the id of a conversation and what the policy proposes behind ``line``."""
        async with self._asking:  # while there is no room, a few ask for all
            found = await self._post("/v1/episodes")
        async with openai.AsyncOpenAI(base_url=found["base_url"], api_key="none", max_retries=10) as client:
            answer = await client.completions.create(model="policy", prompt=line)
        return found["id"], answer.choices[0].text

    async def tell(self, id: str, kept: bool) -> None:
        """Report whether the user kept the proposal."""
        await self._post(f"/v1/episodes/{id}/reward", reward=float(kept))
        self.kept.append(kept)

    async def _post(self, path: str, **body: float) -> Any:
        """Return the answer; a control plane that has no room, or is away for a moment, is asked again."""
        while True:
            try:
                answer = await self._http.post(path, json=body)
            except httpx.TransportError:
                await asyncio.sleep(1.0)
                continue
            if answer.status_code not in (429, 503):
                return answer.raise_for_status().json()
            await asyncio.sleep(float(answer.headers.get("Retry-After", 0.3)))


async def use(editor: Editor, users: int, conversations: int, seed: int) -> None:
    """Let so many users type at once until so many proposals are judged."""
    chance = random.Random(seed)

    async def type_lines() -> None:
        while len(editor.kept) < conversations:
            line = lines.beginning(chance)
            id, proposed = await editor.propose(line)
            await asyncio.sleep(chance.uniform(*SECONDS))
            await editor.tell(id, lines.keeps(line, proposed))
            if len(editor.kept) % 100 == 0:
                print(f"{len(editor.kept)} proposals, {sum(editor.kept[-100:])} % of the last 100 kept", flush=True)

    typing = [asyncio.create_task(type_lines()) for _ in range(users)]
    await asyncio.gather(*typing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run on this machine")
    parser.add_argument("--url", help="of the control plane, without a folder")
    parser.add_argument("--token", default="", help="of the control plane, or of a tenant")
    parser.add_argument("--users", type=int, default=60, help="at once")
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given: Any = parser.parse_args()
    url, token = given.url, given.token
    if given.run is not None:
        url = json.loads((given.run / "control.json").read_text())["url"]
        token = (given.run / "control_token").read_text().strip()
    if not url:
        parser.error("give the folder of a run, or --url")
    asyncio.run(use(Editor(url, token), given.users, given.conversations, given.seed))


if __name__ == "__main__":
    main()
