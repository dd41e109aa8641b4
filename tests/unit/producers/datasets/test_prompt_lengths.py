"""Prompts above ``max_prompt_tokens`` are left out when the data is opened, and the order of the others is stable."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.checks.thorough import measure_prompts
from deploy.offline.evaluate import open_datasets
from deploy.offline.tiny_vision_model import write_tiny_vision_model
from producers.datasets.loading import MOST_MEASURED, ShortPrompts, build_dataset
from producers.datasets.mixture import build_mixture
from producers.images.settings import image_settings
from producers.prompt_meter import PromptMeter
from schemas.config import TidemillConfig, parse_config
from schemas.errors import ConfigError
from schemas.images import prepare_image
from tests.support.models.pictures import picture
from tests.support.models.tiny_model import make_tiny_model
from tests.support.user_code.datasets import Numbers

LENGTHS = (3, 9, 4, 30, 5, 5, 12)
"""Characters of the prompts, each of which is a token of the tiny model."""


@pytest.fixture
def config(tmp_path: Path) -> TidemillConfig:
    return configured(tmp_path, {"max_prompt_tokens": 9})


def configured(folder: Path, settings: dict[str, Any], lengths: tuple[int, ...] = LENGTHS) -> TidemillConfig:
    rows = [json.dumps({"prompt": "1" * length, "answer": str(length)}) for length in lengths]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    data = {"name": "jsonl", "args": {"path": str(folder / "rows.jsonl")}}
    model = folder / "model"
    path = model if model.is_dir() else make_tiny_model(model, hidden=32, layers=1)
    return parse_config(
        {
            "run": {"folder": str(folder / "run")},
            "model": {"path": str(path), "max_length": 64},
            "train": {**data, **settings},
            "eval": {"dataset": {**data, **settings}},
            "sampling": {"max_tokens": 8},
            "reward": {"terms": [{"name": "exact"}]},
        }
    )


def test_what_is_left_keeps_its_order_at_every_start(config: TidemillConfig) -> None:
    orders = []
    for _ in range(2):
        mixture = build_mixture(config.train, config.base, 0, PromptMeter.of(config))
        (level,) = mixture.parts[0].levels
        assert isinstance(level, ShortPrompts)
        assert (level.label, level.left_out) == ("jsonl", 2)
        assert [len(level[index].text or "") for index in range(len(level))] == [3, 9, 4, 5, 5]
        orders.append([mixture.at(position).index for position in range(20)])
        assert sorted(orders[-1][:5]) == [0, 1, 2, 3, 4]
    assert orders[0] == orders[1]
    with pytest.raises(IndexError, match="example 5 of 5"):
        level[5]


def test_only_a_configuration_that_asks_for_it_loads_the_tokenizer(tmp_path: Path) -> None:
    assert PromptMeter.of(configured(tmp_path, {})) is None


def test_a_feeder_without_the_library_says_what_to_install(
    config: TidemillConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"max_prompt_tokens needs the package transformers: pip"):
        PromptMeter.of(config)


def test_the_limit_counts_before(tmp_path: Path) -> None:
    config = configured(tmp_path, {"max_prompt_tokens": 9, "limit": 3})
    assert len(build_dataset(config.train[0], config.base, PromptMeter.of(config))) == 3


def test_held_out_prompts_are_left_out_too(config: TidemillConfig) -> None:
    assert config.eval is not None
    (held_out,) = open_datasets(config, config.eval)
    assert [len(task.text or "") for task in held_out.tasks] == [3, 9, 4, 5, 5]


def test_doctor_says_how_many(tmp_path: Path) -> None:
    lengths = (*([70] * 300), 5)
    found = measure_prompts(configured(tmp_path, {"max_prompt_tokens": 40}, lengths))
    assert found == "up to 5 tokens in the first 1; model.max_length is 64; max_prompt_tokens leaves out 300 examples"


def test_the_tokens_of_images_count(tmp_path: Path) -> None:
    write_tiny_vision_model(tmp_path / "model")
    (tmp_path / "red.png").write_bytes(picture("red"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Which colour?", "image": "red.png"}))
    args = {"path": str(tmp_path / "rows.jsonl"), "answer": None, "chat": True}
    config = parse_config(
        {
            "model": {"path": str(tmp_path / "model"), "kind": "vision", "max_pixels": 12544},
            "train": [
                {"name": "jsonl", "label": "shown", "args": {**args, "image": "image"}},
                {"name": "jsonl", "label": "plain", "args": args},
            ],
            "reward": {"terms": [{"name": "exact"}]},
        }
    )
    meter = PromptMeter(config)
    shown, plain = (meter(build_dataset(one, config.base), one.label, 0) for one in config.train)
    image = image_tokens(config, picture("red"))
    assert image > 1
    assert shown - plain >= image


def image_tokens(config: TidemillConfig, file: bytes) -> int:
    settings = image_settings(config)
    assert settings is not None
    image, _ = prepare_image(file, settings, "it")
    return settings.tokens(image.width, image.height)


def test_examples_that_cannot_be_used_stay_and_fail_in_their_turn(config: TidemillConfig) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise ValueError("no such file")
            return super().__getitem__(index)

    dataset = ShortPrompts(Broken(3, "1"), "mine", 9, PromptMeter(config))
    assert (len(dataset), dataset.left_out) == (3, 0)
    with pytest.raises(ValueError, match="no such file"):
        dataset[1]


def test_data_of_which_nothing_is_left_or_that_has_no_end_is_a_wrong_configuration(config: TidemillConfig) -> None:
    meter = PromptMeter(config)
    with pytest.raises(ConfigError, match="dataset 'mine': max_prompt_tokens 1 leaves out all 4 examples"):
        ShortPrompts(Numbers(4, "1"), "mine", 1, meter)
    with pytest.raises(ConfigError, match="dataset 'mine': max_prompt_tokens measures up to 10,000,000 examples"):
        ShortPrompts(Numbers(MOST_MEASURED + 1), "mine", 9, meter)
