"""The benchmarks in small: they end, lose nothing, and give the figures that scripts ask for. No timings."""

import asyncio
import json
import signal
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.agents.episodes import EpisodeShape
from benchmarks.agents.episodes import measure as measure_episodes
from benchmarks.agents.tokens import measure as measure_tokens
from benchmarks.cli.app import app
from benchmarks.harness.workload import PipelineShape, TrajectoryPool, begin, open_broker
from benchmarks.services.control import measure as measure_control
from benchmarks.services.overlap import measure as measure_overlap
from benchmarks.services.overlap import simulate
from benchmarks.services.scale import Lengths, answer_of, open_pending
from benchmarks.services.scale import measure as measure_scale
from benchmarks.services.traces import costs
from benchmarks.services.transport import PIPELINES, PipelineBench, measure, measure_behind
from benchmarks.weights.spread import measure as measure_spread
from benchmarks.weights.transports import measure as measure_weights
from broker.connection.connection import open_client
from broker.connection.embedded import EmbeddedServer
from deploy.planning.cluster import ClusterRates, LengthMix
from schemas.errors import ConfigError, InfraError

pytestmark = pytest.mark.matrix("benchmarks are tools of development")

SMALL = PipelineShape(samples=2, batch=2, commit_every=2)


def test_transport_gives_every_figure() -> None:
    told: list[int] = []
    row = measure(64, "off", trajectories=16, rounds=1, flow=SMALL, url=None, advance=told.append)
    keys = {"trajectories_per_s", "raw_trajectories_per_s", "ratio", "cpu_us_per_trajectory", "bytes_per_trajectory"}
    keys |= {"one_hop_trajectories_per_s", "one_hop_ratio", "one_hop_cpu_us_per_trajectory"}
    assert all(row[key] > 0 for key in keys)
    assert row["trajectories"] == 16
    assert row["aof"] == "off"
    assert sum(told) == 6


def test_the_pipelines_leave_nothing_on_a_server_of_the_user(server: EmbeddedServer) -> None:
    client = open_client(server.url)
    with PipelineBench(server.url, 32, SMALL) as bench:
        for pipeline in (*PIPELINES, *PIPELINES):
            bench.round(pipeline, 16)
        bench.balanced()
        streams = [key for key in client.scan_iter(match=f"*{bench.run}*") if client.type(key) == b"stream"]
        assert streams
        left = {key.decode().rpartition(":")[2]: client.xlen(key) for key in streams}
        # Credits of the last steps, the bounded lists of changes and orders, and the hop that takes nothing away.
        staying = ("raw_credits", "changes", "orders", "json_actors")
        assert all(count == 0 for name, count in left.items() if name not in staying), left
    assert not list(client.scan_iter(match=f"*{bench.run}*"))


def test_a_long_run_is_compared_with_a_fresh_one() -> None:
    result = measure_behind(40, 32, "off", trajectories=16, rounds=1, flow=SMALL, url=None, advance=lambda _: None)
    assert result["behind"] >= 40
    assert {"start_per_s", "after_per_s", "fresh_per_s", "ratio", "memory_after_bytes"} <= result.figures().keys()


def test_a_role_that_ends_is_named(server: EmbeddedServer) -> None:
    with PipelineBench(server.url, 32, SMALL) as bench:
        bench.round("ours", 8)
        open_broker(server.url, bench.run).purge()
        with pytest.raises(InfraError, match="assembler failed while ours: the broker has forgotten"):
            bench.round("ours", 8)


def test_every_generator_of_the_scale_run_is_a_consumer() -> None:
    lengths = Lengths(median=20, rate=400)
    row = measure_scale(6, 1.5, "off", lengths, url=None, tick=lambda _: None)
    assert row["generators"] == 6
    assert row["published"] == row["trained"] + row["left"] > 0
    assert row["broker_cpu"] > 0
    assert row["task_ms_p99"] is not None


async def test_generators_of_the_scale_run_wait_in_one_thread(server: EmbeddedServer) -> None:
    feeder = open_broker(server.url, "waits")
    begin(feeder.trainer_session(), SMALL)
    pool = TrajectoryPool(32)

    async def wait_all() -> list[int]:
        queues = [open_pending(server.url, "waits").task_queue(f"generator-{index}") for index in range(4)]
        waits = [asyncio.create_task(answer_of(partial(queue.read, 1, 10_000))) for queue in queues]
        await asyncio.sleep(0)
        assert not any(wait.done() for wait in waits)
        feeder.ledger.admit_all([pool.task(task_id, 2) for task_id in range(4)])
        async with asyncio.timeout(5):
            return [delivery.message.task_id for found in await asyncio.gather(*waits) for delivery in found]

    assert sorted(await wait_all()) == [0, 1, 2, 3]


def test_groups_that_are_dropped_in_the_scale_run_give_their_slots_back() -> None:
    lengths = Lengths(median=20, rate=400)
    row = measure_scale(6, 1.5, "off", lengths, url=None, tick=lambda _: None, drops=3.0)
    assert row["published"] == row["trained"] + row["dropped"] + row["left"] > row["dropped"] > 0
    assert row["drops_per_s"] <= 3.0


def test_the_command_prints_one_json_object() -> None:
    options = ["--tokens", "32", "--aof", "off", "--trajectories", "1", "--rounds", "1", "--json"]
    done = CliRunner().invoke(app, ["transport", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["benchmark"] == "transport"
    assert [row["tokens"] for row in found["rows"]] == [32]


@pytest.mark.parametrize(("option", "value"), [("--tokens", "many"), ("--tokens", "0"), ("--aof", "sometimes")])
def test_a_wrong_option_is_refused(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["transport", option, value])
    assert done.exit_code == 2


@pytest.mark.parametrize("kind", ["file", "redis", "peer"])
def test_weights_give_every_figure_and_leave_nothing(kind: str, tmp_path: Path, server: EmbeddedServer) -> None:
    told: list[int] = []
    row = measure_weights("1M", kind, 1, "transformers", server.url, tmp_path, told.append)
    keys = {"publish_s", "fetch_s", "publish_delta_s", "fetch_delta_s", "raw_copy_s", "apply_s", "step_s", "held_s"}
    assert all(row[key] > 0 for key in keys | {"ratio", "ratio_delta", "held_ratio"})
    assert {"pause_s", "pause_ratio", "probe_s"} <= row.figures().keys()
    assert 0 < row["bytes_delta"] < 0.05 * row["bytes_full"], "the delta of one small step"
    assert told == [1]
    assert not list(tmp_path.iterdir())
    assert not list(open_client(server.url).scan_iter(match="*bench*"))


def test_a_version_reaches_all_generators_though_a_peer_is_killed(tmp_path: Path, server: EmbeddedServer) -> None:
    row = measure_spread("peer", 3, 30, 1, server.url, tmp_path)
    assert row["egress"] <= 2.2
    assert (row["killed_arrived"], row["killed_by"]) == (3, -signal.SIGKILL)
    assert row["seconds"] > 0
    assert row["joiner_s"] > 0
    assert not list(tmp_path.iterdir())
    assert not list(open_client(server.url).scan_iter(match="*bench*"))


def test_a_version_is_broadcast_to_all_generators(tmp_path: Path, server: EmbeddedServer) -> None:
    row = measure_spread("nccl", 2, 20, 1, server.url, tmp_path)
    assert (row["broadcast"], row["egress"]) == (1.0, 0.0), "nothing from peers"
    assert row["seconds"] > 0
    assert row["joiner_s"] > 0
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_measured_is_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match="a model of 7B is not known here, give some of 1M, 50M, 500M"):
        measure_weights("7B", "file", 1, "transformers", None, None, lambda _: None)
    for wrong, line in (
        (["weights", "--transports", "pigeon"], "'pigeon' is not one of file, redis, peer"),
        (["weights", "--models", "1M,7B"], "'7B' is not one of 1M, 50M, 500M"),
        (["generator", "--samples", "4", "--group", "8"], "4 samples make no group of 8"),
    ):
        result = CliRunner().invoke(app, wrong)
        assert result.exit_code == 2
        assert line in " ".join(result.output.replace("│", " ").split())


def test_the_control_plane_is_measured_beside_a_pipeline() -> None:
    told: list[int] = []
    row = measure_control(5, 10, 2, 3.0, rounds=1, trajectories=64, url=None, advance=told.append)
    assert row["requests"] > 2
    assert row["status_bytes"] > 1000
    assert row["page_bytes_per_s"] > 0
    assert all(
        row[key] > 0 for key in ("events_per_s", "rss_mb", "trajectories_per_s_with", "trajectories_per_s_without")
    )
    assert sum(told) == 3


@pytest.mark.parametrize("client", ["openai", "raw"])
def test_episodes_of_agents_give_every_figure(client: str) -> None:
    row = measure_episodes(EpisodeShape(episodes=4, calls=3, tool_s=0.05, call_s=0.01), client, processes=1)
    assert (row["episodes"], row["calls"], row["rows"]) == (4, 12, 4)
    assert row["wall_s"] > row["ideal_s"] == pytest.approx(0.13)
    assert all(row[key] > 0 for key in ("generator_cpu_s", "workers_cpu_s", "lag_max_ms"))


def test_joined_turns_are_one_row_where_a_history_rendered_anew_makes_several() -> None:
    same, other = (measure_tokens(cut, episodes=5, turns=4) for cut in (0.0, 0.05))
    assert same["rows"] == other["rows"] == same["rendered_rows"] == 1.0
    assert same["tokens"] == same["rendered_tokens"] > same["loss_tokens"] > 0
    assert 1 < other["rendered_rows"] <= other["call_rows"] == 4
    assert other["tokens"] < other["rendered_tokens"] <= other["call_tokens"]


def test_the_agents_command_prints_the_parts_that_were_asked_for() -> None:
    done = CliRunner().invoke(app, ["agents", "--parts", "tokens", "--json"])
    assert done.exit_code == 0, done.output
    assert {row["part"] for row in json.loads(done.stdout)["rows"]} == {"tokens"}
    done = CliRunner().invoke(app, ["agents", "--parts", "speed"])
    assert done.exit_code == 2
    assert "'speed' is not one of episodes, endpoint, tokens" in " ".join(done.output.split())


def test_an_overlap_run_on_the_broker_keeps_the_bound_and_gives_the_figures_of_its_simulation() -> None:
    rates, mix = ClusterRates(), LengthMix(mean=600, longest=3200)
    plan, row = simulate(4, 2, 1, rates, mix)
    measured = measure_overlap(row, plan, rates, mix, 2, 20.0, None, lambda _: None)
    assert row["generators"] + row["trainers"] == 4
    assert measured["measured_steps"] >= 1
    assert measured["measured_tokens_per_s"] > 0
    assert measured["measured_oldest"] <= 1


def test_what_weights_log_is_not_in_the_result() -> None:
    """Peers log each connection that ends."""
    done = CliRunner().invoke(app, ["weights", "--models", "1M", "--transports", "peer", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"][0]["bytes_full"] > 0


@pytest.mark.parametrize("calls", [0, 2])
def test_trajectories_with_traces_and_without_take_the_same_way(calls: int) -> None:
    found = asyncio.run(costs(TrajectoryPool(16), 16, calls, 4, "http://127.0.0.1:9"))
    assert [*found] == ["off", "on", "again", "sending"]
    assert found["off"].low > 0
