"""The tool ``python``: an interpreter for each episode, in the sandbox, that keeps its variables."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from producers.episodes.tools.functions import ToolError
from producers.episodes.tools.python_tool import PythonSource
from producers.workflows.base import FailedSample, find_workflow
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.errors import ConfigError, InfraError
from schemas.system.sandbox.jail import Sandbox
from tests.support.producers.generator_service import wait_until
from tests.support.producers.played_episodes import SpeakingEngine, chat_task, chat_tokenizer, loop_config, play
from tests.support.user_code.sandboxes import left_with, mark, sandbox


@pytest.fixture(autouse=True)
def _with_a_sandbox() -> None:
    sandbox()


def results(*codes: str, **settings: Any) -> list[str]:
    """What the codes give, one after the other, in one interpreter."""

    async def run() -> list[str]:
        found = []
        async with PythonSource(settings, "tools").open() as tools:
            for code in codes:
                try:
                    found.append(await tools["python"].call(json.dumps({"code": code}), 30.0))
                except ToolError as error:
                    found.append(f"error: {error}")
        return found

    return asyncio.run(run())


def test_variables_are_kept_and_the_last_value_is_shown() -> None:
    assert results("a = 6\nprint('six')", "a * 7", "import os; os.system('echo shell')", "None") == [
        "six",
        "42",
        "shell\n0",
        "",
    ]


def test_what_code_raises_is_its_result_and_the_variables_stay() -> None:
    found = results("a = 1", "1 / 0", "def broken(:", "raise SystemExit(3)", "a")
    assert found[1].endswith("ZeroDivisionError: division by zero")
    assert found[1].startswith('error: Traceback (most recent call last):\n  File "code", line 1')
    assert "SyntaxError" in found[2]
    assert "SystemExit: 3" in found[3]
    assert found[4] == "1"


def test_code_that_takes_too_long_is_interrupted_or_its_interpreter_is_killed() -> None:
    found = results(
        "a = 1\ntry:\n    while True: pass\nexcept Exception: pass",
        "a",
        "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass",
        "a",
        timeout_s=0.5,
    )
    assert "error: it took longer than 0.5 s and was interrupted" in found[0]
    assert found[1] == "1"
    assert found[2] == "error: took longer than 0.5 s; the interpreter is new, without variables"
    assert "NameError" in found[3]


@pytest.mark.parametrize(
    "code", ["import os; os._exit(3)", "import os\nfor fd in range(3, 9):\n    os.write(fd, b'x' * 9)"]
)
def test_an_interpreter_that_ends_or_says_nonsense_is_started_anew(code: str) -> None:
    found = results("a = 1", code, "1 + 1")
    assert found[2] == "2" or (found[2].startswith("error: the interpreter ended") and "error" in found[1])
    assert found[1].startswith("error: ")


def test_it_has_its_limits_and_no_files_of_ours(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    found = results(f"open({str(tmp_path / 'secret')!r}).read()", "len(bytearray(1 << 30))", memory_mb=128)
    assert "FileNotFoundError" in found[0]
    assert found[1].endswith("MemoryError")


def test_nothing_is_left_after_the_episode() -> None:
    word = mark()
    code = f"import os\nif os.fork() == 0:\n    os.setsid(); os.execv('/usr/bin/sleep', ['{word}', '1000'])"
    assert results(code, "1") == ["", "1"]
    assert not left_with(word)


BUSY = """
import itertools, subprocess, sys, threading
children = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(3)]
turns = itertools.count()
def turn():
    while True: next(turns)
threading.Thread(target=turn, daemon=True).start()
"""


async def test_nothing_computes_between_calls() -> None:
    async with PythonSource({"memory_mb": 2048}, "tools").open() as tools:
        python = tools["python"]
        await python.call(json.dumps({"code": BUSY}), 30.0)
        await wait_until(lambda: interpreters() == ["stopped"] * 4)
        found = await python.call(json.dumps({"code": "[child.poll() for child in children]"}), 30.0)
        assert found == "[None, None, None]", "they run on with the next call"
        await wait_until(lambda: interpreters() == ["stopped"] * 4)
    assert interpreters() == []


def interpreters() -> list[str]:
    """What the interpreters in sandboxes below this process do."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if one.name() != "bwrap" and {str(1 << 16), "while True: pass"} & set(one.cmdline()):
                found.append(one.status())
    return found


def answers(*texts: str) -> Any:
    return lambda prompt: texts[prompt.count("<|im_start|>assistant") - 1]


def call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


async def test_episodes_have_interpreters_of_their_own(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    says = answers(call("seen = globals().get('seen', 0) + 1\nseen"), call("seen += 1\nseen"), "Two.")
    config = loop_config(tmp_path, "tools", {"tools": [{"python": {"memory_mb": 256}}]})
    samples = await play(config, SpeakingEngine(tokenizer, says), tokenizer, chat_task("Count.", n=2))
    for sample in samples:
        assert isinstance(sample, SampledCompletion)
        assert [m["content"] for m in sample.data["messages"] if m["role"] == "tool"] == ["1", "2"]


async def test_a_sandbox_that_cannot_start_fails_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise InfraError("the sandbox could not be started: no more processes")

    tokenizer = chat_tokenizer(tmp_path)
    config = loop_config(tmp_path, "tools", {"tools": [{"python": {}}]})
    monkeypatch.setattr(Sandbox, "start", fails)
    engine = SpeakingEngine(tokenizer, answers(call("1"), "Well."))
    # The trial of the sandbox has been made by then.
    (sample,) = await play(config, engine, tokenizer, chat_task("Count."))
    assert isinstance(sample, FailedSample)
    assert "no more processes" in sample.reason


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ({"python": {"timeout_s": 0}}, r"python.timeout_s: Input should be greater than 0"),
        ({"python": {"time": 1}}, r"python.time: Extra inputs are not permitted"),
        ({"python": {"sandbox": "jail"}}, r"sandbox 'jail' must be one of"),
        ({"pythn": {}}, r"name a function, or give python or mcp"),
    ],
)
def test_a_wrong_entry_is_found_before_the_run(entry: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=wrong):
        find_workflow("tools", {"tools": [entry]}, tmp_path)
