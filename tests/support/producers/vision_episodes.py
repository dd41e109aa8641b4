"""Episodes of clients of the real endpoint that show a vision model images, at any place of any turn."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from openai import AsyncOpenAI

from producers.agents.capacity import EngineCapacity
from producers.agents.endpoint.server import EndpointServer
from producers.agents.session import PolicyHandle, Session
from producers.agents.sessions import Sessions
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import Conversation
from producers.conversation.images import EpisodeImages, ImageLimits
from producers.conversation.parsing.answers import ParsedAnswer
from producers.conversation.template_check import check_bridge
from producers.engines.base import Engine
from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer
from schemas.codec import encode
from schemas.config import AgentsConfig
from schemas.images import ImageSettings, prepare_image
from schemas.messages import Sampling, Task
from tests.support.models.pictures import PAD, image_url

WORDS = ("how many", "look", "and this?", "?", "a red one")


class VisionEpisode(msgspec.Struct):
    """An episode as its message, and what its client saw.

    files: of all its images by digest. prompts, answers: token ids of each call as the client read them. why: how
    each prompt came about. shown: images that there were, one that is there twice counted twice.
    """

    trajectory: bytes
    files: dict[str, bytes]
    prompts: list[list[int]]
    answers: list[list[int]]
    why: list[str]
    shown: int


class NumberedParser:
    """Reads what was sampled as text, and numbers it, since no two answers of a random policy must be alike."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._number = 0

    def parse(self, ids: Sequence[int], tools: Any = None, **_: Any) -> ParsedAnswer:
        self._number += 1
        text = self._tokenizer.decode(ids)
        return ParsedAnswer(f"{text} Number{self._number}", None, [], text)


def noise(rng: np.random.Generator) -> bytes:
    """An image file of any size up to 150 pixels."""
    import io

    from PIL import Image as Pillow

    height, width = rng.integers(28, 150, 2)
    file = io.BytesIO()
    Pillow.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def plan(rng: np.random.Generator, images: int) -> list[list[dict[str, Any]]]:
    """Turns of a client as parts of texts and, at any place in them, so many images; one may come twice."""
    turns: list[list[dict[str, Any]]] = [
        [{"type": "text", "text": str(rng.choice(WORDS))} for _ in range(rng.integers(1, 3))]
        for _ in range(rng.integers(2, 5))
    ]
    pictures: list[bytes] = []
    for _ in range(images):
        again = bool(pictures) and rng.random() < 0.25
        pictures.append(pictures[-1] if again else noise(rng))
        turn = turns[rng.integers(len(turns))]
        turn.insert(int(rng.integers(len(turn) + 1)), image_url(pictures[-1]))
    return turns


async def play_vision_episodes(
    engine: Engine, folder: Path, settings: ImageSettings, count: int
) -> list[VisionEpisode]:
    """Play ``count`` episodes with 0 to 3 images, one of them the task's in some; eight at a time."""
    tokenizer = HfTokenizer(str(folder))
    template = ChatTemplate(tokenizer)
    assert check_bridge(template) is None
    sessions, turn = Sessions(), asyncio.Semaphore(8)
    server = EndpointServer(sessions, AgentsConfig())
    url = await server.start()
    capacity = EngineCapacity(16)

    async def play(number: int) -> VisionEpisode:
        rng = np.random.default_rng(1000 + number)
        shown, has_own = number % 4, number % 3 == 0 and number % 4 > 0
        task_image, body = prepare_image(noise(rng), settings)
        own, files = ([task_image], {task_image.digest: body}) if has_own else ([], {})
        images = EpisodeImages(ImagePlaceholders(PAD, settings), ImageLimits(8, 1 << 20, 1 << 20), own, files)
        sampling = Sampling(max_tokens=12, seed=number)
        policy = PolicyHandle(engine, NumberedParser(tokenizer), capacity, 900, 99, tokenizer)
        session = Session(policy, Conversation(template, images=images), sampling)
        sessions.add(session)
        turns = plan(rng, shown - has_own)
        if has_own:
            turns[0].append(image_url(body))
        try:
            async with turn, AsyncOpenAI(base_url=f"{url}/s/{session.token}/v1", api_key="-", max_retries=0) as client:
                prompts, answers = await talk(client, turns, rng)
        finally:
            sessions.end(session)
        found = session.conversation.sample(0, "stop", reward=float(number % 2))
        task = Task(task_id=number, kind="train", n=1, text="x", sampling=sampling)
        return VisionEpisode(
            encode(found.to_trajectory(task, "run", "generator")),
            {**files, **found.files},
            prompts,
            answers,
            list(session.begun.elements()),
            shown,
        )

    try:
        return await asyncio.gather(*(play(number) for number in range(count)))
    finally:
        await server.close()


async def talk(
    client: AsyncOpenAI, turns: Sequence[list[dict[str, Any]]], rng: np.random.Generator
) -> tuple[list[list[int]], list[list[int]]]:
    """Send the turns one after the other, some of them with an old answer left out; what the client read."""
    sent: list[Any] = []
    prompts, answers = [], []
    for parts in turns:
        sent.append({"role": "user" if not sent or rng.random() < 0.7 else "tool", "content": parts})
        if sent[-1]["role"] == "tool":
            sent[-1]["tool_call_id"] = "call"
        if len(sent) > 3 and rng.random() < 0.3:
            del sent[1]
        answer = await client.chat.completions.create(
            model="policy", messages=sent, extra_body={"return_token_ids": True}
        )
        found: dict[str, Any] = answer.model_dump()
        prompts.append(found["prompt_token_ids"])
        answers.append(found["choices"][0]["token_ids"])
        sent.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
    return prompts, answers
