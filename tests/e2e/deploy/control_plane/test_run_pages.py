"""The page over runs on disk in a real browser, without a broker: compare runs, read groups, evaluations and logs."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.support.runs.browser import PATIENCE_MS, PHONE, WatchedPage
from tests.support.runs.run_folders import make_run

TOKEN = "a-token-of-the-tests-1234"
ROOT = Path(__file__).parents[4]
VIEWS = ("metrics", "groups", "groups/7", "groups/7/71", "evaluations", "machine", "logs", "setup", "runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "slow", steps=30)
    make_run(
        folder / "fast",
        steps=30,
        lr=1e-4,
        state="failed: no memory",
        described={"tags": ["seed-1", "warm-up"], "notes": "A higher rate."},
    )
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-P", "-m", "deploy.cli", "ui", str(folder), "--port", "0"]
    environment = {**os.environ, "TIDEMILL_CONTROL_TOKEN": TOKEN}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
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
        seen = WatchedPage(browser, f"{url}#/{place}", TOKEN, **options)
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
    names = ["run.name", "run.notes", "run.tags", "trainer.optimizer.lr"]
    expect(page.locator("#setup-settings tbody th")).to_have_text(names)


def test_the_runs_are_sorted_by_a_column_and_found_by_tags_and_notes(visit: Open) -> None:
    page = visit("runs").page
    names = page.locator("#run-list tbody th a")
    expect(names).to_have_count(2, timeout=PATIENCE_MS)
    for head, both in (("Reward", ["slow", "fast"]), ("Run", ["fast", "slow"])):
        button = page.get_by_role("button", name=head, exact=True)
        for direction, order in (("ascending", both), ("descending", both[::-1])):
            button.click()
            expect(names).to_have_text(order)
            expect(page.get_by_role("columnheader", name=head, exact=True)).to_have_attribute("aria-sort", direction)
            expect(button).to_be_focused()
    expect(page.locator("[aria-sort]")).to_have_count(1)
    expect(page.locator("tr[data-run=fast] .run-tag")).to_have_text(["seed-1", "warm-up"])
    for words in ("seed-1", "higher rate"):
        page.get_by_label("Search runs").fill(words)
        expect(names).to_have_text(["fast"])


def test_charts_are_pinned_to_the_top_and_sections_fold_for_good(visit: Open) -> None:
    seen = visit("metrics?run=slow")
    page = seen.page
    cards = page.locator("#grid .grid-card")
    expect(cards.first.locator("canvas")).to_be_visible(timeout=PATIENCE_MS)
    everything, last = cards.count(), cards.last.get_attribute("data-metric")
    page.get_by_label(f"Pin {last} to the top").click()
    expect(cards.first).to_have_attribute("data-metric", str(last))
    expect(page.locator(".grid-section").first).to_have_text("pinned1")
    page.get_by_role("button", name="pinned").click()
    expect(cards).to_have_count(everything - 1)
    first = cards.first.get_attribute("data-metric")
    page.get_by_label(f"Pin {first} to the top").click()
    expect(page.locator(".grid-section").first).to_have_text("pinned2")
    expect(cards).to_have_count(everything - 2)
    assert seen.errors == []

    page.reload()
    expect(page.locator(".grid-fold").first).to_have_attribute("aria-expanded", "false", timeout=PATIENCE_MS)
    expect(cards).to_have_count(everything - 2)
    page.get_by_label("Search metrics by name").fill(str(last))
    expect(page.get_by_label(f"Pin {last} to the top")).to_have_attribute("aria-pressed", "true", timeout=PATIENCE_MS)


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
    counted = page.locator("#group-rates [role=img]")
    expect(counted).to_have_count(4)
    expect(counted.nth(0)).to_have_attribute("aria-label", re.compile("^Prompts by mean reward, .*0.2: 1, .*0.5: 1, "))
    expect(counted.nth(1)).to_have_attribute("aria-label", re.compile("^Samples by reward, from 0.0: 5, .*0.9: 3$"))
    expect(counted.nth(3)).to_have_attribute("aria-label", re.compile("^Samples by length, "))
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
    page.get_by_role("link", name="Step", exact=True).click()
    expect(page.locator("#group-detail h2")).to_have_text("Step 7")
    lines = page.locator("#group-detail .trace li")
    expect(lines).to_have_count(8)
    expect(lines.nth(4)).to_contain_text("prompt 71, sample 0")
    expect(lines.nth(4).locator("i")).to_have_count(5)
    expect(lines.nth(4).locator("[data-failed]")).to_have_attribute("title", "attempt generator-0, 1.0 s, failed")
    page.locator("#group-detail .group").last.click()
    expect(samples).to_have_count(4)
    page.get_by_role("link", name="All groups").click()
    expect(page.locator(".group")).to_have_count(2)


def test_the_worst_sample_of_the_last_evaluation_is_two_clicks_away(visit: Open) -> None:
    page = visit("runs").page
    page.locator("#tab-evaluations").click()
    worst = page.locator("#prompt-list .cell").first
    expect(worst).to_have_text("0.00", timeout=PATIENCE_MS)
    newest = page.locator("#evaluation-list tbody th").first.inner_text()
    expect(worst).to_have_attribute("aria-label", re.compile(rf"version {newest}:"))
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


def test_the_log_that_is_shown_first_has_something_in_it(visit: Open, folder: Path) -> None:
    logs = folder / "fast" / "logs"
    (logs / "trainer.log").write_text("")
    (logs / "generator-0.log").write_text("no memory\n")
    page = visit("logs?run=fast").page
    expect(page.locator(".log-line")).to_have_text("no memory", timeout=PATIENCE_MS)
    expect(page.locator("#log-service")).to_have_value("generator-0")


@pytest.mark.matrix("every view by every screen; the overview is held by test_dashboard")
@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, {"viewport": PHONE, "is_mobile": True}], ids=str)
def test_every_view_fits_and_has_no_violation_of_accessibility(visit: Open, options: dict[str, Any]) -> None:
    seen = visit("runs", **options)
    for view in VIEWS:
        seen.page.evaluate("view => { location.hash = `#/${view}?run=slow` }", view)
        expect(seen.page.locator(f"#view-{view.split('/')[0]} .panel:visible").first).to_be_visible()
        seen.until("() => !document.querySelector('.view:not([hidden]) [role=status]')?.textContent.includes('No run')")
        assert seen.violations() == [], view
        width = seen.page.evaluate("document.documentElement.clientWidth")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width, view


def test_figures_at_the_axes_are_as_large_on_a_sharp_display(visit: Open) -> None:
    page = visit("runs", viewport=PHONE, is_mobile=True, device_scale_factor=2).page
    page.evaluate("""() => {
      const kept = Object.getOwnPropertyDescriptor(CanvasRenderingContext2D.prototype, "font");
      window.fonts = [];
      const set = function (font) { window.fonts.push(parseFloat(font)); kept.set.call(this, font); };
      Object.defineProperty(CanvasRenderingContext2D.prototype, "font", { ...kept, set });
    }""")
    page.evaluate("location.hash = '#/metrics?run=slow'")
    expect(page.locator(".grid-card canvas").first).to_be_visible(timeout=PATIENCE_MS)
    assert page.evaluate("Math.min(...window.fonts)") >= 20


def test_a_time_axis_tells_its_ticks_apart(visit: Open) -> None:
    page = visit("runs").page
    page.evaluate("""() => {
      const kept = CanvasRenderingContext2D.prototype.fillText;
      window.drawn = new Set();
      CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
        window.drawn.add(text);
        kept.call(this, text, ...more);
      };
    }""")
    page.evaluate("location.hash = '#/metrics?run=slow'")
    expect(page.locator(".grid-card canvas").first).to_be_visible(timeout=PATIENCE_MS)
    page.evaluate("window.drawn.clear()")
    page.locator("#grid-axis").get_by_role("button", name="Time").click()
    drawn = set(page.evaluate("[...window.drawn]"))
    assert {"0:30", "1:00"} <= drawn, drawn


def test_a_cursor_between_the_points_of_a_run_tells_the_nearest(visit: Open) -> None:
    """Over time no two runs have points at the same place."""
    page = visit("metrics?run=slow").page
    near = page.evaluate("""async () => {
      const { near } = await import(new URL("assets/js/elements/grid-chart.js", document.baseURI));
      const xs = [0, 1, 4, 5, 9];
      return [0, 1, 2, 3, 4].map((at) => near(xs, [7, null, undefined, 8, null], at));
    }""")
    assert near == [7, 7, 8, 8, None]


def test_a_sample_without_others_is_not_called_the_best(visit: Open) -> None:
    page = visit("evaluations?run=slow").page
    page.locator("#prompt-list .cell").first.click(timeout=PATIENCE_MS)
    expect(page.locator("dialog .sample")).to_have_count(1)
    expect(page.locator("dialog .sample em")).to_have_count(0)
    expect(page.locator("dialog").get_by_role("button", name="Difference to the best")).to_have_count(0)


def test_names_of_views_and_settings_are_read_on_a_phone(visit: Open) -> None:
    page = visit("setup?run=slow", viewport=PHONE, is_mobile=True).page
    expect(page.locator("#tab-setup")).to_be_in_viewport(ratio=1)
    name = page.locator("#setup-settings tbody th").first.bounding_box()
    assert name is not None
    assert name["width"] >= 140


def test_a_checkpoint_is_saved_from_the_page(visit: Open, folder: Path) -> None:
    checkpoint = folder / "slow" / "checkpoints" / "step-00000004-t0001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights" * 5000)
    page = visit("runs").page
    page.evaluate("sessionStorage.setItem('tidemill-token', 'kept in this tab')")
    page.locator("#tab-setup").click()
    page.evaluate("location.hash = '#/setup?run=slow'")
    link = page.get_by_role("link", name=f"Download {checkpoint.name}")
    with page.expect_download() as found:
        link.click()
    assert found.value.suggested_filename == f"{checkpoint.name}.tar"
    with tarfile.open(found.value.path()) as archive:
        assert archive.getmember(f"{checkpoint.name}/model.safetensors").size == 35_000


def test_a_run_that_was_left_does_not_come_back_when_it_answers_late(visit: Open) -> None:
    page = visit("runs").page
    held: list[Route] = []
    page.route("**/v1/runs/fast/config", lambda route: held.append(route))
    with page.expect_request("**/v1/runs/fast/config"):
        page.evaluate("location.hash = '#/setup?run=fast'")
    page.evaluate("location.hash = '#/setup?run=slow'")
    expect(page.get_by_label("Environment of slow")).to_be_visible(timeout=PATIENCE_MS)
    with page.expect_response("**/v1/runs/fast/checkpoints") as last:
        held[0].continue_()
    last.value.finished()
    page.evaluate("new Promise(requestAnimationFrame)")
    expect(page.get_by_label("Environment of slow")).to_be_visible()
    expect(page.get_by_label("Environment of fast")).to_have_count(0)


def test_a_view_that_is_left_asks_no_more(visit: Open) -> None:
    """Also one that is left before it has its first answer."""
    seen = visit("runs")
    expect(seen.page.locator("tr[data-run=slow]")).to_be_visible(timeout=PATIENCE_MS)
    for view in ("logs", "metrics", "logs", "runs"):
        seen.page.evaluate("view => { location.hash = `#/${view}?run=slow` }", view)
    with seen.page.expect_request("**/v1/runs?*"):
        pass
    before = len([url for url in seen.requests if "/logs/" in url or "/metrics" in url])
    with seen.page.expect_request("**/v1/runs?*"):
        pass
    assert len([url for url in seen.requests if "/logs/" in url or "/metrics" in url]) == before
