"""Every task of reasoning-gym: procedural problems with their own scorers, no download.

Problems are made in a child process with a fixed hash seed: five tasks (knight_swap, word_ladder,
ransom_note, …) iterate over sets, and would be another problem in every process.
"""

import os
import sys
from typing import Annotated, Any

from pydantic import Field

from producers.datasets.base import Example, check_index
from producers.datasets.helper_process import HelperProcess
from schemas.messages import ChatMessage

MOST = 1 << 20
"""Problems of a dataset. To reasoning-gym a problem is seed + index, and ours are so far apart in its seeds."""
SEEDS = 1 << 12
"""With more the problems of the last would be at 2**32 and above, which numpy takes for no seed."""
INSTRUCTION = "Think step by step, then give only the final answer between <answer> and </answer>."


class ReasoningGym:
    """``size`` problems of one task.

    task: its name in reasoning-gym, e.g. chain_sum. params: its settings, e.g. ``{max_terms: 3}``.
    seed: each gives other problems, as for a held-out set. instruction: added below each
    problem; empty for none. chat: false gives plain text, for models without a chat template.

    ``data["reasoning_gym"]`` is what the reward of that name makes the problem from again.
    """

    def __init__(
        self,
        *,
        task: str,
        size: Annotated[int, Field(ge=1, le=MOST)] = 10_000,
        seed: Annotated[int, Field(ge=0, lt=SEEDS)] = 0,
        params: dict[str, Any] | None = None,
        instruction: str = INSTRUCTION,
        chat: bool = True,
    ) -> None:
        self._size = size
        self._recipe: dict[str, Any] = {"task": task, "size": size, "seed": seed * MOST, "params": params or {}}
        self._instruction = instruction
        self._chat = chat
        program = [sys.executable, "-P", "-m", "producers.datasets.reasoning_gym_child"]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self._child = HelperProcess("reasoning-gym", program, environment, self._recipe)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:
        check_index(self, index)
        entry = self._child.ask({"index": index})
        data = {"answer": entry["answer"], "reasoning_gym": {**self._recipe, "index": index, "digest": entry["digest"]}}
        question = entry["question"]
        prompt = f"{question}\n\n{self._instruction}" if self._instruction else question
        if self._chat:
            return Example(messages=[ChatMessage("user", prompt)], data=data)
        return Example(text=f"{prompt}\n", data=data)
