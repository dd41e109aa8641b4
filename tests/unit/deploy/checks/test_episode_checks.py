"""What ``tidemill doctor`` says of episodes: whether their turns are joined, and whether their times fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.checks.agent_episode import play_episode
from deploy.checks.finding import Finding
from deploy.checks.thorough import check_bridge, compare_times
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import TidemillConfig, parse_config
from tests.support.models.chat_templates import SOURCES, STOPS, write_tokenizer
from tests.support.models.pictures import PAD, picture, vision_tokenizer


def config(folder: Path, deadline_s: float = 100.0, staleness: int = 4, **more: Any) -> TidemillConfig:
    return parse_config(
        {
            "run": {"name": "times", "folder": str(folder / "run")},
            "model": {"path": str(folder)},
            "train": {"name": "arithmetic"},
            "reward": {},
            "flow": {"staleness": staleness},
            "generator": {
                "workflow": {"name": "agent", "args": {"run": "a.py:run"}},
                "agents": {"deadline_s": deadline_s},
            },
            **more,
        }
    )


def test_episodes_that_end_within_the_steps_that_wait_for_them_are_all_right(tmp_path: Path) -> None:
    found = compare_times(config(tmp_path, 100), 20.0)
    assert found == (
        "episodes take up to 100 s, the trainer gives up after 600 s, and 5 steps of 20 s are enough for all"
    )


def test_longer_ones_are_told_with_the_staleness_that_they_need(tmp_path: Path) -> None:
    found = compare_times(config(tmp_path, 101), 20.0)
    assert isinstance(found, Finding)
    assert found.level == "warn"
    assert "waits for episodes that take over 100 s: flow.staleness 4 allows 5 steps of 20 s (given)" in found.text
    assert "flow.staleness 5, or a flow.window, or generator.agents.deadline_s 100" in found.advice
    assert isinstance(compare_times(config(tmp_path, 101, staleness=5), 20.0), str)


def test_without_a_given_time_it_is_what_the_runs_last_steps_took(tmp_path: Path) -> None:
    found = compare_times(config(tmp_path), None)
    assert isinstance(found, str)
    assert "--step-s" in found
    (tmp_path / "run").mkdir()
    lines = [{"time/total_s": 500.0}] * 50 + [{"time/total_s": 30.0, "time/wait_s": 25.0, "step": 1}] * 50
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = compare_times(config(tmp_path), None)
    assert isinstance(found, Finding)
    assert "allows 5 steps of 5 s (measured)" in found.text


def test_evaluations_that_hold_weights_back_for_less_are_told(tmp_path: Path) -> None:
    evaluation = {"dataset": {"name": "arithmetic"}, "hold_s": 60}
    found = compare_times(config(tmp_path, 90, eval=evaluation), 60.0)
    assert isinstance(found, Finding)
    assert "an evaluation holds new weights back for 60 s" in found.text
    assert found.advice == "set eval.hold_s 90; ignore this if few episodes take so long"


@pytest.mark.parametrize(
    ("template", "level"), [("append only", "ok"), ("space before answers", "ok"), ("none", "warn")]
)
def test_whether_turns_are_joined_is_tried_on_the_models_template(tmp_path: Path, template: str, level: str) -> None:
    write_tokenizer(tmp_path, stops=STOPS.get(template, []))
    source = SOURCES.get(template, "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    found = check_bridge(config(tmp_path))
    if level == "ok":
        assert isinstance(found, str)
        assert "one row" in found
    else:
        assert isinstance(found, Finding)
        assert "each model call becomes a separate row: the chat template closes answers with no token" in found.text


async def test_the_episode_of_an_agent_of_a_vision_model_shows_it_the_images_of_its_row(tmp_path: Path) -> None:
    vision_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "image_token_id": PAD}))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 784, "longest_edge": 12544}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "what?", "answer": "1", "image": "a.png"}))
    (tmp_path / "a.py").write_text(
        "async def run(task, client):\n"
        "    await client.chat.completions.create(model='policy', messages=task['messages'])\n"
        "    return 1.0\n"
    )
    own = {"model": {"path": str(tmp_path), "kind": "vision"}, "reward": {"terms": [{"name": "exact"}]}}
    train = {"name": "jsonl", "args": {"path": str(tmp_path / "rows.jsonl"), "image": "image"}}
    workflow = {"name": "agent", "args": {"run": f"{tmp_path}/a.py:run"}}
    agents = {"deadline_s": 100.0}
    settings = config(tmp_path, **own, train=train, generator={"workflow": workflow, "agents": agents})
    played = await play_episode(settings)
    assert isinstance(played.sample, SampledCompletion)
    assert (len(played.sample.images), played.sample.reward, played.replayed) == (1, 1.0, 1)
