"""On Kubernetes an order to scale sets the Deployment's replicas, over TLS, with what the pod has and no more."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.client import Broker
from broker.heartbeat import HeartbeatThread
from deploy.control_plane.server import deployment_names
from deploy.control_plane.status.kubernetes import Deployments
from deploy.control_plane.web.refusal import Refusal
from schemas.config import parse_config
from schemas.errors import InfraError
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.fake_kubernetes import NAMESPACE, FakeKubernetes

NAMES = {"generator": "generator", "reward": "reward"}


@pytest.fixture
def cluster(certificates: Path) -> Iterator[FakeKubernetes]:
    """A generator Deployment of four, and a reward Deployment that its autoscaler keeps to itself."""
    replicas = {"generator": 4, "reward": 2}
    with FakeKubernetes(
        certificates / "server.crt", certificates / "server.key", replicas, frozenset({"reward"})
    ) as cluster:
        yield cluster


@pytest.fixture
def account(certificates: Path, tmp_path: Path) -> Path:
    """What Kubernetes mounts into a pod."""
    shutil.copy(certificates / "ca.crt", tmp_path / "ca.crt")
    (tmp_path / "token").write_text("first-token\n")
    (tmp_path / "namespace").write_text(NAMESPACE)
    return tmp_path


Inside = Callable[..., Deployments]


@pytest.fixture
def inside(cluster: FakeKubernetes, account: Path) -> Inside:
    def inside(**names: str) -> Deployments:
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(cluster.port)}
        found = Deployments.here({**NAMES, **names}, environment, account)
        assert found is not None
        return found

    return inside


def test_an_order_sets_the_replicas_once(inside: Inside, cluster: FakeKubernetes) -> None:
    deployments = inside()
    assert deployments.scale("generator", 7)
    assert cluster.replicas["generator"] == 7
    assert not deployments.scale("generator", 7)
    assert [method for method, _ in cluster.asked].count("PATCH") == 1
    assert deployments.scale("generator", 0)
    assert deployments.replicas("generator") == 0


def test_what_the_account_may_not_touch_is_no_offer_and_is_refused_with_the_reason(inside: Inside) -> None:
    deployments = inside()
    deployments.refresh()
    found = deployments.scaling
    assert (found.possible, found.by, found.replicas) == (True, "kubernetes", {"generator": 4})
    with pytest.raises(Refusal, match="autoscaler"):
        deployments.scale("reward", 3)


def test_a_deployment_of_another_name_is_told_apart(inside: Inside) -> None:
    with pytest.raises(Refusal, match=r"no Deployment samplers .* control\.deployments"):
        inside(generator="samplers").scale("generator", 1)


def test_a_new_token_is_used_at_once(inside: Inside, cluster: FakeKubernetes, account: Path) -> None:
    deployments = inside()
    assert deployments.replicas("generator") == 4
    cluster.token = "second-token"
    with pytest.raises(Refusal):
        deployments.replicas("generator")
    (account / "token").write_text("second-token")
    assert deployments.replicas("generator") == 4


def test_another_server_than_the_clusters_gets_no_token(
    inside: Inside, cluster: FakeKubernetes, account: Path, certificates: Path
) -> None:
    shutil.copy(certificates / "other.crt", account / "ca.crt")
    with pytest.raises(InfraError, match="certificate verify failed"):
        inside().replicas("generator")
    assert cluster.asked == []


def test_outside_of_a_cluster_there_is_nothing_to_scale(account: Path, tmp_path: Path) -> None:
    assert Deployments.here(NAMES, {}, account) is None
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert Deployments.here(NAMES, inside, tmp_path / "nothing") is None


@pytest.fixture
def api(broker: Broker, inside: Inside) -> Iterator[ControlPlane]:
    with ControlPlane(broker, "api", deployments=inside()) as api:
        yield api


def test_the_control_plane_scales_the_deployment_and_says_for_whom(api: ControlPlane, cluster: FakeKubernetes) -> None:
    api.wait("the Deployments", lambda: api.ask("GET", "/v1/status")[1]["scaling"]["possible"])
    answer = api.ask("POST", "/v1/scale", {"role": "generator", "replicas": 6}, x_tidemill_by="ann")[1]
    assert (answer["changed"], answer["done"], answer["waiting_for"]) == (True, False, ["kubernetes"])
    assert cluster.replicas["generator"] == 6
    event = api.ask("GET", "/v1/timeline")[1]["events"][-1]
    assert (event["name"], event["data"]["by"]) == ("scale", "ann")
    status, problem = api.ask("POST", "/v1/scale", {"role": "reward", "replicas": 5})
    assert (status, "autoscaler" in problem["detail"]) == (409, True)
    status, problem = api.ask("POST", "/v1/stop")
    assert (status, "kubectl delete" in problem["detail"]) == (409, True)


def test_each_pool_has_a_deployment_that_is_named_after_it(inside: Inside, cluster: FakeKubernetes) -> None:
    base = {"model": {"path": "m"}, "train": {"name": "arithmetic"}, "reward": {"terms": [{"name": "exact"}]}}
    assert deployment_names(parse_config(base)) == NAMES
    names = deployment_names(parse_config({**base, "pools": {"l40s": {}, "cpu": {}}}))
    assert names == {"generator.l40s": "generator-l40s", "generator.cpu": "generator-cpu", "reward": "reward"}
    cluster.replicas["generator-l40s"] = 1
    deployments = inside(**names)
    assert deployments.scale("generator.l40s", 3)
    assert (cluster.replicas["generator-l40s"], cluster.replicas["generator"]) == (3, 4)


def test_a_supervisor_comes_first_and_a_lost_api_server_is_said(api: ControlPlane, cluster: FakeKubernetes) -> None:
    with HeartbeatThread(api.broker, "up", "supervisor", lambda: ("running", -1, {"room:generator": 1.0})):
        api.wait("the supervisor", lambda: api.ask("GET", "/v1/status")[1]["scaling"]["by"] == "supervisor")
        assert api.ask("POST", "/v1/scale", {"role": "generator", "replicas": 3})[1]["changed"]
    assert cluster.replicas["generator"] == 4
    api.wait("its end", lambda: api.ask("GET", "/v1/status")[1]["scaling"]["by"] == "kubernetes")
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, cluster, "answer", cluster.answer)
        cluster.answer = lambda *_: (500, {})  # type: ignore[method-assign,assignment]
        status, problem = api.ask("POST", "/v1/scale", {"role": "generator", "replicas": 5})
    assert (status, "answered 500" in problem["detail"]) == (503, True)
