"""The ids of evaluation tasks, which say what version they are for."""

from __future__ import annotations

EVAL_BASE = 1 << 32
"""Evaluation tasks are numbered (version + 1) * EVAL_BASE + index: never like a training task."""


def eval_task_id(version: int, index: int) -> int:
    """Id of the task of one held-out prompt in the evaluation of ``version``."""
    return (version + 1) * EVAL_BASE + index


def eval_version(task_id: int) -> int:
    """The version that an evaluation task is for."""
    return task_id // EVAL_BASE - 1
