"""`tidemill kubernetes` with `placement`: one Job whose pod has all GPUs, and what it needs beside it."""

import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.launchers.kubernetes import Kubernetes
from deploy.run.up import STOP_ORDER
from schemas.config import load_config, parse_config
from schemas.errors import HOPELESS, ConfigError
from tests.unit.deploy.launchers.test_kubernetes_launcher import GET, Objects, apply, file, pod, render

__all__ = ["file"]
TURNS = 'placement={trainer: "0-3", generator: "2-5"}'
POOL = "pools={own: {kubernetes: {node_selector: {gpu: l40s}}}}"


def container(objects: Objects) -> dict[str, Any]:
    (found,) = pod(objects, "Job", "run")["containers"]
    return dict(found)


def variables(objects: Objects) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(objects)["env"]}


def test_one_pod_has_the_run_with_all_gpus_and_nothing_is_beside_it_that_it_does_not_use(file: Path) -> None:
    objects = render(file, TURNS, registry="ghcr.io/me", tag="1.2", storage="1Ti", access_mode="ReadWriteOnce")
    names = {(kind, "" if kind == "ConfigMap" else name) for kind, name in objects}
    policies = {("NetworkPolicy", name) for name in ("services", "control", "run")}
    assert names == policies | {
        ("Job", "run"),
        ("Service", "control"),
        ("PersistentVolumeClaim", "tidemill-runs"),
        ("ConfigMap", ""),
    }
    one = container(objects)
    assert one["args"] == ["up", "/etc/tidemill/config.yaml"]
    assert one["image"] == "ghcr.io/me/tidemill-run:1.2-cuda"
    for amounts in one["resources"].values():
        assert amounts["nvidia.com/gpu"] == "6", "as many as the last one that placement names"
    claim = objects["PersistentVolumeClaim", "tidemill-runs"]["spec"]
    assert (claim["accessModes"], claim["resources"]["requests"]["storage"]) == (["ReadWriteOnce"], "1Ti")


def test_it_resumes_after_a_lost_pod_and_not_after_an_end_that_no_restart_mends(file: Path) -> None:
    objects = render(file, TURNS)
    job, apart = objects["Job", "run"]["spec"], render(file)["Job", "trainer"]["spec"]
    assert job["podFailurePolicy"] == apart["podFailurePolicy"]
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == sorted(HOPELESS)
    assert job["backoffLimit"] == apart["backoffLimit"]
    spec = pod(objects, "Job", "run")
    assert spec["restartPolicy"] == "Never"
    mounted = {mount["name"]: mount for mount in container(objects)["volumeMounts"]}
    assert mounted["runs"] == {"name": "runs", "mountPath": "/tidemill/runs"}, "the broker's data is there, too"
    ((_, files),) = [(name, entry["data"]) for (kind, name), entry in objects.items() if kind == "ConfigMap"]
    data = yaml.safe_load(files["config.yaml"])
    config = parse_config(data, base=Path("/etc/tidemill"))
    assert config.placement is not None
    assert config.placement.shared == [2, 3]
    assert config.broker.url is None, "the broker is the run's own"
    loaded = load_config(file, [TURNS], environment=variables(objects))
    assert loaded.supervisor.grace_s > 60
    # `tidemill up` stops one kind of service after the other: one that hangs takes no time from the checkpoint.
    assert len(STOP_ORDER) * loaded.supervisor.grace_s < spec["terminationGracePeriodSeconds"]


def test_its_control_plane_is_reached_with_the_token_as_that_of_other_runs(file: Path) -> None:
    objects = render(file, TURNS)
    given = variables(objects)
    control = load_config(file, [TURNS], environment=given).control
    assert (control.enabled, control.host, control.port) == (True, "0.0.0.0", 8642)
    assert given["TIDEMILL_CONTROL_TOKEN_FILE"] == "/run/secrets/control/token"
    assert given["TIDEMILL_CONTROL_READ_TOKEN_FILE"] == "/run/secrets/control/read_token"
    assert "TIDEMILL_PROBES__PORT" not in given, "its services cannot share a port"
    service = objects["Service", "control"]["spec"]
    assert service["selector"] == objects["Job", "run"]["spec"]["template"]["metadata"]["labels"]
    assert [port["port"] for port in service["ports"]] == [8642]
    policy = objects["NetworkPolicy", "control"]["spec"]
    assert policy["podSelector"]["matchLabels"] == service["selector"]
    assert policy["ingress"] == [{"ports": [{"port": 8642}]}]


def test_it_has_each_secret_but_users_of_a_server_it_does_not_use(file: Path) -> None:
    objects = render(file, TURNS)
    text = yaml.safe_dump(list(objects.values()))
    found = set(re.findall(r"secretName: (\S+)", text)) | set(re.findall(r"secretRef:\n\s+name: (\S+)", text))
    assert found == {f"tidemill-{name}" for name in ("control", "hub", "trackers", "judges")}
    mounted = {mount["name"] for mount in container(objects)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod(objects, "Job", "run")["volumes"]}


def test_it_reaches_judges_and_models_but_not_the_clouds_metadata_service(file: Path) -> None:
    objects, apart = render(file, TURNS), render(file)
    egress = objects["NetworkPolicy", "run"]["spec"]["egress"]
    assert egress == apart["NetworkPolicy", "generator"]["spec"]["egress"]
    blocks = [peer["ipBlock"] for rule in egress for peer in rule.get("to", []) if "ipBlock" in peer]
    reached = [block for block in blocks if ip_address("10.1.2.3") in ip_network(block["cidr"])]
    assert reached
    assert all("169.254.0.0/16" in block["except"] for block in reached)
    assert objects["NetworkPolicy", "run"]["spec"]["podSelector"]["matchLabels"]["role"] == "run"


def test_the_driver_shows_the_pod_which_gpus_it_has(file: Path) -> None:
    assert variables(render(file, TURNS))["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {"trainer_nodes": 2}, "--trainer-nodes 2"),
        ([], {"trainer_gpus": 4}, "--trainer-gpus 4"),
        ([], {"generator_gpus": 0}, "--generator-gpus 0"),
        ([], {"broker": False}, "--broker False"),
        ([], {"keda": True}, "--keda True"),
        ([POOL], {}, "pools.own.kubernetes node_selector={'gpu': 'l40s'} tolerations=[] image=None"),
    ],
)
def test_what_one_pod_cannot_have_is_said_in_a_line(
    file: Path, overrides: list[str], options: dict[str, Any], message: str
) -> None:
    folder = file.parent / "objects"
    with pytest.raises(ConfigError) as caught:
        Kubernetes(folder=folder, **options).prepare(load_config(file, [TURNS, *overrides], environment={}))
    assert str(caught.value) == f"{message} excludes placement, with which one node has the whole run"
    assert not folder.exists()


def test_no_machine_joins_a_run_in_a_pod(file: Path) -> None:
    config = load_config(file, [TURNS, "pools={own: {nodes: [a]}}"], environment={})
    with pytest.raises(ConfigError, match=r"^pools.own.nodes is for launcher.name local and `tidemill node`: remove"):
        Kubernetes(folder=file.parent / "objects").prepare(config)


def test_a_job_of_another_name_is_applied_like_the_trainers(file: Path) -> None:
    code, said, trial = apply(file, active="1", differs=0, job="run")
    assert code == 0
    assert said[3:] == [GET.replace("trainer", "run"), "diff -l role=run -f", "apply -f"]
    assert [each["metadata"]["name"] for each in yaml.safe_load_all(trial.read_text())] == ["run-trial", "run"]
