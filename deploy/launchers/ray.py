"""``tidemill ray``: the run on a Ray cluster, supervised from this process (deploy/launchers/ray_cluster.py)."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.launchers.ray_cluster import RayCluster
from deploy.up import run_up
from schemas.config import TidemillConfig
from schemas.errors import ConfigError


@dataclass(frozen=True)
class Ray:
    """What Ray is asked for, of each service. address: of the cluster; ``auto`` finds it, ``local`` starts one here.

    generators, max_generators: fewest and most; by default generator.replicas, and as many as the fewest.
    """

    address: str = "auto"
    trainer_cpus: float = 1.0
    trainer_gpus: float = 0.0
    generator_cpus: float = 1.0
    generator_gpus: float = 0.0
    generators: int | None = None
    max_generators: int | None = None

    def launch(self, config: TidemillConfig, fresh: bool = False) -> int:
        least = config.generator.replicas if self.generators is None else self.generators
        most = least if self.max_generators is None else self.max_generators
        if not 1 <= least <= most:
            raise ConfigError(f"Ray needs 1 or more generators and a maximum not below it, not {least} to {most}")
        generator = config.generator.model_copy(update={"replicas": least})
        with RayCluster(self, least, most, config.broker.url) as cluster:
            return run_up(config.model_copy(update={"generator": generator}), cluster, fresh)
