"""The dashboard in a real browser, against a running system: what users see and do there."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, expect

from deploy.control_plane.address import page_link
from tests.support.runs.browser import PATIENCE_MS, PHONE, WatchedPage
from tests.support.runs.dashboard_run import START_S, System

pytestmark = pytest.mark.timeout(480)

TOKEN = "a-token-of-the-tests-1234"


@pytest.fixture(scope="module")
def system(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("dashboard"))
    try:
        system.wait()
        yield system
    finally:
        system.stop()


Open = Callable[..., WatchedPage]


@pytest.fixture
def visit(browser: Browser, system: System) -> Iterator[Open]:
    """Opens the page, and closes it at the end."""
    opened: list[WatchedPage] = []

    def visit(url: str | None = None, token: str | None = None, **options: Any) -> WatchedPage:
        seen = WatchedPage(browser, url or system.url, token if url else system.token, **options)
        opened.append(seen)
        return seen

    yield visit
    for seen in opened:
        seen.close()


@contextmanager
def frozen(seen: WatchedPage) -> Iterator[None]:
    """The run of the page stands still: no step is taken, so that no trajectory leaves while it is read."""

    def order(path: str, body: dict[str, Any]) -> None:
        answer = seen.page.request.post(f"{seen.url}v1/{path}", data={**body, "wait_s": 60})
        assert answer.ok, answer.text()

    order("pause", {"mode": "freeze"})
    try:
        yield
    finally:
        order("resume", {})


def search_again(seen: WatchedPage, state: str) -> Locator:
    """The list of trajectories in this state as it is now; its rows."""
    seen.page.locator("#search [name=state]").select_option(state)
    expect(seen.page.locator(".trajectory-id").first).to_contain_text(state, timeout=PATIENCE_MS)
    with seen.page.expect_response(lambda answer: f"state={state}" in answer.url):
        seen.page.get_by_role("button", name="Search again").click()
    return seen.page.locator(".trajectory")


def confirm(seen: WatchedPage, verb: str) -> None:
    dialog = seen.page.locator("dialog[open]")
    dialog.get_by_role("button", name=verb, exact=True).click()
    expect(dialog).to_have_count(0)


def test_the_run_is_seen_moving_and_nothing_comes_from_elsewhere(visit: Open) -> None:
    seen = visit()
    page = seen.page
    expect(page.locator("#state")).to_have_text("running", timeout=PATIENCE_MS)
    expect(page.locator("#link")).to_have_text("live")
    step = seen.number("step")
    seen.until_step_after(step)
    assert seen.number("generated") > 0
    expect(page.locator("#bottleneck")).not_to_be_empty()
    expect(page.locator("svg.flow")).to_have_attribute("aria-label", re.compile(r"Generators: .* tok/s"))
    expect(page.locator(".edge[data-edge=trajectories] .edge-rate")).to_contain_text("/s")
    expect(page.locator(".edge[data-edge=weights]")).to_contain_text("staleness")
    for chart in ("#chart-reward", "#chart-tokens", "#chart-gap"):
        expect(page.locator(f"{chart} canvas")).to_be_visible(timeout=PATIENCE_MS)
    assert page.locator(".bar-of").count() > 1
    expect(page.locator(".service[data-service=generator-0]")).to_contain_text("tok/s")
    expect(page.locator("#use-bars .use")).to_have_count(3)
    expect(page.locator("#use-bars [data-part=trained]")).to_contain_text("trained")
    page.locator("#axis").get_by_role("button", name="Time").click()
    expect(page.locator("#axis [data-axis=time]")).to_have_attribute("aria-pressed", "true")
    assert len(seen.requests) > 20
    assert (seen.errors, seen.elsewhere()) == ([], [])


def test_pause_freezes_the_run_and_resume_goes_on(visit: Open) -> None:
    seen = visit()
    page = seen.page
    read = (
        "async () => { const s = await (await fetch('v1/status')).json(); return [s.step, s.ledger.tokens_generated]; }"
    )
    page.get_by_role("button", name="Pause").click()
    confirm(seen, "Pause")
    expect(page.locator("#state")).to_have_text("paused", timeout=PATIENCE_MS)
    expect(page.locator("#banner")).to_contain_text("Paused (freeze) by dashboard")
    frozen = page.evaluate(read)
    # The control plane looks again once a second: after three looks nothing may have moved.
    time = page.evaluate("async () => (await (await fetch('v1/status')).json()).time")
    seen.until("async then => (await (await fetch('v1/status')).json()).time > then + 3", time)
    assert page.evaluate(read) == frozen
    assert seen.number("step") == frozen[0]
    page.get_by_role("button", name="Resume").click()
    confirm(seen, "Resume")
    expect(page.locator("#state")).to_have_text("running", timeout=PATIENCE_MS)
    seen.until_step_after(frozen[0])
    expect(page.locator(".event[data-name=paused]").first).to_be_visible()
    expect(page.locator(".event[data-name=resumed]").first).to_be_visible()
    assert seen.errors == []


def test_scale_starts_a_replica_and_stops_it(visit: Open) -> None:
    seen = visit()
    page = seen.page
    page.get_by_role("button", name="Start another generator").click()
    confirm(seen, "Start it")
    second = page.locator(".service[data-service=generator-1]")
    expect(second).to_contain_text("tok/s", timeout=1000 * START_S)
    expect(page.locator(".node[data-node=generator] .node-note")).to_contain_text("2 live")
    page.get_by_role("button", name="Stop a generator").click()
    confirm(seen, "Stop it")
    expect(second).to_have_count(0, timeout=PATIENCE_MS)
    assert seen.errors == []


def test_a_killed_generator_turns_red_and_leaves(visit: Open, system: System) -> None:
    seen = visit()
    spot = system.start("generator", "spot")
    row = seen.page.locator(".service[data-service=spot]")
    try:
        expect(row).to_have_attribute("data-presence", "live", timeout=1000 * START_S)
    finally:
        spot.kill()
        spot.wait(10)
    expect(row).to_have_attribute("data-presence", "silent", timeout=PATIENCE_MS)
    expect(row).to_contain_text("silent for")
    system.age_heartbeat("spot", 20)
    expect(row).to_have_count(0, timeout=PATIENCE_MS)
    expect(seen.page.locator("#service-list .empty")).to_contain_text("spot")
    assert seen.errors == []


def test_a_trajectory_opens_and_its_tokens_are_coloured(visit: Open) -> None:
    seen = visit()
    page = seen.page
    with frozen(seen):
        first = search_again(seen, "trained").first
        first.focus()
        page.keyboard.press("Enter")
        drawer = page.locator("dialog.drawer")
        tokens = drawer.locator(".turn .token")
        expect(tokens.first).to_be_visible()
        assert tokens.count() > 5
        own = drawer.locator(".turn .token:not([data-shade=none])").first
        expect(own).to_have_attribute("data-shade", re.compile(r"version-\d"))
        drawer.get_by_role("button", name="Log-probability").click()
        expect(own).to_have_attribute("data-shade", re.compile(r"likely-\d"))
        drawer.get_by_role("button", name="Mask").click()
        expect(own).to_have_attribute("data-shade", "own")
        drawer.locator(".tokens").focus()
        page.keyboard.press("ArrowRight")
        expect(drawer.locator(".token-line")).to_contain_text("log-probability -")
        expect(drawer.locator(".facts")).to_contain_text("trained in step")
        assert seen.violations() == []
        title = drawer.locator("h2").inner_text()
        page.keyboard.press("j")
        expect(drawer.locator("h2")).not_to_have_text(title)
        page.keyboard.press("Escape")
        expect(drawer).to_have_count(0)
    page.locator("#search [name=task_id]").fill("999999999")
    expect(page.locator("#trajectory-list")).to_contain_text("None fits")
    assert seen.errors == []


def test_a_trajectory_that_has_left_is_told_with_what_the_list_showed(visit: Open) -> None:
    seen = visit()
    page = seen.page
    gone = {"status": 404, "title": "Not Found", "detail": "sample 0 of task 7 is not in the pipeline"}
    page.route(re.compile(r"/v1/trajectories/\d+/\d+$"), lambda route: route.fulfill(status=404, json=gone))
    row = page.locator(".trajectory").first
    said = row.locator(".trajectory-text b").inner_text()
    row.click()
    drawer = page.locator("dialog.drawer")
    expect(drawer).to_contain_text("It has left the broker")
    expect(drawer.locator("pre").last).to_have_text(said)
    assert seen.violations() == []
    # Chromium itself writes a line for an answer that is a 404.
    assert [line for line in seen.errors if "404" not in line] == []


def test_a_dead_letter_is_shown_and_dropped(visit: Open, system: System) -> None:
    seen = visit()
    page = seen.page
    letter = page.locator(".letter").first
    expect(letter).to_contain_text("cannot be scored", timeout=PATIENCE_MS)
    key = letter.get_attribute("data-key")
    letter.get_by_role("button", name="Show").click()
    expect(page.locator("dialog pre")).not_to_be_empty()
    page.keyboard.press("Escape")
    page.locator(f".letter[data-key='{key}']").get_by_role("button", name="Drop").click()
    confirm(seen, "Drop it")
    expect(page.locator(f".letter[data-key='{key}']")).to_have_count(0)
    assert seen.errors == []


def test_a_failed_group_is_requeued_from_its_dead_letter(visit: Open, system: System) -> None:
    seen = visit()
    page = seen.page
    letter = system.fail_a_group()
    row = page.locator(f".letter[data-key='{letter}']")
    expect(row).to_contain_text("no generator could make it", timeout=PATIENCE_MS)
    row.get_by_role("button", name="Requeue").click()
    confirm(seen, "Requeue")
    expect(row).to_have_count(0)
    expect(page.locator(".event[data-name=requeue]").first).to_contain_text("by dashboard")
    assert seen.errors == []


def test_a_letter_whose_group_went_on_is_refused_in_the_dialog(visit: Open) -> None:
    seen = visit()
    page = seen.page
    row = page.locator(".letter", has_text="cannot be scored").first
    expect(row).to_be_visible(timeout=PATIENCE_MS)
    row.get_by_role("button", name="Requeue").click()
    dialog = page.locator("dialog[open]")
    dialog.get_by_role("button", name="Requeue", exact=True).click()
    expect(dialog.locator(".problem")).to_contain_text("dead letter")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_what_the_supervisor_does_is_in_the_timeline(visit: Open, system: System) -> None:
    seen = visit()
    reward = system.run.service("reward-0")
    assert reward is not None
    reward.kill()
    events = seen.page.locator(".event[data-name=service]")
    expect(events.filter(has_text="killed by SIGKILL").first).to_contain_text("reward-0", timeout=PATIENCE_MS)
    expect(events.filter(has_text="restarted").first).to_be_visible(timeout=PATIENCE_MS)
    assert seen.errors == []


def test_the_api_is_described_and_tried_without_internet(visit: Open, system: System) -> None:
    seen = visit(f"{system.url}docs", token=system.token)
    page = seen.page
    expect(page.locator(".opblock")).to_have_count(len(seen.routes()), timeout=PATIENCE_MS)
    status = page.locator("#operations-reading-status")
    status.locator(".opblock-summary-control").click()
    status.get_by_role("button", name="Try it out").click()
    status.get_by_role("button", name="Execute").click()
    expect(status.locator(".live-responses-table")).to_contain_text('"bottleneck"', timeout=PATIENCE_MS)
    expect(status.locator(".curl-command")).to_contain_text("/v1/status")
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert (seen.errors, seen.elsewhere()) == ([], [])


def test_the_present_policy_is_talked_to(visit: Open) -> None:
    seen = visit()
    page = seen.page
    page.locator("#tab-playground").click()
    page.locator("#play-form [name=as]").select_option("text")
    page.get_by_label("What is said to the policy").fill("3+4=")
    page.locator("#play-form [name=max_tokens]").fill("5")
    page.get_by_role("button", name="Send").click()
    tokens = page.locator(".play-turn[data-role=assistant] .token")
    expect(tokens.first).to_be_visible(timeout=PATIENCE_MS)
    assert 1 <= tokens.count() <= 5
    tokens.first.hover()
    expect(page.locator(".play-turn .token-line")).to_contain_text("probability")
    assert seen.violations() == []
    assert (seen.errors, seen.elsewhere()) == ([], [])


def test_settings_change_while_it_runs(visit: Open) -> None:
    seen = visit()
    page = seen.page
    expect(page.locator("[data-figure=staleness] .card-unit")).to_have_text("of 4", timeout=PATIENCE_MS)
    for value, shown in (("3", "of 3"), ("", "of 4")):
        page.get_by_role("button", name="Orders").click()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Staleness bound").fill(value)
        confirm(seen, "Apply")
        if value:
            expect(page.locator("[data-figure=staleness] .card-unit")).to_have_text(shown)
    expect(page.locator(".event[data-name=settings]").first).to_contain_text("configuration")
    assert seen.errors == []


def test_everything_is_reached_by_keyboard(visit: Open) -> None:
    seen = visit()
    page = seen.page
    expect(page.locator("#pause")).to_be_enabled(timeout=PATIENCE_MS)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "pause":
            break
    expect(page.locator("#pause")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("dialog[open]")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    expect(page.locator("#pause")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_violation_of_accessibility(visit: Open, scheme: str) -> None:
    seen = visit(color_scheme=scheme)
    expect(seen.page.locator(".trajectory").first).to_be_visible(timeout=PATIENCE_MS)
    expect(seen.page.locator("#chart-reward canvas")).to_be_visible(timeout=PATIENCE_MS)
    assert seen.violations() == []
    seen.page.get_by_role("button", name="Pause").click()
    assert seen.violations() == []


def test_the_theme_is_switched_and_kept(visit: Open) -> None:
    seen = visit(color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = seen.page.evaluate(background)
    seen.page.locator("#theme").click()
    assert seen.page.evaluate(background) != light
    seen.page.reload()
    assert seen.page.evaluate(background) != light


def test_it_fits_a_phone(visit: Open) -> None:
    seen = visit(viewport=PHONE, has_touch=True, is_mobile=True)
    page = seen.page
    expect(page.locator(".trajectory").first).to_be_visible(timeout=PATIENCE_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for part in ("#pause", "#state", ".card", "svg.flow", "#chart-reward canvas", ".service", "#letters"):
        box = page.locator(part).first.bounding_box()
        assert box is not None, part
        assert box["x"] >= 0, part
        assert box["x"] + box["width"] <= PHONE["width"], part
    page.locator("#pause").tap()
    box = page.locator("dialog[open]").bounding_box()
    assert box is not None
    assert box["width"] <= PHONE["width"]
    page.keyboard.press("Escape")
    assert seen.violations() == []
    assert seen.errors == []


def test_the_printed_link_opens_the_page_and_the_token_leaves_the_address(visit: Open, system: System) -> None:
    seen = visit(page_link(system.url, system.token))
    expect(seen.page.locator("#state")).to_have_text("running", timeout=PATIENCE_MS)
    assert seen.page.url == system.url
    assert seen.page.evaluate("sessionStorage.getItem('tidemill-token')") == system.token
    assert not [url for url in seen.requests if system.token in url]
    stranger = visit(system.url + "?again")
    expect(stranger.page.get_by_label("Token", exact=True)).to_be_visible()


def test_a_token_is_asked_for_and_a_lost_server_is_noticed(visit: Open, system: System) -> None:
    control = system.start("control", "second", TIDEMILL_CONTROL_TOKEN=TOKEN)
    try:
        seen = visit(system.address(system.folder / "second"))
        page = seen.page
        field = page.get_by_label("Token", exact=True)
        field.fill("not-the-right-token")
        page.keyboard.press("Enter")
        expect(page.locator("dialog .problem")).to_have_text("That token was not accepted.")
        field.fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("running", timeout=PATIENCE_MS)
        assert page.evaluate("Object.values(localStorage).join()").find(TOKEN) == -1
        assert page.evaluate("sessionStorage.getItem('tidemill-token')") == TOKEN

        control.kill()
        control.wait(10)
        expect(page.locator("#link")).to_have_text("offline", timeout=PATIENCE_MS)
        expect(page.locator("#banner")).to_contain_text("has not answered")
        expect(page.locator("#pause")).to_be_disabled()
        control = system.start("control", "second", TIDEMILL_CONTROL_TOKEN=TOKEN)
        expect(page.locator("#link")).to_have_text("live", timeout=PATIENCE_MS)
        expect(page.locator("#banner")).to_be_hidden()
        step = seen.number("step")
        seen.until_step_after(step)
    finally:
        control.kill()
        control.wait(10)
