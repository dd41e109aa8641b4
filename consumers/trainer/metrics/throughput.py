"""Speed and memory of a step: floating-point operations, the share of the hardware's peak, memory, tokens a second."""

import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI300X": 1307e12,
}
"""Dense 16-bit operations a second, by a part of the device's name, longer names first; from data sheets."""
COMPUTING = ("forward", "backward", "optimizer")


def peak_flops(device: str) -> float | None:
    """Return the most operations a second of a device with this name; None if unknown."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name.lower() in device.lower()), None)


def compute_metrics(flops: float, seconds: Mapping[str, float], ranks: int, device: str) -> dict[str, float]:
    """Return ``perf/tflops_per_device`` and, if the device's peak is known, ``perf/mfu``.

    flops: of one forward pass over the step, on all ranks; a step has three times as many (PaLM, arXiv:2204.02311, B),
    not counting what is computed again. seconds: of the step's phases.
    """
    spent = sum(seconds.get(name, 0.0) for name in COMPUTING)
    if not spent:
        return {}
    rate = 3.0 * flops / spent / ranks
    peak = peak_flops(device)
    return {"perf/tflops_per_device": rate / 1e12} | ({"perf/mfu": rate / peak} if peak else {})


def memory_metrics() -> dict[str, float]:
    """Return bytes of this process's memory: now, its peak, and the peak on its GPU since the last call."""
    # Kilobytes, but on macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    figures = {"perf/memory_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
    statm = Path("/proc/self/statm")
    if statm.is_file():
        figures["perf/memory_bytes"] = float(int(statm.read_text().split()[1]) * resource.getpagesize())
    if torch.cuda.is_available():
        figures["perf/gpu_memory_peak_bytes"] = float(torch.accelerator.max_memory_allocated())
        torch.accelerator.reset_peak_memory_stats()
    return figures


def device_name() -> str:
    """Return the name of this process's GPU; "" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


class CountRate:
    """How fast a count grows between two calls."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def of(self, count: float, now: float) -> float | None:
        """Return the growth a second since the last call; None at the first, and if the broker's count restarted."""
        last, self._last = self._last, (count, now)
        if last is None or count < last[0] or now <= last[1]:
            return None
        return (count - last[0]) / (now - last[1])
