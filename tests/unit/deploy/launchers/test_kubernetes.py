"""The Kubernetes files: valid by Kubernetes' own schemas, hardened, and in step with the names in the code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from broker.connection import acl
from broker.connection.keys import GENERATORS, REWARD, Keys
from schemas.config import load_config
from tests.support.runs.command_line import command_names
from tests.support.runs.programs import find_program

FOLDER = Path(__file__).parents[4] / "deploy" / "kubernetes"
PARTS = sorted(path.name for path in FOLDER.iterdir())
WORKLOADS = ("Deployment", "StatefulSet", "Job")


def documents(part: str) -> list[dict[str, Any]]:
    """All objects of a part, as its kustomization names their files."""
    kustomization = yaml.safe_load((FOLDER / part / "kustomization.yaml").read_text())
    files = [FOLDER / part / name for name in kustomization["resources"]]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for part in PARTS:
        for document in documents(part):
            if document["kind"] in WORKLOADS:
                yield document["metadata"]["name"], document["spec"]["template"]["spec"]


@pytest.mark.parametrize("part", PARTS)
def test_every_object_is_valid(part: str) -> None:
    check_schemas(documents(part))


def check_schemas(objects: list[dict[str, Any]]) -> None:
    """Kubernetes' own; KEDA's objects are checked by name further down."""
    for document in objects:
        if not document["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("part", PARTS)
def test_every_file_of_a_part_is_in_its_kustomization(part: str) -> None:
    kustomization = yaml.safe_load((FOLDER / part / "kustomization.yaml").read_text())
    generated = [name for entry in kustomization.get("configMapGenerator", []) for name in entry["files"]]
    named = {"kustomization.yaml", *kustomization["resources"], *generated}
    assert {path.name for path in (FOLDER / part).iterdir()} == named


@pytest.mark.parametrize("part", PARTS)
def test_every_part_renders_to_valid_objects(part: str) -> None:
    command = [find_program("kubectl"), "kustomize", str(FOLDER / part)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rendered = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert all(document["metadata"]["namespace"] == "tidemill" for document in rendered)
    check_schemas(rendered)
    text = yaml.safe_dump(rendered)
    assert "image: tidemill-" not in text, "every image of ours is given a registry"
    assert "name: tidemill-config\n" not in text, "every use of the configuration follows its changes"


def test_no_container_has_more_rights_than_it_needs() -> None:
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"]:
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
                words = [*container.get("command", []), *container.get("args", [])]
                # A Deployment starts again what ends: only the trainer, a Job, may.
                assert ("--stay" in words) == (container["image"] != "tidemill-trainer")
                words = [word for word in words if word != "--stay"]
                assert words[-2] in commands
                assert words[-1] == "/etc/tidemill/config.yaml"
                assert container["image"] == f"tidemill-{words[-2]}"
                started.add(words[-2])
    assert started == {"control", "feeder", "reward", "generator", "trainer"}


def test_the_configuration_is_valid_and_scaling_names_its_streams() -> None:
    config = load_config(FOLDER / "run" / "config.yaml", environment={})
    keys = Keys(config.broker.prefix, config.run.name)
    groups = {keys.tasks: GENERATORS, keys.trajectories: REWARD}
    triggers = [
        trigger["metadata"]
        for document in documents("keda")
        if document["kind"] == "ScaledObject"
        for trigger in document["spec"]["triggers"]
    ]
    assert len(triggers) == 2
    for trigger in triggers:
        assert groups[trigger["stream"]] == trigger["consumerGroup"]


def test_the_trainers_job_agrees_with_itself_on_its_size() -> None:
    (job,) = [document for document in documents("run") if document["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert int(values["NODES"]) == job["spec"]["parallelism"] == job["spec"]["completions"]
    assert values["GPUS"] == container["resources"]["limits"]["nvidia.com/gpu"]
    service = job["spec"]["template"]["spec"]["subdomain"]
    assert f"--master-addr={job['metadata']['name']}-0.{service}" in container["command"]
    assert any(
        document["kind"] == "Service" and document["metadata"]["name"] == service for document in documents("run")
    )


def test_a_pod_has_the_broker_user_of_its_role_and_no_other() -> None:
    users = {name: name for name in acl.ROLES} | {"control": "operator", "redis": "server"}
    for name, pod in pods():
        secrets = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        others = [secret["secretName"] for secret in secrets if secret["secretName"] != "tidemill-control"]
        assert others == [f"tidemill-broker-{users[name]}"], name
        assert len(secrets) == 1 + (name == "control"), name
        for container in pod["containers"]:
            for variable in container.get("env", []):
                assert "secretKeyRef" not in variable.get("valueFrom", {}), name


def test_reward_and_feeder_pods_cannot_change_what_the_trainer_reads() -> None:
    """They may run what a model wrote, and a checkpoint is what the trainer continues from."""
    for name, pod in pods():
        for mount in (mount for container in pod["containers"] for mount in container.get("volumeMounts", [])):
            if mount["name"] == "runs":
                assert mount.get("readOnly", False) == (name in ("reward", "feeder")), name


def test_secrets_are_files_and_in_no_manifest() -> None:
    text = "".join(path.read_text() for path in FOLDER.rglob("*.yaml"))
    assert not re.search(r"kind: Secret\b", text)
    assert not re.search(r"redis(s)?://", text)
