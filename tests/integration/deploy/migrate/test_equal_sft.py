"""A converted script of TRL's SFT has TRL's own loss and gradient, on the same rows with the same model.

TRL runs itself here: it reads the rows, renders and cuts them, and trains one step.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consumers.offline.encoding import encode_demonstration
from consumers.offline.loop import DEFAULT_LIMITS
from consumers.offline.sft import _Model, _Training
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.policy import load_model
from deploy.migrate.convert import convert_file
from deploy.offline.warm_start import Demonstrations
from producers.tokenizer import HfTokenizer
from schemas.config import parse_config
from tests.support.models.tiny_model import make_tiny_model

SCRIPT = """
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    max_steps=1,
    max_length=128,
    bf16=False,
    use_cpu=True,
    max_grad_norm=0,
    report_to="none",
)
rows = load_dataset("json", data_files="rows.jsonl", split="train")
trainer = SFTTrainer(model="start", args=args, train_dataset=rows)
"""
TEXTS = [("one", "a"), ("two and", "bcdefgh"), ("3+4=", "7"), ("x", "a long answer to it"), ("yes?", "no"), ("z", "zz")]


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"prompt": prompt, "completion": answer} for prompt, answer in TEXTS],
    "messages": [{"prompt": said("user", one), "completion": said("assistant", two)} for one, two in TEXTS],
}
"""Of ragged lengths, as many as a step has."""


def theirs() -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of TRL's first step and its gradient, which the script in this folder makes."""
    from transformers import TrainerCallback

    names: dict[str, Any] = {}
    exec(SCRIPT, names)
    gradient: dict[str, torch.Tensor] = {}

    class Watch(TrainerCallback):
        """Keeps the gradient of the step."""

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            gradient.update({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})

    names["trainer"].add_callback(Watch)
    return names["trainer"].train().training_loss, gradient


@pytest.mark.parametrize("kind", ROWS)
def test_a_converted_script_of_sft_has_trls_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    make_tiny_model(tmp_path / "start", hidden=32)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS[kind])))
    (tmp_path / "train.py").write_text(SCRIPT + "trainer.train()\n")
    monkeypatch.chdir(tmp_path)
    _, done = convert_file(tmp_path / "train.py")
    made = json.loads(json.dumps(done.config))
    for part in ("dataset", "eval"):
        made["warm_start"][part]["args"] |= {"path": "rows.jsonl", "split": "train"}
    config = parse_config(made, base=tmp_path)
    settings = config.warm_start
    assert settings is not None
    assert (settings.model, settings.batch_size, config.model.max_length) == ("start", len(TEXTS), 128)
    tokenizer = HfTokenizer("start")
    shown = Demonstrations(settings.dataset, tmp_path)
    rows = [encode_demonstration(tokenizer, one, config.model.max_length) for one in shown]
    model = _Model(load_model("start", "float32"))
    loss = _Training(model, rows, settings, DEFAULT_LIMITS, Ranks(), None)._loss(rows, rows)
    loss.backward()
    want, gradient = theirs()
    assert float(loss.detach()) == pytest.approx(want, abs=1e-6)
    ours = {name: one.grad for name, one in model.causal_lm.named_parameters()}
    assert ours.keys() == gradient.keys()
    for name, one in ours.items():
        assert one is not None
        assert float((one - gradient[name]).abs().max()) < 1e-6, name
