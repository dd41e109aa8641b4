"""One hop of a pipeline without guarantees, for comparison, as PipelineRL's streams (ServiceNow/PipelineRL).

Two processes: actors append to a plain stream, an entry and a round trip for each group of samples that belong
together, its body JSON with lists of numbers; the trainer reads an entry at a time from the last id on. Rewards are
computed where samples are made, so that the third process has nothing to do. There is no admission and no credit, no
acknowledgement, ownership or journal: what a crash takes is lost, and a slow reader loses what is cut off at the end of
the stream. Both sides use the fastest JSON that we have. Unlike there, the writer empties the stream between rounds.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from benchmarks.harness.workload import PipelineShape, TrajectoryPool
from benchmarks.pipelines.raw import entries
from broker.connection.connection import BLOCK_MS, open_client
from broker.connection.keys import Keys
from schemas.messages import Trajectory, versions_of

MOST = 1_000_000
"""Approximate number of entries at which the stream is trimmed."""


class _JsonStream:
    def __init__(self, url: str, run: str, pool: TrajectoryPool, flow: PipelineShape) -> None:
        self._stream = f"{Keys('tidemill', run).base}:json_actors"
        self._client = open_client(url)
        self._pool = pool
        self._flow = flow


class Producer(_JsonStream):
    """The actors: they add an entry for each group."""

    def run(self, steps: int) -> dict[str, Any]:
        client, samples = self._client, self._flow.samples
        client.delete(self._stream)
        for group in range(steps * self._flow.batch):
            task = self._pool.task(group, samples)
            body = msgspec.json.encode([self._sample(self._pool.trajectory(task, k, 0)) for k in range(samples)])
            client.xadd(self._stream, {b"data": body}, maxlen=MOST, approximate=True)
        return {}

    def _sample(self, trajectory: Trajectory) -> dict[str, Any]:
        mask = trajectory.loss_mask.numpy()
        return {
            "text": trajectory.prompt + trajectory.completion,
            "n_predicted": int(mask.sum()),
            "reward": float(trajectory.sample % 2),
            "logprobs": trajectory.logprobs.numpy().tolist(),
            "input_ids": trajectory.tokens.numpy().tolist(),
            "labels": mask.tolist(),
            "group_id": trajectory.task_id,
            "metadata": {"model_version": 0, "rollout_index": trajectory.sample},
        }


class Rewarder(_JsonStream):
    """No reward service: the actors compute the reward."""

    def run(self, steps: int) -> dict[str, Any]:
        return {}


class Assembler(_JsonStream):
    """The trainer: it makes numpy arrays of each sample, in order of arrival."""

    _last = b"0"

    def run(self, steps: int) -> dict[str, Any]:
        trained = 0
        for _ in range(steps):
            arrays = []
            for _ in range(self._flow.batch):
                for sample in self._read():
                    tokens = np.array(sample["input_ids"], dtype=np.int32)
                    arrays.append(
                        (
                            tokens,
                            np.array(sample["labels"], dtype=np.uint8),
                            np.array(sample["logprobs"], dtype=np.float32),
                            versions_of([], len(tokens)),
                        )
                    )
            trained += len(arrays)
        return {"trained": trained}

    def _read(self) -> list[dict[str, Any]]:
        while True:
            reply: Any = self._client.xread({self._stream: self._last}, count=1, block=BLOCK_MS)
            for entry_id, fields in entries(reply):
                self._last = entry_id
                found: list[dict[str, Any]] = msgspec.json.decode(fields[b"data"])
                return found
