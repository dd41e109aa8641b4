"""What a process and its children use of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from broker.process_meter import ProcessMeter, ProcessUse, family, gpu_memory, read_processes

BUSY = "import sys, time; data = bytearray(64 << 20); print('begun', flush=True)\nwhile True: pass"


def test_a_childs_processor_and_memory_count() -> None:
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline()
        meter, alone = ProcessMeter(os.getpid()), ProcessMeter(os.getpid(), alone=True)
        for one in (meter, alone):
            one.look(time.monotonic())
        assert "cpu" not in meter.figures
        time.sleep(0.3)
        for one in (meter, alone):
            one.look(time.monotonic())
        assert meter.figures["memory_bytes"] >= alone.figures["memory_bytes"] + (64 << 20)
        assert meter.figures["cpu"] > alone.figures["cpu"] >= 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_descendants_are_found_through_every_generation() -> None:
    tree = {pid: ProcessUse(parent, 0, 0.0, 0) for pid, parent in ((2, 1), (3, 2), (4, 3), (5, 1))}
    assert family(2, tree) == {2, 3, 4}
    assert family(9, tree) == set()
    assert os.getpid() in read_processes()


def test_gpu_memory_is_summed_by_process() -> None:
    assert gpu_memory("12, 100\n12, 20\n7, [N/A]\nno processes\n") == {12: 120 << 20}
