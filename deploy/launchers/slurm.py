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
from deploy.launchers.factory import check_own_broker, check_places, check_whole
from deploy.launchers.gpus import Auto, check_counts
from deploy.planning.cluster import DeviceQuota, engine_width
from deploy.run.folder import settle_configuration
from deploy.services.main import ROLES
from schemas.config import TidemillConfig, by_pool
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
TURNS_GRACE_S = 120
"""The same for each kind of service of a run in one job, whose warning comes 420 s before its end: `tidemill up` stops
them in turn, and generators and reward services may hang before the trainer is asked. Each job ends so much earlier."""
NO_GPUS = "no GPUs: Slurm knows of none here; --trainer-gpus and --generator-gpus ask for some"


class Slurm(SlurmOptions):
    """The launcher ``slurm``: it writes scripts, and a user runs the last of them."""

    def launch(self, config: TidemillConfig, fresh: bool = False) -> int:
        """Write the scripts and print their paths. ConfigError with ``fresh``."""
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
        whole = None if config.placement is None or config.placement.is_auto else config.placement
        if whole is None:
            check_places(config, "Slurm", self.generators)
            if self.own_broker:
                check_own_broker(config, "Slurm")
        else:
            options = ("generators", "generator_gpus", "trainer_nodes", "trainer_gpus", "container")
            check_whole(self, config, "slurm", *options)
        check_record(config)
        elsewhere = bool(self.setup or self.container)
        # Only a job's node can check its ports and GPUs, and the data, user's code and model of another environment.
        skip = {"control plane", "GPUs", *(["user code"] if elsewhere else []), *(["model"] if self.container else [])}
        check(config, here=not elsewhere and not any(pool.python for pool in config.pools.values()), skip=skip)
        if whole is not None:
            # One job on one node with the whole run, in which GPUs are used in turns.
            DeviceQuota.check(config)
            folder = self._make_folder(config)
            values = self._values(config, folder) | {"gpus": _gpus(whole.least_gpus), "grace_s": str(TURNS_GRACE_S)}
            return [_write(folder / name, name, values) for name in (SCRIPTS[0], UP)]
        dealt = self.deal(config)
        DeviceQuota.check(config, self.trainer_nodes * max(1, _number(dealt.trainer_gpus)), self.generators)
        gpus = {pool: self.deal(one).generator_gpus for pool, one in by_pool(config).items()}
        if dealt is not self:
            each = [f"{count} for each generator{f' of {pool}' if pool else ''}" for pool, count in gpus.items()]
            text = f"GPUs: {', '.join([f'{dealt.trainer_gpus} for each trainer node', *each])}"
            print(text if dealt.trainer_gpus or any(gpus.values()) else NO_GPUS, file=sys.stderr)
        return dealt.write(config, gpus)

    def deal(self, config: TidemillConfig) -> Slurm:
        """Return the same with numbers for ``auto``; ConfigError for what can be none."""
        check_counts(self.trainer_gpus, self.generator_gpus)
        if "auto" not in (self.trainer_gpus, self.generator_gpus):
            return self
        command = ["sinfo", "--noheader", "--format=%G", *([f"--partition={self.partition}"] if self.partition else [])]
        there = "gpu" in ask(command)
        trainer, generator = (config.trainer.processes, engine_width(config)) if there else (0, 0)
        return replace(
            self,
            trainer_gpus=trainer if self.trainer_gpus == "auto" else self.trainer_gpus,
            generator_gpus=generator if self.generator_gpus == "auto" else self.generator_gpus,
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
        written = []
        for pool, size in arrays.items():
            own = {
                "last": str(max(size, 1) - 1),
                "dash": f"-{pool}" if pool else "",
                "pool": f"--pool {pool} " if pool else "",
                "generator_gpus": _gpus((gpus or {}).get(pool, self.generator_gpus)),
                "sbatch": self._common(config.pools[pool].slurm if pool else {}),
            }
            written.append(_write(folder / _script(pool), GENERATORS, values | own))
        names = [*([PREPARE] if config.warm_start else []), *SCRIPTS]
        return written + [_write(folder / name, name, values) for name in names]

    def _make_folder(self, config: TidemillConfig) -> Path:
        """Make the folder of the scripts, and write the configuration in effect into that of the run."""
        folder = Path(self.folder or config.folder / "slurm").resolve()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        config.folder.mkdir(parents=True, exist_ok=True)
        settle_configuration(config)
        return folder

    def _values(self, config: TidemillConfig, folder: Path) -> dict[str, str]:
        prepared = f"--dependency=afterok:$(sbatch --parsable {shlex.quote(str(folder / PREPARE))})"
        file = shlex.quote(str(config.folder / CONFIG))
        # The virtual environment of this very process.
        activate = Path(sys.prefix) / "bin" / "activate"
        return {
            **{f"run_{role}": self._command(role) for role in ROLES},
            "run": config.run.name,
            "config": file,
            "folder": shlex.quote(str(folder)),
            "workdir": shlex.quote(os.getcwd()),
            "setup": self.setup or (f". {shlex.quote(str(activate))}" if activate.is_file() else ":"),
            "sbatch": self._common(),
            "own_broker": "yes" if self.own_broker else "no",
            "rewards": str(config.reward.replicas),
            "trainer_gpus": _gpus(self.trainer_gpus),
            "trainer_nodes": str(self.trainer_nodes),
            "start_trainer": self._trainer(file),
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
        ranks = max(1, gpus := _number(self.trainer_gpus))
        if self.trainer_nodes * ranks == 1:
            # Without GPUs, as many ranks as the configuration says.
            return f"keep forward {self._command('trainer')} trainer {config}{' --ranks 1' if gpus else ''}"
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
