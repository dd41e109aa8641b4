"""Whole steps on four ranks, or two, however they share the model: the gradient and training are those of one."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.parallel_layouts import CASES, FEW, run_layouts
from tests.support.trainer.parallel_steps import Job, make_divisible_model, report, run_jobs
from tests.support.trainer.sharded_algorithms import ALGORITHMS, run_algorithms

LAYOUTS = {
    "shard 2, tensor 2": {"tensor": 2},
    "context 2, tensor 2": {"context": 2, "tensor": 2},
    "replicate 2, context 2": {"replicate": 2, "context": 2},
    "shard 4": {},
}
BESIDE: dict[str, tuple[dict[str, Any], str, str]] = {
    "critic": (
        {"advantage": {"name": "gae"}, "critic": {"optimizer": {"lr": 1e-2}}},
        "shard 2, tensor 2",
        "context 2, tensor 2",
    ),
    "adapter": ({"lora": {"rank": 4, "alpha": 8.0}, "optimizer": {"lr": 1e-2}}, "shard 4", "replicate 2, context 2"),
}
"""What a checkpoint may hold beside a policy or in its place: settings, the layout that writes it, one that resumes."""
OFFLOADED = {"optimizer": {"lr": 1e-3, "offload": True}}
EVENLY_CUT = [
    name
    for name, case in CASES.items()
    if "replicate" not in case.parallel and case.vocabulary % 2 == 0 and not case.experts
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one rank and of four; their checkpoints are resumed under other layouts, and on one rank."""
    folder = tmp_path_factory.mktemp("runs")
    model = make_divisible_model(folder / "model")
    run_jobs(model, folder, [Job("alone", 0, 2), Job("alone to alone", 2, 3, source="alone")])
    for name, (settings, _, _) in BESIDE.items():
        jobs = [Job(name, 0, 2, trainer=settings), Job(f"{name} to alone", 2, 4, source=name, trainer=settings)]
        run_jobs(model, folder, jobs)
    trained = [Job(name, 0, 2, parallel) for name, parallel in LAYOUTS.items()]
    taken_over = [Job(f"alone to {name}", 2, 3, parallel, source="alone") for name, parallel in LAYOUTS.items()]
    others = [
        Job("another", 2, 3, LAYOUTS["context 2, tensor 2"], source="shard 2, tensor 2"),
        Job("published", 2, 2, LAYOUTS["context 2, tensor 2"], source="alone"),
        Job("away", 0, 2, LAYOUTS["shard 2, tensor 2"], trainer={"away": True}),
        Job("offloaded", 0, 2, LAYOUTS["shard 2, tensor 2"], trainer=OFFLOADED),
        Job("another offloaded", 2, 3, LAYOUTS["context 2, tensor 2"], source="shard 2, tensor 2", trainer=OFFLOADED),
    ]
    for name, (settings, first, then) in BESIDE.items():
        written = Job(f"{name} in parts", 0, 2, LAYOUTS[first], trainer=settings)
        others += [written, Job(f"{name} in others", 2, 4, LAYOUTS[then], source=written.name, trainer=settings)]
    run_in_ranks(4, run_jobs, model, folder, [*trained, *taken_over, *others], output=folder / "output.txt")
    run_jobs(model, folder, [Job(f"{name} to alone", 2, 3, source=name) for name in LAYOUTS])
    for name, (settings, _, _) in BESIDE.items():
        job = Job(f"{name} in parts to alone", 2, 4, source=f"{name} in parts", trainer=settings)
        run_jobs(model, folder, [job])
    return folder


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for a, b in zip(wanted["metrics"], found["metrics"], strict=True):
        names = ["loss", "tokens", "entropy", "grad_norm", "kl", "ess", "ratio_max", "staleness_mean", "samples"]
        for name in names + [name for name in ("critic_loss", "critic_error", "critic_grad_norm") if name in a]:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
    assert found["staleness"] == wanted["staleness"]
    assert found["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-3), "as a generator's probe would see"


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_steps_are_those_of_one_rank(folder: Path, name: str) -> None:
    assert_same(report(folder, name, 0, 4), report(folder, "alone", 0, 1))


def test_two_steps_are_the_same_to_the_bit_if_the_state_was_in_main_memory_between_them(folder: Path) -> None:
    assert_same_files(folder / "away", folder / "shard 2, tensor 2")


def test_two_steps_and_their_checkpoint_are_the_same_to_the_bit_with_the_optimizer_in_main_memory(folder: Path) -> None:
    assert_same_files(folder / "offloaded", folder / "shard 2, tensor 2")


def test_an_optimizer_in_main_memory_resumes_the_checkpoint_of_one_that_is_not(folder: Path) -> None:
    assert_same_files(folder / "another offloaded", folder / "another")


def assert_same_files(found: Path, wanted: Path) -> None:
    assert (found / "weights").read_bytes() == (wanted / "weights").read_bytes()
    files = [file.relative_to(wanted) for file in wanted.rglob("*.distcp")]
    assert len(files) in (4, 8), "of four ranks, and of the run that was resumed"
    assert all((found / file).read_bytes() == (wanted / file).read_bytes() for file in files)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_of_one_rank_goes_on_under_a_layout(folder: Path, name: str) -> None:
    assert_same(report(folder, f"alone to {name}", 2, 4), report(folder, "alone to alone", 2, 1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_of_a_layout_goes_on_with_one_rank(folder: Path, name: str) -> None:
    assert_same(report(folder, f"{name} to alone", 2, 1), report(folder, "alone to alone", 2, 1))


def test_a_checkpoint_of_a_layout_goes_on_under_another(folder: Path) -> None:
    assert_same(report(folder, "another", 2, 4), report(folder, "alone to alone", 2, 1))


@pytest.mark.parametrize("name", BESIDE)
def test_a_critic_and_an_adapter_go_on_too(folder: Path, name: str) -> None:
    """For two steps: only the second has what optimizers made of their state."""
    assert_same(report(folder, f"{name} in parts", 0, 4), report(folder, name, 0, 1))
    wanted = report(folder, f"{name} to alone", 2, 1)
    assert_same(report(folder, f"{name} in others", 2, 4), wanted)
    assert_same(report(folder, f"{name} in parts to alone", 2, 1), wanted)


def test_what_is_published_under_a_layout_is_the_same_file(folder: Path) -> None:
    """Of the same weights, to the bit: names, order and bytes."""
    alone = (folder / "alone/weights").read_bytes()
    assert (folder / "published/weights").read_bytes() == alone


def test_the_written_model_is_what_was_published(folder: Path) -> None:
    for name in LAYOUTS:
        weights = load_file(folder / name / "weights")
        model = AutoModelForCausalLM.from_pretrained(folder / name / "model")
        for key, tensor in model.named_parameters():
            assert torch.equal(tensor, weights[key]), (name, key)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Returns what the ranks report of a case: of those in FEW at once, and of the others."""

    @cache
    def run(few: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("layouts")
        names = [name for name in CASES if (name in FEW) == few]
        run_in_ranks(4, run_layouts, folder / "report.json", names, output=folder / "output.txt")
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        return report

    def find(name: str) -> dict[str, Any]:
        case: dict[str, Any] = run(name in FEW)[name]
        return case

    return find


MORE = pytest.mark.matrix("one more layout; FEW have every dimension, both kinds of models, all options but one")


def cases(names: Iterable[str]) -> list[ParameterSet]:
    return [pytest.param(name, marks=() if name in FEW else MORE) for name in names]


@pytest.mark.parametrize("name", cases(CASES))
def test_the_gradient_is_that_of_one_process(found: Callable[[str], dict[str, Any]], name: str) -> None:
    case = found(name)
    assert case["error"] <= 5e-6, case["worst"]
    assert case["norm_error"] <= 1e-6
    assert case["clipped"] == pytest.approx(1e-3, rel=1e-3)
    assert case["offloaded"], "the parameters were in main memory before, and their own memory was free"
    if CASES[name].written:
        seen, blind, full = case["published"]
        assert seen, "a version is whole if all ranks write their parts"
        assert blind, "and if only rank 0 sees the folder"
        assert full, "and is deleted if one has no room"
        assert case["muon"], "a step with the same gradients is that of one process to the bit"
    if CASES[name].rows > 4:
        assert case["micro_batches"] >= 3, "a gradient is summed over several"


@pytest.mark.parametrize("name", cases(name for name, case in CASES.items() if case.experts))
def test_the_load_of_experts_is_that_of_one_process(found: Callable[[str], dict[str, Any]], name: str) -> None:
    """However tokens and experts are dealt. Where tokens are cut, those that fill a micro-batch up count too."""
    case = found(name)
    load = case["load"]
    assert load.keys() == {"expert_load_max", "experts_unused"}
    filled = "context" in CASES[name].parallel
    # Recorded choices are random here, so that those of the filling tokens weigh more.
    most = 0.1 if CASES[name].replayed else 0.05
    assert load == pytest.approx(case["wanted_load"], rel=most if filled else 1e-6)
    assert load["expert_load_max"] > 1


@pytest.mark.parametrize("name", cases(EVENLY_CUT))
def test_a_rank_holds_its_share_of_all_parameters(found: Callable[[str], dict[str, Any]], name: str) -> None:
    """A quarter of the whole, but for norms, which are not cut by tensor parallelism, and are small."""
    assert found(name)["share"] == pytest.approx(0.25, rel=0.02)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def reports(folders: Path) -> dict[int, dict[str, Any]]:
    """By number of ranks."""
    model = make_tiny_model(folders / "model", hidden=32, layers=2)
    other = make_tiny_model(folders / "other", seed=1, hidden=32, layers=2)
    for world in (1, 2):
        (folders / str(world)).mkdir()
    run_algorithms(model, other, folders / "1")
    run_in_ranks(2, run_algorithms, model, other, folders / "2", output=folders / "output.txt")
    return {world: json.loads((folders / str(world) / "report.json").read_text()) for world in (1, 2)}


@pytest.mark.parametrize("name", [*ALGORITHMS, "three components"])
def test_an_algorithm_on_two_ranks_is_that_of_one(reports: dict[int, dict[str, Any]], name: str) -> None:
    one, two = (reports[world][name] for world in (1, 2))
    whole = {"imbalance", "micro_batches", "forward_flops", "shared_tokens_fraction"}
    for alone, shared in zip(one["metrics"], two["metrics"], strict=True):
        assert alone.keys() == shared.keys()
        for metric in alone.keys() - whole:
            assert shared[metric] == pytest.approx(alone[metric], rel=1e-3, abs=1e-5), metric
    assert not any(one["sharded"])
    beside = [True, False] if name == "reference in main memory" else [True] * len(two["sharded"])
    assert two["sharded"] == beside


def test_each_component_of_the_loss_is_that_of_one_rank_to_a_millionth(reports: dict[int, dict[str, Any]]) -> None:
    one, two = (reports[world]["three components"]["metrics"] for world in (1, 2))
    for alone, shared in zip(one, two, strict=True):
        for metric in ("loss", "supervised_loss", "reference_kl"):
            assert shared[metric] == pytest.approx(alone[metric], rel=1e-6, abs=1e-6), metric
        assert 0 < alone["taught_fraction"] < 1
        assert min(alone["supervised_tokens"], alone["tokens"], alone["reference_kl"]) > 0


def test_what_was_tested_there_did_something(reports: dict[int, dict[str, Any]]) -> None:
    first = {name: reports[2][name]["metrics"][0] for name in ALGORITHMS}
    assert first["m2po"]["masked_fraction"] > 0
    assert first["gae"]["critic_grad_norm"] > 0
    assert first["kl in the loss"]["grad_norm"] == pytest.approx(
        first["reference in main memory"]["grad_norm"], rel=1e-4
    )
    assert first["kl in the loss"]["grad_norm"] != pytest.approx(first["kl off the reward"]["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("name", ["dpo", "ipo", "reward model", "sft"])
def test_a_trainer_without_generators_learns_alike_on_two_ranks(reports: dict[int, dict[str, Any]], name: str) -> None:
    """Twelve steps of AdamW make more of the order of summing than one."""
    one, two = (reports[world][name]["looks"] for world in (1, 2))
    assert [look["step"] for look in two] == [look["step"] for look in one]
    for alone, shared in zip(one, two, strict=True):
        assert shared == pytest.approx(alone, rel=0.02, abs=2e-3)
    assert two[-1]["accuracy"] >= 0.5, "something was learned"


def test_two_ranks_write_whole_models(reports: dict[int, dict[str, Any]], folders: Path) -> None:
    assert reports
    for name in ("dpo", "reward-model", "sft"):
        kind = AutoModelForSequenceClassification if name == "reward-model" else AutoModelForCausalLM
        one, two = (kind.from_pretrained(folders / str(world) / name) for world in (1, 2))
        for (key, alone), (_, shared) in zip(one.named_parameters(), two.named_parameters(), strict=True):
            assert torch.allclose(alone, shared, atol=5e-3), (name, key)
