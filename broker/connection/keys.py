"""The names of a run's keys. One hash tag per run, so that Redis Cluster keeps them together."""

from collections.abc import Sequence

GENERATORS, REWARD, TRAINER = "generators", "reward", "trainer"
"""Consumer groups, in the order in which work passes through them."""


class Keys:
    """``Keys("tidemill", "arithmetic").tasks == "{tidemill:arithmetic}:tasks"``."""

    def __init__(self, prefix: str, run: str) -> None:
        self.base = f"{{{prefix}:{run}}}"
        self.ctl = self._key("ctl")
        self.leader_term = self._key("leader_term")
        self.slots = self._key("slots")
        self.counts = self._key("counts")
        self.groups = self._key("groups")
        self.samples = self._key("samples")
        self.tasks = self._key("tasks")
        self.eval_tasks = self._key("eval_tasks")
        self.trajectories = self._key("trajectories")
        self.bodies = self._key("bodies")
        self.scored = self._key("scored")
        self.dead = self._key("dead")
        self.journal = self._key("journal")
        self.evals = self._key("evals")
        self.changes = self._key("changes")
        self.orders = self._key("orders")
        self.weights = self._key("weights")
        self.chunks = self._key("chunks")
        self.rejections = self._key("rejections")
        self.peers = self._key("peers")
        self.roll = self._key("roll")
        self.roll_answers = self._key("roll_answers")
        self.roll_changes = self._key("roll_changes")
        self.events = self._key("events")
        self.metrics = self._key("metrics")
        self.services = self._key("services")
        self.readmit = self._key("readmit")
        self.failed = self._key("failed")
        self.prompts = self._key("prompts")
        self.partials = self._key("partials")
        self.images = self._key("images")
        self.run_control = self._key("run_control")
        self.recent = self._key("recent")
        self.eval_samples = self._key("eval_samples")
        self.counters = self._key("counters")
        self.questions = self._key("questions")
        self.answers = self._key("answers")
        self.live = self._key("live")
        self.live_seats = self._key("live_seats")
        self.live_begun = self._key("live_begun")

    def _key(self, name: str) -> str:
        return f"{self.base}:{name}"

    @property
    def run(self) -> str:
        """The run's name."""
        return self.base.strip("{}").rpartition(":")[2]

    def all(self) -> list[str]:
        """All keys that a run can have, whether it has them or not: no search of the server is needed."""
        return [key for name, key in vars(self).items() if name != "base"]

    def named(self, names: Sequence[str]) -> list[str]:
        """Keys by the names that scripts declare: ``CTL`` is ``ctl``."""
        return [str(getattr(self, name.lower())) for name in names]
