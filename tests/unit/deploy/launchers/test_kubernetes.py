"""The Kubernetes files: valid by Kubernetes' own schemas, hardened, and in step with the names in the code."""

import re
import subprocess
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from broker.connection import acl
from schemas.config import load_config
from schemas.control_api.status import StreamStatus
from schemas.errors import HOPELESS
from tests.support.runs.command_line import command_names
from tests.support.runs.kubernetes_objects import check_schemas
from tests.support.runs.programs import find_program

FOLDER = Path(__file__).parents[4] / "deploy" / "kubernetes"
PARTS = sorted(path.name for path in FOLDER.iterdir())
WORKLOADS = ("Deployment", "StatefulSet", "Job")


def documents(part: str) -> list[dict[str, Any]]:
    """All objects of a part, as its kustomization names their files."""
    kustomization = yaml.safe_load((FOLDER / part / "kustomization.yaml").read_text())
    files = [FOLDER / part / name for name in kustomization["resources"]]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for part in PARTS:
        for document in documents(part):
            if document["kind"] in WORKLOADS:
                yield document["metadata"]["name"], document["spec"]["template"]["spec"]


@pytest.mark.parametrize("part", PARTS)
def test_every_object_is_valid(part: str) -> None:
    check_schemas(documents(part))


@pytest.mark.parametrize("part", PARTS)
def test_every_file_of_a_part_is_in_its_kustomization(part: str) -> None:
    kustomization = yaml.safe_load((FOLDER / part / "kustomization.yaml").read_text())
    generated = [name for entry in kustomization.get("configMapGenerator", []) for name in entry["files"]]
    named = {"kustomization.yaml", *kustomization["resources"], *generated}
    assert {path.name for path in (FOLDER / part).iterdir()} - {"apply.sh", "priority.yaml"} == named


@pytest.mark.parametrize("part", PARTS)
def test_every_part_renders_to_valid_objects(part: str) -> None:
    command = [find_program("kubectl"), "kustomize", str(FOLDER / part)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rendered = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert all(document["metadata"]["namespace"] == "tidemill" for document in rendered), (
        "the end of a run deletes it all"
    )
    check_schemas(rendered)
    text = yaml.safe_dump(rendered)
    assert "image: tidemill-" not in text, "every image of ours is given a registry"
    assert "name: tidemill-config\n" not in text, "every use of the configuration follows its changes"


def test_no_container_has_more_rights_than_it_needs() -> None:
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in containers(pod):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["limits"]["memory"], name


def test_services_are_started_with_commands_that_exist_and_the_configuration_that_is_mounted() -> None:
    commands = command_names()
    started = set()
    for _, pod in pods():
        for container in pod["containers"]:
            if container["image"].startswith("tidemill-"):
                words = container["args"]
                # A Deployment starts again what ends: only the trainer and a whole run, which are Jobs, may.
                assert ("--stay" in words) == (container["image"] not in ("tidemill-trainer", "tidemill-run"))
                assert words[0] in commands
                assert words[1] == "/etc/tidemill/config.yaml"
                assert container["image"] == f"tidemill-{'run' if words[0] == 'up' else words[0]}"
                started.add(words[0])
    assert started == {"control", "feeder", "reward", "generator", "trainer", "up"}


def test_the_configuration_is_valid() -> None:
    for part in ("run", "turns"):
        config = load_config(FOLDER / part / "config.yaml", environment={})
        assert (config.placement is not None) == (part == "turns")


def test_scaling_asks_the_control_plane_for_what_waits_and_may_only_look() -> None:
    """Redis' own lag counts entries that were deleted unread, and its password is the administrator's."""
    objects = {document["metadata"]["name"]: document for document in documents("keda")}
    names = get_args(StreamStatus.model_fields["name"].annotation)
    assert "waiting" in StreamStatus.model_fields
    for role, stream in (("generator", "tasks"), ("reward", "trajectories")):
        (trigger,) = objects[role]["spec"]["triggers"]
        assert stream in names
        assert trigger["metadata"]["valueLocation"] == f'streams.#(name=="{stream}").waiting'
        assert trigger["metadata"]["url"] == "http://control.tidemill:8642/v1/status"
        secret = objects[trigger["authenticationRef"]["name"]]["spec"]["secretTargetRef"]
        assert secret == [{"parameter": "token", "name": "tidemill-control", "key": "read_token"}]
    (control,) = [pod for name, pod in pods() if name == "control"]
    env = {entry["name"]: entry["value"] for entry in control["containers"][0]["env"]}
    assert env["TIDEMILL_CONTROL_READ_TOKEN_FILE"] == "/run/secrets/control/read_token"


def test_no_number_of_replicas_takes_scaling_back() -> None:
    for document in documents("run"):
        if document["metadata"]["name"] in ("generator", "reward") and document["kind"] == "Deployment":
            assert "replicas" not in document["spec"]


def job() -> dict[str, Any]:
    (found,) = [document for document in documents("run") if document["kind"] == "Job"]
    return found


def test_an_end_that_no_restart_mends_fails_the_job_and_a_drained_node_does_not() -> None:
    ignored, failed = job()["spec"]["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert failed == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(HOPELESS)}}


@pytest.mark.parametrize(("asked", "ends", "code"), [(False, 0, 0), (False, 2, 2), (True, 0, 75), (True, 1, 1)])
def test_a_trainer_asked_to_end_has_not_finished_its_job(tmp_path: Path, asked: bool, ends: int, code: int) -> None:
    """Kubernetes takes a pod that ends with 0 for the end of the Job, also one that was deleted or drained."""
    command = job()["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:2] == ["tini", "--"]
    program = tmp_path / "tidemill"
    program.write_text(
        "#!/bin/sh\n"
        + (f"trap 'exit {ends}' TERM; sleep 0.2; kill $PPID; while :; do sleep 0.1; done" if asked else f"exit {ends}")
    )
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([*command[2:], "trainer"], env=environment, timeout=60, check=False)
    assert done.returncode == code


def test_a_checkpoint_has_the_grace_of_its_pod() -> None:
    pod = job()["spec"]["template"]["spec"]
    env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    granted = load_config(
        FOLDER / "run" / "config.yaml",
        environment={"TIDEMILL_SUPERVISOR__GRACE_S": env["TIDEMILL_SUPERVISOR__GRACE_S"]},
    ).supervisor.grace_s
    assert 60 < granted < pod["terminationGracePeriodSeconds"]


def test_a_trainer_takes_a_node_back_from_generators() -> None:
    classes = list(yaml.safe_load_all((FOLDER / "run" / "priority.yaml").read_text()))
    check_schemas(classes)
    value = {entry["metadata"]["name"]: entry["value"] for entry in classes}
    used = {name: pod.get("priorityClassName") for name, pod in pods()}
    assert value[used["trainer"]] > value[used["generator"]]
    assert set(value) == {used["trainer"], used["generator"]}


def test_a_model_of_the_hub_is_downloaded_once_into_the_volume() -> None:
    for name, pod in pods():
        if name in ("trainer", "generator", "run"):
            for container in containers(pod):
                env = {entry["name"]: entry.get("value") for entry in container["env"]}
                assert env["HF_HOME"].startswith("/tidemill/runs/"), name
                assert env["HF_TOKEN_PATH"] == "/run/secrets/hub/token", name


def test_a_start_does_not_walk_through_the_volume() -> None:
    for name, pod in pods():
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch", name


def test_the_trainers_job_agrees_with_itself_on_its_size() -> None:
    spec = job()["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert int(values["NODES"]) == spec["parallelism"] == spec["completions"]
    assert {one["resources"]["limits"]["nvidia.com/gpu"] for one in containers(spec["template"]["spec"])} == {
        values["GPUS"]
    }
    service = spec["template"]["spec"]["subdomain"]
    assert f"--meet={job()['metadata']['name']}-0.{service}:29500" in container["args"]
    assert any(
        document["kind"] == "Service" and document["metadata"]["name"] == service for document in documents("run")
    )


def test_a_pod_has_the_broker_user_of_its_role_and_no_other() -> None:
    users = {name: name for name in acl.ROLES} | {"control": "operator", "redis": "server"}
    for name, pod in pods():
        secrets = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        mounted = {secret["secretName"] for secret in secrets}
        # A whole run has a broker of its own.
        expected = {f"tidemill-broker-{users[name]}"} if name != "run" else set()
        expected |= {"tidemill-control"} if name in ("control", "run") else set()
        # A token for the hub, for those that load a model.
        expected |= {"tidemill-hub"} if name in ("trainer", "generator", "run") else set()
        assert mounted == expected, name
        for container in pod["containers"]:
            for variable in container.get("env", []):
                assert "secretKeyRef" not in variable.get("valueFrom", {}), name


def test_reward_and_feeder_pods_cannot_change_what_the_trainer_reads() -> None:
    """They may run what a model wrote, and a checkpoint is what the trainer continues from."""
    for name, pod in pods():
        for mount in (mount for container in pod["containers"] for mount in container.get("volumeMounts", [])):
            if mount["name"] == "runs":
                assert mount.get("readOnly", False) == (name in ("reward", "feeder")), name


def test_what_a_model_wrote_reaches_no_metadata_service_and_no_name_server_but_the_clusters() -> None:
    policies = [each for part in ("run", "turns") for each in documents(part) if each["kind"] == "NetworkPolicy"]
    for role in ("reward", "generator", "run"):
        (egress,) = [
            each["spec"]["egress"]
            for each in policies
            if "Egress" in each["spec"]["policyTypes"] and each["spec"]["podSelector"]["matchLabels"]["role"] == role
        ]
        for rule in egress:
            assert rule["to"], "a rule without it names every address"
            for block in (peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer):
                network = ip_network(block["cidr"])
                metadata = ip_address("169.254.169.254" if network.version == 4 else "fd00:ec2::254")
                assert metadata not in network or any(metadata in ip_network(part) for part in block["except"])


def test_secrets_are_files_and_in_no_manifest() -> None:
    text = "".join(path.read_text() for path in FOLDER.rglob("*.yaml"))
    assert not re.search(r"kind: Secret\b", text)
    assert not re.search(r"redis(s)?://", text)
