"""The Helm chart, rendered by Helm's own engine: its schema, names, secrets, and the plain files made from it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.connection import acl
from deploy.launchers.kubernetes import Kubernetes
from schemas.config import load_config
from tests.support.runs.kubernetes_objects import check_schemas, read_objects
from tests.support.runs.programs import skip_or_fail
from tests.unit.deploy.launchers.test_kubernetes_launcher import POOLS, WARM, Objects, file, pod
from tests.unit.deploy.launchers.test_kubernetes_launcher import render as render_plain
from tests.unit.deploy.launchers.test_kubernetes_turns import TURNS

try:
    import helm_python

    from scripts import manifests
except ImportError:
    skip_or_fail("helm-python-sdk is not installed: make dev")

__all__ = ["file"]
CONFIG = "run: {name: sums}\n"
SHARED = CONFIG + "placement: {trainer: '0', generator: '0-1'}\n"
OF_THE_CLUSTER = {"kube-root-ca.crt", "tidemill-trainer", "tidemill-generator"}
FULL: dict[str, Any] = {
    "config": CONFIG + "trainer: {publish: {transport: peer}}\n",
    "files": {"reward.py": "def exact(completion, answer):\n    return 1.0\n"},
    "images": {"pullSecrets": [{"name": "pull"}]},
    "trainer": {"nodes": 1, "gpus": 4, "labels": {"kueue.x-k8s.io/queue-name": "team"}, "nodeSelector": {"pool": "a"}},
    "generator": {"gpus": 0, "waitFor": "/tidemill/runs/cache/sums/config.json", "runtimeClassName": "gvisor"},
    "reward": {
        "egress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 443}]}],
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
    },
    "storage": {"accessMode": "ReadWriteOnce", "className": "fast"},
    "broker": {
        "own": False,
        "caSecret": "broker-ca",
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}], "ports": [{"port": 6380}]}],
    },
    "autoscaling": {"by": "keda", "generator": {"max": 8}},
    "nameServers": [{"ipBlock": {"cidr": "10.96.0.10/32"}}],
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
}

WHOLE: dict[str, Any] = {
    "config": SHARED,
    "run": {"enabled": True, "gpus": 2, "attempt": 3, "labels": {"kueue.x-k8s.io/queue-name": "team"}},
    "storage": {"accessMode": "ReadWriteOnce"},
    "monitoring": {"enabled": True},
}


def render(values: dict[str, Any], name: str = "sums", namespace: str = "team") -> Objects:
    """All objects of a release, each valid by Kubernetes' own schemas."""
    texts = manifests.render({"config": CONFIG, **values}, name, namespace).values()
    found = [document for text in texts for document in read_objects(text)]
    check_schemas(found)
    assert len({(each["kind"], each["metadata"]["name"]) for each in found}) == len(found)
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


def trainer(objects: Objects) -> str:
    """Name of the Job that trains."""
    (name,) = [name for kind, name in objects if kind == "Job"]
    return name


def test_the_plain_files_are_those_of_the_chart() -> None:
    for path, text in manifests.plain().items():
        assert path.read_text(encoding="utf-8") == text, f"{path} differs: python -m scripts.manifests"
    made = {*manifests.plain(), *manifests.PLAIN.rglob("kustomization.yaml"), *manifests.PLAIN.rglob("config.yaml")}
    assert set(manifests.PLAIN.rglob("*.yaml")) == made, "every object is the chart's"


def test_helm_finds_no_fault() -> None:
    for values in ({"config": CONFIG}, FULL, {"config": SHARED, "run": {"enabled": True}}):
        report = helm_python.lint(manifests.CHART, values, strict=True)
        assert not report["errors"]
        assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


def names(value: Any, key: str = "") -> Iterator[str]:
    """Everything in an object that names another one."""
    if isinstance(value, dict):
        for inner, each in value.items():
            yield from names(each, inner)
    elif isinstance(value, list):
        for each in value:
            yield from names(each, key)
    elif key in ("secretName", "claimName", "serviceAccountName", "subdomain", "serviceName", "resourceNames"):
        yield value


def references(objects: Objects) -> Iterator[str]:
    for document in objects.values():
        yield document["metadata"]["name"]
        yield from names(document)
        text = yaml.safe_dump(document)
        for kind in ("secret", "secretRef", "configMap", "scaleTargetRef", "roleRef", "authenticationRef"):
            yield from re.findall(rf"\b{kind}:\n(?:\s+[a-zA-Z]+: .*\n)*?\s+name: (\S+)", text)


def test_every_name_is_of_the_release_so_a_namespace_holds_several_runs() -> None:
    for values in ({}, {**FULL, "broker": {}}, WHOLE):
        first, second = render(values, "zq7"), render(values, "yk9")
        assert not set(first) & set(second)
        assert {name for name in references(first) if not name.startswith("zq7-")} <= OF_THE_CLUSTER
        for (kind, _), document in first.items():
            selector = document["spec"].get("selector") if kind in ("Deployment", "Service", "StatefulSet") else None
            policy = document["spec"]["podSelector"] if kind == "NetworkPolicy" else None
            for chosen in filter(None, (selector, policy)):
                assert chosen.get("matchLabels", chosen)["app.kubernetes.io/instance"] == "zq7", document
        assert yaml.safe_dump(list(first.values())).replace("zq7", "yk9") == yaml.safe_dump(list(second.values()))
        assert ("http://zq7-control.team:8642" in yaml.safe_dump(list(first.values()))) == ("autoscaling" in values)


def test_each_secret_is_mounted_and_may_have_another_name() -> None:
    users = {*acl.ROLES, "server"}
    expected = {f"sums-broker-{role}" for role in users - {"observer"}}
    expected |= {f"sums-{name}" for name in ("control", "hub", "trackers", "judges")}
    assert secrets(render({})) == expected
    others = {name: f"my-{name}" for name in ("broker", "control", "hub", "trackers", "judges")}
    assert secrets(render({"secrets": others})) == {name.replace("sums-", "my-") for name in expected}
    assert "broker-ca" in secrets(render(FULL))
    whole = {f"sums-{name}" for name in ("control", "hub", "trackers", "judges")}
    assert secrets(render(WHOLE)) == whole, "the broker in its pod has no users"
    assert secrets(render({**WHOLE, "secrets": others})) == {name.replace("sums-", "my-") for name in whole}


def secrets(objects: Objects) -> set[str]:
    text = yaml.safe_dump(list(objects.values()))
    found = set(re.findall(r"secretName: (\S+)", text))
    return found | set(re.findall(r"secret(?:Ref)?:\n\s+name: (\S+)", text))


def test_a_job_has_another_name_only_if_the_trainer_differs() -> None:
    """A Job can't be changed: an upgrade replaces one of another name, and leaves one of the same name alone."""
    name = trainer(render({}))
    same = [{"reward": {"limits": {"memory": "8Gi"}}}, {"generator": {"gpus": 2}}, {"autoscaling": {"by": "none"}}]
    assert {trainer(render(values)) for values in same} == {name}
    others = [{"config": "run: {name: other}\n"}, {"trainer": {"nodes": 2}}, {"trainer": {"attempt": 1}}]
    assert len({name, *(trainer(render(values)) for values in others)}) == 4
    (container,) = pod(render({}), "Job", name)["containers"]
    assert f"--meet={name}-0.sums-trainer:29500" in container["args"]


def test_pods_roll_when_the_configuration_changes() -> None:
    for key in ("config", "files"):
        changed = render({key: "run: {name: b}\n" if key == "config" else {"a.py": ""}})
        for kind, name in (("Deployment", "sums-generator"), ("Deployment", "sums-control")):
            old, new = (each[kind, name]["spec"]["template"]["metadata"] for each in (render({}), changed))
            assert old["annotations"] != new["annotations"]


def test_values_that_teams_ask_for_reach_the_objects() -> None:
    objects = render(FULL)
    job = objects["Job", trainer(objects)]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "a"}
    generator = pod(objects, "Deployment", "sums-generator")
    assert generator["runtimeClassName"] == "gvisor"
    assert generator["initContainers"][0]["command"][-1] == FULL["generator"]["waitFor"]
    assert pod(objects, "Deployment", "sums-reward")["imagePullSecrets"] == [{"name": "pull"}]
    egress = objects["NetworkPolicy", "sums-reward"]["spec"]["egress"]
    assert [rule for rule in FULL["broker"]["egress"] + FULL["reward"]["egress"] if rule not in egress] == []
    assert FULL["nameServers"] in [rule["to"] for rule in egress]
    assert ("StatefulSet", "sums-redis") not in objects
    assert objects["ScaledObject", "sums-generator"]["spec"]["maxReplicaCount"] == 8
    ports = {port["name"] for kind, name in objects if kind == "Deployment" for port in ports_of(objects, kind, name)}
    monitored = objects["PodMonitor", "sums-services"]["spec"]["podMetricsEndpoints"]
    assert {endpoint["port"] for endpoint in monitored} == ports
    (control,) = pod(objects, "Deployment", "sums-control")["containers"]
    env = {entry["name"]: entry["value"] for entry in control["env"]}
    assert env["TIDEMILL_CONTROL__DEPLOYMENTS__GENERATOR"] == "sums-generator"
    assert objects["Role", "sums-control"]["rules"][0]["resourceNames"] == ["sums-generator"]
    kept = objects["PersistentVolumeClaim", "sums-runs"]["metadata"]["annotations"]
    assert kept == {"helm.sh/resource-policy": "keep"}


def test_values_of_a_whole_run_reach_its_job_and_make_it_again() -> None:
    objects = render(WHOLE)
    name = trainer(objects)
    assert name.startswith("sums-run-")
    assert objects["Job", name]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert {kind for kind, _ in objects} == {
        "Job", "Service", "ConfigMap", "PersistentVolumeClaim", "NetworkPolicy", "PodMonitor"
    }  # fmt: skip
    monitored = objects["PodMonitor", "sums-services"]["spec"]["podMetricsEndpoints"]
    assert {endpoint["port"] for endpoint in monitored} == {port["name"] for port in ports_of(objects, "Job", name)}
    changed = {**WHOLE, "run": {**WHOLE["run"], "attempt": 4}}
    assert trainer(render({**WHOLE, "trainer": {"attempt": 1}})) == name != trainer(render(changed))


def ports_of(objects: Objects, kind: str, name: str) -> list[dict[str, Any]]:
    return [port for container in pod(objects, kind, name)["containers"] for port in container["ports"]]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"config": ""}, "config is empty"),
        ({"trainer": {"nodes": 0}}, "minimum: got 0, want 1"),
        ({"trainer": {"node": 2}}, "'node' not allowed"),
        ({"storage": {"size": "many"}}, "'many' does not match pattern"),
        ({"storage": {"accessMode": "ReadOnlyMany"}}, "one of 'ReadWriteMany', 'ReadWriteOnce'"),
        ({"autoscaling": {"by": "magic"}}, "one of 'none', 'hpa', 'keda'"),
        ({"broker": {"own": False}}, "/broker/egress"),
        ({"files": {"config.yaml": ""}}, "config.yaml"),
        ({"reward": {"egress": [{"ports": [{"port": 443}]}]}}, "missing property 'to'"),
        ({"reward": {"limits": {"memory": None}}}, "memory"),
        ({"autoscaling": {"by": "hpa", "reward": {"min": 0}}}, "minimum: got 0, want 1"),
        ({"storage": {"accessMode": "ReadWriteOnce"}}, "needs trainer.publish.transport redis or peer"),
        ({"storage": {"accessMode": "ReadWriteOnce"}, "trainer": {"nodes": 2}}, "excludes trainer.nodes 2"),
        ({"config": SHARED}, "config has placement: set run.enabled to true, and run.gpus"),
        ({"run": {"nodes": 2}}, "'nodes' not allowed"),
        ({"run": {"gpus": -1}}, "minimum: got -1, want 0"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], text: str) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render(values)
    assert text in str(caught.value)


def test_names_that_yaml_takes_for_something_else_are_texts() -> None:
    pools = {"on": {}, "null": {}}
    objects = render({"generator": {"pools": pools, "waitFor": "1"}, "autoscaling": {"by": "none"}}, name="true")
    for pool in pools:
        document = objects["Deployment", f"true-generator-{pool}"]
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert (labels["pool"], labels["app.kubernetes.io/instance"]) == (pool, "true")
        assert document["spec"]["template"]["spec"]["containers"][0]["args"][-1] == pool
    with pytest.raises(helm_python.HelmError, match="must begin with a letter"):
        render({}, name="123")


MORE = pytest.mark.matrix("one more set of options of the chart")


def in_order(value: Any) -> Any:
    """Lists whose entries have names, such as variables, by name: kustomize puts what it changes first."""
    if isinstance(value, dict):
        return {key: in_order(inner) for key, inner in value.items()}
    if isinstance(value, list):
        items = [in_order(inner) for inner in value]
        named = all(isinstance(item, dict) and "name" in item for item in items)
        return sorted(items, key=lambda item: str(item["name"])) if named else items
    return value


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ([], {"trainer_nodes": 3, "storage": "1Ti", "registry": "ghcr.io/me", "tag": "1.2"}),
        ([], {"trainer_gpus": 0, "generator_gpus": 0, "broker": False, "keda": True}),
        pytest.param([], {}, marks=MORE),
        pytest.param([], {"access_mode": "ReadWriteOnce", "storage_class": "fast"}, marks=MORE),
        pytest.param([f"pools={POOLS}"], {"access_mode": "ReadWriteOnce"}, marks=MORE),
        ([f"pools={POOLS}", "model.path=/tidemill/runs/cache/sums", f"warm_start={WARM}"], {"registry": "ghcr.io/me"}),
        pytest.param([TURNS], {"registry": "ghcr.io/me", "tag": "1.2"}, marks=MORE),
        ([TURNS, "trainer.publish.transport=file"], {"access_mode": "ReadWriteOnce", "storage_class": "fast"}),
    ],
)
def test_helm_and_kubectl_get_the_same_objects(file: Path, overrides: list[str], options: dict[str, Any]) -> None:
    folder = file.parent / "helm"
    (written,) = Kubernetes(folder=folder, helm=True, **options).prepare(load_config(file, overrides, environment={}))
    values = yaml.safe_load(written.read_text(encoding="utf-8"))
    plain = render_plain(file, *overrides, **options)
    rendered = render({**values, "plain": True}, namespace="tidemill-sums")
    tag = options.get("tag", "0.1.0")
    registry = options.get("registry", "registry.example")
    hashed = {name: "tidemill-config" for kind, name in plain if kind == "ConfigMap"}
    (config,) = [each["data"] for (kind, _), each in plain.items() if kind == "ConfigMap"]
    assert config == {"config.yaml": values["config"], **values["files"]}

    def same(objects: Objects) -> dict[str, str]:
        """Without what kustomize adds: namespace, images' registries and tags, the hash of the configuration."""
        found = {}
        for (kind, name), document in objects.items():
            text = yaml.safe_dump(in_order(document) | {"metadata": document["metadata"] | {"namespace": ""}})
            for old, new in hashed.items():
                text = text.replace(old, new)
            text = re.sub(rf"{registry}/(tidemill-\w+):{tag}(-cuda)?", r"\1", text)
            found[f"{kind} {name}"] = text.replace("  namespace: tidemill-sums\n", "")
        return {name: text for name, text in found.items() if not name.startswith("ConfigMap ")}

    assert same(rendered) == same(plain)
    cuda = pod(render(values), "Job", trainer(render(values)))["containers"][0]["image"]
    assert cuda == pod(plain, "Job", trainer(plain))["containers"][0]["image"]
