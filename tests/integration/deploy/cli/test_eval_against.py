"""``tidemill eval --against``: two models answer the same held-out prompts, and the better one leads."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.offline.evaluate import Duel
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import run_tidemill

PROMPTS = [f"{number}+{number + 1}=" for number in range(12)]
REWARD = '''
def distinct(completion, **data):
    """Share of characters that are not there twice."""
    return len(set(completion)) / max(1, len(completion))
'''


def rewards(model: Path) -> list[float]:
    """What the model's greedy answers earn, by transformers alone."""
    tokenizer, causal_lm = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            answer = causal_lm.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        found.append(len(set(text)) / max(1, len(text)))
    return found


def test_the_winner_of_each_prompt_and_the_lead_are_those_of_the_models_answers(tmp_path: Path) -> None:
    one, two = (make_tiny_model(tmp_path / f"model-{seed}", seed=seed, hidden=32, layers=1) for seed in (0, 1))
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    config = {
        "model": {"path": "model-0", "dtype": "float32", "max_length": 64},
        "train": {"name": "arithmetic"},
        "eval": {"dataset": {"name": "jsonl", "args": {"path": "heldout.jsonl", "answer": None}}},
        "sampling": {"max_tokens": 8},
        "reward": {"terms": [{"name": "rewards.py:distinct"}]},
        "generator": {"engine": "transformers"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    expected = Duel.of(rewards(one), rewards(two))
    assert expected.wins, "the two models differ"
    assert expected.losses

    done = run_tidemill("eval", "config.yaml", "--model", "model-0", "--against", "model-1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["against"]) == ("model-0", "model-1")
    assert found["datasets"]["jsonl"]["samples"] == len(PROMPTS)
    assert found["datasets"]["jsonl"]["reward"] == pytest.approx(sum(rewards(one)) / len(PROMPTS))
    assert "accuracy" not in found["datasets"]["jsonl"], "a share of characters is neither right nor wrong"
    assert found["duels"] == {"jsonl": expected.as_json()}

    done = run_tidemill("eval", "config.yaml", "--model", "model-1", "--against", "model-0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    other = Duel(expected.losses, expected.ties, expected.wins)
    first, last = done.stdout.splitlines()
    assert first.startswith(f"model-1: held-out reward {sum(rewards(two)) / len(PROMPTS):.4f} on 12 samples")
    assert "accuracy" not in first
    assert last == f"model-1 against model-0, by prompts: {other}"

    done = run_tidemill("eval", "config.yaml", "reward.correct_from=0.5", "--model", "model-0", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    correct = sum(reward >= 0.5 for reward in rewards(one))
    assert json.loads(done.stdout)["datasets"]["jsonl"]["accuracy"] == pytest.approx(correct / len(PROMPTS))
