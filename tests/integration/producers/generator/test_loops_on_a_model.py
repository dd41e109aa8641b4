"""Episodes of several turns, sampled by a real tiny model: what is trained is what was sampled, in one row."""

import json
import string
from pathlib import Path

import numpy as np

from producers.engines.base import EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from producers.tokenizer import HfTokenizer
from producers.workflows.trajectory_builder import SampledCompletion
from tests.support.models.chat_templates import SOURCES
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.played_episodes import chat_task, loop_config, play

ECHO = """
class Echo:
    def reset(self, task):
        self.turns = 0

    async def step(self, text):
        self.turns += 1
        return f"You said {len(text)} letters.", 1.0, self.turns == 4
"""


async def test_log_probabilities_of_a_row_of_four_turns_are_those_of_a_forward_pass(tmp_path: Path):
    folder = make_tiny_model(tmp_path)
    (folder / "chat_template.jinja").write_text(SOURCES["append only"].replace("<|im_end|>", "<eos>"), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "echo.py").write_text(ECHO, encoding="utf-8")
    config = loop_config(folder, "environment", {"environment": "echo.py:Echo"})
    task = chat_task("Talk to me.", n=3, max_tokens=100, stop=list(string.printable), seed=3)
    tokenizer = HfTokenizer(str(folder))

    engine = TransformersEngine(EngineSettings(str(folder), "float32", max_length=1024, max_samples=8))
    await engine.start()
    try:
        for sample in await play(config, engine, tokenizer, task):
            assert isinstance(sample, SampledCompletion)
            trajectory = sample.to_trajectory(task, "run", "generator")
            (row,) = trajectory.rows()
            assert (trajectory.calls, trajectory.reward) == (4, 4.0)
            assert [turn.role for turn in trajectory.turns] == ["prompt", *["assistant", "user"] * 3, "assistant"]
            ids = trajectory.tokens.numpy()[row.places]
            trained = trajectory.loss_mask.numpy()[row.places].astype(bool)
            expected = np.concatenate([[0.0], await engine.logprobs(ids.tolist())])
            difference = (trajectory.logprobs.numpy()[row.places] - expected)[trained]
            assert np.abs(difference).max() < 1e-4
    finally:
        await engine.close()
