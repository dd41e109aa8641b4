"""A run as Kubernetes objects: a folder for `kubectl`, from one configuration, that you can edit.

The objects are those of ``deploy/kubernetes/run``, or of ``turns`` for a run with ``placement``, which is one pod. A
kustomization beside them says what differs: namespace, images, sizes, and a ConfigMap with the configuration and the
files that it names. For Helm, one file of values says the same. This launcher only writes files.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import yaml

from deploy.checks.preflight import check
from deploy.launcher_options import KubernetesOptions
from deploy.launchers.factory import check_own_broker, check_places, check_whole
from deploy.launchers.gpus import check_counts
from deploy.planning.cluster import DeviceQuota, engine_width
from schemas.config import TidemillConfig, by_pool, dump_config, of_pool
from schemas.control_api.orders import scaled_role
from schemas.errors import OK_EXIT, ConfigError
from schemas.model_folder import fetched_name, is_of_hub

RUNS = Path("/tidemill/runs")
HUB = RUNS / "cache" / "hub"
"""HF_HOME of the pods."""
PATCHES, PRIORITY = "patches.yaml", "priority.yaml"
PEER_PORT = 8643
BROKER_DEADLINE_S = 600.0
"""Seconds that services wait for the broker, by default: a pod with a volume takes minutes to move to another node."""
MAX_FILES = 900_000
"""Bytes of the files in the ConfigMap, of which Kubernetes allows 1 MiB."""
OF_ONE_NODE = "ReadWriteOnce"
WITHOUT_VOLUME = ("feeder", "reward")
"""Services without the volume where only one node can mount it, beside the generators."""
OF_ALL = ("apply.sh", PRIORITY)
"""Files of deploy/kubernetes/run that a run in one pod has as well."""
TO_OTHER_BROKER = {
    "to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}],
    "ports": [{"port": 6379}, {"port": 6380}],
}
"""Rule with which reward pods reach a broker that is no pod of the run: its address is in a secret."""
WAIT = 'for _ in $(seq 1800); do [ ! -e "$0" ] || exit 0; sleep 2; done; echo "no $0 after an hour" >&2; exit 1'
"""Shell of a container that waits for a file."""


class Kubernetes(KubernetesOptions):
    """The launcher ``kubernetes``: it writes a folder whose ``apply.sh`` starts the run."""

    def launch(self, config: TidemillConfig, fresh: bool = False) -> int:
        """Write the run's files and print their paths. ConfigError with ``fresh``."""
        if fresh:
            raise ConfigError("--fresh does not work with Kubernetes: for a new run, choose another run.name")
        for path in self.prepare(config):
            print(path)
        return OK_EXIT

    def prepare(self, config: TidemillConfig) -> list[Path]:
        """Check the configuration and write the folder; returns its files, apply.sh last.

        ConfigError for what cannot work, and nothing is written. Models and your code are not checked: pods have them.
        """
        check_counts(self.trainer_gpus, self.generator_gpus)
        self._check(config)
        check(config, here=False, skip={"user code", "model", "control plane", "folders"})
        data, named = _portable(config, [Path(file) for file in self.extra_files or ()])
        values = self._values(config, data, named) if self.helm else None
        folder = Path(self.folder or config.folder / "kubernetes").resolve()
        if values is None:
            _refuse_own(folder, config, named)
        folder.mkdir(parents=True, exist_ok=True)
        if values is not None:
            path = _write(folder / "values.yaml", values)
            chart = files("deploy") / "helm" / "tidemill"
            command = f"# helm upgrade --install {config.run.name} {chart} --values {path}\n"
            path.write_text(command + path.read_text(encoding="utf-8"), encoding="utf-8")
            return [path]
        left_out = {"config.yaml", "kustomization.yaml", *(["autoscaler.yaml"] if self.keda else [])}
        parts = ["run", *(["redis"] if self.broker else []), *(["keda"] if self.keda else [])]
        with as_file(files("deploy") / "kubernetes") as source:
            found = [path for part in parts for path in sorted((source / part).iterdir())]
            if config.placement is not None:
                parts, found = ["turns"], [*(source / "turns").iterdir(), *(source / "run" / name for name in OF_ALL)]
            written = [Path(shutil.copy(path, folder)) for path in found if path.name not in left_out]
            if config.pools and config.placement is None:
                path = folder / "generator.yaml"
                _write(path, *self._pool_objects(config, path.read_text(encoding="utf-8")))
            base = yaml.safe_load((source / parts[0] / "kustomization.yaml").read_text(encoding="utf-8"))
        (folder / "apply.sh").chmod(0o755)
        resources = [path.name for path in written if path.suffix == ".yaml" and path.name != PRIORITY]
        for path in named:
            if path.name in (*resources, PRIORITY, PATCHES, "kustomization.yaml", "apply.sh"):
                raise ConfigError(f"the file {path} has the name of an object's file: rename it")
            written.append(Path(shutil.copy(path, folder)))
        written.append(_write(folder / "config.yaml", data))
        written.append(_write(folder / PATCHES, *self._patches(config)))
        written.append(_write(folder / "kustomization.yaml", self._kustomization(config, base, resources, named)))
        return sorted(written, key=lambda path: (path.name == "apply.sh", path.name))

    def _check(self, config: TidemillConfig) -> None:
        check_places(config, "Kubernetes")
        if whole := config.placement is not None:
            check_whole(self, config, "kubernetes", "trainer_nodes", "trainer_gpus", "generator_gpus", "broker", "keda")
        elif units := [name for name, pool in config.pools.items() if pool.units]:
            raise ConfigError(f"pools.{units[0]}.units: pods don't see which units others have; make a pool of each")
        if self.broker and not whole:
            check_own_broker(config, "Kubernetes")
        if config.pools and self.keda:
            raise ConfigError("--keda excludes pools, whose tasks wait together: `tidemill scale RUN generator.POOL=N`")
        if self.trainer_nodes < 1:
            raise ConfigError(f"Kubernetes needs 1 or more trainer nodes, not {self.trainer_nodes}")
        self._quota(config)
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", self._namespace(config)):
            raise ConfigError(
                f"namespace {self._namespace(config)!r} must have 1 to 63 lower-case letters, digits and hyphens"
            )
        if config.run.folder is not None and not (RUNS.parent / config.run.folder).is_relative_to(RUNS):
            raise ConfigError(f"run.folder {config.run.folder} must be below {RUNS}, where pods mount their volume")
        if self.access_mode not in ("ReadWriteMany", OF_ONE_NODE):
            raise ConfigError(f"access_mode {self.access_mode!r} must be ReadWriteMany or {OF_ONE_NODE}")
        if self.access_mode == OF_ONE_NODE and not whole:
            problem = ""
            if (transport := config.trainer.publish.transport) not in ("redis", "peer"):
                problem = (
                    f"needs trainer.publish.transport redis or peer, not {transport}: generators on other nodes do"
                )
                problem += " not see the trainer's files"
            elif config.warm_start is not None:
                problem = "excludes warm_start: generators load its model"
            elif self.trainer_nodes > 1:
                problem = f"excludes {self.trainer_nodes} trainer nodes"
            if problem:
                raise ConfigError(f"a volume of one node ({OF_ONE_NODE}) {problem}")

    def _quota(self, config: TidemillConfig) -> DeviceQuota:
        """Return the run's quota; ConfigError if it is too small for the trainer and a generator of each kind."""
        if config.placement is not None:
            return DeviceQuota.check(config)
        control = config.control.model_copy(update={"devices": self._devices(config)})
        return DeviceQuota.check(config.model_copy(update={"control": control}), generators=1)

    def _most_generators(self, config: TidemillConfig) -> int | None:
        """Return how many generators KEDA may start within the run's quota; None without one."""
        quota = self._quota(config)
        return None if quota.most is None else (quota.most - quota.trainer) // quota.widths["generator"]

    def _made_model(self, config: TidemillConfig) -> str:
        """Return the file that is on the volume once the trainer's pod has the model; "" if nothing waits for it."""
        model = config.model
        if config.warm_start is not None:
            return f"{model.path}/config.json"
        waits = is_of_hub(model.path) and model.kind != "mlp" and self.access_mode != OF_ONE_NODE
        return f"{HUB}/{fetched_name(model.path)}" if waits else ""

    def _devices(self, config: TidemillConfig) -> dict[str, int]:
        """Return the setting control.devices of these pods; without GPUs a generator has what its engine has."""
        ranks = self._gpus(config, "trainer") or config.trainer.processes
        gpus = {scaled_role("generator", pool): self._gpus(one, "generator") for pool, one in by_pool(config).items()}
        return {kind: count for kind, count in gpus.items() if count} | {"trainer": self.trainer_nodes * ranks}

    def _namespace(self, config: TidemillConfig) -> str:
        return self.namespace or f"tidemill-{config.run.name}"

    def _kustomization(
        self, config: TidemillConfig, base: dict[str, Any], resources: Sequence[str], named: Sequence[Path]
    ) -> dict[str, Any]:
        cuda = {role: "-cuda" if self._gpus(config, role) else "" for role in ("trainer", "generator", "run")}
        images = [
            {
                "name": image["name"],
                "newName": f"{self.registry}/{image['name']}",
                "newTag": self.tag + cuda.get(image["name"].removeprefix("tidemill-"), ""),
            }
            for image in base["images"]
        ]
        return base | {
            "namespace": self._namespace(config),
            "resources": list(resources),
            "configMapGenerator": [
                {"name": "tidemill-config", "files": ["config.yaml", *(path.name for path in named)]}
            ],
            "images": images,
            "patches": [{"path": PATCHES}, *([] if self.broker else [_opens_broker()])],
        }

    def _gpus(self, config: TidemillConfig, role: str) -> int:
        if config.placement is not None:
            return config.placement.least_gpus
        asked = self.trainer_gpus if role == "trainer" else self.generator_gpus
        if asked != "auto":
            return int(asked)
        return config.trainer.processes if role == "trainer" else engine_width(config)

    def _values(self, config: TidemillConfig, data: Mapping[str, Any], named: Sequence[Path]) -> dict[str, Any]:
        """Return the chart's values: what ``_kustomization`` and ``_patches`` say."""
        values: dict[str, Any] = {
            "config": yaml.safe_dump(data, sort_keys=False, allow_unicode=True),
            "files": {path.name: _read_text(path) for path in named},
            "images": {"registry": self.registry, "tag": self.tag},
            "storage": {"size": self.storage, "accessMode": self.access_mode, "className": self.storage_class or ""},
        }
        if config.placement is not None:
            return values | {"run": {"enabled": True, "gpus": self._gpus(config, "run")}}
        most = self._most_generators(config)
        return values | {
            "trainer": {
                "nodes": self.trainer_nodes,
                "gpus": self._gpus(config, "trainer"),
                "ranks": config.trainer.processes,
            },
            "generator": {
                "gpus": self._gpus(config, "generator"),
                "waitFor": self._made_model(config),
                "pools": {
                    name: {
                        "gpus": self._gpus(of_pool(config, name), "generator"),
                        "image": pool.kubernetes.image or "",
                        "nodeSelector": pool.kubernetes.node_selector,
                        "tolerations": pool.kubernetes.tolerations,
                    }
                    for name, pool in config.pools.items()
                },
            },
            "broker": {"own": self.broker} | ({} if self.broker else {"egress": [TO_OTHER_BROKER]}),
            "autoscaling": {"by": "keda" if self.keda else "hpa", **({"generator": {"max": most}} if most else {})},
        }

    def _pool_objects(self, config: TidemillConfig, text: str) -> list[dict[str, Any]]:
        """Return a Deployment for each pool, and what else the file with that of all generators has."""
        common, *others = yaml.safe_load_all(text)
        found = []
        for name, pool in config.pools.items():
            one, own, gpus = deepcopy(common), pool.kubernetes, self._gpus(of_pool(config, name), "generator")
            one["metadata"]["name"] = f"generator-{name}"
            spec = one["spec"]["template"]["spec"]
            labels = [one["metadata"]["labels"], one["spec"]["template"]["metadata"]["labels"]]
            for each in (*labels, one["spec"]["selector"]["matchLabels"]):
                each["pool"] = name
            spec["tolerations"] += own.tolerations
            if own.node_selector:
                spec["nodeSelector"] = own.node_selector
            (container,) = spec["containers"]
            container["args"] += ["--pool", name]
            container["image"] = own.image or f"{self.registry}/tidemill-generator:{self.tag}{'-cuda' if gpus else ''}"
            if file := self._made_model(config):
                spec["initContainers"] = [_waits_for(file, container["image"])]
            for kind in ("requests", "limits"):
                amounts = container["resources"][kind]
                del amounts["nvidia.com/gpu"]
                amounts |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
            found.append(one)
        return [*found, *others]

    def _patches(self, config: TidemillConfig) -> list[dict[str, Any]]:
        """Return strategic merge patches: what differs from deploy/kubernetes."""
        claim = {"accessModes": [self.access_mode], "resources": {"requests": {"storage": self.storage}}}
        named = {"storageClassName": self.storage_class} if self.storage_class else {}
        volume = _patch("v1", "PersistentVolumeClaim", "tidemill-runs", claim | named)
        if config.placement is not None:
            whole = {"containers": [{"name": "run", "resources": _resources(self._gpus(config, "run"))}]}
            return [_patch("batch/v1", "Job", "run", {"template": {"spec": whole}}), volume]
        ranks = self._gpus(config, "trainer")
        env = [
            {"name": "NODES", "value": str(self.trainer_nodes)},
            {"name": "GPUS", "value": str(ranks or config.trainer.processes)},
        ]
        pod = {
            "initContainers": [{"name": "prepare", "resources": _resources(ranks)}],
            "containers": [{"name": "trainer", "env": env, "resources": _resources(ranks)}],
        }
        size = {"parallelism": self.trainer_nodes, "completions": self.trainer_nodes}
        deployments = sorted(f"generator-{name}" for name in config.pools) or ["generator"]
        compact = json.dumps(self._devices(config), separators=(",", ":"), sort_keys=True)
        devices = [{"name": "TIDEMILL_CONTROL__DEVICES", "value": compact}]
        control: dict[str, Any] = {"containers": [{"name": "control", "env": devices}]}
        if self.access_mode == OF_ONE_NODE:
            beside = {"labelSelector": {"matchLabels": {"app": "tidemill", "role": "trainer"}}}
            term = {"topologyKey": "kubernetes.io/hostname", **beside}
            control["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        patches = [
            _patch("batch/v1", "Job", "trainer", size | {"template": {"spec": pod}}),
            _patch_pods("control", control),
            volume,
        ]
        if self.access_mode == OF_ONE_NODE:
            own: dict[str, Any] = {"volumes": [{"name": "runs", "persistentVolumeClaim": None, "emptyDir": {}}]}
            patches += [_patch_pods(name, own) for name in (*deployments, *WITHOUT_VOLUME)]
        if config.pools:
            rule = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get", "patch"]}
            role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "control"}}
            patches.append({**role, "rules": [{**rule, "resourceNames": deployments}]})
        else:
            file, gpus = self._made_model(config), self._gpus(config, "generator")
            waits = {"initContainers": [_waits_for(file)]} if file else {}
            containers = [{"name": "generator", "resources": _resources(gpus)}]
            patches.append(_patch_pods("generator", {"containers": containers, **waits}))
        if self.keda:
            patches += [_scaled(role, self._namespace(config)) for role in ("reward", "generator")]
            if most := self._most_generators(config):
                patches[-1]["spec"]["maxReplicaCount"] = most
        return patches


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the file {path} is not UTF-8 text, which Helm's values must be: put it into the volume"
        ) from error


def _patch(version: str, kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}


def _patch_pods(deployment: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return _patch("apps/v1", "Deployment", deployment, {"template": {"spec": spec}})


def _opens_broker() -> dict[str, Any]:
    """Return a patch by position: a merge would replace all rules of the policy."""
    added = [{"op": "add", "path": "/spec/egress/1", "value": TO_OTHER_BROKER}]
    return {"target": {"kind": "NetworkPolicy", "name": "reward"}, "patch": json.dumps(added)}


def _resources(gpus: int) -> dict[str, Any]:
    """Return what differs in a container's resources; None removes a GPU that the base asks for."""
    return {kind: {"nvidia.com/gpu": str(gpus) if gpus else None} for kind in ("requests", "limits")}


def _waits_for(file: str, image: str = "tidemill-generator") -> dict[str, Any]:
    """Return a container of a generator that ends once the trainer's pod has made the model with this file.

    Without it the generator would end and be started again, with pauses that grow to five minutes.
    """
    return {
        "name": "wait",
        "image": image,
        "command": ["tini", "--", "sh", "-c", WAIT, file],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "runs", "mountPath": str(RUNS), "readOnly": True}],
    }


def _scaled(role: str, namespace: str) -> dict[str, Any]:
    """Return a patch with the control plane's address in this namespace: KEDA asks from its own."""
    stream, target = {"reward": ("trajectories", "256"), "generator": ("tasks", "32")}[role]
    metadata = {
        "url": f"http://control.{namespace}:8642/v1/status",
        "valueLocation": f'streams.#(name=="{stream}").waiting',
        "targetValue": target,
        "authMode": "bearer",
    }
    trigger = {"type": "metrics-api", "metadata": metadata, "authenticationRef": {"name": "tidemill-control"}}
    return _patch("keda.sh/v1alpha1", "ScaledObject", role, {"triggers": [trigger]})


def _portable(config: TidemillConfig, extra: Sequence[Path]) -> tuple[dict[str, Any], list[Path]]:
    """Return a pod's configuration and files; ConfigError if one is missing, two share a name, or all are too big."""
    named: dict[str, Path] = {}

    def add(path: Path) -> str:
        known = named.setdefault(path.name, path.resolve())
        if known != path.resolve():
            raise ConfigError(f"the files {known} and {path} have the same name; pods have all files in one folder")
        return path.name

    def move(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: move(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [move(inner) for inner in value]
        if not isinstance(value, str) or not value or "\n" in value or len(value) > 1_000:
            return value
        name, colon, attribute = value.rpartition(":") if ".py:" in value else (value, "", "")
        try:
            path = base / Path(name).expanduser()
            return f"{add(path)}{colon}{attribute}" if path.is_file() else value
        except (OSError, RuntimeError):  # the text is too long for a name, or begins with ~ and no user's name
            return value

    data = dump_config(config)
    base = Path(data["run"].pop("base"))
    data = move(data)
    data.setdefault("broker", {}).setdefault("deadline_s", BROKER_DEADLINE_S)
    if config.trainer.publish.from_peers and not config.trainer.publish.peer.port:
        # The port that network.yaml opens.
        data["trainer"]["publish"].setdefault("peer", {})["port"] = PEER_PORT
    for path in extra:
        if not path.is_file():
            raise ConfigError(f"--file {path}: no such file")
        add(path)
    if "config.yaml" in named:
        raise ConfigError(f"the file {named['config.yaml']} has the name of the configuration in the pods: rename it")
    size = sum(path.stat().st_size for path in named.values())
    if size > MAX_FILES:
        largest = max(named.values(), key=lambda path: path.stat().st_size)
        raise ConfigError(
            f"the files that the configuration names have {size:,} bytes, and a ConfigMap holds {MAX_FILES:,}: put the"
            f" largest, {largest}, into the volume, and name it by its path below {RUNS}"
        )
    return data, list(named.values())


def _refuse_own(folder: Path, config: TidemillConfig, named: Sequence[Path]) -> None:
    """Raise ConfigError for the folder of the user's configuration or files, which would be overwritten."""
    found = "your configuration" if folder == config.base.resolve() else ""
    if found := next((path.name for path in named if path.parent == folder), found):
        raise ConfigError(f"--folder {folder} has {found}, which the pods' files would replace: choose another folder")


class _Blocks(yaml.SafeDumper):
    """Writes text of several lines as it is."""


_Blocks.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _write(path: Path, *documents: Mapping[str, Any]) -> Path:
    text = yaml.dump_all(documents, Dumper=_Blocks, sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")
    return path
