"""Readable samples of evaluations, on their way from reward services to the run's folder.

They are texts and rewards without tokens, bounded in number and size, and nothing depends on them.
"""

import json
from collections.abc import Sequence
from typing import Any

from broker.connection.connection import RunData
from broker.queues.tasks import EVAL_BASE
from schemas.errors import printable
from schemas.messages import Score, Trajectory
from schemas.run_folder import as_text, parse_line

KEEP, KEEP_BYTES = 10_000, 16 * 2**20
PROMPT, COMPLETION = 4_000, 8_000
"""Characters of a text that are kept."""
AT_ONCE = 500


class EvalSamples(RunData):
    """``keep`` is the reward service's side, ``take`` the trainer's."""

    def keep(self, scored: Sequence[tuple[Trajectory, Score]]) -> None:
        """Store samples. Tried once; InfraError if the broker is full or does not answer."""
        lines = [json.dumps(describe(trajectory, score), ensure_ascii=False) for trajectory, score in scored]
        if lines:
            self._connection.run_script("keep_eval_samples", KEEP, KEEP_BYTES, *map(printable, lines), once=True)

    def take(self, after: str, written: str) -> list[tuple[str, dict[str, Any]]]:
        """Read samples after the entry ``after``, each with its entry; delete those up to the entry ``written``."""
        entries: Any = self._connection.run_script("take_eval_samples", after, AT_ONCE, written)
        samples = ((entry.decode(), parse_line(b"".join(fields[1:2]))) for entry, fields in entries)
        return [(entry, line) for entry, line in samples if line and isinstance(line.get("version"), int)]


def describe(trajectory: Trajectory, score: Score) -> dict[str, Any]:
    """Describe a sample as JSON; the reward is null if it has none."""
    versions = [span.version for span in trajectory.spans]
    return {
        "version": trajectory.task_id // EVAL_BASE - 1,
        "index": trajectory.task_id % EVAL_BASE,
        "dataset": trajectory.dataset,
        "prompt": trajectory.prompt[:PROMPT],
        "data": {str(name): as_text(value)[:PROMPT] for name, value in trajectory.data.items() if name != "messages"},
        "sample": {
            "sample": trajectory.sample,
            "completion": trajectory.completion[:COMPLETION],
            "reward": score.reward if score.status == "ok" else None,
            "terms": dict(score.components),
            "tokens": trajectory.sampled_tokens,
            "finish": trajectory.finish,
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
            "generator": trajectory.generator,
            "seconds": trajectory.seconds,
        },
    }
