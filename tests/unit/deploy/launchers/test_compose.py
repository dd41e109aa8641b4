"""docker-compose.yml and the Dockerfile, as far as no Docker engine is needed; deploy/compose-test.sh needs one."""

import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.connection.acl import ROLES
from deploy.control_plane.status.scaling import scale_command
from tests.support.runs.command_line import command_names
from tests.support.runs.programs import find_program

ROOT = Path(__file__).parents[4]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file with every variable at its default."""
    text = (ROOT / "docker-compose.yml").read_text()
    found: dict[str, Any] = yaml.safe_load(DEFAULT.sub(r"\1", text))
    return found


def chosen(compose: dict[str, Any], *profiles: str) -> set[str]:
    """Services that start with these profiles."""
    return {
        name
        for name, service in compose["services"].items()
        if not service.get("profiles") or set(service["profiles"]) & set(profiles)
    }


def ours(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in compose["services"].items() if service["image"].startswith("tidemill-")}


def test_the_linter_has_nothing_to_say_about_the_dockerfile() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_variable_has_a_default() -> None:
    assert "$" not in DEFAULT.sub("", (ROOT / "docker-compose.yml").read_text())


@pytest.mark.parametrize("profile", ["cpu", "gpu", "obs"])
def test_docker_compose_accepts_the_file(profile: str) -> None:
    command = [find_program("docker-compose"), "--profile", profile, "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_word_it_is_the_cpu_and_each_profile_has_one_trainer_and_generators(compose: dict[str, Any]) -> None:
    (default,) = re.findall(r"^COMPOSE_PROFILES=(\w+)$", (ROOT / ".env").read_text(), re.MULTILINE)
    common = {"redis", "acl", "prepare", "token", "feeder", "reward", "control"}
    assert chosen(compose, default) == common | {"generator", "trainer"}
    assert chosen(compose, "gpu") == common | {"generator-gpu", "trainer-gpu"}
    assert chosen(compose, "obs") == chosen(compose, default) | {"prometheus", "grafana"}
    trainers = [service["container_name"] for name, service in compose["services"].items() if "trainer" in name]
    assert len(trainers) == 2
    assert len(set(trainers)) == 1, "no engine starts both"


def test_gpu_services_reserve_devices_and_have_cuda_images(compose: dict[str, Any]) -> None:
    for name in ("generator-gpu", "trainer-gpu"):
        service = compose["services"][name]
        assert service["image"].endswith(":cuda")
        assert service["build"]["args"]["TORCH_INDEX"] == ""
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert device["device_ids"]
    assert compose["services"]["generator-gpu"]["build"]["args"]["ACCELERATOR"] == "cuda"


def test_services_run_commands_that_exist_on_a_configuration_that_exists(compose: dict[str, Any]) -> None:
    commands = command_names()
    for name, service in ours(compose).items():
        if "entrypoint" in service:
            continue
        command, config, *options = service["command"]
        # Its page is looked at when the run is finished; the others let go of what they hold.
        assert options == (["--stay"] if name == "control" else [])
        assert command == name.removesuffix("-gpu")
        assert command in commands
        assert (ROOT / config).is_file()


def test_the_command_that_scales_generators_names_the_service_of_each_profile(compose: dict[str, Any]) -> None:
    hint = compose["services"]["control"]["environment"]["TIDEMILL_CONTROL__SCALE_HINT"]
    command = scale_command(hint, "generator", "3")
    services = {name for name in compose["services"] if name.startswith("generator")}
    assert services == {name.strip(",()") for name in command.split() if name.startswith("generator")} - {"generator=3"}


def test_services_have_no_rights_that_they_do_not_need(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
    for name, service in ours(compose).items():
        assert service["cap_drop"] == ["ALL"], name
    assert "USER ${UID}" in DOCKERFILE.read_text()


def test_a_service_has_the_broker_user_of_its_role_and_no_other(compose: dict[str, Any]) -> None:
    roles = {"control": "operator", "redis": "server"}
    for name, service in compose["services"].items():
        role = roles.get(name, name.removesuffix("-gpu"))
        volumes = [volume.split(":") for volume in service.get("volumes", [])]
        mine = [volume for volume in volumes if volume[0].startswith("broker-")]
        if name == "acl":
            assert {source: place for source, place in mine} == {
                source: f"/tidemill/broker/{source.removeprefix('broker-')}"
                for source in compose["volumes"]
                if source.startswith("broker-")
            }
            assert all(f"{place} " in f"{DOCKERFILE.read_text()} ".replace("\n", " ") for _, place in mine)
            assert all(f"users/{place.rpartition('/')[2]}/*" in service["entrypoint"][2] for _, place in mine)
        elif role in ROLES or name in roles:
            assert [volume[0] for volume in mine] == [f"broker-{role}"], name
            assert mine[0][2] == "ro", name
            if name != "redis":
                assert service["environment"]["REDIS_URL_FILE"] == f"{mine[0][1]}/redis_url"
                assert not service["environment"]["REDIS_URL"]
        else:
            assert mine == [], name
        assert ("users" in {volume[0] for volume in volumes}) == (name == "acl"), "all URLs"


def test_reward_and_feeder_services_cannot_change_what_the_trainer_reads(compose: dict[str, Any]) -> None:
    """They may run what a model wrote, and a checkpoint is what the trainer continues from."""
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            if volume.startswith("runs:"):
                assert volume.endswith(":ro") == (name in ("reward", "feeder")), name


def test_every_service_has_a_health_check_and_time_to_end(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["stop_grace_period"], name
        if name not in ("acl", "prepare", "token", "prometheus", "grafana"):
            assert service["healthcheck"]["test"][0] == "CMD", name


def test_a_checkpoint_has_the_grace_of_its_container(compose: dict[str, Any]) -> None:
    for name in ("trainer", "trainer-gpu"):
        service = compose["services"][name]
        grace = int(service["environment"]["TIDEMILL_SUPERVISOR__GRACE_S"])
        assert 60 < grace < int(service["stop_grace_period"].removesuffix("s"))


def test_every_image_is_built_once_from_a_target_of_the_dockerfile(compose: dict[str, Any]) -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(), re.MULTILINE))
    built = {service["image"]: service["build"]["target"] for service in ours(compose).values() if "build" in service}
    assert {service["image"] for service in ours(compose).values()} == set(built)
    for image, target in built.items():
        assert image.removesuffix(":cuda") == f"tidemill-{target}"
        assert target in targets


def test_every_image_is_published_and_the_ones_for_gpus_with_cuda() -> None:
    stages = DOCKERFILE.read_text().split("\nFROM ")
    images = {stage.split()[2] for stage in stages if "COPY --from=code" in stage}
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "images.yml").read_text())
    built = workflow["jobs"]["build"]["strategy"]["matrix"]["include"]
    assert {one["role"] for one in built} == images
    assert {one["role"] for one in built if one.get("suffix") == "-cuda"} == {"trainer", "generator", "run"}
    assert {one["role"] for one in built if one.get("accelerator") == "cuda"} == {"generator", "run"}
    (whole,) = [stage for stage in stages if stage.split()[2] == "run-packages"]
    assert '--vllm "${ACCELERATOR}" --extras "train,${FEEDER_EXTRAS},${REWARD_EXTRAS}"' in whole


def test_every_build_argument_is_one_of_the_dockerfile(compose: dict[str, Any]) -> None:
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE.read_text(), re.MULTILINE))
    for service in ours(compose).values():
        assert set(service.get("build", {}).get("args", {})) <= arguments


def test_every_file_that_is_mounted_exists(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"], volume


def test_ports_are_for_this_machine_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_scrapes_the_control_plane_with_its_token(compose: dict[str, Any]) -> None:
    (job,) = yaml.safe_load((ROOT / "deploy/observability/prometheus.yml").read_text())["scrape_configs"]
    control = compose["services"]["control"]["environment"]
    assert job["authorization"]["credentials_file"] == control["TIDEMILL_CONTROL_TOKEN_FILE"]
    assert job["static_configs"] == [{"targets": [f"control:{control['TIDEMILL_CONTROL__PORT']}"]}]
