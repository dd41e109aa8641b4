"""Episodes that an engine samples for clients of the real endpoint, a real training step over them, and what must hold.

With one vLLM for all chat templates of an installed trl: ``python -m tests.support.producers.sampled_episodes``.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file

from consumers.trainer.data.groups import Group
from consumers.trainer.model.policy import Policy as TrainedPolicy
from consumers.trainer.model.policy import load_model
from deploy.offline.tiny_model import write_tiny_model
from producers.agents.capacity import EngineCapacity
from producers.agents.endpoint.server import EndpointServer
from producers.agents.session import PolicyHandle, Session
from producers.agents.sessions import Sessions
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import Conversation, History
from producers.conversation.parsing.answers import ParsedAnswer, ToolCall, call_id
from producers.conversation.template_check import check_bridge
from producers.engines.base import Engine, EngineSettings
from producers.engines.vllm.engine import VllmEngine
from producers.tokenizer import HfTokenizer
from schemas.codec import decode, encode
from schemas.config import AgentsConfig
from schemas.messages import FileSource, Sampling, Task, Trajectory
from tests.support.models.chat_templates import TOOL
from tests.support.models.trl_templates import real_template, stops_of, template_files, write_common_tokenizer
from tests.support.producers.conversations import Message, can_show, replay
from tests.support.trainer.train_steps import make_train_step

HABITS = frozenset({"reasoning dropped", "spaces stripped", "arguments re-encoded"})
HISTORIES: tuple[History, ...] = ("held", "template")
LONGEST = 14
"""Tokens of an answer."""


@dataclass(frozen=True)
class Ask:
    """One request of a client. calls: tools that its answer is read to call. choices: n. end: what ends the answer."""

    calls: int = 0
    reasoning: bool = False
    choices: int = 1
    end: str = "as sampled"

    def settings(self) -> dict[str, Any]:
        """What the client sends for it."""
        limits: dict[str, Any] = {"length": {"max_tokens": 3}, "stop string": {"stop": ["e", "t", "a", "o", " "]}}
        return {"n": self.choices, **limits.get(self.end, {})}


ANSWERS = [
    Ask(),
    Ask(reasoning=True, choices=2),
    Ask(end="length"),
    Ask(reasoning=True, end="stop string"),
    Ask(choices=2),
]
CALLS = [
    Ask(calls=1),
    Ask(calls=2, reasoning=True, choices=2),
    Ask(calls=2, end="stop string"),
    Ask(reasoning=True, end="length"),
    Ask(calls=2),
    Ask(),
]


class AskedParser:
    """Reads whatever was sampled as the client's plan says, since a random policy calls no tools. No two are alike."""

    def __init__(self, decode: Any) -> None:
        self.ask = Ask()
        self._decode = decode
        self._number = 0

    def parse(self, ids: Sequence[int], tools: Any = None, *, prompt_ids: Sequence[int] = (), **_: Any) -> ParsedAnswer:
        self._number += 1
        text: str = self._decode(ids)
        thought, said = (text[: len(text) // 2], text[len(text) // 2 :]) if self.ask.reasoning else (None, text)
        calls = [
            ToolCall(
                call_id(prompt_ids, ids, number),
                "add",
                f'{{"b": {json.dumps(said)},  "a":{self._number}, "last": "sum{number}"}}',
            )
            for number in range(self.ask.calls)
        ]
        content = None if calls else f" {said} Number{self._number} "
        return ParsedAnswer(content, f"{thought} Thought{self._number}" if thought is not None else None, calls, text)


@dataclass(frozen=True)
class Delivered:
    """An answer as its client got it. kept: whether it is trained. end: why it ended."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    kept: bool
    end: str


@dataclass
class Episode:
    """An episode that was played to its end."""

    trajectory: Trajectory
    delivered: list[Delivered]
    why: list[str]


def possible(template: ChatTemplate, plan: Sequence[Ask], tools: list[Any] | None) -> list[Ask]:
    """The part of a plan whose turns the template takes and shows."""
    parser = AskedParser(lambda ids: "Fiftysix")
    messages: list[Message] = [{"role": "user", "content": "Multiply"}]
    kept = []
    for number, ask in enumerate(plan):
        parser.ask = ask
        answer = parser.parse([number]).message()
        new = following(answer, number)
        words = [message["content"] for message in new] + (["sum"] if ask.calls else [])
        if can_show(template, [*messages, answer, *new], tools, words):
            kept.append(ask)
            messages += [answer, *new]
    return kept


def following(answer: Message, number: int) -> list[Message]:
    """What a client sends after an answer: the results of its calls, or a user's next words."""
    calls = answer.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": f"Question{number}"}]
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": f"Result{number}x{k}"}
        for k, call in enumerate(calls)
    ]


class Stage:
    """The real endpoint over an engine::

    async with Stage(engine, tokenizer) as stage:
        episode = await stage.play(template, ANSWERS, history="held")
    """

    def __init__(self, engine: Engine, tokenizer: HfTokenizer, max_length: int = 4000, at_once: int = 24) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._sessions = Sessions()
        self._server = EndpointServer(self._sessions, AgentsConfig())
        self._places = EngineCapacity(at_once)
        self._turn = asyncio.Semaphore(at_once)
        self._number = 0
        self._url = ""

    async def __aenter__(self) -> Self:
        self._url = await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def play(
        self,
        template: ChatTemplate,
        plan: Sequence[Ask],
        tools: list[Any] | None = None,
        *,
        history: History = "held",
        habits: frozenset[str] = frozenset(),
    ) -> Episode:
        """Play one episode of a client with these habits."""
        async with self._turn:
            parser = AskedParser(self._tokenizer.decode)
            policy = PolicyHandle(self._engine, parser, self._places, self._max_length, 99, self._tokenizer)
            self._number += 1
            sampling = Sampling(max_tokens=LONGEST)
            task = Task(task_id=self._number, kind="train", n=1, text="x", sampling=sampling)
            session = Session(policy, Conversation(template, history), sampling)
            self._sessions.add(session)
            url = f"{self._url}/s/{session.token}/v1"
            try:
                async with AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
                    delivered = await _talk(client, parser, plan, tools, habits)
            finally:
                self._sessions.end(session)
            found = session.conversation.sample(0, "stop", reward=float(self._number % 3))
            why = list(session.begun.elements())
            return Episode(found.to_trajectory(task, "run", "generator"), delivered, why)


async def _talk(
    client: AsyncOpenAI, parser: AskedParser, plan: Sequence[Ask], tools: list[Any] | None, habits: frozenset[str]
) -> list[Delivered]:
    sent: list[Any] = [{"role": "user", "content": "Multiply seven by eight"}]
    delivered: list[Delivered] = []
    more: dict[str, Any] = {"tools": tools} if tools else {}
    for number, ask in enumerate(plan):
        parser.ask = ask
        answer = await client.chat.completions.create(
            model="policy",
            messages=sent,
            logprobs=True,
            extra_body={"return_token_ids": True},
            **ask.settings(),
            **more,
        )
        found: dict[str, Any] = answer.model_dump()
        # Nothing follows the last request, of which the first choice is then trained.
        taken = number % ask.choices if number + 1 < len(plan) else 0
        for index, choice in enumerate(found["choices"]):
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            end = "length" if len(choice["token_ids"]) == (ask.settings().get("max_tokens") or LONGEST) else "stop"
            delivered.append(
                Delivered(found["prompt_token_ids"], choice["token_ids"], logprobs, index == taken, f"{ask.end}, {end}")
            )
        message = {name: value for name, value in found["choices"][taken]["message"].items() if value is not None}
        message = replay(message, habits)
        sent += [message, *following(message, number)]
    return delivered


def check_delivered(episode: Episode) -> int:
    """Every token of each kept answer is trained once, after the very ids and the log-probability it was read with.

    Returns how many these are.
    """
    found, delivered = episode.trajectory, episode.delivered
    tokens, mask, logprobs = found.tokens.numpy(), found.loss_mask.numpy(), found.logprobs.numpy()
    rows = found.rows()
    answers = [turn for turn in found.turns if turn.call >= 0]
    assert sorted(turn.call for turn in answers) == [k for k, answer in enumerate(delivered) if answer.kept]
    trained = np.zeros(len(tokens), np.uint8)
    for turn in answers:
        answer = delivered[turn.call]
        number = next(k for k, segment in enumerate(found.segments) if segment.start <= turn.start < segment.end)
        segment = found.segments[number]
        place = segment.shared + turn.start - segment.start
        row = tokens[rows[number].places]
        assert row[:place].tolist() == answer.prompt
        assert tokens[turn.start : turn.end].tolist() == answer.tokens
        np.testing.assert_array_equal(logprobs[turn.start : turn.end], np.asarray(answer.logprobs, np.float32))
        trained[turn.start : turn.end] += 1
    np.testing.assert_array_equal(trained, mask)
    return int(trained.sum())


def largest_gap(policy: TrainedPolicy, episodes: Sequence[Episode], version: int) -> float:
    """The largest difference, in nats, between what was recorded and what a real training step computes.

    The episodes take the way to the trainer. policy: changed by it.
    """
    step = make_train_step(policy, {"micro_batch_tokens": 8192})
    sent = [decode(encode(episode.trajectory), Trajectory) for episode in episodes]
    groups = [Group(one.task_id, [(one, one.reward or 0.0)]) for one in sent]
    metrics = step.run(step.planner.plan(groups).batch(), version).metrics
    assert metrics["tokens"] == metrics["logprob_gap_tokens"] == sum(map(check_delivered, episodes))
    return metrics["logprob_gap_max"]


def write_eager_stops(folder: Path, file: Path, stops: Sequence[int], lift: float = 3.0) -> Path:
    """Write a tiny model's weights to ``file``, changed so that it ends its answers with these tokens often."""
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0  # the first number of the residual stream is that of the embedding
    embeddings = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embeddings)
    head[:, 0] = 0.0
    embeddings[:, 0] = 1.0
    head[list(stops), 0] += lift
    save_file(weights, file, {"format": "pt"})
    return file


def trained_policy(folder: Path, weights: Path) -> TrainedPolicy:
    """The trainer's policy with weights of a file."""
    model = load_model(folder, "float32")
    model.load_state_dict(load_file(weights), strict=False)
    return TrainedPolicy(model)


@dataclass
class Figures:
    """What was seen over all templates. ends: answers by what the client asked for, and how they ended."""

    templates: int = 0
    episodes: int = 0
    calls: int = 0
    answers: int = 0
    answers_left_out: int = 0
    loss_tokens: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    episodes_of: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)
    gaps: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, episode: Episode) -> None:
        self.episodes += 1
        self.calls += len(episode.why)
        self.answers += len(episode.delivered)
        self.answers_left_out += sum(not answer.kept for answer in episode.delivered)
        self.loss_tokens += int(episode.trajectory.loss_mask.numpy().sum())
        self.rows[name] += len(episode.trajectory.rows())
        self.episodes_of[name] += 1
        self.ends.update(answer.end for answer in episode.delivered)
        self.why.update(episode.why)


async def try_all(folder: Path, files: Sequence[Path]) -> Figures:
    """Play and compare with each template file."""
    write_common_tokenizer(folder, list(files))
    tokenizer = HfTokenizer(str(folder))
    shape = {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 2, "max_length": 4096}
    write_tiny_model(folder, tokenizer.hf, 0, **shape, initializer_range=0.1)
    families: dict[tuple[str, ...], list[Path]] = {}
    for file in files:
        families.setdefault(tuple(stops_of(file)), []).append(file)
    stops = {family: tokenizer.hf.convert_tokens_to_ids(list(family)) for family in families}
    every = sorted({tokenizer.eos_id, *(id for ids in stops.values() for id in ids)})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": every}), encoding="utf-8")
    engine = VllmEngine(EngineSettings(str(folder), "float32", 4000, 32))
    await engine.start()
    figures = Figures()
    try:
        async with Stage(engine, tokenizer) as stage:
            for version, (family, members) in enumerate(families.items(), 1):
                weights = write_eager_stops(folder, folder / f"version-{version}.safetensors", stops[family])
                await engine.load(FileSource(weights), version)
                episodes = await _play_all(stage, [real_template(tokenizer, file) for file in members], figures)
                policy = trained_policy(folder, weights)
                figures.gaps[" ".join(family)] = await asyncio.to_thread(largest_gap, policy, episodes, version)
                print(f"{figures.templates} templates, {figures.gaps}", flush=True)
    finally:
        await engine.close()
    return figures


async def _play_all(stage: Stage, templates: Sequence[ChatTemplate], figures: Figures) -> list[Episode]:
    playing = {}
    for template in templates:
        assert check_bridge(template) is None
        figures.templates += 1
        for tools, full in ((None, ANSWERS), ([TOOL], CALLS)):
            plan = possible(template, full, tools)
            if tools and not any(ask.calls for ask in plan):
                continue
            for history in HISTORIES:
                for habits in (frozenset[str](), HABITS):
                    name = f"{history}, {'tools' if tools else 'text'}, {'changed' if habits else 'faithful'}"
                    playing[stage.play(template, plan, tools, history=history, habits=habits)] = name
    episodes = await asyncio.gather(*playing)
    for name, episode in zip(playing.values(), episodes, strict=True):
        figures.add(name, episode)
    return list(episodes)


def report(figures: Figures) -> Mapping[str, Any]:
    return {
        "templates": figures.templates,
        "episodes": figures.episodes,
        "calls": figures.calls,
        "answers": figures.answers,
        "answers_left_out": figures.answers_left_out,
        "loss_tokens": figures.loss_tokens,
        "largest_gap": max(figures.gaps.values()),
        "gaps": figures.gaps,
        "rows_an_episode": {name: rows / figures.episodes_of[name] for name, rows in sorted(figures.rows.items())},
        "ends": dict(sorted(figures.ends.items())),
        "rows_begin_because": dict(figures.why),
    }


def main() -> None:
    """Compare over all chat templates of an installed trl, and print what was found."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="template files whose names begin so")
    given = parser.parse_args()
    torch.set_num_threads(1)
    files = [file for file in template_files() if file.stem.startswith(given.only)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(try_all(Path(folder), files))
    print(json.dumps({**report(figures), "seconds": round(time.monotonic() - began)}, indent=2))


if __name__ == "__main__":
    main()
