"""Images in an agent's messages become images of its episode: each token that stands for one has its place in a row."""

from typing import Any

import pytest

from consumers.trainer.data.rows import cut_rows
from producers.conversation.calls import digest_key
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import Conversation, History, NextPrompt
from producers.conversation.images import EpisodeImages, ImageLimits
from producers.conversation.template_check import check_bridge
from producers.tokenizer import HfTokenizer
from schemas.errors import DataError
from schemas.images import prepare_image
from schemas.messages import PlacedImage, Sampling, Task, Trajectory
from tests.support.models.chat_templates import sampled
from tests.support.models.pictures import PAD, PLACES, SETTINGS, data_url, image_url, picture, user, vision_tokenizer

LIMITS = ImageLimits(count=3, file_bytes=100_000, stored_bytes=100_000)
RED, BLUE, WIDE = picture(), picture("blue"), picture("red", 84, 28)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return vision_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def template(tokenizer: HfTokenizer) -> ChatTemplate:
    template = ChatTemplate(tokenizer)
    assert check_bridge(template) is None
    return template


class Scene:
    """A conversation whose messages are those of a client."""

    def __init__(self, template: ChatTemplate, limits: ImageLimits = LIMITS, history: History = "held") -> None:
        self.images = EpisodeImages(PLACES, limits)
        self.conversation = Conversation(template, history, self.images)
        self._template = template

    def prompt(self, *messages: Any) -> NextPrompt:
        return self.conversation.prompt(self.images.resolve(messages))

    def ask(self, *messages: Any, text: str = "ok", ids: list[int] | None = None) -> NextPrompt:
        prompt = self.prompt(*messages)
        ids = self._template.ids(f"{text}<|im_end|>") if ids is None else ids
        self.conversation.add(prompt, sampled(ids), answer(text))
        return prompt

    def trajectory(self) -> Trajectory:
        task = Task(task_id=1, kind="train", text="x", n=1, sampling=Sampling())
        return self.conversation.sample(0, "stop").to_trajectory(task, "run", "generator")


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def name_of(data: bytes) -> str:
    return prepare_image(data, SETTINGS)[0].digest


def shown(ids: list[int], tokenizer: HfTokenizer) -> str:
    return tokenizer.decode_all(ids).replace("<|image_pad|>", "#")


def check_places(found: Trajectory) -> None:
    """Each image stands where its tokens are in every row that has it, and these are not trained."""
    for row in cut_rows(found, 0):
        tokens, mask = row.tokens.numpy(), row.loss_mask.numpy()
        for image in row.images:
            assert set(tokens[image.start : image.end].tolist()) == {PAD}
            assert not mask[image.start : image.end].any()
            assert (tokens[image.start - 1], tokens[image.end]) == (3, 4)


def test_images_of_later_turns_are_joined_to_the_row(template: ChatTemplate, tokenizer: HfTokenizer) -> None:
    scene = Scene(template)
    first = scene.ask(user("what?", RED))
    assert shown(first.ids, tokenizer).endswith(
        "user\nwhat?<|vision_start|>####<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    # The policy samples the token that stands for images: it is text.
    history = [user("what?", RED), answer("ok"), user(BLUE, " and ", WIDE, "?")]
    second = scene.ask(*history, text="it", ids=[PAD, PAD, 2])
    assert second.why == "joined"
    assert second.ids[: len(first.ids)] == first.ids
    assert shown(second.ids[len(first.ids) :], tokenizer) == (
        "ok<|im_end|>\n<|im_start|>user\n<|vision_start|>####<|vision_end|> and <|vision_start|>###<|vision_end|>?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    third = scene.ask(*history, answer("it"), {"role": "user", "content": "why?"})
    assert (third.why, third.images) == ("joined", second.images)
    found = scene.trajectory()
    assert len(found.rows()) == 1
    assert [image.digest for image in found.images] == [name_of(RED), name_of(BLUE), name_of(WIDE)]
    check_places(found)
    assert scene.images.for_engine(second.images)["images"][2].data == prepare_image(WIDE, SETTINGS)[1]
    files = scene.conversation.sample(0, "stop").files
    assert files == {name_of(data): prepare_image(data, SETTINGS)[1] for data in (RED, BLUE, WIDE)}


def test_a_template_that_leaves_old_turns_as_they_are_joins_images_in_both_histories(template: ChatTemplate) -> None:
    asked = {"held": Scene(template), "template": Scene(template, history="template")}
    history = [user(RED, "what?"), answer("ok"), user("and", BLUE)]
    second = {}
    for name, scene in asked.items():
        scene.ask(*history[:1])
        second[name] = scene.ask(*history)
    assert [prompt.why for prompt in second.values()] == ["joined", "joined"]
    assert second["held"].digest == second["template"].digest


def test_images_of_the_task_are_not_stored_again(template: ChatTemplate) -> None:
    image, body = prepare_image(RED, SETTINGS)
    images = EpisodeImages(PLACES, LIMITS, [image], {image.digest: body})
    conversation = Conversation(template, images=images)
    messages = images.resolve([user("what?", body, BLUE)])
    conversation.add(conversation.prompt(messages), sampled([20, 2]), answer("x"))
    sample = conversation.sample(0, "stop")
    assert [placed.digest for placed in sample.images] == [image.digest, name_of(BLUE)]
    assert list(sample.files) == [name_of(BLUE)]


def test_another_image_in_the_same_place_is_another_prompt(template: ChatTemplate) -> None:
    red, blue = Scene(template).prompt(user("what?", RED)), Scene(template).prompt(user("what?", BLUE))
    assert red.ids == blue.ids
    assert digest_key(red.digest, 0) != digest_key(blue.digest, 0)
    assert red.digest == Scene(template).prompt(user("wh", "at?", RED)).digest


def test_rows_share_what_is_before_an_image_that_differs_and_equal_images(
    template: ChatTemplate,
) -> None:
    scene = Scene(template)
    for parts in ((RED, "one"), (BLUE, "one"), (RED, "two"), (WIDE, "one"), ("no image", "one")):
        scene.ask(user("see", *parts))
    found = scene.trajectory()
    rows, tokens = found.rows(), found.tokens.numpy()
    image = PlacedImage(name_of(RED), found.images[0].start, found.images[0].end)
    assert [row.shared for row in rows[:2]] == [0, image.start]
    assert rows[2].shared > image.end
    assert rows[3].shared == image.start
    assert [found.digest for found in found.images] == [name_of(RED), name_of(BLUE), name_of(WIDE)]
    check_places(found)
    assert all(len(tokens[row.places]) == len(row.places) for row in rows)


def test_a_sampled_token_is_not_shared_with_an_image_of_the_same_tokens(template: ChatTemplate) -> None:
    scene = Scene(template)
    scene.ask({"role": "user", "content": "see"}, ids=[3, PAD, PAD, PAD, PAD, 4, 2])
    raw = scene.conversation.raw_prompt(scene.prompt(user("see", RED)).ids)
    assert raw.images == [], "ids that a program writes itself are text"
    scene.ask(user("see", RED))
    check_places(scene.trajectory())


def test_special_tokens_in_texts_between_images_stay_text(template: ChatTemplate, tokenizer: HfTokenizer) -> None:
    scene = Scene(template)
    first = scene.ask(user(RED, "a <|image_pad|> ", "b"))
    assert first.ids.count(PAD) == 4
    assert scene.ask(user(RED, "a ", "", "<|image_pad|> b"), answer("ok"), user("c")).why == "joined"


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("https://example.org/cat.png", r"messages\[1\]: the image https://example.org/cat.png is not fetched from"),
        ("/etc/passwd", r"messages\[1\]: the image /etc/passwd is not fetched from anywhere: send it as a data: URL"),
        ("data:image/png,abc", r"messages\[1\]: the data: URL of an image can't be read: it is not in base64"),
        ("data:image/png;base64,a$b", r"messages\[1\]: the data: URL of an image can't be read: "),
        (data_url(b"<svg onload='alert(1)'/>", "image/svg+xml"), r"messages\[1\]: an image can't be decoded \(PNG"),
        (data_url(b"x" * 100_500), r"messages\[1\]: an image has more than the 100000 bytes that generator.agents."),
        (data_url(picture("red", 1, 300)), r"messages\[1\]: an image: an image of 1 x 300 pixels is too oblong"),
        (data_url(picture(None, 9000, 8000)), r"messages\[1\]: an image: 9000 x 8000 pixels are over 67108864"),
    ],
    ids=["http", "path", "no base64", "wrong base64", "svg", "bytes", "oblong", "pixels"],
)
def test_an_image_that_cannot_be_used_is_refused_with_reason(template: ChatTemplate, part: str, reason: str) -> None:
    wrong = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": part}}]}
    with pytest.raises(DataError, match=reason):
        Scene(template).prompt(user("?"), wrong)


def test_images_of_a_prompt_and_different_ones_of_an_episode_are_limited(template: ChatTemplate) -> None:
    scene = Scene(template)
    scene.ask(user(RED, RED, BLUE))
    with pytest.raises(DataError, match=r"the request has 4 images, generator.agents.max_images allows 3 in a prompt"):
        scene.prompt(user(RED, RED, BLUE, BLUE))
    scene.ask(user(WIDE))
    with pytest.raises(DataError, match=r"this would be image 4 of the episode, generator.agents.max_images is 3"):
        scene.prompt(user(picture("green")))
    small = ImageLimits(count=3, file_bytes=100_000, stored_bytes=50)
    with pytest.raises(DataError, match=r"as it is stored, broker.max_message_bytes is 50: lower model.max_pixels"):
        Scene(template, small).prompt(user(RED))


def test_a_policy_of_text_refuses_images_and_a_template_must_have_places_for_them(template: ChatTemplate) -> None:
    with pytest.raises(DataError, match=r"messages\[0\] has an image, and this policy reads text only \(model.kind\)"):
        EpisodeImages().resolve([user(RED)])
    scene = Scene(template)
    with pytest.raises(DataError, match="the prompt has 0 images, and the chat template gives it places for 1"):
        scene.prompt({"role": "system", "content": "<|image_pad|>"}, user("?"))


def test_an_image_alone_may_be_what_a_tool_gave(template: ChatTemplate, tokenizer: HfTokenizer) -> None:
    scene = Scene(template)
    first = scene.ask(user("look"))
    result = {"role": "tool", "tool_call_id": "c", "content": [image_url(RED)]}
    second = scene.prompt(user("look"), answer("ok"), result)
    assert second.why == "joined"
    assert shown(second.ids[len(first.ids) :], tokenizer).startswith(
        "ok<|im_end|>\n<|im_start|>tool\n<|vision_start|>####<|vision_end|><|im_end|>\n"
    )
