"""Everything on this machine: the launcher that is taken when none is named."""

from __future__ import annotations

from deploy.launchers.processes import Processes
from deploy.up import run_up
from schemas.config import TidemillConfig


class Local(Processes):
    """No options."""

    def launch(self, config: TidemillConfig, fresh: bool = False) -> int:
        return run_up(config, self, fresh)
