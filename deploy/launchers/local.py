"""Everything on this machine: the launcher that is taken when none is named."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.run.up import run_up
from deploy.supervisor.process import Process, Processes
from schemas.config import TidemillConfig
from schemas.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Local(Processes):
    """GPUs are dealt out when a number is given: the first ones to the trainer, the next to each generator in turn.

    trainer_gpus: of the trainer. generator_gpus: of one generator. With 0 a service sees what this process sees.
    """

    def __init__(self, trainer_gpus: int = 0, generator_gpus: int = 0) -> None:
        self._trainer_gpus = trainer_gpus
        self._generator_gpus = generator_gpus

    def launch(self, config: TidemillConfig, fresh: bool = False) -> int:
        return run_up(config, self, fresh)

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> Process:
        gpus = self._gpus(role, name)
        if gpus:
            environment = {**environment, VISIBLE: ",".join(gpus)}
        return super().start(argv, name, role, log, environment, mark)

    def _gpus(self, role: str, name: str) -> list[str]:
        """Names of the service's devices; ConfigError when this process sees too few."""
        if role == "trainer":
            wanted = range(self._trainer_gpus)
        elif role == "generator":
            first = self._trainer_gpus + int(name.removeprefix("generator-")) * self._generator_gpus
            wanted = range(first, first + self._generator_gpus)
        else:
            return []
        given = [device for device in os.environ.get(VISIBLE, "").split(",") if device]
        if given and wanted and wanted[-1] >= len(given):
            raise ConfigError(
                f"{name} would have GPU {wanted[-1] + 1} of the {len(given)} in {VISIBLE}: fewer generators, or smaller"
                " launcher.args.trainer_gpus and generator_gpus"
            )
        return [given[index] if given else str(index) for index in wanted]
