"""DPO, IPO and a reward model on a tiny model: they learn a preference that can be checked, and leave a whole model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from consumers.offline.pairs import Preference
from consumers.offline.preference import train_on_pairs
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.policy import Policy, load_model
from deploy.cli.app import app
from deploy.offline.tiny_vision_model import SPECIALS, write_tiny_vision_model
from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer
from schemas.config import DpoConfig, ModelConfig, RewardModelConfig
from schemas.errors import ConfigError, DataError
from schemas.images import read_image_settings
from schemas.messages import ChatMessage, ContentPart
from tests.support.models.pictures import picture
from tests.support.models.tiny_model import make_tiny_model

PAIRS = [Preference(f"{a}>", "xyz"[a % 3] * 2, "abc"[a % 3] * (1 + a % 4)) for a in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1)
    return ModelConfig(path=str(folder), dtype="float32", max_length=64)


def section(out: Path, **changes: object) -> dict[str, Any]:
    data = {"name": "jsonl"}
    return {
        "out": out,
        "dataset": data,
        "eval": data,
        "steps": 40,
        "batch_size": 8,
        "optimizer": {"lr": 3e-3},
    } | changes


def margin(model: str, reference: str, pair: Preference) -> float:
    """log(policy/reference) of the chosen minus that of the rejected answer, token by token in plain torch."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    sums = []
    for folder in (model, reference):
        policy = load_model(folder, "float32")
        for text in (pair.chosen, pair.rejected):
            prompt = tokenizer(pair.prompt, add_special_tokens=False).input_ids
            ids = [*prompt, *tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            with torch.no_grad():
                logprobs = torch.log_softmax(policy(torch.tensor([ids])).logits[0].float(), -1)
            sums.append(sum(float(logprobs[t - 1, ids[t]]) for t in range(len(prompt), len(ids))))
    return (sums[0] - sums[2]) - (sums[1] - sums[3])


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_dpo_prefers_the_chosen_answers(model: ModelConfig, tmp_path: Path, loss: str) -> None:
    settings = DpoConfig.model_validate(section(tmp_path / "out", loss=loss))
    looks: list[float] = []
    result = train_on_pairs(
        model, PAIRS[:16], PAIRS[16:], settings, load_tokenizer=HfTokenizer, progress=lambda p: looks.append(p.loss)
    )
    assert result.accuracy == 1.0
    assert looks[-1] == result.loss
    by_hand = [margin(str(settings.out), model.path, pair) for pair in PAIRS[16:]]
    assert result.margin == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-3)
    assert json.loads((settings.out / "preferences.json").read_text())["accuracy"] == 1.0


def test_dpo_of_a_model_that_reads_images_prefers_by_what_they_show(model: ModelConfig, tmp_path: Path) -> None:
    """The texts of all pairs are alike but for the order of the answers, which the colour of the picture decides."""
    write_tiny_vision_model(tmp_path / "model", characters="ab")
    looks = ModelConfig(path=str(tmp_path / "model"), kind="vision", dtype="float32", max_length=64)
    places = ImagePlaceholders(SPECIALS.index("<|image_pad|>"), read_image_settings(tmp_path / "model"))
    prompt = [ChatMessage("user", [ContentPart("text", "a"), ContentPart("image")])]
    shown = [
        Preference(prompt, *("ab" if red else "ba"), [picture("red" if red else "blue", 28 + 28 * size, 28)])
        for size in range(4)
        for red in (True, False)
    ]
    settings = DpoConfig.model_validate(section(tmp_path / "out", steps=60))
    result = train_on_pairs(looks, shown, shown, settings, load_tokenizer=HfTokenizer, places=places)
    assert result.accuracy == 1.0
    with pytest.raises(DataError, match=r"has images: set model\.kind to vision"):
        train_on_pairs(
            model, shown, shown, settings.model_copy(update={"out": tmp_path / "b"}), load_tokenizer=HfTokenizer
        )


def test_ipo_stops_at_its_margin(model: ModelConfig, tmp_path: Path) -> None:
    """1/(2 beta) = 1: with certain preferences DPO would never stop."""
    settings = DpoConfig.model_validate(section(tmp_path / "out", loss="ipo", beta=0.5, steps=120))
    assert train_on_pairs(model, PAIRS[:16], PAIRS[:16], settings, load_tokenizer=HfTokenizer).margin == pytest.approx(
        1.0, abs=0.2
    )


def test_a_reward_model_ranks_pairs_and_is_an_ordinary_classifier(model: ModelConfig, tmp_path: Path) -> None:
    settings = RewardModelConfig.model_validate(section(tmp_path / "out"))
    result = train_on_pairs(model, PAIRS[:16], PAIRS[16:], settings, load_tokenizer=HfTokenizer)
    assert result.accuracy == 1.0
    scorer = AutoModelForSequenceClassification.from_pretrained(settings.out)
    tokenizer = AutoTokenizer.from_pretrained(settings.out)
    gaps = []
    for pair in PAIRS[16:]:
        texts = [tokenizer(pair.prompt + text + tokenizer.eos_token).input_ids for text in (pair.chosen, pair.rejected)]
        with torch.no_grad():
            # One at a time: padding, of which a trained batch had much, must not have counted.
            good, bad = (float(scorer(torch.tensor([ids])).logits) for ids in texts)
        gaps.append(good - bad)
    assert result.margin == pytest.approx(sum(gaps) / len(gaps), rel=1e-3)


def test_the_first_step_of_dpo_starts_at_the_reference(model: ModelConfig, tmp_path: Path) -> None:
    settings = DpoConfig.model_validate(section(tmp_path / "out", steps=1, optimizer={"lr": 1e-12}))
    result = train_on_pairs(model, PAIRS[:8], PAIRS[8:16], settings, load_tokenizer=HfTokenizer)
    assert result.loss == pytest.approx(0.6931, abs=1e-3)
    assert result.margin == pytest.approx(0.0, abs=1e-3)


def test_nothing_is_left_when_it_fails(model: ModelConfig, tmp_path: Path) -> None:
    settings = DpoConfig.model_validate(section(tmp_path / "out"))
    with pytest.raises(DataError, match=r"model\.max_length 64"):
        train_on_pairs(model, [Preference("1>", "x" * 100, "y")], PAIRS, settings, load_tokenizer=HfTokenizer)
    with pytest.raises(ConfigError, match="both sets"):
        train_on_pairs(model, PAIRS, [], settings, load_tokenizer=HfTokenizer)
    assert list(tmp_path.iterdir()) == []
    settings.out.mkdir()
    with pytest.raises(ConfigError, match=r"exists already.*dpo\.out"):
        train_on_pairs(model, PAIRS, PAIRS, settings, load_tokenizer=HfTokenizer)


@pytest.mark.parametrize("command", ["dpo", "reward-model"])
def test_the_command_trains_from_a_yaml(
    model: ModelConfig, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected} for p in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"name": "jsonl", "args": {"path": "pairs.jsonl", "answer": None}}
    name = command.replace("-", "_")
    config = {
        "run": {"folder": str(tmp_path / "run")},
        "model": model.model_dump(),
        "sampling": {"max_tokens": 8},
        "train": data,
        "reward": {"terms": [{"name": "exact"}]},
        name: section(tmp_path / "out", dataset=data, eval=data) | {"out": str(tmp_path / "out")},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    as_json = ["--json"] if command == "reward-model" else []
    app([command, str(tmp_path / "config.yaml"), *as_json], standalone_mode=False)
    printed = capsys.readouterr()
    assert "step 40: held-out loss" in printed.err
    if command == "reward-model":
        made = json.loads(printed.out)
        assert (made["model"], made["heldout_pairs"], made["accuracy"]) == (str(tmp_path / "out"), 24, 1.0)
        assert made["step"] == 40
        assert made["seconds"] > 0
    else:
        assert "1.000 of 24 held-out pairs" in printed.out
        assert Policy(load_model(tmp_path / "out", "float32"))


@pytest.mark.parametrize("wanted", [True, False])
def test_dpo_shares_prompts_as_the_trainer_does(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    """``trainer.share_prefixes: false`` holds for the policy and its reference."""
    lines = [{"prompt": "12345>", "chosen": "x", "rejected": "y"}] * 8
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"name": "jsonl", "args": {"path": "pairs.jsonl", "answer": None}}
    config = {
        "run": {"folder": str(tmp_path / "run")},
        "model": model.model_dump(),
        "sampling": {"max_tokens": 8},
        "train": data,
        "reward": {"terms": [{"name": "exact"}]},
        "trainer": {"share_prefixes": wanted},
        "dpo": section(tmp_path / "out", dataset=data, eval=data, steps=1) | {"out": str(tmp_path / "out")},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    shared = set[bool]()
    forward = Policy.forward

    def noting(policy: Policy, *args: Any, **settings: Any) -> Any:
        shared.add(policy.share_prefixes)
        return forward(policy, *args, **settings)

    monkeypatch.setattr(Policy, "forward", noting)
    app(["dpo", str(tmp_path / "config.yaml")], standalone_mode=False)
    assert shared == {wanted}


def test_a_configuration_without_the_section_is_refused(model: ModelConfig, tmp_path: Path) -> None:
    config = {
        "model": model.model_dump(),
        "sampling": {"max_tokens": 8},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="no dpo section"):
        app(["dpo", str(tmp_path / "config.yaml")], standalone_mode=False)


class NotingRanks(Ranks):
    """Ranks that keep what they prepared."""

    def prepare(self, model: Any, dtype: torch.dtype = torch.float32) -> Any:
        self.prepared = [*getattr(self, "prepared", []), super().prepare(model, dtype)]
        return self.prepared[-1]


def test_the_reference_of_dpo_holds_no_gathered_weights_between_steps(model: ModelConfig, tmp_path: Path) -> None:
    half = model.model_copy(update={"dtype": "bfloat16"})
    settings = DpoConfig.model_validate(section(tmp_path / "out", steps=1))
    ranks = NotingRanks()
    train_on_pairs(half, PAIRS[:8], PAIRS[8:16], settings, load_tokenizer=HfTokenizer, ranks=ranks)
    reference = ranks.prepared[1]
    assert all(isinstance(parameter, DTensor) for parameter in reference.parameters())
