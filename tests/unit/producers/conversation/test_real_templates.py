"""Turns are joined on the chat templates of real models, which an installed trl carries as files."""

from pathlib import Path
from typing import Any

import pytest

from producers.conversation.template_check import check_bridge
from producers.tokenizer import HfTokenizer
from tests.support.models.chat_templates import TOOL, StoppingTemplate, tool_call
from tests.support.models.trl_templates import real_template, template_files, write_common_tokenizer
from tests.support.producers.conversations import Turn, can_show, check_exact, play
from tests.support.runs.programs import skip_or_fail

USER = {"role": "user", "content": "Multiply seven by eight"}
NEXT = {"role": "user", "content": "Really certain"}
ANSWERS = [
    Turn({"role": "assistant", "content": "Fiftysix "}, [NEXT]),
    Turn({"role": "assistant", "content": "Yes", "reasoning_content": "Seven eights"}, [USER], choices=2),
    Turn({"role": "assistant", "content": "Fiftysix again"}, [NEXT], "length"),
    Turn({"role": "assistant", "content": "Yes indeed"}, [USER], "stop string"),
    Turn({"role": "assistant", "content": "Fiftysix"}, []),
]
RESULT = {"role": "tool", "name": "add", "content": "product"}
CALLS = [
    Turn({"role": "assistant", "content": None, "tool_calls": [tool_call(a=1, b="second")]},
         [{**RESULT, "tool_call_id": "call00001"}]),
    Turn({"role": "assistant", "content": None, "reasoning_content": "Once more",
          "tool_calls": [tool_call(a=1, b="second"), tool_call("call00002", a=2, b="second")]},
         [{**RESULT, "tool_call_id": "call00001"}, {**RESULT, "tool_call_id": "call00002", "content": "quotient"}]),
    Turn({"role": "assistant", "content": "Fiftysix"}, []),
]  # fmt: skip
HABITS = frozenset({"reasoning dropped", "spaces stripped", "arguments re-encoded"})


FILES = template_files()
COMMON = frozenset({"deepseekv3", "gemma3", "glm4moe", "gptoss", "llama3_2", "qwen2_5", "qwen3", "qwen3_5_think"})
MORE = pytest.mark.matrix("the template of one more model")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return HfTokenizer(str(write_common_tokenizer(tmp_path_factory.mktemp("tokenizer"), FILES)))


def test_trl_is_installed_for_its_templates() -> None:
    if not FILES:
        skip_or_fail("trl is not installed: pip install trl")
    assert len(FILES) > 50
    assert {file.stem for file in FILES} >= COMMON


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[] if file.stem in COMMON else MORE, id=file.stem) for file in FILES]
)
def test_a_real_template_is_joined_in_every_turn_that_it_can_show(tokenizer: HfTokenizer, file: Path) -> None:
    template = real_template(tokenizer, file)
    assert check_bridge(template) is None
    rows = []
    for plan, tools in ((ANSWERS, None), (CALLS, [TOOL])):
        plan = shown(template, plan, tools)
        joins_with_and_without_older_turns_are_equal(template, plan, tools)
        for habits in (frozenset[str](), HABITS):
            for history in ("held", "template"):
                settings: Any = {"habits": habits, "history": history, "tools": tools, "chance": 0.02}
                played = play(template, [USER], plan, **settings)
                rows.append((history, len(check_exact(played).segments)))
                if history == "held":
                    assert {prompt.why for prompt in played.prompts[1:]} <= {"joined"}
    assert {number for history, number in rows if history == "held"} == {1}


def joins_with_and_without_older_turns_are_equal(
    template: StoppingTemplate, plan: list[Turn], tools: list[Any] | None
) -> None:
    short = template.short_history
    prompts = []
    longer = [*plan[:-1], Turn(plan[-1].answer, [USER]), *plan]
    for template.short_history in (False, short):
        played = play(template, [USER], longer, tools=tools)
        prompts.append([prompt.ids for prompt in played.prompts])
    assert prompts[0] == prompts[1]


def shown(template: StoppingTemplate, plan: list[Turn], tools: list[Any] | None) -> list[Turn]:
    """The turns that a template takes and shows; at least the last answer."""
    messages: list[Any] = [USER]
    kept = []
    for turn in plan:
        words = [m["content"] for m in turn.new] + (["second"] if turn.answer.get("tool_calls") else [])
        if not turn.new or can_show(template, [*messages, turn.answer, *turn.new], tools, words):
            kept.append(turn)
            messages += [turn.answer, *turn.new]
    return kept
