"""A run as Slurm jobs: readable scripts that a user can edit and queue, from one configuration.

Promises: every job can be preempted, requeued and run out of time, and the run goes on; generators are an array
of which any part may run at any time; the run's end cancels what is left of it. Writes files and does nothing else.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from schemas.config import TidemillConfig
from schemas.errors import ConfigError

SCRIPTS = ("job.sh", "services.sbatch", "trainer.sbatch", "generators.sbatch", "submit.sh")
PREPARE = "prepare.sbatch"


@dataclass(frozen=True)
class SlurmOptions:
    """What Slurm is asked for. generators: size of the array. gpus: of one generator and of one trainer node.

    time: of every job, as Slurm writes it; jobs that need longer are requeued. extra: more #SBATCH options, for all.
    own_broker: the services job starts a Redis; else each job finds one by the REDIS_URL or REDIS_URL_FILE it inherits.
    """

    generators: int = 1
    generator_gpus: int = 0
    trainer_nodes: int = 1
    trainer_gpus: int = 0
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    setup: str | None = None
    extra: tuple[str, ...] = ()
    own_broker: bool = True


class Slurm:
    """Life cycle::

    slurm = Slurm(config, Path("config.yaml"), SlurmOptions(generators=8, generator_gpus=1, trainer_gpus=8))
    slurm.write(Path("runs/NAME/slurm"))        # then: sh runs/NAME/slurm/submit.sh
    """

    def __init__(self, config: TidemillConfig, file: Path, options: SlurmOptions) -> None:
        """file: the configuration, on a file system that all nodes share. ConfigError for options that can't be."""
        if options.generators < 1 or options.trainer_nodes < 1:
            raise ConfigError("--generators and --trainer-nodes must be 1 or more")
        self._config = config
        self._file = file.resolve()
        self._options = options

    def write(self, folder: Path) -> list[Path]:
        """Write the scripts; returns their paths, that of submit.sh last. Overwrites what an earlier call wrote."""
        folder = folder.resolve()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        values = self._values(folder)
        written = []
        for name in ([PREPARE] if self._config.warm_start else []) + [*SCRIPTS]:
            path = folder / name
            text = (files("deploy.launchers") / "slurm_scripts" / name).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(values), encoding="utf-8")
            path.chmod(0o755 if name == "submit.sh" else 0o644)
            written.append(path)
        return written

    def _values(self, folder: Path) -> Mapping[str, str]:
        options, config = self._options, self._config
        return {
            "run": config.run.name,
            "config": shlex.quote(str(self._file)),
            "folder": shlex.quote(str(folder)),
            "workdir": shlex.quote(os.getcwd()),
            "broker": shlex.quote(str(config.folder / "broker")),
            "setup": options.setup or _activate(),
            "sbatch": self._common(),
            "own_broker": "yes" if options.own_broker else "no",
            "last": str(options.generators - 1),
            "rewards": str(config.reward.replicas),
            "generator_gpus": _gpus(options.generator_gpus),
            "trainer_gpus": _gpus(options.trainer_gpus),
            "trainer_nodes": str(options.trainer_nodes),
            "start_trainer": self._trainer(),
            "queue_prepare": self._prepare(folder),
        }

    def _common(self) -> str:
        asked = {
            "--time": self._options.time,
            "--partition": self._options.partition,
            "--account": self._options.account,
        }
        lines = [f"#SBATCH {name}={value}" for name, value in asked.items() if value]
        return "\n".join([*lines, *(f"#SBATCH {option}" for option in self._options.extra)])

    def _prepare(self, folder: Path) -> str:
        if self._config.warm_start is None:
            return "after="
        return f"after=--dependency=afterok:$(sbatch --parsable {shlex.quote(str(folder / PREPARE))})"

    def _trainer(self) -> str:
        """One process needs no launcher; more are ranks that meet at the first node of the job."""
        config = shlex.quote(str(self._file))
        ranks = max(1, self._options.trainer_gpus)
        if self._options.trainer_nodes * ranks == 1:
            return f"keep forward tidemill trainer {config}"
        return (
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            "keep leave srun --kill-on-bad-exit=1 torchrun \\\n"
            f"    --nnodes {self._options.trainer_nodes} --nproc-per-node {ranks} --shutdown-timeout 60 \\\n"
            '    --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \\\n'
            f"    -m deploy.cli trainer {config}"
        )


def _gpus(count: int) -> str:
    return f"#SBATCH --gpus-per-node={count}" if count else "# No GPU was asked for."


def _activate() -> str:
    """The line that makes `tidemill` known: the virtual environment of this very process."""
    script = Path(sys.prefix) / "bin" / "activate"
    return f". {shlex.quote(str(script))}" if script.is_file() else ":"
