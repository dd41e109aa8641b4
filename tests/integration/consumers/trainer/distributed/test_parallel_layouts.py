"""However four ranks share a model and its tokens, the gradient is that of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.parallel_layouts import CASES, run_layouts

pytestmark = pytest.mark.integration

EVENLY_CUT = [
    name
    for name, case in CASES.items()
    if "replicate" not in case.parallel and case.vocabulary % 2 == 0 and not case.experts
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("layouts")
    run_in_ranks(4, run_layouts, folder / "report.json", output=folder / "output.txt")
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_one_process(found: dict[str, Any], name: str) -> None:
    case = found[name]
    assert case["error"] <= 5e-6, case["worst"]
    assert case["norm_error"] <= 1e-6
    assert case["clipped"] == pytest.approx(1e-3, rel=1e-3)
    if CASES[name].rows > 4:
        assert case["micro_batches"] >= 3, "a gradient is summed over several"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.experts])
def test_the_load_of_experts_is_that_of_one_process(found: dict[str, Any], name: str) -> None:
    """However tokens and experts are dealt. Where tokens are cut, those that fill a micro-batch up count too."""
    load = found[name]["load"]
    assert load.keys() == {"expert_load_max", "experts_unused"}
    filled = "context" in CASES[name].parallel
    # Recorded choices are random here, so that those of the filling tokens weigh more.
    most = 0.1 if CASES[name].replayed else 0.05
    assert load == pytest.approx(found[name]["wanted_load"], rel=most if filled else 1e-6)
    assert load["expert_load_max"] > 1


@pytest.mark.parametrize("name", EVENLY_CUT)
def test_a_rank_holds_its_share_of_all_parameters(found: dict[str, Any], name: str) -> None:
    """A quarter of the whole, but for norms, which are not cut by tensor parallelism, and are small."""
    assert found[name]["share"] == pytest.approx(0.25, rel=0.02)
