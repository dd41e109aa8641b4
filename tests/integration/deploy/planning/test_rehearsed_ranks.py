"""A step rehearsed for many ranks beside the same step on real ones, over gloo: memory, FLOPs and collectives."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deploy.planning.changes import rehearse_apart
from tests.support.models.tiny_mixture import make_mixture
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.sized_steps import configuration, measure_in_ranks

PEAK_TOLERANCE = 0.1


def matrix(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.matrix("each layout by itself; one with all parts runs always"))


@pytest.mark.parametrize(
    ("model", "ranks", "parallel", "trainer"),
    [
        ("qwen2", 4, {"tensor": 2, "context": 2}, {}),
        matrix("qwen2", 4, {"replicate": 2}, {}),
        matrix("tied", 2, {"tensor": 2}, {}),
        matrix("deep", 2, {"context": 2}, {}),
        matrix("mixture", 4, {"tensor": 2}, {}),
        matrix("qwen2", 2, {}, {"dtype": "bfloat16"}),
        matrix("qwen2", 2, {}, {"critic": {}, "advantage": {"name": "gae"}}),
        matrix("qwen2", 2, {}, {"lora": {"rank": 4}}),
    ],
)
def test_a_rank_does_what_was_rehearsed(
    tmp_path: Path, model: str, ranks: int, parallel: dict[str, int], trainer: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    if model == "mixture":
        make_mixture(folder, hidden_size=64, head_dim=16)
    else:
        make_tiny_model(folder, hidden=128, layers=12 if model == "deep" else 4, tied=model == "tied")
    trainer = {"parallel": parallel, "processes": ranks, **trainer}
    run_in_ranks(ranks, measure_in_ranks, folder, trainer, tmp_path / "report", output=tmp_path / "output")
    real = json.loads((tmp_path / "report").read_text())
    found = rehearse_apart(configuration(folder, **trainer), ranks, on_gpu=False)
    assert found["optimizer"] == real["optimizer"]
    assert found["gradients"] == real["gradients"]
    assert found["flops"] == real["flops"]
    sent: Counter[str] = Counter()
    for each in found["traffic"]:
        sent[f"{each['kind']} {each['size']}"] += each["sent"]
    assert sent == real["sent"]
    peak = sum(found[name] for name in ("gradients", "activations", "temporary"))
    assert peak == pytest.approx(real["peak"], rel=PEAK_TOLERANCE)


@pytest.mark.matrix("one more comparison of rehearsed steps")
@pytest.mark.parametrize("trainer", [{"activation_checkpointing": True}, {"lora": {"rank": 4}}])
def test_the_kernels_of_a_gpu_have_the_flops_of_a_cpus(tmp_path: Path, trainer: dict[str, Any]) -> None:
    config = configuration(make_tiny_model(tmp_path, hidden=128, layers=4), **trainer)
    flops = [rehearse_apart(config, 2, on_gpu=on_gpu)["flops"] for on_gpu in (False, True)]
    assert flops[0] == flops[1]


@pytest.mark.matrix("experts on ranks of their own; the layouts above count the rest")
def test_experts_are_taken_to_get_as_many_tokens_each(tmp_path: Path) -> None:
    folder = make_mixture(tmp_path / "model", hidden_size=64, head_dim=16)
    trainer: dict[str, Any] = {"parallel": {"tensor": 2, "expert": 2}, "processes": 2}
    run_in_ranks(2, measure_in_ranks, folder, trainer, tmp_path / "report", output=tmp_path / "output")
    real = json.loads((tmp_path / "report").read_text())
    found = rehearse_apart(configuration(folder, **trainer), 2, on_gpu=False)
    assert found["optimizer"] == real["optimizer"]
    assert found["gradients"] == real["gradients"]
    # The real router sends one rank more than the other.
    assert found["flops"] == pytest.approx(real["flops"], rel=0.1)
    sent: Counter[str] = Counter()
    for each in found["traffic"]:
        sent[f"{each['kind']} {each['size']}"] += each["sent"]
    exchanged, in_reality = sent.pop("all-to-all 2"), real["sent"].pop("all-to-all 2")
    assert sent == real["sent"]
    assert exchanged == pytest.approx(in_reality, rel=0.5)
