"""`tidemill kubernetes`: a folder for kubectl, with the configuration, its files and every size written once."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.launchers.kubernetes import MAX_FILES, Kubernetes
from deploy.planning.cluster import DeviceQuota
from schemas.config import load_config, parse_config
from schemas.errors import ConfigError
from schemas.model_folder import fetched_name
from tests.support.runs.kubernetes_objects import check_schemas, read_objects
from tests.support.runs.programs import find_program

POOLS = (
    "{slow: {generator: {engine: transformers, args: {}}, kubernetes: {image: own.example/slow:1}},"
    " l40s: {generator: {args: {tensor_parallel_size: 4}}, env: {A: b}, kubernetes:"
    " {node_selector: {gpu: l40s}, tolerations: [{key: l40s, operator: Exists}]}}}"
)
WARM = "{model: 'rewards.py:build', dataset: {name: arithmetic}, eval: {name: arithmetic}}"
Objects = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration that names a data file and a reward function beside it."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2+3=", "answer": "5"}\n')
    (tmp_path / "rewards.py").write_text("def exact(completion, answer):\n    return float(completion == answer)\n")
    data = {
        "run": {"name": "sums"},
        "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
        "train": {"name": "jsonl", "args": {"path": "prompts.jsonl"}},
        "reward": {"terms": [{"name": "rewards.py:exact"}]},
        "generator": {"engine": "vllm", "args": {"tensor_parallel_size": 2}},
        "trainer": {"processes": 4, "publish": {"transport": "peer"}},
    }
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def render(file: Path, *overrides: str, **options: Any) -> Objects:
    """All objects as kubectl would send them, each valid by Kubernetes' own schemas."""
    folder = file.parent / "objects"
    Kubernetes(folder=folder, **options).prepare(load_config(file, overrides, environment={}))
    command = [find_program("kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rendered = read_objects(done.stdout)
    check_schemas(rendered)
    return {(document["kind"], document["metadata"]["name"]): document for document in rendered}


def pod(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = objects[kind, name]["spec"]["template"]["spec"]
    return spec


def test_pods_have_the_configuration_with_the_files_that_it_names(file: Path) -> None:
    objects = render(file)
    ((_, files),) = [(name, entry["data"]) for (kind, name), entry in objects.items() if kind == "ConfigMap"]
    assert files["rewards.py"] == (file.parent / "rewards.py").read_text()
    assert files["prompts.jsonl"] == (file.parent / "prompts.jsonl").read_text()
    config = parse_config(yaml.safe_load(files["config.yaml"]), base=Path("/etc/tidemill"))
    assert config.reward.terms[0].name == "rewards.py:exact"
    assert config.trainer.publish.peer.port == 8643, "the port that the network policy opens"
    assert config.broker.deadline_s == 600, "a Redis pod takes minutes to move to another node"
    own = render(file, "broker.deadline_s=90")
    ((_, files),) = [(name, entry["data"]) for (kind, name), entry in own.items() if kind == "ConfigMap"]
    assert yaml.safe_load(files["config.yaml"])["broker"]["deadline_s"] == 90


@pytest.mark.parametrize("text", ["no file has so long a name " * 20, "~no-such-user is a name", "a\0b"])
def test_texts_that_can_name_no_file_stay_texts(file: Path, text: str) -> None:
    folder, config = file.parent / "objects", load_config(file, environment={})
    run = config.run.model_copy(update={"notes": text})
    Kubernetes(folder=folder).prepare(config.model_copy(update={"run": run}))
    assert yaml.safe_load((folder / "config.yaml").read_text())["run"]["notes"] == text


def test_the_size_of_the_trainer_is_one_number_everywhere(file: Path) -> None:
    objects = render(file, trainer_nodes=3)
    job = objects["Job", "trainer"]["spec"]
    assert (job["parallelism"], job["completions"]) == (3, 3)
    (container,) = pod(objects, "Job", "trainer")["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (env["NODES"], env["GPUS"]) == ("3", "4")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    (generator,) = pod(objects, "Deployment", "generator")["containers"]
    assert generator["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_without_gpus_nothing_asks_for_one(file: Path) -> None:
    objects = render(file, trainer_gpus=0, generator_gpus=0, registry="ghcr.io/me", tag="1.2")
    assert "nvidia.com/gpu" not in yaml.safe_dump([entry for entry in objects.values()]).replace(
        "key: nvidia.com/gpu", ""
    )
    (container,) = pod(objects, "Job", "trainer")["containers"]
    assert container["image"] == "ghcr.io/me/tidemill-trainer:1.2"
    assert {"name": "GPUS", "value": "4"} in container["env"], "ranks of the configuration"


def test_generators_wait_for_the_model_that_the_trainers_pod_makes(file: Path) -> None:
    """A generator without its model ends with 2, and is started again with pauses that grow to five minutes."""
    assert "initContainers" not in pod(render(file, access_mode="ReadWriteOnce"), "Deployment", "generator")
    (wait,) = pod(render(file), "Deployment", "generator")["initContainers"]
    assert wait["command"][-1] == f"/tidemill/runs/cache/hub/{fetched_name('Qwen/Qwen2.5-0.5B-Instruct')}"
    assert "initContainers" not in pod(render(file, "model.path=/tidemill/runs/mine"), "Deployment", "generator")
    warm = {"model": "rewards.py:build", "dataset": {"name": "arithmetic"}, "eval": {"name": "arithmetic"}}
    data = yaml.safe_load(file.read_text())
    data["model"] = {"path": "/tidemill/runs/cache/sums"}
    file.write_text(yaml.safe_dump({**data, "warm_start": warm}))
    generator = pod(render(file), "Deployment", "generator")
    (wait,) = generator["initContainers"]
    assert wait["image"] == generator["containers"][0]["image"]
    assert wait["command"][-1] == "/tidemill/runs/cache/sums/config.json"
    script, made = wait["command"][-2], file.parent / "config.json"
    assert subprocess.run(["timeout", "1", "sh", "-c", script, made], timeout=60, check=False).returncode == 124
    made.touch()
    assert subprocess.run(["sh", "-c", script, made], timeout=60, check=False).returncode == 0


def test_each_pool_is_a_deployment_with_its_own_gpus_nodes_and_image(file: Path) -> None:
    objects = render(file, f"pools={POOLS}")
    names = sorted(name for kind, name in objects if kind == "Deployment" and name.startswith("generator"))
    assert names == ["generator-l40s", "generator-slow"]
    found = {name: objects["Deployment", f"generator-{name}"] for name in ("l40s", "slow")}
    for name, document in found.items():
        labels = {"app": "tidemill", "role": "generator", "pool": name}
        assert document["spec"]["selector"]["matchLabels"] == labels, "no Deployment takes the pods of another"
        assert document["spec"]["template"]["metadata"]["labels"] == labels
    l40s, slow = (pod(objects, "Deployment", f"generator-{name}") for name in ("l40s", "slow"))
    (one,), (other,) = l40s["containers"], slow["containers"]
    assert one["args"] == ["generator", "/etc/tidemill/config.yaml", "--stay", "--pool", "l40s"]
    assert (one["image"], other["image"]) == ("registry.example/tidemill-generator:0.1.0-cuda", "own.example/slow:1")
    assert one["resources"]["limits"]["nvidia.com/gpu"] == one["resources"]["requests"]["nvidia.com/gpu"] == "4"
    assert other["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert (l40s["nodeSelector"], slow.get("nodeSelector")) == ({"gpu": "l40s"}, None)
    assert [one for one in l40s["tolerations"] if one not in slow["tolerations"]] == [
        {"key": "l40s", "operator": "Exists"}
    ]
    (rule,) = objects["Role", "control"]["rules"]
    assert rule["resourceNames"] == names, "each can be scaled"


def test_every_object_is_in_the_namespace_of_the_run(file: Path) -> None:
    objects = render(file, keda=True)
    assert not [kind for kind, _ in objects if kind == "PriorityClass"], "other runs use it when this one is deleted"
    text = yaml.safe_dump(list(objects.values()))
    assert set(re.findall(r"namespace: (\S+)", text)) == {"tidemill-sums"}
    assert "http://control.tidemill-sums:8642/v1/status" in text
    assert not [kind for kind, _ in objects if kind == "HorizontalPodAutoscaler"], "one autoscaler, not two"


@pytest.mark.parametrize(
    ("options", "overrides", "trainer", "widths"),
    [
        ({"trainer_nodes": 2, "trainer_gpus": 8, "generator_gpus": 4}, [], 16, {"generator": 4}),
        ({"trainer_nodes": 2, "trainer_gpus": 0, "generator_gpus": 0}, [], 8, {"generator": 2}),
        ({}, [f"pools={POOLS}"], 4, {"generator.l40s": 4, "generator.slow": 1}),
    ],
)
def test_the_control_plane_counts_the_devices_of_the_pods(
    file: Path, options: dict[str, Any], overrides: list[str], trainer: int, widths: dict[str, int]
) -> None:
    """Else `tidemill scale` would exceed supervisor.max_devices."""
    (control,) = pod(render(file, *overrides, **options), "Deployment", "control")["containers"]
    given = {entry["name"]: entry.get("value") for entry in control["env"]}
    environment = {name: given[name] for name in ("TIDEMILL_CONTROL__DEVICES",)}
    quota = DeviceQuota.of(load_config(file, overrides, environment=environment))
    assert (quota.trainer, quota.widths) == (trainer, widths)


def test_keda_starts_no_more_generators_than_the_run_may_hold(file: Path) -> None:
    quota = "supervisor.max_devices=21"
    objects = render(file, quota, keda=True)
    assert objects["ScaledObject", "generator"]["spec"]["maxReplicaCount"] == 8, "of two GPUs each, beside four"
    folder = file.parent / "chart"
    Kubernetes(folder=folder, helm=True, keda=True).prepare(load_config(file, [quota], environment={}))
    assert yaml.safe_load((folder / "values.yaml").read_text())["autoscaling"]["generator"] == {"max": 8}
    objects = render(file, quota, keda=True, generator_gpus=4)
    assert objects["ScaledObject", "generator"]["spec"]["maxReplicaCount"] == 4, "of four GPUs each"


def test_a_volume_of_one_node_is_mounted_by_trainer_and_control_alone(file: Path) -> None:
    objects = render(file, access_mode="ReadWriteOnce", storage_class="fast")
    claim = objects["PersistentVolumeClaim", "tidemill-runs"]["spec"]
    assert (claim["accessModes"], claim["storageClassName"]) == (["ReadWriteOnce"], "fast")
    mounted = {
        name
        for kind, name in objects
        if kind in ("Deployment", "Job")
        for volume in pod(objects, kind, name)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert mounted == {"trainer", "control"}
    assert "podAffinity" in pod(objects, "Deployment", "control")["affinity"]


def test_reward_pods_reach_a_broker_that_is_not_the_runs_own(file: Path) -> None:
    """No pod of the run is it, and its address is in a secret: ports are what the rule can name."""
    objects = render(file), render(file, "broker.url=redis://other", broker=False)
    own, other = (each["NetworkPolicy", "reward"]["spec"]["egress"] for each in objects)
    (rule,) = [rule for rule in other if rule not in own]
    assert [rule for rule in own if rule not in other] == []
    assert rule == {
        "to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}],
        "ports": [{"port": 6379}, {"port": 6380}],
    }
    folder = file.parent / "chart"
    Kubernetes(folder=folder, helm=True, broker=False).prepare(load_config(file, environment={}))
    assert yaml.safe_load((folder / "values.yaml").read_text())["broker"] == {"own": False, "egress": [rule]}


@pytest.mark.parametrize(
    ("overrides", "options", "text"),
    [
        (["trainer.publish.transport=file"], {"access_mode": "ReadWriteOnce"}, "transport redis or peer, not file"),
        ([], {"access_mode": "ReadWriteOnce", "trainer_nodes": 2}, "excludes 2 trainer nodes"),
        ([], {"access_mode": "ReadOnlyMany"}, "'ReadOnlyMany' must be ReadWriteMany or ReadWriteOnce"),
        ([], {"trainer_nodes": 0}, "1 or more trainer nodes, not 0"),
        ([], {"namespace": "My_Run"}, "namespace 'My_Run' must have"),
        (["run.folder=/data/run"], {}, "run.folder /data/run must be below /tidemill/runs"),
        (
            ["broker.url=redis://:secret@other"],
            {},
            "broker.url redis://***@other excludes the run's own broker, which Ku",
        ),
        ([], {"extra_files": ["nothing.py"]}, "--file nothing.py: no such file"),
    ],
)
def test_what_cannot_work_writes_nothing(file: Path, overrides: list[str], options: dict[str, Any], text: str) -> None:
    folder = file.parent / "objects"
    with pytest.raises(ConfigError) as caught:
        Kubernetes(folder=folder, **options).prepare(load_config(file, overrides, environment={}))
    assert text in str(caught.value)
    assert not folder.exists()


@pytest.mark.parametrize("named", ["", "more/notes.txt"])
def test_the_folder_of_your_own_files_is_refused_and_they_stay(file: Path, named: str) -> None:
    own = file.rename(file.with_name("config.yaml"))
    before, folder = own.read_bytes(), (file.parent / named).parent if named else file.parent
    folder.mkdir(exist_ok=True)
    if named:
        (file.parent / named).touch()
    seen = sorted(folder.iterdir())
    launcher = Kubernetes(folder=folder, extra_files=[str(file.parent / named)] if named else [])
    with pytest.raises(ConfigError, match=rf"^--folder {folder} has .*: choose another folder$"):
        launcher.prepare(load_config(own, environment={}))
    assert own.read_bytes() == before
    assert sorted(folder.iterdir()) == seen


def test_files_that_no_config_map_holds_are_named(file: Path) -> None:
    (file.parent / "prompts.jsonl").write_text(" " * (MAX_FILES + 1))
    with pytest.raises(ConfigError, match=r"put the largest, .*prompts\.jsonl, into the volume"):
        Kubernetes(folder=file.parent / "objects").prepare(load_config(file, environment={}))


OBJECTS = "kind: Job\nmetadata:\n  name: trainer\n---\nkind: Service\nmetadata:\n  name: trainer\n"
KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in
    "kustomize .") printf "$OBJECTS" ;;
    *dry-run*) cat >"$CALLS.trial"; exit "$REJECTED" ;;
    *"get job"*) printf "$ACTIVE" ;;
    diff*) exit "$DIFFERS" ;;
esac
"""
GET = "-n tidemill-sums get job trainer --ignore-not-found -o jsonpath={.status.active}"
DELETE = "-n tidemill-sums delete job trainer --ignore-not-found --wait --timeout=330s"


def apply(
    file: Path, rejected: int = 0, active: str = "", differs: int = 1, job: str = "trainer"
) -> tuple[int, list[str], Path]:
    """Run apply.sh with a kubectl that answers so; returns its exit code, what it asked, and the objects on trial.

    active: pods of the Job, whose name is ``job``. differs: exit code of kubectl diff.
    """
    folder = file.parent / "objects"
    *_, script = Kubernetes(folder=folder).prepare(load_config(file, environment={}))
    kubectl, calls = file.parent / "bin" / "kubectl", file.parent / "calls"
    kubectl.parent.mkdir()
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    environment = {"PATH": f"{kubectl.parent}:{os.environ['PATH']}", "CALLS": str(calls)}
    environment |= {"OBJECTS": OBJECTS.replace("trainer", job)}
    environment |= {"REJECTED": str(rejected), "ACTIVE": active, "DIFFERS": str(differs)}
    done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60, check=False)
    said = [re.sub(r" /\S+", "", line) for line in calls.read_text().splitlines()]
    return done.returncode, said, Path(f"{calls}.trial")


@pytest.mark.parametrize("rejected", [0, 1])
def test_a_configuration_is_applied_whole_or_not_at_all(file: Path, rejected: int) -> None:
    code, said, trial = apply(file, rejected)
    assert code == rejected
    assert said[:2] == ["kustomize .", "apply --dry-run=server -f -"]
    changes = ["apply -f priority.yaml", GET, DELETE, "apply -f"]
    assert said[2:] == ([] if rejected else changes)
    names = [entry["metadata"]["name"] for entry in yaml.safe_load_all(trial.read_text())]
    assert names == ["trainer-trial", "trainer"], "the Job that runs stays"


@pytest.mark.parametrize(("differs", "made_again"), [(0, []), (1, [DELETE]), (2, [DELETE])])
def test_a_trainer_that_runs_as_it_should_is_not_made_again(file: Path, differs: int, made_again: list[str]) -> None:
    _, said, _ = apply(file, active="1", differs=differs)
    assert said[3:] == [GET, "diff -l role=trainer -f", *made_again, "apply -f"]
