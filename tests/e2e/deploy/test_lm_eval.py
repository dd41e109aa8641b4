"""The evaluation harness lm-eval asks ``tidemill serve`` by the command of docs/operations.md."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.programs import environment_python
from tests.support.user_code.docs_code import ROOT

pytestmark = pytest.mark.timeout(300)

QUESTIONS = ["What is 2+3?", "What is 4+4?", "Name a sea."]
TASK = {
    "task": "three",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["<never>"], "max_gen_toks": 8, "temperature": 0, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture
def program() -> Path:
    """The harness, in an interpreter of its own."""
    return environment_python("lm-eval").with_name("lm_eval")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The address of a served model."""
    make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    serve = [sys.executable, "-m", "tidemill", "serve", "model", "--engine", "transformers", "--address", "127.0.0.1:0"]
    with subprocess.Popen(serve, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.endswith("/v1, until Ctrl-C\n")
        yield line.split()[1].rstrip(",").removesuffix("/v1")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def answer(url: str, question: str) -> str:
    """The model's likeliest answer."""
    asked = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0}
    body = json.dumps({"model": "policy", **asked}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


@pytest.mark.matrix("another program of that address; make test asks it by an OpenAI client's requests")
def test_the_harness_scores_the_answers_of_a_served_model(program: Path, url: str, tmp_path: Path) -> None:
    answers = [answer(url, question) for question in QUESTIONS]
    rows = [{"question": QUESTIONS[0], "answer": answers[0]}]
    rows += [{"question": question, "answer": "something else"} for question in QUESTIONS[1:]]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}}}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/three.yaml").write_text(yaml.safe_dump(task))

    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    lm_eval (run .*\\\n.*)$", page, re.MULTILINE)
    words = command.replace("\\\n", "").replace("gsm8k_cot", "three").replace("http://127.0.0.1:8000", url).split()
    done = subprocess.run(
        [program, *words, "--include_path", "tasks", "--output_path", "results", "--log_samples"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(found.read_text())["results"]["three"]
    assert results["exact_match,none"] == pytest.approx(1 / 3)
    (found,) = (tmp_path / "results").rglob("samples_three_*.jsonl")
    samples = sorted(map(json.loads, found.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0] for sample in samples] == answers
