"""``tidemill agent``: one run of the configured agent, printed for debugging."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from deploy.checks.agent_episode import ANSWER, play_episode, play_on_server
from deploy.checks.model_files import check_made
from deploy.logs import configure_logging
from producers.workflows.base import FailedSample
from schemas.config import TidemillConfig
from schemas.errors import ERROR_EXIT, ConfigError


def run_agent(
    config: TidemillConfig, base_url: str | None, api_key: str, example: int, answers: Path | None, as_json: bool
) -> None:
    """Run the agent on one example and print the result; exit code 1 if it fails.

    Without ``base_url``, the agent talks to the real endpoint in front of an engine without a model, and its
    conversation is printed, too. answers: a file of that engine's answers, one JSON string a line. as_json: print one
    JSON object.
    """
    given = _read_answers(answers) if answers is not None else [ANSWER]
    if base_url is None:
        check_made(config)
    configure_logging(config, "agent", "agent")
    began = time.monotonic()
    messages: list[dict[str, Any]] = []
    said: dict[str, Any] = {}
    if base_url is not None:
        result = asyncio.run(play_on_server(config, base_url, api_key, example))
        failed = result.kind != "returned"
        said = {"reward": result.reward, "turns": result.turn_rewards, "metrics": result.metrics, "data": result.data}
        reason = f"{result.kind}: {result.error}" if result.error else result.kind
    else:
        played = asyncio.run(play_episode(config, example, given))
        failed = isinstance(played.sample, FailedSample)
        reason = played.sample.reason if isinstance(played.sample, FailedSample) else "returned"
        if not isinstance(played.sample, FailedSample):
            found = played.sample
            messages = found.data.get("messages", [])
            rows = max(1, len(found.segments))
            said = {"reward": found.reward, "rows": rows, "replayed": played.replayed, "metrics": found.metrics}
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        print(json.dumps({"failed": failed, "reason": reason, "seconds": seconds, "messages": messages, **said}))
    else:
        for message in messages:
            print(_line(message))
        print(f"agent {reason} after {seconds} s")
        for name, value in said.items():
            if value not in (None, {}):
                print(f"{name}: {json.dumps(value)}")
    if failed:
        sys.exit(ERROR_EXIT)


def _read_answers(file: Path) -> list[str]:
    """Read a file of answers; ConfigError names the line that is wrong."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--answers {file} can't be read: {error}") from None
    found: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            answer = json.loads(line) if line.strip() else ""
        except ValueError:
            answer = None
        if not isinstance(answer, str):
            raise ConfigError(f'--answers {file}, line {number}: must be a JSON string, such as "7 + 5 = 12"')
        found += [answer] if line.strip() else []
    if not found:
        raise ConfigError(f'--answers {file} is empty: give one JSON string a line, such as "7 + 5 = 12"')
    return found


def _line(message: dict[str, Any]) -> str:
    """Return a message as a line for the terminal."""
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []]
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    return f"{message['role']:>9}: {' '.join([text, *calls]).strip()}"
