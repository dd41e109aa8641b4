"""An engine of each kind as the contract suite has it: started once, with models to load."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from producers.engines.base import ABILITIES, Ability, Completion, Engine
from schemas.messages import FileSource
from tests.support.producers.vllm_checks import reference_logprobs

MAX_LENGTH = 512


@dataclass
class Subject:
    """An engine under test. folders: models of one shape, by seed. seed: of the weights that the engine has now."""

    kind: str
    engine: Engine
    folders: dict[int, Path]
    seed: int = 0

    def needs(self, ability: Ability) -> None:
        """Skip the test, in the engine's words, where it says that it is without this ability."""
        assert ability in ABILITIES
        if (reason := self.engine.lacks.get(ability)) is not None:
            pytest.skip(f"{self.kind} lacks {ability}: {reason}")

    @property
    def has_weights(self) -> bool:
        return "weights" not in self.engine.lacks

    def file(self, seed: int) -> FileSource:
        return FileSource(self.folders[seed] / "model.safetensors")

    async def load(self, seed: int) -> int:
        """Load the weights of a seed as the next version; which that is."""
        version = self.engine.version + 1
        await self.engine.load(self.file(seed), version)
        self.seed = seed
        return version

    async def under_way(self) -> None:
        """Wait until tokens are being sampled."""
        seen: set[int | None] = set()
        async with asyncio.timeout(60):
            while len(seen - {None}) < 3:
                seen.add(self.engine.growth())
                await asyncio.sleep(0.001)

    async def changing(self, version: int) -> None:
        """Wait until no request is let in any more that begins with this version."""
        gate = getattr(self.engine, "_gate", None)  # without one, a load is done between two tokens
        async with asyncio.timeout(60):
            while self.engine.version == version:
                if gate is not None and gate.holders:
                    return
                await asyncio.sleep(0.001)

    def assert_whole(self, completion: Completion) -> None:
        """Every token has a log-probability and a version."""
        assert len(completion.tokens) == len(completion.logprobs)
        ends = [0, *(span.end for span in completion.spans)]
        assert [span.start for span in completion.spans] == ends[:-1]
        assert ends[-1] == len(completion.tokens)
        versions = [span.version for span in completion.spans]
        assert versions == sorted(set(versions))

    def assert_sampled(
        self, prompt: list[int], completion: Completion, temperature: float = 1.0, seed: int | None = None
    ) -> None:
        """The log-probabilities are those of the model, to 1e-5."""
        self.assert_whole(completion)
        if self.has_weights:
            folder = self.folders[self.seed if seed is None else seed]
            expected = reference_logprobs(folder, prompt + completion.tokens, temperature)[len(prompt) - 1 :]
            assert abs(completion.logprobs - expected).max(initial=0.0) < 1e-5


Start = Callable[[], Awaitable[Engine]]
