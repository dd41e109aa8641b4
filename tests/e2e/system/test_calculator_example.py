"""examples/agents/calculator as its user starts it, with a model that was shown two products only."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.runs.up_runs import UpRun

pytestmark = pytest.mark.matrix("an example trained whole; its agent is a unit test")

EXAMPLE = Path(__file__).parents[3] / "examples" / "agents" / "calculator"


ASKED = {"role": "user", "content": "37*84=?"}


def turns(a: int, b: int) -> list[dict[str, Any]]:
    question = [{"role": "system", "content": "calculator"}, {"role": "user", "content": f"{a}*{b}=?"}]
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a}*{b}"}}}}</tool_call>'
    product = str(a * b)
    seen = [*question, {"role": "assistant", "content": call}, {"role": "tool", "content": product}]
    return [{"messages": question, "answer": call}, {"messages": seen, "answer": product}]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.timeout(300)
def test_an_agent_that_asks_its_tool_is_one_row(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLE, tmp_path / "e")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model"]["path"] = str(tmp_path / "model")
    # A call and a result for each of two products; the second is the one that is asked.
    write_rows(folder / "shown.jsonl", [*turns(75, 80), *turns(37, 84)])
    write_rows(folder / "asked.jsonl", [{"messages": [ASKED], "answer": "3108"}])
    shown, asked = ({"name": "jsonl", "args": {"path": f"{n}.jsonl", "prompt": "messages"}} for n in ("shown", "asked"))
    config["warm_start"].update(dataset=shown, eval=shown)
    config["train"] = config["eval"]["dataset"] = asked
    config["warm_start"].update(lr=3e-3, batch_size=8, stop_accuracy=1.0, eval_every=10)
    config["generator"].update(engine="transformers")
    config["trainer"].update(steps=3, batch_groups=8)
    run = UpRun(folder, config)
    summary = run.finish_whole()
    assert summary["logprob_gap_mean"] < 1e-4
    # The last step has a second line, with the evaluation after it.
    steps = {line["step"]: line for line in run.lines("metrics.jsonl")}
    assert sorted(steps) == [1, 2, 3]
    lines = steps.values()
    assert sum(line["reward/mean"] for line in lines) / 3 > 0.3, "the agent's reward is what is trained on"
    assert sum(line["episode/calls"] for line in lines) / 3 > 1.3, "the calculator is asked, then the answer is given"
    assert {line["train/rows_max"] for line in lines} == {1.0}
