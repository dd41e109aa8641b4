"""An agent's episode in the reader of the dashboard, in a real browser: its messages, its rows and what they earned."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, expect

from broker.client import Broker
from producers.tokenizer import HfTokenizer
from schemas.codec import Array
from schemas.digests import digest
from schemas.images import ImageSettings, probe_image
from schemas.messages import PlacedImage, Segment, Span, Trajectory, Turn
from schemas.messages.moments import Moment, pack
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.prompt_groups import make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.browser import PHONE, WatchedPage

MESSAGES = [
    {"role": "system", "content": "Answer with a number. Use the calculator for what you can't do in your head."},
    {"role": "user", "content": "37*84="},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "A product of two numbers of two digits: better not in my head.",
        "tool_calls": [{"id": "c1", "function": {"name": "calculator", "arguments": '{"expression": "37*84"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3108"},
    {"role": "assistant", "content": "3108"},
]
PARTS = ["37*84=", "37*84", "=3108+", "3108", "12-3=", "9"]
"""Two rows: question, call, result and answer; a helper that was asked after the question."""


def episode(model: Path) -> Trajectory:
    ids = [HfTokenizer(str(model)).encode(text) for text in PARTS]
    ends = [sum(map(len, ids[: k + 1])) for k in range(len(ids))]
    starts = [0, *ends]
    own = [0, 1, 0, 1, 0, 1]
    mask = [bit for part, bit in zip(ids, own, strict=True) for _ in part]
    roles = ["prompt", "assistant", "tool", "assistant", "user", "assistant"]
    rewards = [None, 0.25, None, 0.75, None, None]
    calls = [-1, 0, -1, 1, -1, 2]
    return replace(
        make_trajectory(0, 0),
        tokens=Array.of([token for part in ids for token in part], "i4"),
        loss_mask=Array.of(mask, "u1"),
        logprobs=Array.of([-0.4 * bit for bit in mask], "f4"),
        spans=[Span(3, starts[1], ends[1]), Span(4, starts[3], ends[3]), Span(4, starts[5], ends[5])],
        turns=[Turn(*turn) for turn in zip(roles, starts, ends, calls, rewards, strict=False)],
        segments=[Segment(0, ends[3]), Segment(ends[3], ends[5], 0, ends[0], "helper")],
        finish="deadline",
        reward=1.0,
        metrics={"agents/tool_s": 0.125},
        calls=3,
        data={"messages": MESSAGES, "answer": "3108"},
        trace=pack(
            Moment("admitted", "", 1000_000_000, 1000_000_000),
            Moment("attempt", "generator-0", 1001_000_000, 1002_000_000),
            Moment("chat", "", 1001_000_000, 1002_000_000, 6),
            Moment("attempt", "generator-1", 1004_000_000, 1009_000_000),
            Moment("chat", "", 1004_000_000, 1006_000_000, 6),
            Moment("tool", "calculator", 1006_000_000, 1007_000_000),
            Moment("chat", "", 1007_000_000, 1009_000_000, 4),
        ),
    )


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_an_episode_is_read_by_message_and_by_row(browser: Browser, broker: Broker, tmp_path: Path, look: str) -> None:
    model = make_tiny_model(tmp_path / "model")
    take_over(broker)
    broker.ledger.admit(make_task(0))
    tasks = broker.task_queue("g")
    tasks.read(1, 10)
    assert tasks.publish(0, [episode(model)]) == ["ok"]
    options = {"viewport": PHONE} if look == "phone" else {"color_scheme": look}
    with ControlPlane(broker, "episodes", model=str(model)) as api:
        seen = WatchedPage(browser, api.url, **options)
        page = seen.page
        page.locator(".trajectory").first.click()
        messages = page.locator(".messages > li")
        expect(messages).to_have_count(4)
        expect(messages.nth(2)).to_contain_text("calculator")
        expect(messages.nth(2).locator("pre").last).to_be_hidden()
        messages.nth(2).locator("summary").last.click()
        expect(messages.nth(2).locator("pre").last).to_have_text("3108")
        for fact in ("deadline", "Model calls", "Workflow's reward", "agents/tool_s"):
            expect(page.locator(".facts")).to_contain_text(fact)
        expect(page.locator(".facts")).not_to_contain_text("better not in my head")
        moments = page.locator(".trace li")
        expect(moments).to_have_count(7)
        expect(moments.nth(5)).to_have_text("tool calculator, 1.0 s")
        expect(moments.nth(5)).to_have_attribute("data-inside", "")
        turns = page.locator(".tokens .turn")
        expect(turns).to_have_count(4)
        expect(turns.nth(3)).to_contain_text("reward 0.750")
        page.locator(".rows button").nth(1).click()
        expect(turns).to_have_count(3)
        expect(turns.nth(2)).to_contain_text("9")
        first = page.locator(".tokens .token").first
        expect(first).to_have_attribute("data-shade", "none")
        page.locator(".tokens").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator(".token.is-chosen")).to_have_text("9")
        wide = page.evaluate(
            "document.querySelector('dialog').scrollWidth - document.querySelector('dialog').clientWidth"
        )
        assert (wide, seen.violations(), seen.errors, seen.elsewhere()) == (0, [], [], [])
        seen.page.screenshot(path=tmp_path / f"{look}.png")
        seen.context.close()


def test_images_are_seen_where_they_stand_and_grow_when_clicked(browser: Browser, broker: Broker) -> None:
    image = probe_image(ImageSettings(14, 2, 2, 784, 12544, (0.5,) * 3, (0.5,) * 3))
    name, gone = digest(image), "0" * 32
    content = [{"type": "text", "text": "What is "}, *({"type": "image", "digest": one} for one in (name, gone))]
    seen_by_policy = replace(
        make_trajectory(0, 0),
        images=[PlacedImage(name, 0, 1)],
        data={"messages": [{"role": "user", "content": content}]},
    )
    take_over(broker)
    broker.ledger.admit(make_task(0))
    tasks = broker.task_queue("g")
    tasks.read(1, 10)
    tasks.keep_images(0, {name: image})
    assert tasks.publish(0, [seen_by_policy]) == ["ok"]
    with ControlPlane(broker, "episodes") as api:
        seen = WatchedPage(browser, api.url)
        seen.page.locator(".trajectory").first.click()
        pictures = seen.page.locator(".messages .pictures > li")
        expect(pictures).to_have_count(2)
        shown = pictures.first.locator("img")
        expect(shown).to_have_js_property("naturalWidth", 56)
        expect(pictures.nth(1)).to_contain_text("is not in the pipeline")
        pictures.first.locator("button").click()
        expect(pictures.first).to_have_class("is-large")
        assert (seen.violations(), seen.elsewhere()) == ([], [])
        seen.context.close()
