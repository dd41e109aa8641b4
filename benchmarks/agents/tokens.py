"""Tokens to train an episode: with turns that are joined, and with a history that is rendered again from its messages.

An episode asks a tool in all turns but the last. Its answers are cut into tokens as a policy may cut them: sometimes
otherwise than the tokenizer would. A history that is rendered again stays in the row only if its token ids are those
that were sampled.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agents.model import END, write_model
from benchmarks.agents.tool_use import LAST_ANSWER, TOOLS, tool_call, tool_result
from benchmarks.harness.report import ResultRow, Table
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import Conversation
from producers.conversation.parsing.factory import AnswerParser
from producers.engines.base import Completion
from producers.tokenizer import HfTokenizer
from schemas.messages import Span

CUTS = (0.0, 0.01, 0.02, 0.05)
"""Chances of a cut, as a policy in training may have."""


TOKENS = Table(
    "Tokens to train of an episode",
    {
        "turns": "{turns}",
        "unusual cuts": "{cut:.0%}",
        "tokens": "{tokens:.0f}",
        "rows": "{rows:.2f}",
        "rendered again: times tokens, rows": "{rendered_ratio:.2f}, {rendered_rows:.2f}",
        "a row a call: times tokens": "{call_ratio:.2f}",
    },
    part="tokens",
)
"""Means over the episodes. rendered: of a history that is rendered again for each call; call: a row a call."""


def measure(cut: float, episodes: int = 30, turns: int = 6) -> ResultRow:
    """Return one row: rows and tokens of an episode, joined, rendered again, and as one row for each call.

    cut: chance of a cut between two characters that the tokenizer would not make.
    """
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        write_model(Path(name), 8192)
        tokenizer = HfTokenizer(name)
    scene = _Scene(tokenizer, turns, random.Random(0), cut)
    found = np.array([scene.play() for _ in range(episodes)], dtype=float)
    names = ("rows", "tokens", "rendered_rows", "rendered_tokens", "call_rows", "call_tokens", "loss_tokens")
    means = dict(zip(names, found.mean(axis=0).tolist(), strict=True))
    ratios = {f"{way}_ratio": means[f"{way}_tokens"] / means["tokens"] for way in ("rendered", "call")}
    return TOKENS.row(episodes=episodes, turns=turns, cut=cut, **means, **ratios)


class _Scene:
    """Episodes of a policy that tokenizes its text as ``draw`` says."""

    def __init__(self, tokenizer: HfTokenizer, turns: int, draw: random.Random, cut: float) -> None:
        self._template = ChatTemplate(tokenizer)
        self._parser = AnswerParser("hermes", None, tokenizer, vllm=False)
        self._turns = turns
        self._draw = draw
        self._cut = cut

    def play(self) -> tuple[int, ...]:
        """Play one episode; return rows and tokens in the order of ``measure``'s names."""
        conversation = Conversation(self._template)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the number that we look for?"}]
        rendered: list[list[int]] = []
        call_tokens = 0
        for turn in range(self._turns):
            prompt = conversation.prompt(messages, TOOLS)
            answer = self._answer(tool_call(turn) if turn < self._turns - 1 else LAST_ANSWER)
            fresh = self._template.ids(self._template.render(messages, TOOLS))
            if rendered and fresh[: len(rendered[-1])] == rendered[-1]:
                rendered.pop()
            rendered.append([*fresh, *answer])
            call_tokens += len(rendered[-1])
            message = self._parser.parse(answer, TOOLS, prompt_ids=prompt.ids).message()
            span = Span(0, 0, len(answer))
            conversation.add(prompt, Completion(answer, np.zeros(len(answer), np.float32), [span], "stop"), message)
            messages.append(message)
            for call in message.get("tool_calls") or []:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": tool_result(turn)})
        sample = conversation.sample(0, "stop")
        loss = int(sum(sample.loss_mask))
        return (
            len(sample.segments) or 1,
            len(sample.tokens),
            len(rendered),
            sum(map(len, rendered)),
            self._turns,
            call_tokens,
            loss,
        )

    def _answer(self, text: str) -> list[int]:
        pieces = [""]
        for character in text:
            if self._draw.random() < self._cut:
                pieces.append("")
            pieces[-1] += character
        return [token for piece in [*pieces, END] for token in self._template.ids(piece)]
