"""Ranks of several machines meet over gloo, also where a machine's own name is a loopback address."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from consumers.trainer.distributed import network
from consumers.trainer.distributed.network import choose_interface, interface_to, used_interface

RANK = """
import datetime, os, sys
import torch, torch.distributed as dist
from consumers.trainer.distributed.network import choose_interface, used_interface
if sys.argv[1] == "ours":
    choose_interface()
    print("by", *used_interface(), flush=True)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
number = torch.ones(1)
dist.all_reduce(number)
print("sum", number.item(), flush=True)
dist.destroy_process_group()
"""
MACHINES = r"""
# Two machines with a cable between them; each calls itself 127.0.1.1.
set -e
start() {  # name, rank
  printf '127.0.0.1 localhost\n127.0.1.1 %s\n10.9.0.1 head\n' "$1" >"$FOLDER/$1"
  hostname "$1"; mount --bind "$FOLDER/$1" /etc/hosts; ip link set lo up
}
export -f start
mkfifo "$FOLDER/go"
unshare --net --uts --mount bash -ec '
  echo $$ >"$FOLDER/pid"; read -r _ <"$FOLDER/go"
  start one 1; ip addr add 10.9.0.2/24 dev vb; ip link set vb up
  RANK=1 exec "$PYTHON" -c "$PROGRAM" "$WAY" >"$FOLDER/out1" 2>&1' &
until [ -s "$FOLDER/pid" ]; do sleep 0.05; done
start zero 0
ip link add va type veth peer name vb
ip link set vb netns "$(cat "$FOLDER/pid")"
ip addr add 10.9.0.1/24 dev va; ip link set va up
echo go >"$FOLDER/go"
RANK=0 "$PYTHON" -c "$PROGRAM" "$WAY"
wait
"""


def on_two_machines(folder: Path, way: str) -> str:
    """What rank 0 says."""
    folder.mkdir()
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[5]),
        **{"FOLDER": str(folder), "PYTHON": sys.executable, "PROGRAM": RANK, "WAY": way},
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29777"},
    }
    command = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "bash", "-c", MACHINES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    return done.stdout + done.stderr


@pytest.fixture
def namespaces() -> None:
    """Skips a test where they can't be made."""
    tried = subprocess.run(["unshare", "-Urnm", "true"], capture_output=True, check=False)
    if tried.returncode or shutil.which("ip") is None:
        pytest.skip("no network namespaces here, or no program ip")


@pytest.mark.usefixtures("namespaces")
def test_ranks_of_machines_that_call_themselves_loopback_meet(tmp_path: Path) -> None:
    said = on_two_machines(tmp_path / "ours", "ours")
    assert "sum 2.0" in said
    assert "by va 10.9.0.1 10000" in said
    assert "by vb 10.9.0.2 10000" in (tmp_path / "ours/out1").read_text()


@pytest.mark.usefixtures("namespaces")
@pytest.mark.matrix("what gloo alone can't do: the reason for the interface that the test above chooses")
def test_by_gloos_own_way_they_do_not_meet(tmp_path: Path) -> None:
    assert "sum 2.0" not in on_two_machines(tmp_path / "plain", "gloo's own way")


def test_an_interface_is_chosen_for_several_machines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interface_to", {"head": "fast0", "192.0.2.1": "eth0"}.get)
    several = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    for given, chosen in (
        (several | {"MASTER_ADDR": "head"}, "fast0"),
        # Rank 0 may be told that it is localhost.
        (several | {"MASTER_ADDR": "localhost"}, "eth0"),
        (several | {"MASTER_ADDR": "head", "GLOO_SOCKET_IFNAME": "mine"}, "mine"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "head"}, None),
        ({}, None),
    ):
        choose_interface(given)
        assert given.get("GLOO_SOCKET_IFNAME") == chosen


def test_the_interface_that_a_user_names_is_the_one_in_use() -> None:
    assert used_interface({"GLOO_SOCKET_IFNAME": "lo,eth0"})[:2] == ("lo", "127.0.0.1")
    for nowhere in ({"GLOO_SOCKET_IFNAME": "none0"}, {"MASTER_ADDR": "localhost"}, {}):
        assert used_interface(nowhere)[1:] == ("", 0)


def test_loopback_and_unknown_hosts_have_no_interface() -> None:
    assert [interface_to(host) for host in ("localhost", "127.0.1.1", "no-such-host.invalid")] == [None] * 3
