"""Versions of a policy as a trainer publishes them, and what it says of a probe with each."""

from pathlib import Path

import torch

from consumers.trainer.model.hf_weights import named_weights
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.probe import reference_logprobs
from tests.support.models.weight_files import write_weights

PROBE = [5, 9, 40, 41, 80, 7]


def publish_versions(model: Path, folder: Path, count: int = 2) -> tuple[list[list[float]], list[Path]]:
    """The log-probabilities of the model and of each version, and the files of the versions."""
    policy = Policy(load_model(model, "float32"))
    expected, files = [list(reference_logprobs(policy, PROBE))], []
    for version in range(1, count + 1):
        with torch.no_grad():
            for _, tensor in named_weights(policy):
                tensor.add_(0.02 * torch.randn_like(tensor))
        files.append(folder / f"v{version}.safetensors")
        write_weights(policy, files[-1], "float32")
        expected.append(list(reference_logprobs(policy, PROBE)))
    return expected, files
