"""Runs over HTTP as their folders show them, and orders, which are done once under one key."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from broker.client import Broker
from deploy.control_plane.address import address_of, own_token
from producers.datasets.mixture import DatasetPart, Mixture
from producers.feeder import Feeder
from schemas.images import ImageSettings, probe_image
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.feeding import feed_until
from tests.support.broker.trainer_sessions import take_over
from tests.support.configurations import minimal_config
from tests.support.runs.run_folders import make_run
from tests.support.trainer.trainer_loop import until
from tests.support.user_code.datasets import Numbers

ROOT = Path(__file__).parents[4]
TOKEN, READER = "the-token-of-orders-123", "the-token-of-readers-45"


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `tidemill ui` over two runs, which asks for a token."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first", steps=12)
    make_run(folder / "second", steps=6, lr=1e-4)
    command = [sys.executable, "-P", "-m", "deploy.cli", "ui", str(folder), "--port", "0"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    environment |= {"TIDEMILL_CONTROL_TOKEN": TOKEN, "TIDEMILL_CONTROL_READ_TOKEN": READER}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def ask(url: str, path: str, token: str = READER, method: str = "GET") -> tuple[int, Any]:
    request = Request(f"{url}{path}", headers={"Authorization": f"Bearer {token}"}, method=method)
    try:
        with urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_control_plane_without_a_token_makes_one_for_the_owner_of_the_run(broker: Broker, tmp_path: Path) -> None:
    take_over(broker)
    folder = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(
        f"run: {{name: {broker.connection.keys.run}, folder: {folder}}}\nmodel: {{path: nowhere}}\n"
        f"train: {{name: arithmetic}}\nreward: {{terms: [{{name: exact}}]}}\n"
    )
    command = [sys.executable, "-P", "-m", "deploy.cli", "control", str(tmp_path / "run.yaml"), "control.port=0"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "REDIS_URL": broker.connection.url}
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        until(lambda: address_of(folder) is not None, "the address")
        url, token = address_of(folder), own_token(folder)
        assert url is not None
        assert token is not None
        for path, method in (("v1/status", "GET"), ("v1/runs", "GET"), ("v1/pause", "POST"), ("metrics", "GET")):
            assert ask(url, path, "a-token-of-another-user", method)[0] == 401
        until(lambda: ask(url, "v1/status", token)[0] == 200, "the status")
        process.kill()
        process.wait(20)
        assert address_of(folder) is None
    finally:
        process.kill()
        process.wait(20)


def test_a_page_without_a_control_plane_prints_a_link_with_its_token(tmp_path: Path) -> None:
    make_run(tmp_path / "first", steps=2)
    command = [sys.executable, "-P", "-m", "deploy.cli", "ui", str(tmp_path), "--port", "0"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    try:
        assert process.stdout is not None
        url, _, token = process.stdout.readline().split()[-1].partition("#token=")
        assert ask(url, "v1/runs", "a-token-of-another-user")[0] == 401
        assert ask(url, "v1/runs", token)[0] == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_every_resource_of_a_run_is_read_without_a_broker(ui: str) -> None:
    status, runs = ask(ui, "v1/runs")
    assert status == 200
    assert ({run["name"] for run in runs["runs"]}, runs["live"]) == ({"first", "second"}, None)
    assert ask(ui, "v1/runs/first")[1]["summary"]["exit_reason"] == "finished"
    assert ask(ui, "v1/runs/first/config")[1]["settings"]["broker.url"] == "redis://***@somewhere:6379/0"
    metrics = ask(ui, "v1/runs/second/metrics?name=reward/mean&limit=4")[1]
    assert (metrics["step"], metrics["next"], list(metrics["series"])) == ([1, 2, 3, 4], "4", ["reward/mean"])
    group = ask(ui, "v1/runs/first/groups?sort=reward_high&limit=1")[1]["groups"][0]
    whole = ask(ui, f"v1/runs/first/groups/{group['step']}/{group['task_id']}")[1]
    assert len(whole["samples"]) == group["n"] == 4
    assert ask(ui, "v1/runs/first/evaluations")[1]["evaluations"][-1]["mean"] == 0.75
    assert ask(ui, "v1/runs/first/evaluations/12")[1]["prompts"][0]["mean"] == 0.0
    assert ask(ui, "v1/runs/first/logs")[1]["logs"][0]["service"] == "trainer"
    assert "tracker" in ask(ui, "v1/runs/first/logs/trainer")[1]["lines"][-1]
    assert ask(ui, "v1/runs/first/resources?points=6")[1]["cpu"]["generator-0"] == [0.5] * 6
    assert ask(ui, "v1/runs/first/alerts")[1]["alerts"][0]["over"] == 1e9 + 60
    assert ask(ui, "v1/runs/first/checkpoints")[1]["checkpoints"] == []


@pytest.mark.parametrize(
    "path",
    [
        "unknown",
        "unknown/metrics",
        "first/groups/1/999",
        "first/evaluations/7",
        "first/logs/unknown",
        "..%2Ffirst/logs",
    ],
)
def test_what_is_not_there_is_a_problem_that_says_so(ui: str, path: str) -> None:
    status, problem = ask(ui, f"v1/runs/{path}")
    assert (status, problem["status"]) == (404, 404)
    assert ask(ui, "v1/runs/first/groups?limit=0")[0] == 422


def test_a_checkpoint_is_downloaded_whole(broker: Broker, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "own", state="")
    checkpoint = folder / "checkpoints" / "step-00000004-t0001"
    (checkpoint / "parts").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(os.urandom(70_000))
    (checkpoint / "parts" / "rank-0.json").write_text("{}")
    with ControlPlane(broker, "own", folder=folder) as api:
        url = f"{api.url}/v1/runs/own/checkpoints/{checkpoint.name}"
        with urlopen(url, timeout=20) as answer, tarfile.open(fileobj=answer, mode="r|") as archive:
            archive.extractall(tmp_path / "copy", filter="data")
        assert api.ask("GET", "/v1/runs/own/checkpoints/step-00000005-t0001")[0] == 404
        assert api.ask("GET", "/v1/runs/own/checkpoints/..%2Flogs")[0] == 404
    for file in ("model.safetensors", "parts/rank-0.json"):
        assert (tmp_path / "copy" / checkpoint.name / file).read_bytes() == (checkpoint / file).read_bytes()


def test_without_a_token_nothing_is_read(ui: str) -> None:
    assert ask(ui, "v1/runs", token="a-wrong-one-of-somebody")[0] == 401
    assert ask(ui, "v1/runs", token=TOKEN)[0] == 200


def test_a_readers_token_reads_and_orders_nothing(broker: Broker) -> None:
    with ControlPlane(broker, "shared", token=TOKEN, reader=READER) as api:
        url = f"{api.url}/"
        assert ask(url, "v1/status")[0] == 200
        status, problem = ask(url, "v1/pause", method="POST")
        assert (status, problem["detail"]) == (403, "this token may only read: orders need the other one")
        assert ask(url, "v1/pause", token=TOKEN, method="POST")[0] == 200


def test_a_control_plane_shows_its_own_run_and_no_other(broker: Broker, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "own", state="")
    make_run(tmp_path / "other")
    with ControlPlane(broker, "own", folder=folder) as api:
        runs = api.ask("GET", "/v1/runs")[1]
        assert ([run["name"] for run in runs["runs"]], runs["live"]) == (["own"], "own")
        assert api.ask("GET", "/v1/runs/own/groups")[1]["total"] == 80
        assert api.ask("GET", "/v1/runs/other")[0] == 404


def test_a_picture_of_a_kept_sample_is_read_from_the_runs_folder(tmp_path: Path, broker: Broker) -> None:
    make_run(tmp_path / "seen", steps=2)
    image = probe_image(ImageSettings(14, 2, 2, 784, 12544, (0.5,) * 3, (0.5,) * 3))
    folder = tmp_path / "seen" / "samples" / "images"
    folder.mkdir(parents=True)
    (folder / f"{'1' * 32}.png").write_bytes(image)
    with ControlPlane(broker, "seen", folder=tmp_path / "seen") as api:
        with urlopen(f"{api.url}/v1/runs/seen/images/{'1' * 32}", timeout=20) as answer:
            assert (answer.read(), answer.headers["content-type"]) == (image, "image/png")
        assert api.ask("GET", f"/v1/runs/seen/images/{'2' * 32}")[0] == 404
        assert api.ask("GET", "/v1/runs/seen/images/..")[0] in (404, 422)


@pytest.fixture
def api(broker: Broker) -> Iterator[ControlPlane]:
    with ControlPlane(broker, broker.connection.keys.run, held_out=True) as api:
        yield api


def test_an_order_that_is_repeated_with_its_key_is_done_once(api: ControlPlane) -> None:
    take_over(api.broker)
    first = api.ask("POST", "/v1/checkpoint", {}, idempotency_key="mine-1")
    again = api.ask("POST", "/v1/checkpoint", {}, idempotency_key="mine-1")
    assert first == again
    assert api.broker.ledger.read_state().control.checkpoint == 1
    assert api.ask("POST", "/v1/checkpoint", {}, idempotency_key="mine-2")[0] == 200
    assert api.broker.ledger.read_state().control.checkpoint == 2
    status, problem = api.ask("POST", "/v1/pause", {}, idempotency_key="mine-1")
    assert (status, problem["detail"][:45]) == (422, "this Idempotency-Key was sent with another re")
    assert api.broker.ledger.read_state().control.pause == "none"
    refused = api.ask("POST", "/v1/stop", None, idempotency_key="mine-3")
    assert refused == api.ask("POST", "/v1/stop", None, idempotency_key="mine-3")
    assert refused[0] == 409


def test_every_route_has_a_name_of_its_own_for_generated_clients(api: ControlPlane) -> None:
    with urlopen(Request(f"{api.url}/openapi.json"), timeout=20) as answer:
        paths = json.loads(answer.read())["paths"]
    named = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(named) == len(set(named))
    assert {"status", "pause", "evaluate", "list_runs", "download_checkpoint"} <= set(named)
    assert "Idempotency-Key" in [one["name"] for one in paths["/v1/pause"]["post"]["parameters"]]


def test_every_change_describes_what_an_idempotency_key_can_be_answered(api: ControlPlane) -> None:
    paths = api.ask("GET", "/openapi.json")[1]["paths"]
    changes = {
        f"{method} {path}": operation
        for path, item in paths.items()
        for method, operation in item.items()
        if method in ("post", "patch", "put", "delete")
    }
    assert len(changes) > 10
    assert [name for name, operation in changes.items() if not {"409", "422"} <= operation["responses"].keys()] == []
    api.ask("POST", "/v1/pause", {}, idempotency_key="mine")
    assert api.ask("POST", "/v1/episodes", None, idempotency_key="mine")[0] == 422


def test_an_evaluation_is_ordered_of_the_present_version_and_of_one_to_come(api: ControlPlane) -> None:
    take_over(api.broker, step=6, version=6)
    status, answer = api.ask("POST", "/v1/evaluations", {}, x_tidemill_by="ann@desk")
    assert (status, answer["changed"], answer["done"]) == (200, True, False)
    assert answer["text"] == "the evaluation of version 6 is under way"
    assert not api.ask("POST", "/v1/evaluations", {"version": 6})[1]["changed"]
    assert api.ask("POST", "/v1/evaluations", {"version": 5})[0] == 409
    config = minimal_config(
        run={"name": api.broker.connection.keys.run}, eval={"dataset": {"name": "arithmetic"}, "every": 50}
    )
    results, ctl = api.broker.evals.read_results, api.broker.connection.keys.ctl
    feeder = Feeder(config, api.broker, Mixture([DatasetPart("sums", [Numbers(4)], 1.0)]), [Numbers(3)])

    def both() -> bool:
        if len(results()) == 1 and api.ask("POST", "/v1/evaluations", {"version": 9})[1]["changed"]:
            for version in (8, 9, 10):
                api.broker.connection.client.hset(ctl, "version", version)
                api.broker.run_control.pause("drain", f"wakes the feeder at {version}")
                api.broker.run_control.pause("none", "")
        return len(results()) == 2

    assert feed_until(feeder, both) == []
    assert [(one.version, one.n) for one in results()] == [(6, 3), (9, 3)]
    (event, *_) = [one.event for one in api.broker.events.newest(9) if one.event.name == "evaluation"]
    assert event.text == "evaluation of version 6 ordered by ann@desk"


def test_without_held_out_prompts_no_evaluation_is_ordered(broker: Broker) -> None:
    with ControlPlane(broker, broker.connection.keys.run) as api:
        status, problem = api.ask("POST", "/v1/evaluations", {})
    assert (status, problem["detail"]) == (409, "the configuration has no eval section: there are no held-out prompts")
