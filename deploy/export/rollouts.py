"""``tidemill replay --rollouts``: generates the samples of recorded steps again, and compares them to the last bit.

In exact mode a token follows from its seed, its place, the tokens before it and the weights. Training again passes
through every version of the weights, in the recorded order, and each time an engine generates what that version
sampled, whichever step trained it. The answers of tools and environments are the recorded ones.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from consumers.offline.replay import ReplayPlan
from consumers.trainer.checkpoint.batch_files import BatchFiles
from consumers.trainer.rank_group import RankGroup
from producers.engines.factory import make_engine
from producers.generator.service import engine_settings
from producers.tasks import make_sampling, task_seed
from schemas.config import TidemillConfig
from schemas.config.generator import ENDPOINT_WORKFLOWS
from schemas.errors import ConfigError
from schemas.messages import FileSource, Sampling, Trajectory


@dataclass(frozen=True)
class VersionPiece:
    """Neighbouring tokens of a sample, all sampled by one version of the weights, and what was before them."""

    version: int
    before: Sequence[int]
    tokens: Sequence[int]
    logprobs: npt.NDArray[np.float32]
    sampling: Sampling
    name: str


def check_rollouts(config: TidemillConfig) -> None:
    """Raise ConfigError if the samples of a run can't be generated again."""
    if not config.exact:
        raise ConfigError(
            "replay --rollouts needs a run with generator.exact: true and generator.engine transformers: otherwise the"
            " last bits of a sample depend on what was in flight with it"
        )
    if (workflow := config.generator.workflow.name) in ENDPOINT_WORKFLOWS:
        raise ConfigError(f"replay --rollouts: seeds of the workflow {workflow} depend on the order of its requests")


def pieces_of(sample: Trajectory, seed: int, sampling: Sampling) -> Iterator[VersionPiece]:
    """Cut a sample into pieces. seed: of its task; sampling: of the run."""
    every, mask, versions = sample.tokens.numpy(), sample.loss_mask.numpy(), sample.versions()
    settings = msgspec.structs.replace(sampling, temperature=sample.temperature, seed=seed + sample.sample, stop=[])
    for row in sample.rows():
        tokens, own = every[row.places].tolist(), versions[row.places]
        sampled = mask[row.places].astype(bool)
        sampled[: row.shared] = False
        kinds = np.where(sampled, own, -1)
        ends = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
        for start, end in zip([0, *ends], ends, strict=False):
            if kinds[start] < 0:
                continue
            yield VersionPiece(
                version=int(kinds[start]),
                before=tokens[:start],
                tokens=tokens[start:end],
                logprobs=sample.logprobs.numpy()[row.places[start:end]],
                sampling=msgspec.structs.replace(settings, max_tokens=end - start),
                name=f"task {sample.task_id}, sample {sample.sample}, token {start}",
            )


class RolloutReplay(AbstractContextManager["RolloutReplay"]):
    """Samples that are generated again while their run is trained again::

        with RolloutReplay(config, plan) as generated:
            run_replay(config, plan, show_step, generated.before_step)
        print(generated.verdict())

    differs: the pieces that came out otherwise. tokens: that were generated again.
    """

    def __init__(self, config: TidemillConfig, plan: ReplayPlan) -> None:
        self._config, self._plan = config, plan
        self._runner, self._folder = asyncio.Runner(), TemporaryDirectory()
        self._engine = make_engine(config.generator.engine, engine_settings(config, "replay"), config.base)
        self._pieces: dict[int, list[VersionPiece]] | None = None
        self.tokens = self.samples = 0
        self.differs: list[str] = []

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()
        self._folder.cleanup()

    def before_step(self, ranks: RankGroup, version: int) -> None:
        """Generate what this version of the weights sampled, with the weights of the ranks."""
        if self._pieces is None:
            self._pieces = self._read()
            self._runner.run(self._engine.start())
        if pieces := self._pieces.pop(version, []):
            snapshot, _ = ranks.gather([0, 0], file := Path(self._folder.name) / f"{version}.safetensors")
            snapshot.fill()
            self._runner.run(self._generate(FileSource(file), version, pieces))
            file.unlink()

    def _read(self) -> dict[int, list[VersionPiece]]:
        files, sampling = BatchFiles(self._config.folder), make_sampling(self._config.sampling)
        supervised = self._config.supervised_weights
        found: dict[int, list[VersionPiece]] = {}
        for step in range(self._plan.first, self._plan.last):
            for group in files.read(step).groups:
                seed = task_seed(self._config.run.seed, group.task_id)
                generated = [sample for sample in group.samples if sample.dataset not in supervised]
                self.samples += len(generated)
                for piece in (piece for sample in generated for piece in pieces_of(sample, seed, sampling)):
                    found.setdefault(piece.version, []).append(piece)
        return found

    async def _generate(self, weights: FileSource, version: int, pieces: Sequence[VersionPiece]) -> None:
        await self._engine.load(weights, version)
        requests = [self._engine.generate(piece.before, piece.sampling) for piece in pieces]
        for piece, (again,) in zip(pieces, await asyncio.gather(*requests), strict=True):
            self.tokens += len(piece.tokens)
            if again.tokens != piece.tokens or again.logprobs.tobytes() != piece.logprobs.tobytes():
                self.differs.append(piece.name)

    def as_json(self) -> dict[str, Any]:
        """Return the outcome for ``--json``. other: tokens of weights that training did not pass through."""
        left = sum(len(piece.tokens) for pieces in (self._pieces or {}).values() for piece in pieces)
        return {"samples": self.samples, "tokens": self.tokens, "other": left, "differs": self.differs}

    def verdict(self) -> str:
        """Return one line for users: whether tokens and log-probabilities are equal, else the first that differ."""
        what, left = f"{self.tokens} tokens of {self.samples} samples were generated again", self.as_json()["other"]
        rest = f"; {left} others are of weights that these steps do not pass through" if left else ""
        if not self.differs:
            return f"equal: {what}, to the bit{rest}"
        return f"NOT EQUAL: {what}, and differ in {len(self.differs)} places, the first {self.differs[0]}{rest}"
