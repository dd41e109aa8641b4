"""Cards and links by their data sheets, and the time that a step's work takes on them.

An operator takes as long as its arithmetic or its memory, whichever is longer (roofline, doi:10.1145/1498765.1498785).
What sharding gathers and reduces overlaps with the arithmetic; what tensor and context parallelism exchange does not.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import ConfigError

USABLE = 0.92
"""Assumed share of a card's memory that tensors can have: the rest goes to CUDA, NCCL and fragments."""
ARITHMETIC, BANDWIDTH, TRANSFER = 0.6, 0.8, 0.7
"""Assumed shares of the data sheets' peaks that matrix products, memory and links reach."""
MACHINE = 8
"""Assumed GPUs of a machine."""
MAIN_MEMORY = "main memory"
"""The dimension of traffic between a card and its host, counted in one direction: the other is as much."""


@dataclass(frozen=True)
class Card:
    """A GPU. memory: bytes that its driver reports. tflops: dense, in 16-bit types. tbps: terabytes a second of memory.

    nvlink: gigabytes a second that it sends to other GPUs of its machine; None if it has no NVLink. host: that it
    exchanges with main memory, each way.
    """

    memory: int
    tflops: float
    tbps: float
    nvlink: float | None
    host: float


CARDS = {
    "a100-40": Card(40960 << 20, 312, 1.555, 300, 32),
    "a100-80": Card(81920 << 20, 312, 2.039, 300, 32),
    "b200": Card(183359 << 20, 2250, 8.0, 900, 64),
    "h100": Card(81559 << 20, 989, 3.35, 450, 64),
    "h200": Card(143771 << 20, 989, 4.8, 450, 64),
    "l4": Card(23034 << 20, 121, 0.3, None, 32),
    "l40s": Card(46068 << 20, 362, 0.864, None, 32),
}
LINKS = {
    "pcie3": 16.0,
    "pcie4": 32.0,
    "pcie5": 64.0,
    "eth25": 3.125,
    "eth100": 12.5,
    "eth200": 25.0,
    "eth400": 50.0,
    "ib100": 12.5,
    "ib200": 25.0,
    "ib400": 50.0,
    "ib800": 100.0,
}
"""Gigabytes a second that a GPU sends: nvlink is that of its card. One network adapter for each GPU is assumed."""


@dataclass(frozen=True)
class Links:
    """Gigabytes a second that a GPU sends to others of its machine, and to those of other machines."""

    inside: float
    between: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. arithmetic: of all operators. sharding: of what is done beside it. exchanges: waited for."""

    arithmetic: float
    sharding: float
    exchanges: float

    @property
    def total(self) -> float:
        """Seconds of a step: sharding overlaps with arithmetic, exchanges do not."""
        return max(self.arithmetic, self.sharding) + self.exchanges


def find_card(gpu: str) -> Card:
    """Return the card of a name; ConfigError names those that are known."""
    if (card := CARDS.get(gpu.lower())) is None:
        raise ConfigError(f"--gpu {gpu!r} is not known, must be one of {', '.join(CARDS)}")
    return card


def recognize_card(device: str) -> str | None:
    """Return the name here of a card that its driver calls ``device``; None for one that is not known."""
    words = re.findall(r"[a-z]+\d+[a-z]*|\d+", device.lower())
    return next((name for name in CARDS if set(name.split("-")) <= set(words)), None)


def find_links(text: str | None, gpu: str) -> Links:
    """Read ``--link``: the link within a machine, and after a comma that between machines, by default ib400.

    None: nvlink if the card has it, else pcie4. ConfigError names the links that are known.
    """
    nvlink = {"nvlink": rate} if (rate := find_card(gpu).nvlink) else {}
    inside, _, between = (text or ("nvlink" if nvlink else "pcie4")).lower().partition(",")
    rates = nvlink | LINKS
    for name in (inside, between or "ib400"):
        if name not in rates:
            known = ", ".join(rates)
            raise ConfigError(f"--link {name!r} is not known for {gpu.lower()}, must be one of {known}, or two of them")
    return Links(rates[inside], rates[between or "ib400"])


def step_time(size: Mapping[str, Any], card: Card, links: Links) -> StepTime:
    """Compute the time of a step from a StepSize as JSON."""
    arithmetic = sum(
        calls * max(flops / (card.tflops * 1e12 * ARITHMETIC), moved / (card.tbps * 1e12 * BANDWIDTH))
        for flops, moved, calls in size["operators"]
    )
    seconds = {True: 0.0, False: 0.0}
    for traffic in size["traffic"]:
        rate = links.inside if traffic["span"] <= MACHINE else links.between
        if traffic["dimension"] == MAIN_MEMORY:
            # There and back, one after the other.
            rate = card.host / 2
        seconds[traffic["overlaps"]] += traffic["sent"] / (rate * 1e9 * TRANSFER)
    return StepTime(arithmetic, seconds[True], seconds[False])
