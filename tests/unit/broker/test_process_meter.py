"""What a process and its children use of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from broker import process_meter
from broker.process_meter import ProcessMeter, gpu_memory, read_processes

BUSY = "import sys, time; data = bytearray(64 << 20); print('begun', flush=True)\nwhile True: pass"


def cpu_seconds(pid: int) -> float:
    (use,) = read_processes(pid, alone=True).values()
    return use.cpu_s


def test_a_childs_processor_and_memory_count() -> None:
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline()
        meter, alone = ProcessMeter(os.getpid()), ProcessMeter(os.getpid(), alone=True)
        for one in (meter, alone):
            one.measure(time.monotonic())
        assert "cpu" not in meter.figures
        began, deadline = cpu_seconds(child.pid), time.monotonic() + 60
        while cpu_seconds(child.pid) < began + 0.2:
            assert time.monotonic() < deadline, "the child is given no processor"
            time.sleep(0.01)
        for one in (meter, alone):
            one.measure(time.monotonic())
        assert meter.figures["memory_bytes"] >= alone.figures["memory_bytes"] + (64 << 20)
        assert meter.figures["cpu"] > alone.figures["cpu"] >= 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize(
    ("answer", "used", "patience_s"),
    [
        ('echo "$CHILD, 700"; echo "1, 5000"; echo "$OWN, 24"', 724 << 20, 60.0),
        ('echo "1, 5000"', 0, 60.0),
        ("echo No devices were found; exit 6", None, 60.0),
        ("exec sleep 60", None, 0.2),
    ],
    ids=["own and child's", "only others'", "no driver", "hangs"],
)
def test_memory_of_gpus_is_that_of_the_process_and_its_children(
    answer: str, used: int | None, patience_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    tool = tmp_path / "nvidia-smi"
    query = "--query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "{query}" ] || exit 2\nOWN={os.getpid()} CHILD={child.pid}\n{answer}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(process_meter, "GPU_S", patience_s)
    try:
        meter = ProcessMeter(os.getpid())
        meter.measure(time.monotonic())
        assert meter.figures.get("gpu_memory_bytes") == used
        tool.unlink()
        meter.measure(time.monotonic())
        assert meter.figures.get("gpu_memory_bytes") == used, "asked again only after a while"
    finally:
        child.kill()
        child.communicate()


def test_gpu_memory_is_summed_by_process() -> None:
    assert gpu_memory("12, 100\n12, 20\n7, [N/A]\nno processes\n") == {12: 120 << 20}
