"""What a page that is opened is told of the minutes before."""

from __future__ import annotations

from deploy.control_plane.status.series import POINTS_KEPT, SERIES_KEPT, MetricsSeries, ThroughputSeries
from tests.support.broker.run_statuses import make_status


def looks(pace: ThroughputSeries, times: list[float]) -> None:
    seen = make_status()
    for time in times:
        rates = seen.throughput.model_copy(update={"generated_tokens": time})
        pace.add(seen.model_copy(update={"time": time, "throughput": rates}))


def test_one_point_a_second_is_kept_however_often_the_run_is_looked_at() -> None:
    pace = ThroughputSeries()
    looks(pace, [10.0, 10.1, 10.2, 11.0, 11.5, 12.0])
    history = pace.history()
    assert history.time == [10.0, 11.0, 12.0]
    assert history.generated_tokens == [10.0, 11.0, 12.0]
    assert len(history.trained_tokens) == 3


def test_the_oldest_are_forgotten() -> None:
    pace = ThroughputSeries()
    looks(pace, [float(second) for second in range(POINTS_KEPT + 5)])
    assert pace.history().time[0] == 5.0
    assert len(pace.history().time) == POINTS_KEPT


def test_figures_of_several_parts_are_series_too_and_their_number_is_bounded() -> None:
    series = MetricsSeries()
    series.add({"step": 1, "loss": 1, "reward/histogram": {"0.0": 3, "name": "x"}, "text": "no number"})
    series.add({"step": 2, "loss": 2.0})
    found = series.since(-1, 10)
    assert found.series == {"loss": [1.0, 2.0], "reward/histogram/0.0": [3.0, None]}
    series.add({"step": 3, **{f"made-up-{number}": number for number in range(2 * SERIES_KEPT)}})
    assert len(series.names) == SERIES_KEPT


def test_only_the_newest_steps_are_kept() -> None:
    series = MetricsSeries(keep=3)
    for step in range(5):
        series.add({"step": step, "loss": float(step), "staleness/histogram": {str(step): 1}})
    found = series.since(-1, 10)
    assert found.step == [2, 3, 4]
    assert found.series == {"loss": [2.0, 3.0, 4.0]}
    assert found.staleness == [{"2": 1}, {"3": 1}, {"4": 1}]
