"""A whole run in exact mode, with a tool and two generators: generated and trained again, to the last bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.runs.command_line import run_tidemill
from tests.support.runs.up_runs import UpRun

pytestmark = pytest.mark.matrix("a whole run; test_replayed_rollouts.py replays three steps with a tool's answers")
EXAMPLE = Path(__file__).parents[3] / "examples" / "agents" / "calculator"
PAIRS = ((75, 80), (37, 84), (12, 34), (90, 11))
STEPS = 50
TOOL_TURN = 5
"""The token that opens a turn of a tool."""
TOOL = '''
def calculator(expression: str) -> str:
    """Multiply two numbers.

    expression: such as 37*84.
    """
    a, b = expression.split("*")
    return str(int(a) * int(b))
'''


def turns(a: int, b: int) -> list[dict[str, Any]]:
    """A call, the answer after its result, and a guess."""
    question = [{"role": "system", "content": "calculator"}, {"role": "user", "content": f"{a}*{b}=?"}]
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a}*{b}"}}}}</tool_call>'
    seen = [*question, {"role": "assistant", "content": call}, {"role": "tool", "content": str(a * b)}]
    return [
        {"messages": question, "answer": call},
        {"messages": seen, "answer": str(a * b)},
        {"messages": question, "answer": str(a * b + 7)},
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_config(folder: Path) -> dict[str, Any]:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "tool.py").write_text(TOOL)
    write_rows(folder / "shown.jsonl", [turn for pair in PAIRS for turn in turns(*pair)])
    asked = [{"messages": [{"role": "user", "content": f"{a}*{b}=?"}], "answer": str(a * b)} for a, b in PAIRS]
    write_rows(folder / "asked.jsonl", asked)
    shown, asked_of = (
        {"name": "jsonl", "args": {"path": f"{name}.jsonl", "prompt": "messages"}} for name in ("shown", "asked")
    )
    config["model"]["path"] = str(folder / "model")
    config["warm_start"].update(dataset=shown, eval=shown, lr=3e-3, batch_size=12, stop_accuracy=0.6, eval_every=10)
    del config["eval"]
    return config | {
        "train": asked_of,
        "sampling": {"n": 4, "max_tokens": 24},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {
            "engine": "transformers",
            "exact": True,
            "update": "recompute",
            "replicas": 2,
            "workflow": {"name": "tools", "args": {"tools": ["tool.py:calculator"]}},
        },
        "flow": {"staleness": 2},
        "trainer": {
            "steps": STEPS,
            "batch_groups": 8,
            "threads": 1,
            "record": True,
            "advantage": {"name": "raw"},
            "optimizer": {"lr": 2e-4},
            "checkpoint": {"every": 10, "keep": 100},
        },
    }


@pytest.mark.timeout(600)
def test_fifty_steps_are_generated_and_trained_again_to_the_bit(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLE, tmp_path / "e")
    run = UpRun(folder, make_config(folder))
    summary = run.finish()
    assert summary["exit_reason"] == "finished"
    assert summary["logprob_gap_mean"] == 0.0
    lines = {line["step"]: line for line in run.lines("metrics.jsonl")}.values()
    assert all(line.get("train/logprob_gap_max", 0.0) == 0.0 for line in lines)
    assert max(line["staleness/max"] for line in lines) >= 1
    done = run_tidemill("replay", str(run.folder), "--from", "0", "--rollouts", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["equal"], found["to"]) == (True, STEPS)
    assert found["rollouts"]["samples"] == STEPS * 8 * 4
    assert (found["rollouts"]["other"], found["rollouts"]["differs"]) == (0, [])
    samples = run_tidemill("batches", str(run.folder), "--step", str(STEPS - 1), "--json", cwd=tmp_path)
    assert any(TOOL_TURN in json.loads(line)["tokens"] for line in samples.stdout.splitlines())
