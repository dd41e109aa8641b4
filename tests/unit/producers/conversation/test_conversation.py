"""The calls of an episode become rows: a call that continues an answer is joined to it, each token trained once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producers.conversation.calls import digest_key
from producers.conversation.conversation import Conversation
from producers.tokenizer import HfTokenizer
from schemas.errors import DataError
from schemas.messages import Sampling, Task, Trajectory, Turn
from tests.support.models.chat_templates import (
    TOOL,
    StoppingTemplate,
    named_template,
    sampled,
    tool_call,
    write_tokenizer,
)

USER = {"role": "user", "content": "What is 1 + 2?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return HfTokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture(scope="module")
def template(tokenizer: HfTokenizer) -> StoppingTemplate:
    return named_template(tokenizer, "append only")


def ask(conversation: Conversation, messages: list[Any], text: str, **settings: Any) -> tuple[int, str]:
    """One call answered with a text; its number, and why its prompt was as it was."""
    prompt = conversation.prompt(messages, **settings)
    ids = conversation._template.ids(text + "<|im_end|>")
    return conversation.add(prompt, sampled(ids), {"role": "assistant", "content": text}), prompt.why


def trajectory(conversation: Conversation, **settings: Any) -> Trajectory:
    sample = conversation.sample(0, "stop", **settings)
    task = Task(task_id=1, kind="train", text="x", n=1, sampling=Sampling())
    return sample.to_trajectory(task, "run", "generator")


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def row_texts(template: StoppingTemplate, found: Trajectory) -> list[str]:
    ids = found.tokens.numpy()
    return [template._tokenizer.hf.decode(ids[row.places]) for row in found.rows()]


def test_a_conversation_of_three_turns_is_one_row(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    assert ask(conversation, [USER], "It is 3") == (0, "first")
    second = [USER, answer("It is 3"), {"role": "user", "content": "Sure?"}]
    assert ask(conversation, second, "Yes") == (1, "joined")
    assert ask(conversation, [*second, answer("Yes"), {"role": "user", "content": "Why?"}], "Sums") == (2, "joined")
    found = trajectory(conversation)
    text = (
        "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\nIt is 3<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSums<|im_end|>"
    )
    assert row_texts(template, found) == [text]
    assert [(turn.role, turn.call) for turn in found.turns] == [
        ("prompt", -1), ("assistant", 0), ("user", -1), ("assistant", 1), ("user", -1), ("assistant", 2),
    ]  # fmt: skip
    assert (found.prompt[-4:], found.completion, found.calls) == ("ant\n", "Sums", 3)


def test_ids_are_those_that_were_sampled_however_their_text_would_be_cut(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    letters = [i for letter in "the answer" for i in template.ids(letter)] + template.ids("<|im_end|>")
    assert letters != template.ids("the answer<|im_end|>")
    first = conversation.prompt([USER])
    conversation.add(first, sampled(letters), answer("the answer"))
    following = conversation.prompt([USER, answer("the answer"), USER])
    assert following.ids[: len(first.ids) + len(letters)] == first.ids + letters
    assert (following.parent, following.why) == (0, "joined")


@pytest.mark.parametrize(
    "replayed",
    [
        {"role": "assistant", "content": None, "tool_calls": [tool_call("other", b=2, a=1)]},
        {"role": "assistant", "content": "", "tool_calls": [tool_call(a=1, b=2)], "refusal": None},
        {"role": "assistant", "content": [], "reasoning": " I add ", "tool_calls": [tool_call(a=1, b=2)]},
        {"role": "assistant", "content": "\n", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}]},
    ],
    ids=["arguments in another order", "empty text", "reasoning", "spaces"],
)  # fmt: skip
def test_what_clients_change_without_meaning_is_the_same_message(template: StoppingTemplate, replayed: Any) -> None:
    conversation = Conversation(template)
    ids = template.ids('<think>\nI add\n</think>\n\n<tool_call>{"name":  "add"}</tool_call><|im_end|>')
    given = {"role": "assistant", "content": None, "reasoning_content": "I add", "tool_calls": [tool_call(a=1, b=2)]}
    first = conversation.prompt([USER], [TOOL])
    conversation.add(first, sampled(ids), given)
    result = {"role": "tool", "tool_call_id": "call00001", "content": "3"}
    following = conversation.prompt([USER, replayed, result], [TOOL])
    assert following.why == "joined"
    rest = "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert following.ids == first.ids + ids + template.ids(rest)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda messages: [*messages[:1], answer("It is 4"), *messages[2:]], "history rewritten"),
        (lambda messages: [{"role": "user", "content": "What?"}, *messages[1:]], "history rewritten"),
        (lambda messages: [*messages[:2], USER, answer("never ours"), USER], "history rewritten"),
        (lambda messages: [{"role": "user", "content": "Something else"}], "first"),
    ],
    ids=["another answer", "another question", "a foreign answer after ours", "another conversation"],
)
def test_a_rewritten_history_begins_a_new_row(template: StoppingTemplate, change: Any, why: str) -> None:
    conversation = Conversation(template)
    ask(conversation, [USER], "It is 3")
    assert ask(conversation, change([USER, answer("It is 3"), USER]), "Yes")[1] == why
    found = trajectory(conversation)
    assert len(found.segments) == 2
    assert found.segments[1].shared > 0
    assert sum(found.loss_mask.numpy()) == sum(len(call.completion.tokens) for call in conversation._calls.values())


def test_other_tools_begin_a_new_row(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    ask(conversation, [USER], "It is 3")
    assert ask(conversation, [USER, answer("It is 3"), USER], "Yes", tools=[TOOL])[1] == "tools changed"


def test_of_two_choices_the_one_that_the_next_request_contains_goes_on(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    prompt = conversation.prompt([USER])
    for text in ("It is 3", "It is 4"):
        conversation.add(prompt, sampled(template.ids(text + "<|im_end|>")), answer(text))
    assert ask(conversation, [USER, answer("It is 4"), USER], "Yes")[1] == "joined"
    found = trajectory(conversation)
    (row,) = row_texts(template, found)
    assert "It is 4<|im_end|>\n<|im_start|>user" in row
    assert "It is 3" not in row
    assert found.calls == 3
    assert [turn.call for turn in found.turns if turn.role == "assistant"] == [1, 2]


def test_two_requests_that_go_on_with_one_answer_are_two_rows_that_share_it(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    ask(conversation, [USER], "It is 3")
    for text in ("Yes", "No"):
        ask(conversation, [USER, answer("It is 3"), {"role": "user", "content": f"Say {text}"}], text)
    found = trajectory(conversation)
    rows = row_texts(template, found)
    assert [row.count("It is 3") for row in rows] == [1, 1]
    assert (found.segments[1].parent, len(found.rows()[1].places) - found.segments[1].shared) == (
        0, found.segments[1].end - found.segments[1].start,
    )  # fmt: skip
    assert sum(found.loss_mask.numpy()) == sum(len(call.completion.tokens) for call in conversation._calls.values())


def test_the_same_answer_twice_is_trained_twice(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    ask(conversation, [USER], "It is 3")
    ask(conversation, [USER], "It is 3")
    found = trajectory(conversation)
    tokens = template.ids("It is 3<|im_end|>")
    assert [segment.end - segment.start - len(tokens) for segment in found.segments] == [found.segments[1].shared, 0]
    assert sum(found.loss_mask.numpy()) == 2 * len(tokens)


def test_an_answer_that_nobody_received_is_not_in_the_sample(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    conversation.remove(ask(conversation, [USER], "It is 3")[0])
    ask(conversation, [USER], "It is 4")
    found = trajectory(conversation)
    assert (found.calls, len(found.segments), found.completion) == (1, 1, "It is 4")
    assert conversation.prompt([USER, answer("It is 3"), USER]).parent is None


def test_sub_agents_are_told_apart_by_name_and_by_their_first_system_prompt(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    system = {"role": "system", "content": "You are the boss"}
    other = {"role": "system", "content": "You count"}
    ask(conversation, [system, USER], "I ask")
    ask(conversation, [other, USER], "Three")
    ask(conversation, [USER], "Named", name="critic")
    ask(conversation, [{"role": "system", "content": "Now be kind"}, USER, answer("I ask"), USER], "So 3")
    found = trajectory(conversation)
    names = [segment.name for segment in found.segments]
    assert (names[0], names[2], names[3]) == ("main", "critic", "main")
    assert names[1].startswith("agent-")
    assert found.completion == "So 3"
    only = trajectory(conversation, train=["main"])
    assert [segment.name for segment in only.segments] == ["main", "main"]
    with pytest.raises(DataError, match=r"no token to train: its calls are of agent-.*, critic, main"):
        conversation.sample(0, "stop", train=["unknown"])


def test_rewards_of_calls_stand_at_their_turns_and_versions_at_their_tokens(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    ids = template.ids("It is 3<|im_end|>")
    prompt = conversation.prompt([USER])
    conversation.set_reward(conversation.add(prompt, sampled(ids, version=4), answer("It is 3")), 0.5)
    following = conversation.prompt([USER, answer("It is 3"), USER])
    conversation.add(following, sampled(ids, version=5), answer("It is 3"))
    found = trajectory(conversation, reward=1.0, data={"k": 1})
    assert [turn.reward for turn in found.turns if turn.role == "assistant"] == [0.5, None]
    versions, mask = found.versions(), found.loss_mask.numpy()
    assert versions[mask == 1].tolist() == [4] * len(ids) + [5] * len(ids)
    np.testing.assert_array_equal(found.logprobs.numpy()[mask == 1], np.tile(sampled(ids).logprobs, 2))
    assert (found.reward, found.data) == (1.0, {"k": 1})


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_the_close_of_an_answer_that_was_cut_is_added_and_not_trained(template: StoppingTemplate, finish: Any) -> None:
    conversation = Conversation(template)
    ids = template.ids("It is")
    prompt = conversation.prompt([USER])
    conversation.add(prompt, sampled(ids, finish), answer("It is"))
    following = conversation.prompt([USER, answer("It is"), USER])
    assert following.ids[len(prompt.ids) + len(ids)] == template.ids("<|im_end|>")[0]
    conversation.add(following, sampled(ids, finish), answer("It is"))
    found = trajectory(conversation)
    assert found.tokens.numpy()[found.loss_mask.numpy() == 1].tolist() == ids * 2


def test_prompts_of_ids_are_joined_where_they_begin_with_all_that_is_held(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    first = template.ids("Count: one")
    conversation.add(conversation.raw_prompt(first), sampled([300, 301]), answer("two"))
    joined = conversation.raw_prompt([*first, 300, 301, 302])
    assert (joined.why, joined.parent) == ("raw", 0)
    conversation.add(joined, sampled([303]), answer("three"))
    assert conversation.raw_prompt([*first, 300]).parent is None
    found = trajectory(conversation)
    assert found.turns[-2:] == [
        Turn("user", len(first) + 2, len(first) + 3),
        Turn("assistant", len(first) + 3, len(first) + 4, 1),
    ]


def test_saved_calls_are_found_by_their_prompt_and_how_often_it_was_asked(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    first = conversation.prompt([USER])
    assert conversation.key(first) == digest_key(first.digest, 0)
    ask(conversation, [USER], "It is 3")
    conversation.remove(ask(conversation, [USER], "undelivered")[0])
    ask(conversation, [USER], "It is 4")
    partial = conversation.partial(3)
    assert [call.key for call in partial.calls] == [digest_key(first.digest, 0), digest_key(first.digest, 1)]
    assert conversation.key(first) == digest_key(first.digest, 2)
    assert (partial.sample, partial.size) == (3, sum(len(call.tokens) for call in partial.calls))


def test_an_episode_without_an_answered_call_has_no_sample(template: StoppingTemplate) -> None:
    with pytest.raises(DataError, match="no model call that was answered"):
        Conversation(template).sample(0, "stop")


def test_an_episode_that_is_handed_over_before_its_first_token_is_empty(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    assert conversation.sample(2, "abort").tokens == []
    conversation.add(conversation.prompt([USER]), sampled([], "abort"), answer(""))
    handed_over = conversation.sample(2, "abort").to_partial()
    assert (handed_over.sample, handed_over.size, len(handed_over.calls)) == (2, 0, 1)


def test_the_conversation_for_people_is_that_of_the_main_agent(template: StoppingTemplate) -> None:
    conversation = Conversation(template)
    ask(conversation, [USER], "It is 3")
    ask(conversation, [USER, answer("It is 3"), USER], "Still")
    ask(conversation, [USER], "aside", name="critic")
    assert conversation.messages() == [USER, answer("It is 3"), USER, answer("Still")]


def test_a_template_that_refuses_the_messages_says_so(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    refusing = StoppingTemplate(tokenizer, "{{ raise_exception('only users') }}", ["<|im_end|>"])
    with pytest.raises(DataError, match="refuses the messages: only users"):
        Conversation(refusing).prompt([USER])


def test_where_the_bridge_is_off_each_call_is_a_row_that_shares_what_it_can(tokenizer: HfTokenizer) -> None:
    template = named_template(tokenizer, "append only")
    template.bridge_off = "its turns are not joined"
    conversation = Conversation(template)
    ask(conversation, [USER], "It is 3")
    assert ask(conversation, [USER, answer("It is 3"), USER], "Yes")[1] == "no bridge"
    found = trajectory(conversation)
    first, second = found.segments
    assert (second.parent, second.shared) == (0, first.end)


def test_one_history_as_the_template_writes_it_begins_a_row_where_reasoning_is_dropped(tokenizer: HfTokenizer) -> None:
    conversation = Conversation(named_template(tokenizer, "old reasoning dropped"), history="template")
    ids = conversation._template.ids("<think>\nOne\n</think>\n\nIt is 3<|im_end|>")
    given = {**answer("It is 3"), "reasoning_content": "One"}
    conversation.add(conversation.prompt([USER]), sampled(ids), given)
    following = conversation.prompt([USER, answer("It is 3"), USER])
    assert following.why == "template"
    assert "One" not in conversation._template.decode(following.ids)
