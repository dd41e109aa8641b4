"""The page over runs on disk in a real browser, without a broker: compare runs, read groups, evaluations and logs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import PATIENCE_MS, PHONE, WatchedPage, open_browser
from tests.support.run_folders import make_run

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]
VIEWS = ("metrics", "groups", "groups/7/71", "evaluations", "machine", "logs", "setup", "runs")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "slow", steps=30)
    make_run(folder / "fast", steps=30, lr=1e-4, state="failed: no memory")
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-P", "-m", "deploy.cli", "ui", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


Open = Callable[..., WatchedPage]


@pytest.fixture
def visit(browser: Browser, url: str) -> Iterator[Open]:
    opened: list[WatchedPage] = []

    def visit(place: str = "", **options: Any) -> WatchedPage:
        seen = WatchedPage(browser, f"{url}#/{place}", **options)
        opened.append(seen)
        return seen

    yield visit
    for seen in opened:
        assert (seen.errors, seen.elsewhere()) == ([], [])
        seen.close()


def saved(seen: WatchedPage, button: str) -> str:
    """The file that a button saves."""
    with seen.page.expect_download() as download:
        seen.page.get_by_role("button", name=button, exact=True).click()
    return Path(download.value.path()).read_text(errors="replace")


def test_two_runs_are_chosen_and_overlaid(visit: Open) -> None:
    page = visit().page
    row = page.locator("tr[data-run=fast]")
    expect(row).to_contain_text("failed", timeout=PATIENCE_MS)
    expect(page.locator("#tab-overview")).to_have_count(0)
    page.get_by_label("Compare slow").check()
    page.get_by_label("Compare fast").check()
    page.get_by_role("button", name="Compare 2 runs").click()
    card = page.locator("[data-metric='reward/mean']")
    expect(card.locator("canvas")).to_be_visible()
    expect(card.locator(".grid-legend .key")).to_have_count(2)
    expect(card.locator("[role=img]")).to_have_attribute(
        "aria-label", "reward/mean: slow 0.02955 at first, 0.5934 now; fast 0.2592 at first, 0.9999 now"
    )
    page.locator("#tab-setup").click()
    expect(page.locator("#setup-settings")).to_contain_text("trainer.optimizer.lr")
    expect(page.locator("#setup-settings tbody tr")).to_have_count(2)


def test_metrics_are_searched_smoothed_drawn_over_samples_and_saved(visit: Open) -> None:
    seen = visit("metrics?run=slow")
    page = seen.page
    page.get_by_label("Search metrics by name").fill("train")
    expect(page.locator(".grid-card")).to_have_count(2)
    expect(page.locator("[data-metric='train/entropy'] canvas")).to_be_visible()
    page.locator("#grid-axis").get_by_role("button", name="Samples").click()
    page.get_by_label("Log axis").check()
    page.locator("#grid-smooth").fill("0.9")
    expect(page.locator("#grid-smooth-value")).to_have_text("0.90")
    lines = saved(seen, "Save train/entropy as CSV").splitlines()
    assert lines[:2] == ["run,step,train/entropy", "slow,1,1"]
    assert len(lines) == 31
    assert saved(seen, "Save train/entropy as a picture")[1:4] == "PNG"
    assert saved(seen, "CSV").splitlines()[0] == "run,step,train/entropy,train/grad_norm"
    plot = page.locator("[data-metric='train/entropy'] .u-over")
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 40, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 140, box["y"] + 40)
    page.mouse.up()
    page.get_by_role("button", name="Reset zoom").click()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_disabled()


def test_the_samples_of_a_prompt_are_read_side_by_side(visit: Open) -> None:
    seen = visit("groups?run=slow")
    page = seen.page
    page.get_by_label("Text in prompt or completion").fill("what is 7 plus")
    expect(page.locator(".group")).to_have_count(2, timeout=PATIENCE_MS)
    page.locator("#group-search [name=sort]").select_option("reward_high")
    expect(page.locator(".group").first).to_contain_text("0.500")
    page.locator(".group").first.click()
    samples = page.locator(".sample")
    expect(samples).to_have_count(4)
    expect(samples.first).to_have_attribute("data-best", "")
    expect(samples.first).to_contain_text("+0.500")
    expect(samples.nth(2)).to_contain_text("length-0.200")
    page.get_by_role("button", name="Difference to the best").click()
    expect(page.locator(".sample[data-sample='2'] del")).to_have_text("8")
    expect(page.locator(".sample[data-sample='2'] ins")).to_have_text("10")
    page.locator(".side-bar select").select_option("longest")
    expect(samples.first).to_have_attribute("data-sample", "3")
    assert json.loads(saved(seen, "Save as JSON"))["task_id"] == 71
    page.get_by_role("link", name="All groups").click()
    expect(page.locator(".group")).to_have_count(2)


def test_the_worst_sample_of_the_last_evaluation_is_two_clicks_away(visit: Open) -> None:
    page = visit("runs").page
    page.locator("#tab-evaluations").click()
    worst = page.locator("#prompt-list .cell").nth(1)
    expect(worst).to_have_text("0.00", timeout=PATIENCE_MS)
    worst.click()
    expect(page.locator("dialog .sample")).to_contain_text("It is -1")
    page.keyboard.press("Escape")
    expect(page.locator("#evaluation-list tbody tr").first).to_contain_text("+0.500")


def test_the_use_of_machines_and_the_alerts_of_a_run_are_shown(visit: Open) -> None:
    seen = visit("machine?run=slow")
    page = seen.page
    cards = page.locator("#machine-charts .grid-card")
    expect(cards).to_have_count(3, timeout=PATIENCE_MS)
    expect(cards.first.locator(".grid-legend .key")).to_have_count(4)
    assert "trainer 1 at first" in (cards.first.locator("[role=img]").get_attribute("aria-label") or "")
    expect(page.locator(".alert")).to_contain_text("no step for 15 minutes")
    assert saved(seen, "Save queues as CSV").splitlines()[1] == "1000000000,4,0"


def test_every_route_is_described_and_tried_without_internet(visit: Open, url: str) -> None:
    seen = visit("runs")
    page = seen.page
    page.goto(f"{url}docs")
    expect(page.locator(".opblock")).to_have_count(len(seen.routes()), timeout=PATIENCE_MS)
    runs = page.locator("#operations-runs-list_runs")
    runs.locator(".opblock-summary-control").click()
    runs.get_by_role("button", name="Try it out").click()
    runs.get_by_role("button", name="Execute").click()
    expect(runs.locator(".live-responses-table")).to_contain_text('"slow"', timeout=PATIENCE_MS)
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_log_is_filtered_and_followed(visit: Open, folder: Path) -> None:
    page = visit("logs?run=slow").page
    lines = page.locator(".log-line")
    expect(lines.last).to_contain_text("a tracker is given up", timeout=PATIENCE_MS)
    page.locator("#log-level").select_option("warning")
    expect(lines).to_have_count(1)
    with (folder / "slow" / "logs" / "trainer.log").open("a") as stream:
        stream.write(json.dumps({"event": "and then this", "level": "error", "step": 7}) + "\n")
    expect(lines.last).to_contain_text("and then this step=7")
    page.get_by_label("Search log lines").fill("tracker")
    expect(lines).to_have_count(1)


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, {"viewport": PHONE, "is_mobile": True}], ids=str)
def test_every_view_fits_and_has_no_serious_violation_of_accessibility(visit: Open, options: dict[str, Any]) -> None:
    seen = visit("runs", **options)
    for view in VIEWS:
        seen.page.evaluate("view => { location.hash = `#/${view}?run=slow` }", view)
        expect(seen.page.locator(f"#view-{view.split('/')[0]} .panel:visible").first).to_be_visible()
        seen.until("() => !document.querySelector('.view:not([hidden]) [role=status]')?.textContent.includes('No run')")
        assert seen.violations() == [], view
        width = seen.page.evaluate("document.documentElement.clientWidth")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width, view


def test_a_view_that_is_left_asks_no_more(visit: Open) -> None:
    """Also one that is left before it has its first answer."""
    seen = visit("runs")
    expect(seen.page.locator("tr[data-run=slow]")).to_be_visible(timeout=PATIENCE_MS)
    for view in ("logs", "metrics", "logs", "runs"):
        seen.page.evaluate("view => { location.hash = `#/${view}?run=slow` }", view)
    with seen.page.expect_request("**/v1/runs"):
        pass
    before = len([url for url in seen.requests if "/logs/" in url or "/metrics" in url])
    with seen.page.expect_request("**/v1/runs"):
        pass
    assert len([url for url in seen.requests if "/logs/" in url or "/metrics" in url]) == before
