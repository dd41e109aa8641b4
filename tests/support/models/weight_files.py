"""A policy's weights as a file, as a trainer publishes them."""

from pathlib import Path

from consumers.trainer.model.policy import Policy
from consumers.trainer.model.snapshot import Snapshots
from schemas.messages import TensorSpec


def write_weights(policy: Policy, path: Path, dtype: str) -> list[TensorSpec]:
    """Write what is published of a policy in this process to ``path``; what is in it."""
    snapshot = Snapshots(policy, dtype).take(path)
    snapshot.fill()
    return snapshot.specs
