"""The names of a run's keys. One hash tag per run, so that Redis Cluster keeps them together."""

from __future__ import annotations

GENERATORS, REWARD, TRAINER = "generators", "reward", "trainer"
"""Consumer groups, in the order of the streams' life."""


class Keys:
    """``Keys("tidemill", "arithmetic").tasks == "{tidemill:arithmetic}:tasks"``."""

    def __init__(self, prefix: str, run: str) -> None:
        self.base = f"{{{prefix}:{run}}}"
        self.ctl = self._key("ctl")
        self.slots = self._key("slots")
        self.counts = self._key("counts")
        self.groups = self._key("groups")
        self.samples = self._key("samples")
        self.tasks = self._key("tasks")
        self.eval_tasks = self._key("eval_tasks")
        self.trajectories = self._key("trajectories")
        self.scored = self._key("scored")
        self.dead = self._key("dead")
        self.journal = self._key("journal")
        self.evals = self._key("evals")
        self.changes = self._key("changes")
        self.weights = self._key("weights")
        self.events = self._key("events")
        self.metrics = self._key("metrics")
        self.services = self._key("services")

    def _key(self, name: str) -> str:
        return f"{self.base}:{name}"

    @property
    def scripted(self) -> list[str]:
        """Keys handed to every script, in the order of lua/prelude.lua."""
        return [
            self.ctl,
            self.slots,
            self.counts,
            self.groups,
            self.samples,
            self.tasks,
            self.eval_tasks,
            self.trajectories,
            self.scored,
            self.dead,
            self.journal,
            self.evals,
            self.changes,
        ]

    @property
    def groups_of_streams(self) -> list[tuple[str, str]]:
        """Every stream with its consumer group."""
        return [
            (self.tasks, GENERATORS),
            (self.eval_tasks, GENERATORS),
            (self.trajectories, REWARD),
            (self.scored, TRAINER),
        ]

    def weight_chunk(self, version: int, index: int) -> str:
        """Key of one chunk of a weight version."""
        return self._key(f"weights:{version}:{index}")
