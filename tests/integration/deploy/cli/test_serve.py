"""``tidemill serve``: a checkpoint answers OpenAI's own client as its export does, sampled as the client asks."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from deploy.offline.serve import find_served
from schemas.config import save_config
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import run_tidemill
from tests.support.trainer.trajectories import make_groups

openai = pytest.importorskip("openai")

KEY = "key-of-the-test"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints of steps 1 and 2, whose policy is far from its first model."""
    folder = tmp_path_factory.mktemp("served")
    config = minimal_config(
        run={"name": "served", "folder": str(folder / "run")},
        model={"path": str(make_tiny_model(folder / "model", hidden=32, layers=1)), "dtype": "float32"},
        generator={"engine": "transformers"},
        trainer={"optimizer": {"lr": 0.05}},
    )
    step = build_train_step(config, policy=Policy(load_model(config.model.path, "float32")))
    for number in (1, 2):
        step.run(step.planner.plan(make_groups([3, 4], seed=number)).batch(), number)
        checkpoints = CheckpointStore(config.folder / "checkpoints")
        checkpoints.save(step, step=number, version=number, leader_term=1, extra={})
    save_config(config, config.folder / "config.yaml")
    return config.folder


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    """The address of a server of the newest checkpoint, which ends cleanly on SIGTERM."""
    command = [sys.executable, "-m", "tidemill", "serve", str(run), "--address", "127.0.0.1:0"]
    environment = os.environ | {"TIDEMILL_SERVE_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.endswith("/v1, until Ctrl-C\n")
        yield line.split()[1].rstrip(",")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def ask(url: str, key: str = KEY, **settings: Any) -> Any:
    with openai.OpenAI(base_url=url, api_key=key, timeout=60, max_retries=0) as client:
        return client.completions.create(model="any", prompt="12+34=", **settings)


def answer_ids(answer: Any, choice: int = 0) -> list[int]:
    return [int(name.removeprefix("token_id:")) for name in answer.choices[choice].logprobs.tokens]


def test_the_newest_checkpoint_answers_as_its_export_does(url: str, run: Path) -> None:
    exported = run / "exports/step-00000002-t0001"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer("12+34=", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        want = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :].tolist()
    got = answer_ids(ask(url, temperature=0, max_tokens=8, logprobs=1))
    assert got == want
    first = AutoModelForCausalLM.from_pretrained(run.parent / "model")
    with torch.inference_mode():
        assert first.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :].tolist() != want


def test_the_client_decides_how_its_answer_is_sampled(url: str) -> None:
    samples = ask(url, n=8, temperature=1.5, max_tokens=8, logprobs=1)
    assert len({tuple(answer_ids(samples, k)) for k in range(8)}) > 1
    greedy = answer_ids(ask(url, temperature=0, max_tokens=8, logprobs=1))
    likeliest = ask(url, temperature=1.5, top_p=1e-6, max_tokens=8, logprobs=1)
    assert answer_ids(likeliest) == greedy, "top_p keeps the likeliest token only"
    again = [answer_ids(ask(url, temperature=1.0, seed=7, max_tokens=8, logprobs=1)) for _ in range(2)]
    assert again[0] == again[1]


def test_a_chat_answer_comes_whole_or_as_a_stream(url: str) -> None:
    messages: Any = [{"role": "user", "content": "12+34="}]
    with openai.OpenAI(base_url=url, api_key=KEY, timeout=60) as client:
        asked: Any = {"model": "policy", "messages": messages, "temperature": 0, "max_tokens": 6}
        whole = client.chat.completions.create(**asked, tool_choice="auto").choices[0].message.content
        parts = client.chat.completions.create(**asked, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole
        assert [model.id for model in client.models.list()] == ["policy"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty: only temperature, top_p, top_k, seed are supported"),
        ({"temperature": -1}, r"sampling\.temperature -1\.0 must be 0 or more"),
        ({"seed": 1.5}, "seed"),
        ({"extra_body": {"guided_regex": "a+"}}, "guided_regex: only temperature"),
    ],
)
def test_what_no_engine_can_do_is_named(url: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(url, max_tokens=2, **settings)


def test_settings_that_change_nothing_are_accepted(url: str) -> None:
    neutral = {"presence_penalty": 0, "best_of": 1, "extra_body": {"repetition_penalty": 1.0, "min_p": 0, "top_k": -1}}
    assert ask(url, max_tokens=2, **neutral).usage.completion_tokens <= 2


def test_a_wrong_key_is_refused(url: str) -> None:
    with pytest.raises(openai.AuthenticationError, match="not the one that the server was started with"):
        ask(url, key="wrong", max_tokens=2)


def test_what_is_served_may_be_a_run_a_checkpoint_or_a_model(run: Path) -> None:
    config, folder = find_served(str(run / "checkpoints/step-00000001-t0001"), None, 99, None)
    assert (Path(folder).name, config.model.max_length) == ("step-00000001-t0001", 99)
    assert find_served(str(run), 1, None, None)[1] == folder
    config, folder = find_served(str(run.parent / "model"), None, None, "scripted")
    assert (folder, config.generator.engine) == (str(run.parent / "model"), "scripted")


def test_a_server_that_others_reach_needs_a_key(run: Path) -> None:
    done = run_tidemill("serve", str(run.parent / "model"), "--address", "0.0.0.0:8000")
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "tidemill: --address 0.0.0.0:8000: other machines can reach it, so give a key with --api-key",
    )
