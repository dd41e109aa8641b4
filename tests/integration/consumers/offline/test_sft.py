"""Supervised training and its optimizer step: stops at the mark, small passes, a whole model or nothing."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learning.greedy import greedy
from consumers.offline import sft
from consumers.offline.encoding import DemonstrationIds
from consumers.offline.loop import MOST_SKIPPED, MemoryLimits, MicroBatches, OfflineStep, answer_logprobs
from consumers.offline.provenance import settings_digest
from consumers.offline.sft import SftProgress, train_sft
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.policy import Policy, load_model
from deploy.offline.tiny_vision_model import SPECIALS, write_tiny_vision_model
from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer
from schemas.config import ModelConfig, WarmStartConfig
from schemas.errors import ConfigError, DataError
from schemas.images import read_image_settings
from schemas.messages import ChatMessage, ContentPart
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import run_tidemill

COMMON = {"load_tokenizer": HfTokenizer}
PAIRS = [(f"{a}>", "xyz"[a % 3] * (1 + a % 2)) for a in range(12)]
ROWS = [DemonstrationIds([1, *range(10, 12 + a)], list(range(20, 22 + a % 5)), [], {}) for a in range(12)]


def settings(**changes: object) -> WarmStartConfig:
    data = {"name": "arithmetic"}
    return WarmStartConfig.model_validate(
        {"model": "m:f", "dataset": data, "eval": data, "batch_size": 12, "lr": 3e-3, "eval_every": 5, **changes}
    )


def made(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float32", max_length=64, **changes)


def build(folder: Path, seed: int) -> None:
    make_tiny_model(folder, seed=seed)


def test_trains_to_the_mark_and_writes_an_ordinary_model(tmp_path: Path) -> None:
    seen: list[SftProgress] = []
    wanted = settings(stop_accuracy=0.9, max_steps=300)
    result = train_sft(made(tmp_path / "out"), build, PAIRS, PAIRS, wanted, progress=seen.append, **COMMON)
    assert result.accuracy >= 0.9
    assert seen[-1].step == result.steps
    assert seen[-1].loss < seen[0].loss
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    details = json.loads((tmp_path / "out" / "sft.json").read_text())
    assert details["accuracy"] == result.accuracy
    assert details["settings"] == settings_digest(wanted, 0, "float32")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    answers = greedy(model, [tokenizer(p).input_ids for p, _ in PAIRS], 3, {tokenizer.eos_token_id})
    right = [tokenizer.decode(a) == c for a, (_, c) in zip(answers, PAIRS, strict=True)]
    assert sum(right) / len(right) == pytest.approx(result.accuracy)


def write_config(folder: Path, **warm_start: Any) -> None:
    """Write the pairs, and the configuration of a run whose model a warm start with these settings makes."""
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    data = {"name": "jsonl", "args": {"path": "pairs.jsonl"}}
    config = {
        "model": {"path": "made", "max_length": 64},
        "sampling": {"max_tokens": 8},
        "train": data,
        "reward": {"terms": [{"name": "exact"}]},
        "warm_start": settings(dataset=data, eval=data, **warm_start).model_dump(mode="json"),
        "trainer": {"threads": 3},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def test_the_command_answers_in_json_what_it_made_and_that_there_is_nothing_to_make(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(
        "import torch\n\nfrom tests.support.models.tiny_model import make_tiny_model\n\n\n"
        "def build(folder, seed):\n"
        "    open('threads', 'w').write(str(torch.get_num_threads()))\n    make_tiny_model(folder, seed=seed)\n"
    )
    write_config(tmp_path, model="start.py:build", stop_accuracy=0.3, max_steps=300)
    done = run_tidemill("sft", "config.yaml", "--json", cwd=tmp_path)
    made = json.loads(done.stdout)
    assert (done.returncode, made["model"], made["made"]) == (0, "made", True), done.stderr
    assert made["accuracy"] >= 0.3
    assert made["steps"] > 0
    assert "supervised steps" in done.stderr
    assert (tmp_path / "threads").read_text() == "3"
    for command in ("sft", "prepare"):
        done = run_tidemill(command, "config.yaml", "--json", cwd=tmp_path)
        assert json.loads(done.stdout) == {"model": "made", "made": False}, done.stderr


def test_the_command_trains_a_model_folder_for_all_steps_where_no_accuracy_is_asked_for(tmp_path: Path) -> None:
    start = make_tiny_model(tmp_path / "start")
    write_config(tmp_path, model="start", stop_accuracy=None, max_steps=3, eval_every=2)
    done = run_tidemill("sft", "config.yaml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3
    before, after = (load_model(folder, "float32").state_dict() for folder in (start, tmp_path / "made"))
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)
    done = run_tidemill("sft", "config.yaml", "warm_start.model=./gone", cwd=tmp_path)
    wrong = "tidemill: warm_start.model ./gone does not exist: give a model folder or a Hub id\n"
    assert (done.returncode, done.stderr.splitlines(keepends=True)[-1]) == (2, wrong)


def picture(colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), colour).save(file, "PNG")
    return file.getvalue()


def test_trains_on_pictures_to_answers_of_the_only_tokens_there_are(tmp_path: Path) -> None:
    """The colour decides which action is shown. No token ends an answer."""

    def build_vision(folder: Path, seed: int) -> None:
        write_tiny_vision_model(folder, seed=seed, characters="go", tokens=["<a0>", "<a1>"])

    def places(path: str) -> ImagePlaceholders:
        return ImagePlaceholders(SPECIALS.index("<|image_pad|>"), read_image_settings(Path(path)))

    prompt = [ChatMessage("user", [ContentPart("text", "go"), ContentPart("image")])]
    shown = [
        (prompt, f"<a{k % 2}><a{1 - k % 2}>", [picture((220, 10 * k, 30) if k % 2 else (30, 10 * k, 220))])
        for k in range(12)
    ]
    given: dict[str, Any] = {**COMMON, "load_places": places}
    pictures = {"freeze_vision": False, "output_tokens": "<a.>"}
    result = train_sft(
        made(tmp_path / "out", **pictures),
        build_vision,
        shown,
        shown,
        settings(stop_accuracy=1.0, max_steps=300),
        **given,
    )
    assert result.accuracy == 1.0
    wrong = [(prompt, "<a0>go", shown[0][2])]
    with pytest.raises(DataError, match=r"answer '<a0>go' has token \d+, which model.output_tokens does not match"):
        train_sft(made(tmp_path / "b", **pictures), build_vision, wrong, wrong, settings(max_steps=1), **given)
    with pytest.raises(DataError, match=r"has images: set model\.kind to vision"):
        train_sft(made(tmp_path / "c"), build, shown, shown, settings(max_steps=1), **COMMON)


def test_trains_on_from_a_model_folder(tmp_path: Path) -> None:
    start = make_tiny_model(tmp_path / "start")
    train_sft(made(tmp_path / "out"), start, PAIRS, PAIRS, settings(stop_accuracy=0.5, max_steps=300), **COMMON)
    assert (start / "config.json").exists()


def test_a_mark_that_is_not_reached_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_steps 2"):
        train_sft(made(tmp_path / "out"), build, PAIRS, PAIRS, settings(stop_accuracy=1.0, max_steps=2), **COMMON)
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for name in ("a", "b"):
        train_sft(
            made(tmp_path / name), build, PAIRS, PAIRS, settings(stop_accuracy=0.4, max_steps=300), seed=3, **COMMON
        )
        weights.append(torch.cat([p.flatten() for p in load_model(tmp_path / name, "float32").parameters()]))
    assert torch.equal(weights[0], weights[1])


def test_the_learning_rate_stays_low_when_accuracy_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, used = iter([0.0, 0.0, 0.0, 0.0, 0.6, 0.8, 0.3, 0.1] + 99 * [1.0]), list[float]()
    lr = sft._Training._lr
    monkeypatch.setattr(sft._Training, "_accuracy", lambda training: next(seen))
    monkeypatch.setattr(sft._Training, "_lr", lambda training, step: used.append(lr(training, step)) or used[-1])
    train_sft(made(tmp_path / "out"), build, PAIRS, PAIRS, settings(stop_accuracy=0.9, max_steps=300), **COMMON)
    after_warm_up = used[sft.WARMUP_STEPS - 1 :]
    assert after_warm_up[0] == 3e-3
    assert after_warm_up == sorted(after_warm_up, reverse=True)
    assert after_warm_up[-1] == pytest.approx(3e-3 * 1.5 * (1 - 0.8 / 0.9))


def test_the_learning_rate_falls_to_the_last_step_where_no_accuracy_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, lr = list[float](), sft._Training._lr
    monkeypatch.setattr(sft._Training, "_lr", lambda training, step: used.append(lr(training, step)) or used[-1])
    steps = 4 * sft.WARMUP_STEPS
    wanted = settings(stop_accuracy=None, max_steps=steps, eval_every=steps)
    result = train_sft(made(tmp_path / "out"), build, PAIRS, PAIRS, wanted, **COMMON)
    assert (result.steps, len(used)) == (steps, steps)
    assert used[steps // 2 :] == sorted(used[steps // 2 :], reverse=True)
    assert used[-1] < used[steps // 2]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        train_sft(made(tmp_path / "out"), build, PAIRS, PAIRS, settings(), **COMMON)


def test_batched_greedy_decoding_is_what_hugging_face_generates(tmp_path: Path) -> None:
    model = load_model(make_tiny_model(tmp_path / "m"), "float32")
    prompts = [[5], [9, 14, 3], [7, 8, 20, 30, 4]]
    for prompt, got in zip(prompts, greedy(model, prompts, 6, {2}), strict=True):
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=6
        )
        want = out[0, len(prompt) :].tolist()
        assert got == (want[: want.index(2)] if 2 in want else want)


def test_a_loss_that_is_not_finite_breaks_no_weight_and_ends_the_training(tmp_path: Path) -> None:
    def build_broken(folder: Path, seed: int) -> None:
        model = load_model(make_tiny_model(folder, seed=seed), "float32")
        with torch.no_grad():
            model.get_input_embeddings().weight[HfTokenizer(str(folder)).encode("x")] = float("nan")
        model.save_pretrained(folder)

    with pytest.raises(ConfigError, match="loss or a gradient that is not finite"):
        train_sft(made(tmp_path / "out"), build_broken, PAIRS, PAIRS, settings(max_steps=300), **COMMON)


def tokens(row: DemonstrationIds) -> int:
    return len(row[0]) + len(row[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=32, layers=2)


def build_step(path: Path, packed: bool = True, **limits: Any) -> tuple[Policy, OfflineStep[DemonstrationIds]]:
    policy, ranks, found = Policy(load_model(path, "float32")), Ranks(), MemoryLimits(**limits)
    policy.packed = packed
    found.apply(policy.causal_lm)
    # Plain descent, so that weights differ as gradients do.
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    cut = MicroBatches(ranks, tokens, found, packed)
    return policy, OfflineStep(policy, optimizer, cut, ranks, torch.float32, max_grad_norm=1e9)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_step_in_micro_batches_changes_the_weights_like_one_in_a_piece(path: Path, packed: bool) -> None:
    changed = []
    for limits in ({}, {"micro_batch_tokens": 40, "activation_checkpointing": True}):
        policy, step = build_step(path, packed, **limits)
        seen: list[int] = []

        def loss(rows: Sequence[DemonstrationIds], policy: Policy = policy, seen: list[int] = seen) -> Tensor:
            longest = max(map(tokens, rows))
            seen.append(sum(map(tokens, rows)) if packed else longest * len(rows))
            return -answer_logprobs(policy, rows).sum() / 40

        assert step.run(ROWS, loss, lr=1.0) is not None
        changed.append((torch.cat([p.detach().flatten() for p in policy.parameters()]), seen))
    (whole, one), (cut, several) = changed
    assert len(one) <= 2
    assert len(several) > 3
    assert max(several) <= 40
    assert torch.allclose(whole, cut, atol=1e-5)


def test_logprobs_of_answers_are_those_of_the_whole_distribution(path: Path) -> None:
    policy, _ = build_step(path)
    policy.requires_grad_(False)
    sums = answer_logprobs(policy, ROWS[:3])
    for (prompt, answer, *_), found in zip(ROWS[:3], sums.tolist(), strict=True):
        logits = policy.causal_lm(input_ids=torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
        by_hand = sum(float(logits[len(prompt) - 1 + k, token]) for k, token in enumerate(answer))
        assert found == pytest.approx(by_hand, rel=1e-4)


def test_a_step_that_is_not_finite_changes_nothing_and_several_end_the_training(path: Path) -> None:
    policy, step = build_step(path)
    before = [p.detach().clone() for p in policy.parameters()]

    def broken(rows: Sequence[DemonstrationIds]) -> Tensor:
        return answer_logprobs(policy, rows).sum() * float("nan")

    def good(rows: Sequence[DemonstrationIds]) -> Tensor:
        return -answer_logprobs(policy, rows).sum() / 40

    assert step.run(ROWS, broken, lr=1.0) is None
    assert all(torch.equal(was, now) for was, now in zip(before, policy.parameters(), strict=True))
    assert step.run(ROWS, good, lr=1.0) is not None
    assert not all(torch.equal(was, now) for was, now in zip(before, policy.parameters(), strict=True))
    for _ in range(MOST_SKIPPED - 1):
        assert step.run(ROWS, broken, lr=1.0) is None
    with pytest.raises(ConfigError, match=f"{MOST_SKIPPED} steps in a row"):
        step.run(ROWS, broken, lr=1.0)
