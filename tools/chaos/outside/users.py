"""Users who talk to the policy and reward it late: ``python -m tools.chaos.outside.users FOLDER SEED``, with
``--workload live``.

Each conversation has one to three turns. Its reward is the checksum of the token ids that it was answered with, as an
agent's is. It comes 1 to 60 s later, is sent until it is answered, and then once more, sometimes with another value.
Lines of evidence: those of ``benchmarks.harness.users.Users.note``.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import openai

from benchmarks.harness.users import Users
from schemas.system import guard
from tools.chaos.agents.agent import checksum
from tools.chaos.judging.evidence import EvidenceWriter

COUNT = 160
"""More than there are slots, so that every sample that is offered gets a conversation."""
SILENT = 0.05
ANOTHER = 1.0
"""Is added to every second reward that is sent again."""


class ChaosUsers(Users):
    """Users whose rewards tell their conversations apart. folder: the suite's."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder / "run", seed, silent=SILENT)
        self._evidence = EvidenceWriter(folder / "evidence", "users")

    def note(self, kind: str, **data: Any) -> None:
        """Write it down."""
        self._evidence.write(kind, **data)

    def again(self, value: float) -> float:
        """Return the reward, or another one."""
        return value + self.rng.choice((0.0, ANOTHER))

    async def converse(self, client: openai.AsyncOpenAI, number: int) -> float:
        """Return the checksum of all answers."""
        messages, answers = list[Any](), list[list[int]]()
        for turn in range(self.rng.randint(1, 3)):
            messages.append({"role": "user", "content": f"{number}.{turn}?"})
            answer = await client.chat.completions.create(
                model="policy", messages=messages, extra_body={"return_token_ids": True}
            )
            choice = answer.choices[0]
            answers.append(getattr(choice, "token_ids"))  # noqa: B009 - not of OpenAI's protocol
            messages.append({"role": "assistant", "content": choice.message.content or ""})
        return checksum(answers)


if __name__ == "__main__":
    guard.prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    asyncio.run(ChaosUsers(Path(sys.argv[1]), int(sys.argv[2])).talk(COUNT))
