"""Images that tools and environments of a loop show the policy, in any form that such code has them."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from producers.conversation.images import content_of, join_content
from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer
from producers.workflows.base import FailedSample
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.images import prepare_image
from schemas.messages import ChatMessage, ContentPart, Sampling, Task
from tests.support.models.pictures import PLACES, SETTINGS, image_url, picture, vision_tokenizer
from tests.support.producers.played_episodes import SpeakingEngine, chat_task, loop_config, play

RED, BLUE = (prepare_image(picture(color), SETTINGS)[0].digest for color in ("red", "blue"))

CODE = f'''
import io
from PIL import Image

RED, BLUE = Image.new("RGB", (56, 56), "red"), Image.new("RGB", (56, 56), "blue")

def look(what: str):
    """Looks at something."""
    if what == "both":
        return [RED, "and", {image_url(picture("blue"))!r}, {{"x": 1}}]
    if what == "broken":
        return {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,AAAA"}}}}
    if what == "far":
        return {{"type": "image_url", "image_url": {{"url": "https://example.org/x.png"}}}}
    return RED if what == "red" else {{"no": "image"}}

class Gallery:
    """Two pictures, one after the other; an answer that names its colour earns 1."""

    def __init__(self, first="image"):
        self.first, self.seen = first, 0

    def reset(self, task):
        if self.first == "task":
            assert task["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
            return None
        if self.first == "messages":
            return [{{"role": "system", "content": "Name it."}}, {{"role": "user", "content": [RED, "?"]}}]
        return ["This?", RED] if self.first == "list" else RED

    def step(self, text):
        self.seen += 1
        reward = float(("red", "blue")[self.seen - 1] in text)
        return (BLUE if self.seen == 1 else "Well.", reward, self.seen == 2)

class Wrong(Gallery):
    def step(self, text):
        return RED.load, 0.0, False

class TwoSee:
    def reset(self, task):
        self.turn = 0
        return {{"player": "a", "text": RED}}

    def step(self, text):
        self.turn += 1
        return {{"player": "b", "text": ["You", BLUE]}} if self.turn == 1 else {{"done": True, "rewards": {{"a": 1}}}}
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(CODE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> HfTokenizer:
    return vision_tokenizer(base)


class Said:
    """Answers in their order."""

    def __init__(self, *answers: str) -> None:
        self._answers = list(answers)

    def __call__(self, prompt: str) -> str:
        return self._answers.pop(0)


def played(
    base: Path,
    tokenizer: HfTokenizer,
    name: str,
    args: dict[str, Any],
    answers: Sequence[str],
    task: Task | None = None,
    placeholders: ImagePlaceholders | None = PLACES,
    files: dict[str, bytes] | None = None,
) -> tuple[SampledCompletion | FailedSample, SpeakingEngine]:
    engine = SpeakingEngine(tokenizer, Said(*answers))
    config = loop_config(base, name, args)
    (sample,) = asyncio.run(
        play(config, engine, tokenizer, task or chat_task("See."), placeholders=placeholders, files=files)
    )
    return sample, engine


def look(what: str) -> str:
    return f'<tool_call>{{"name": "look", "arguments": {{"what": "{what}"}}}}</tool_call>'


def test_what_a_tool_shows_is_seen_by_the_policy_and_stands_in_the_row(base: Path, tokenizer: HfTokenizer) -> None:
    answers = (look("red"), look("both"), look("nothing"), "done")
    sample, engine = played(base, tokenizer, "tools", {"tools": ["mine.py:look"]}, answers)
    assert isinstance(sample, SampledCompletion)
    assert [[image.digest for image in images] for images in engine.images] == [[], [RED], *[[RED, RED, BLUE]] * 2]
    assert [image.digest for image in sample.images] == [RED, RED, BLUE]
    assert set(sample.files) == {RED, BLUE}
    assert len(sample.segments) == 1
    results = [message["content"] for message in sample.data["messages"] if message["role"] == "tool"]
    image = {"type": "image", "digest": RED}
    texts = [{"type": "text", "text": "and"}, {"type": "image", "digest": BLUE}, {"type": "text", "text": '{"x": 1}'}]
    assert results == [[image], [image, *texts], '{"no": "image"}']


def test_an_image_that_cannot_be_used_is_told_as_an_error_of_the_call(base: Path, tokenizer: HfTokenizer) -> None:
    args = {"tools": ["mine.py:look"]}
    sample, _ = played(base, tokenizer, "tools", args, (look("broken"), look("far"), "done"))
    assert isinstance(sample, SampledCompletion)
    first, second = [message["content"] for message in sample.data["messages"] if message["role"] == "tool"]
    assert first.startswith("error: the result of look: an image can't be decoded (PNG, JPEG")
    assert second.startswith("error: the result of look: the image https://example.org/x.png is not fetched")
    assert sample.metrics["tool_errors"] == 2
    blind, _ = played(base, tokenizer, "tools", args, (look("red"), look("both"), "done"), placeholders=None)
    assert isinstance(blind, SampledCompletion)
    alone, mixed = [message["content"] for message in blind.data["messages"] if message["role"] == "tool"]
    assert alone == "error: the result of look has an image, and this policy reads text only (model.kind)"
    assert mixed == '[image, which is no text]\nand\n[image, which is no text]\n{"x": 1}'


@pytest.mark.parametrize("first", ["image", "list", "messages"])
@pytest.mark.parametrize("python", [None, sys.executable], ids=["here", "worker"])
def test_an_environment_shows_images_in_reset_and_step(
    base: Path, tokenizer: HfTokenizer, first: str, python: str | None
) -> None:
    args = {"environment": "mine.py:Gallery", "args": {"first": first}, "python": python}
    sample, engine = played(base, tokenizer, "environment", args, ("red", "blue"))
    assert isinstance(sample, SampledCompletion)
    assert sample.reward == 2.0
    assert [[image.digest for image in images] for images in engine.images] == [[RED], [RED, BLUE]]
    assert (len(sample.segments), set(sample.files)) == (1, {RED, BLUE})


def test_an_environment_is_told_the_images_of_its_task(base: Path, tokenizer: HfTokenizer) -> None:
    image, body = prepare_image(picture("red"), SETTINGS)
    task = Task(
        task_id=7,
        kind="train",
        n=1,
        sampling=Sampling(),
        messages=[ChatMessage("user", [ContentPart("image"), ContentPart("text", "?")])],
        images=[image],
    )
    args = {"environment": "mine.py:Gallery", "args": {"first": "task"}}
    sample, engine = played(base, tokenizer, "environment", args, ("red", "blue"), task, files={image.digest: body})
    assert isinstance(sample, SampledCompletion)
    assert [one.digest for one in engine.images[0]] == [RED]
    assert (set(sample.files), sample.reward) == ({BLUE}, 2.0)


def test_players_of_a_game_see_their_own_images(base: Path, tokenizer: HfTokenizer) -> None:
    sample, engine = played(base, tokenizer, "environment", {"environment": "mine.py:TwoSee"}, ("x", "y"))
    assert isinstance(sample, SampledCompletion)
    assert [[image.digest for image in images] for images in engine.images] == [[RED], [BLUE]]
    assert sorted(image.digest for image in sample.images) == sorted([RED, BLUE])


def test_an_observation_that_is_neither_text_nor_image_fails_the_sample(base: Path, tokenizer: HfTokenizer) -> None:
    sample, _ = played(base, tokenizer, "environment", {"environment": "mine.py:Wrong"}, ("x",))
    assert isinstance(sample, FailedSample)
    assert "step must return (text or images, reward, done)" in sample.reason


def test_content_is_text_an_image_or_a_list_of_them() -> None:
    assert content_of("half \ud800") == "half \\ud800"
    assert content_of(["a", {"type": "text", "text": "b"}]) == [{"type": "text", "text": part} for part in "ab"]
    assert content_of({"type": "image_url", "image_url": "data:x"}) == [
        {"type": "image_url", "image_url": {"url": "data:x"}}
    ]
    for wrong in (None, 1, [], {"a": 1}, [1], {"type": "text"}, {"type": "image_url", "image_url": {}}, object):
        assert content_of(wrong) is None
    (part,) = content_of({"type": "image_url", "image_url": "data:\ud800"}) or ()
    assert part["image_url"] == {"url": "data:\\ud800"}  # type: ignore[index]
    parts = [{"type": "text", "text": "a"}]
    assert join_content("a", "b") == "a\n\nb"
    assert json.dumps(join_content(parts, "b")).count("text") == 6
