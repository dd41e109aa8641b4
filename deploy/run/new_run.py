"""The files of a new task, written by ``tidemill init``: a configuration, a reward function, a few prompts."""

from __future__ import annotations

import json
from pathlib import Path

from schemas.config import load_config
from schemas.errors import ConfigError

CONFIG = """\
# What is not here has its default: `tidemill config {file}` prints everything, `tidemill doctor {file}` checks it.
run:
  name: {name}
model:
  path: {model}
  max_length: 1024
train:
  name: jsonl
  args: {{path: {data}, chat: true}}
reward:
  terms:
    - name: rewards.py:correct
sampling: {{n: 8, max_tokens: 512}}
flow: {{staleness: 4}}
trainer:
  steps: {steps}
  batch_groups: 16
  optimizer: {{lr: 1.0e-6}}
"""
REWARD = '''\
"""The reward: called with each completion and all fields of its prompt's line, such as answer."""


def correct(prompt, completion, prompt_ids, completion_ids, answer=None, **data) -> float:
    """1 if the completion ends with the answer, else 0."""
    return float(completion.strip().rstrip(".").endswith(str(answer)))
'''
PROMPTS = [
    {"prompt": f"What is {a} plus {b}? End with the number.", "answer": str(a + b)}
    for a in (3, 8, 12, 27)
    for b in (5, 19, 40, 66)
]


def write_new_run(folder: Path, name: str, model: str, data: Path | None, steps: int) -> list[Path]:
    """Write the files into ``folder``; returns them. ConfigError, and nothing is written, if one is there already.

    data: a file of JSON lines with ``prompt`` and ``answer``; without it one with a few sums is written.
    """
    texts = {folder / "rewards.py": REWARD}
    if data is None:
        texts[folder / "prompts.jsonl"] = "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS)
    elif not data.is_file():
        raise ConfigError(f"--data {data} is no file: give JSON lines with prompt and answer")
    file = folder / "config.yaml"
    where = "prompts.jsonl" if data is None else str(data.resolve())
    quoted = {"name": json.dumps(name), "model": json.dumps(model), "data": json.dumps(where)}
    texts[file] = CONFIG.format(file=file, steps=steps, **quoted)
    taken = [str(path) for path in texts if path.exists()]
    if taken:
        raise ConfigError(f"{', '.join(taken)} exists already: give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    try:
        load_config(file, environment={})
    except ConfigError:
        for path in texts:
            path.unlink()
        raise
    return list(texts)
