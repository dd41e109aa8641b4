"""A run as Slurm jobs: readable scripts that a user can edit and queue, from one configuration.

The run continues if a job is preempted, requeued or out of time. Generators are an array of which any part may run at
any time; the run's end cancels the rest of it. This launcher only writes files.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template

from deploy.checks.preflight import check
from deploy.launcher_options import SlurmOptions
from deploy.launchers.factory import check_places, check_whole
from deploy.launchers.gpus import Auto, check_counts
from deploy.planning.cluster import DeviceQuota, engine_width
from deploy.run.folder import settle_configuration
from schemas.config import TidemillConfig, by_pool
from schemas.config.deploy import PlacementConfig
from schemas.errors import OK_EXIT, ConfigError
from schemas.run_folder import CONFIG
from schemas.run_record import check_record
from schemas.system.processes import ask

SCRIPTS = ("job.sh", "services.sbatch", "trainer.sbatch", "submit.sh")
GENERATORS = "generators.sbatch"
"""The script of generators; of those of a pool, generators-POOL.sbatch."""
PREPARE = "prepare.sbatch"
UP = "up.sbatch"
"""The script of a run with ``placement``: one job that is `tidemill up`."""
GRACE_S = 160
"""Seconds for a checkpoint after Slurm's warning, which comes 180 s before a job's end."""
NO_GPUS = "no GPUs: Slurm knows of none here; --trainer-gpus and --generator-gpus ask for some"


class Slurm(SlurmOptions):
    """The launcher ``slurm``: it writes scripts, and a user runs the last of them."""

    def launch(self, config: TidemillConfig, fresh: bool = False) -> int:
        """Write the scripts as ``prepare`` does, and print their paths."""
        for path in self.prepare(config, fresh):
            print(path)
        return OK_EXIT

    def prepare(self, config: TidemillConfig, fresh: bool = False) -> list[Path]:
        """Check the configuration and write the scripts; on stderr the GPUs that jobs ask for.

        Returns their paths, that of submit.sh last. ConfigError for what cannot work, and nothing is written.
        """
        if fresh:
            raise ConfigError(
                f"--fresh does not work with Slurm: for a new run, `tidemill purge` and rm -r {config.folder}"
            )
        if config.placement is not None and not config.placement.is_auto:
            return self._write_one_job(config, config.placement)
        check_places(config, "Slurm", self.generators)
        check_record(config)
        self._check(config)
        dealt = self.deal(config)
        DeviceQuota.check(config, self.trainer_nodes * max(1, _number(dealt.trainer_gpus)), self.generators)
        gpus = {pool: self.deal(one).generator_gpus for pool, one in by_pool(config).items()}
        if dealt is not self:
            each = [f"{count} for each generator{f' of {pool}' if pool else ''}" for pool, count in gpus.items()]
            text = f"GPUs: {', '.join([f'{dealt.trainer_gpus} for each trainer node', *each])}"
            print(text if dealt.trainer_gpus or any(gpus.values()) else NO_GPUS, file=sys.stderr)
        return dealt.write(config, gpus)

    def _write_one_job(self, config: TidemillConfig, placement: PlacementConfig) -> list[Path]:
        """Write the script of one job on one node with the whole run, in which GPUs are used in turns."""
        check_whole(self, config, "slurm", "generators", "generator_gpus", "trainer_nodes", "trainer_gpus", "container")
        check_record(config)
        self._check(config)
        DeviceQuota.check(config)
        folder = self._make_folder(config)
        values = self._values(config, folder) | {"gpus": _gpus(placement.least_gpus), "grace_s": str(GRACE_S)}
        return [_write(folder / name, name, values) for name in (SCRIPTS[0], UP)]

    def _check(self, config: TidemillConfig) -> None:
        """The check of ``tidemill up``, without what only a job's node can tell; ConfigError for what cannot work."""
        skip = {"control plane"}
        if self.setup or self.container:
            # Data and the user's code are read in an environment that is not this one.
            skip |= {"user code"}
        if self.container:
            skip |= {"model"}
        elsewhere = self.setup or self.container or any(pool.python for pool in config.pools.values())
        check(config, here=not elsewhere, skip=skip)

    def deal(self, config: TidemillConfig) -> Slurm:
        """Return the same with numbers for ``auto``; ConfigError for what can be none."""
        check_counts(self.trainer_gpus, self.generator_gpus)
        if "auto" not in (self.trainer_gpus, self.generator_gpus):
            return self
        command = ["sinfo", "--noheader", "--format=%G", *([f"--partition={self.partition}"] if self.partition else [])]
        there = "gpu" in ask(command)
        trainer = config.trainer.processes if self.trainer_gpus == "auto" and there else self.trainer_gpus
        generator = engine_width(config) if self.generator_gpus == "auto" and there else self.generator_gpus
        return replace(
            self,
            trainer_gpus=0 if trainer == "auto" else trainer,
            generator_gpus=0 if generator == "auto" else generator,
        )

    def write(self, config: TidemillConfig, gpus: Mapping[str, int | Auto] | None = None) -> list[Path]:
        """Write the configuration in effect and the scripts; returns the scripts, submit.sh last. Overwrites.

        gpus: of a generator of each pool, instead of generator_gpus.
        ConfigError, and nothing is written, when the run in the folder began with other settings that it cannot change.
        """
        arrays = {pool: one.generator.replicas for pool, one in by_pool(config).items()}
        if self.generators is not None:
            arrays = {"": self.generators}
        generators = sum(arrays.values())
        if generators < 1 or self.trainer_nodes < 1:
            raise ConfigError(
                f"Slurm needs 1 or more generators and trainer nodes, not {generators} and {self.trainer_nodes}"
            )
        check_record(config)
        folder = self._make_folder(config)
        values = self._values(config, folder)
        queued = [_script(pool) for pool, size in arrays.items() if size]
        values["queue_generators"] = "\n".join(f"sbatch $after {shlex.quote(str(folder / name))}" for name in queued)
        values["generators"] = _script("POOL" if config.pools else "")
        written = [
            _write(folder / _script(pool), GENERATORS, values | self._array(config, pool, size, (gpus or {}).get(pool)))
            for pool, size in arrays.items()
        ]
        for name in ([PREPARE] if config.warm_start else []) + [*SCRIPTS]:
            written.append(_write(folder / name, name, values))
        return written

    def _make_folder(self, config: TidemillConfig) -> Path:
        """Make the folder of the scripts, and write the configuration in effect into that of the run."""
        folder = Path(self.folder or config.folder / "slurm").resolve()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        config.folder.mkdir(parents=True, exist_ok=True)
        settle_configuration(config)
        return folder

    def _array(self, config: TidemillConfig, pool: str, size: int, gpus: int | Auto | None) -> dict[str, str]:
        """Return what the script of a pool's generators says of them; pool: empty without pools."""
        return {
            "last": str(max(size, 1) - 1),
            "dash": f"-{pool}" if pool else "",
            "pool": f"--pool {pool} " if pool else "",
            "generator_gpus": _gpus(self.generator_gpus if gpus is None else gpus),
            "sbatch": self._common(config.pools[pool].slurm if pool else {}),
        }

    def _values(self, config: TidemillConfig, folder: Path) -> dict[str, str]:
        commands = {
            f"run_{role}": self._command(role) for role in ("control", "feeder", "reward", "generator", "trainer")
        }
        prepared = f"--dependency=afterok:$(sbatch --parsable {shlex.quote(str(folder / PREPARE))})"
        return {
            **commands,
            "run": config.run.name,
            "config": shlex.quote(str(config.folder / CONFIG)),
            "folder": shlex.quote(str(folder)),
            "workdir": shlex.quote(os.getcwd()),
            "setup": self.setup or _activate(),
            "sbatch": self._common(),
            "own_broker": "yes" if self.own_broker else "no",
            "rewards": str(config.reward.replicas),
            "trainer_gpus": _gpus(self.trainer_gpus),
            "trainer_nodes": str(self.trainer_nodes),
            "start_trainer": self._trainer(shlex.quote(str(config.folder / CONFIG))),
            "queue_prepare": f"after={prepared if config.warm_start else ''}",
        }

    def _command(self, role: str) -> str:
        return f"{self.container.replace('{role}', role)} tidemill" if self.container else "tidemill"

    def _common(self, own: Mapping[str, str] | None = None) -> str:
        """Return the lines of options for all jobs. own: options of one, which take the place of these."""
        own = own or {}
        asked = {"time": self.time, "partition": self.partition, "account": self.account}
        lines = [f"--{name}={value}" for name, value in asked.items() if value and name not in own]
        lines += [one for one in self.sbatch or () if one.lstrip("-").partition("=")[0] not in own]
        lines += [f"--{name}={value}" if value else f"--{name}" for name, value in own.items()]
        return "\n".join(f"#SBATCH {line}" for line in lines)

    def _trainer(self, config: str) -> str:
        """Return the trainer's command: a single process needs no srun; ranks meet at the job's first node."""
        ranks = max(1, _number(self.trainer_gpus))
        if self.trainer_nodes * ranks == 1:
            return f"keep forward {self._command('trainer')} trainer {config}"
        # A port of the job's own: two runs may have trainers on one node.
        return (
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            f"keep leave srun --kill-on-bad-exit=1 {self._command('trainer')} trainer {config} \\\n"
            f"    supervisor.grace_s={GRACE_S} --ranks {ranks} --nodes {self.trainer_nodes} \\\n"
            '    --meet "$head:$((40000 + SLURM_JOB_ID % 20000))"'
        )


def _script(pool: str) -> str:
    return f"generators-{pool}.sbatch" if pool else GENERATORS


def _write(path: Path, template: str, values: Mapping[str, str]) -> Path:
    text = (files("deploy.launchers") / "slurm_scripts" / template).read_text(encoding="utf-8")
    path.write_text(Template(text).substitute(values), encoding="utf-8")
    path.chmod(0o755 if template == "submit.sh" else 0o644)
    return path


def _number(gpus: int | Auto) -> int:
    return 0 if gpus == "auto" else gpus


def _gpus(gpus: int | Auto) -> str:
    count = _number(gpus)
    return f"#SBATCH --gpus-per-node={count}" if count else "# No GPU was asked for."


def _activate() -> str:
    """Return the line that makes `tidemill` known: the virtual environment of this very process."""
    script = Path(sys.prefix) / "bin" / "activate"
    return f". {shlex.quote(str(script))}" if script.is_file() else ":"
