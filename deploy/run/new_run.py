"""The files of a new task, written by ``tidemill init``: a configuration with its schema, a reward, a few prompts."""

import codecs
import json
import re
import shlex
from pathlib import Path

from deploy.checks.names import FILE, editor_schema
from schemas.config import load_config
from schemas.errors import ConfigError

CONFIG = """\
# yaml-language-server: $schema={schema}
# What is not here has its default: `tidemill config {file}` prints everything, `tidemill doctor {file}` checks it.
run:
  name: {name} # its files are in runs/ under this name
model:
  path: {model} # a folder, or a hub id
  max_length: 1024 # tokens of a prompt with its completion
train: # prompts to train on
  name: jsonl
  args: {{path: {data}, chat: true}} # chat: each prompt is a user's message, in the model's chat template
{held_out}reward:
  terms: # their weighted sum is the reward
    - name: rewards.py:correct
sampling: {{n: 8, max_tokens: 512}} # n completions of each prompt are compared with one another
flow: {{staleness: 4}} # a completion may be older than the newest weights by this many steps
trainer:
  steps: {steps}
  batch_groups: 16 # prompts of one step
  optimizer: {{lr: 1.0e-6}}
"""
HELD_OUT = """\
eval: # held-out prompts, answered at the first and last step and in between
  dataset: {name: jsonl, args: {path: heldout.jsonl, chat: true}}
  every: 20
"""
REWARD = r'''"""The reward: called for each completion, with those fields of the prompt's line that it names."""

import re


def correct(completion, answer):
    """Return 1 if the last word or number of the completion is the answer, else 0."""
    words = re.findall(r"-?\w+(?:[.,]\w+)*", completion)
    return float(words[-1:] == [str(answer)])
'''
PROMPTS = [
    {"prompt": f"What is {a} plus {b}? End with the number.", "answer": str(a + b)}
    for a in (3, 8, 12, 27)
    for b in (5, 19, 40, 66, 7, 14, 58, 72, 31, 90)
]
TRAINED = 32
"""Prompts that are trained on; the others are held out."""


def write_new_run(folder: Path, name: str | None, model: str, data: Path | None, steps: int) -> list[Path]:
    """Write the files into ``folder``; returns them. ConfigError, and nothing is written, if one is there already.

    name: of the run; None for that of the folder, in the characters that are allowed.
    data: a file of JSON lines with ``prompt`` and ``answer``; without it one with a few sums is written.
    """
    if name is None:
        name = re.sub(r"[^a-z0-9_-]+", "-", folder.resolve().name.lower()).strip("-_")[:63] or "first"
    texts = {folder / "rewards.py": REWARD, folder / FILE: json.dumps(editor_schema(), indent=1) + "\n"}
    held_out = ""
    if data is None:
        held_out = HELD_OUT
        for name_of_file, prompts in (("prompts.jsonl", PROMPTS[:TRAINED]), ("heldout.jsonl", PROMPTS[TRAINED:])):
            texts[folder / name_of_file] = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    elif not data.is_file():
        raise ConfigError(f"--data {data} is no file: give JSON lines with prompt and answer")
    else:
        with data.open("rb") as lines:
            first = next((line for line in lines if line.strip()), b"").removeprefix(codecs.BOM_UTF8).lstrip()
        if not first.startswith(b"{"):
            raise ConfigError(
                f"--data {data} must have a JSON object in each line, with prompt and answer; the dataset hf reads CSV"
                " and Parquet: set train to {name: hf, args: {path: FILE, prompt: COLUMN, answer: COLUMN}}"
            )
    file = folder / "config.yaml"
    where = "prompts.jsonl" if data is None else str(data.resolve())
    quoted = {"name": json.dumps(name), "model": json.dumps(model), "data": json.dumps(where)}
    texts[file] = CONFIG.format(file=shlex.quote(str(file)), schema=FILE, held_out=held_out, steps=steps, **quoted)
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
