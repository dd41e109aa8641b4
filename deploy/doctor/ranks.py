"""``tidemill doctor --ranks``: whether ranks can train together. Each measures itself and its link; rank 0 compares."""

import importlib.metadata
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from uuid import uuid4

import msgspec
import torch
import torch.distributed as dist

from consumers.trainer.distributed.network import used_interface
from consumers.trainer.distributed.ranks import Ranks, reason
from deploy.checks.finding import Finding, judged
from deploy.planning.cards import CARDS, find_links, recognize_card
from schemas.config import TidemillConfig
from schemas.errors import InfraError

MEET_S = 120.0
"""Seconds in which all ranks must have met, and any later collective must have ended."""
SEEN_S = 10.0
"""Seconds after which a file in the run's folder must be seen by every rank."""
CLOCK_S = 1.0
"""Seconds by which clocks of machines may differ."""
SLOW = 1.3
"""Times the median of equal devices that a product may take."""
TAKEN = 0.1
"""Share of a GPU's memory that others may have in use."""
WRONG = 5e-3
"""Largest relative error of a product: TF32 has about 1e-3."""
PRODUCT = 8192
"""Rows and columns of the matrices whose product is timed on a GPU."""
LEAST_PRODUCT, LEAST_SUM = 0.3, 0.2
"""Least shares of the data sheet's arithmetic and link that a product and a sum over the ranks should reach."""
PACKAGES = ("tidemill", "torch", "transformers", "accelerate")


class RankReport(msgspec.Struct, frozen=True):
    """What a rank has found out about itself.

    device, device_id: name of its kind, and which one it is. versions: by package. clock_s: seconds ahead of rank 0.
    sees_folder: whether it sees what rank 0 writes into run.folder. product_s: seconds of a matrix product;
    product_error: relative to the same in float64. taken: share of the device's memory that others use. interface,
    address, mbit_per_s: of the network by which it meets the others.
    """

    rank: int
    host: str
    device: str
    device_id: str
    versions: dict[str, str]
    clock_s: float
    sees_folder: bool
    product_s: float
    product_error: float
    taken: float
    interface: str = ""
    address: str = ""
    mbit_per_s: int = 0

    @property
    def name(self) -> str:
        """The rank and its host, as shown to users."""
        return f"rank {self.rank} on {self.host}"


class RankSum(msgspec.Struct, frozen=True):
    """A sum over all ranks. correct: its result. gb_per_s: bytes that each rank sent and received, by second."""

    backend: str
    correct: bool
    gb_per_s: float


def check_ranks(config: TidemillConfig) -> list[Finding] | None:
    """Measure and compare all ranks; every rank calls this. Returns the findings on rank 0, None on the others."""
    try:
        ranks = Ranks(MEET_S, config.trainer.parallel)
    except dist.DistError as error:
        text = f"the ranks did not meet within {MEET_S:.0f} s: start this on every machine, and open the port of --meet"
        raise InfraError(f"{text} and those between the ranks ({reason(error)})") from error
    with ranks.watchdog():
        report = _measure(ranks, config.folder)
        collective = _sum_over_ranks(ranks)
        if not ranks.is_main:
            ranks.channel.send(0, msgspec.msgpack.encode(report))
            return None
        received = [ranks.channel.receive(rank) for rank in range(1, ranks.world)]
        others = [msgspec.msgpack.decode(report, type=RankReport) for report in received]
        return compare([report, *others], collective, config.folder)


def compare(reports: Sequence[RankReport], collective: RankSum | None, folder: Path) -> list[Finding]:
    """Judge what all ranks report. collective: None in a single process. folder: of the run."""
    findings = [_devices(reports), *_versions(reports)]
    hosts = {report.host for report in reports}
    ahead = max(reports, key=lambda report: abs(report.clock_s))
    if len(hosts) > 1:
        text = f"{ahead.name} is {ahead.clock_s:+.2f} s from rank 0, the most of all"
        good = abs(ahead.clock_s) <= CLOCK_S
        findings.append(judged("clocks", good, text, "set them by NTP: logs and traces are compared by time", "warn"))
        findings.append(_networks(reports))
    blind = [report.name for report in reports if not report.sees_folder]
    text = f"{', '.join(blind)}: no file that rank 0 writes into {folder}" if blind else f"all ranks share {folder}"
    wrong = [f"{one.name} is off by {one.product_error:.2g}" for one in reports if not one.product_error <= WRONG]
    taken = [f"{one.name}: {one.taken:.0%} of {one.device} in use" for one in reports if one.taken > TAKEN]
    findings += [
        judged("run.folder", not blind, text, "all ranks write checkpoints into it: put it on a shared file system"),
        judged("products", not wrong, "; ".join(wrong) or "right on all ranks", "this device computes wrong"),
        _speeds(reports),
        judged("device memory", not taken, "; ".join(taken) or "free", "end the other processes on that GPU", "warn"),
    ]
    if collective is not None:
        findings.append(_sum_finding(collective, recognize_card(reports[0].device) if len(hosts) == 1 else None))
    return findings


def _sum_finding(collective: RankSum, card: str | None) -> Finding:
    """Judge a sum. card: of ranks on one machine, whose link is known."""
    if not collective.correct:
        advice = "the connection or its driver is broken: try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1"
        return Finding("sum over ranks", "fail", f"wrong result over {collective.backend}", advice)
    text, share = f"{collective.gb_per_s:.2f} GB/s of each rank over {collective.backend}", 1.0
    if card is not None:
        link = find_links(None, card).inside
        share = collective.gb_per_s / link
        text = f"{text}, {share:.0%} of the {link:g} of {card}'s link"
    advice = "sharding waits for the link: `nvidia-smi topo -m` shows whether the GPUs are connected by NVLink"
    return judged("sum over ranks", share >= LEAST_SUM, text, advice, "warn")


def _devices(reports: Sequence[RankReport]) -> Finding:
    kinds = Counter(report.device for report in reports)
    hosts = Counter(report.host for report in reports)
    machines = f"{len(hosts)} machine{'s' * (len(hosts) > 1)}"
    text = f"{len(reports)} on {machines}: {', '.join(f'{n} x {kind}' for kind, n in kinds.items())}"
    uses = Counter((report.host, report.device_id) for report in reports if report.device != "CPU")
    twice = [f"{host} {device}" for (host, device), n in uses.items() if n > 1]
    text += f"; several use {', '.join(twice)}" if twice else ""
    return judged("ranks", not twice, text, "start one rank for each GPU")


def _versions(reports: Sequence[RankReport]) -> list[Finding]:
    findings = []
    for package, wanted in reports[0].versions.items():
        others = {one.name: one.versions.get(package, "none") for one in reports if one.versions.get(package) != wanted}
        if others:
            listed = ", ".join(f"{version} on {name}" for name, version in others.items())
            text = f"{wanted} on {reports[0].name}, {listed}"
            findings.append(Finding(package, "fail", text, "install the same version everywhere"))
    return findings or [Finding("versions", "ok", ", ".join(f"{k} {v}" for k, v in reports[0].versions.items()))]


def _networks(reports: Sequence[RankReport]) -> Finding:
    """Judge the interfaces of several machines, of which the slowest decides."""
    first = {report.host: report for report in reversed(reports)}
    used = [first[host] for host in sorted(first)]
    texts = []
    for one in used:
        speed = f"{one.mbit_per_s / 1000:g} Gbit/s" if one.mbit_per_s else "of unknown speed"
        texts.append(f"{one.host}: {f'{one.interface} {one.address}, {speed}' if one.address else 'not found'}")
    alike = all(one.address for one in used) and len({one.mbit_per_s for one in used}) == 1
    advice = "name the interfaces of one fast network in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each machine"
    return judged("network", alike, "; ".join(texts), advice, "warn")


def _speeds(reports: Sequence[RankReport]) -> Finding:
    slow = []
    for report in reports:
        usual = median(other.product_s for other in reports if other.device == report.device)
        if report.device != "CPU" and report.product_s > SLOW * usual:
            slow.append(f"{report.name} takes {report.product_s / usual:.1f} times the usual time")
    text = "alike"
    if (card := recognize_card(reports[0].device)) is not None:
        reached = 2 * PRODUCT**3 / max(report.product_s for report in reports) / 1e12 / CARDS[card].tflops
        text = f"products reach {reached:.0%} of {card}'s {CARDS[card].tflops:g} TFLOP/s"
        if reached < LEAST_PRODUCT and not slow:
            slow.append(text)
    advice = "every step waits for the slowest rank: look at the temperature, power and clock of that GPU"
    return judged("speed", not slow, "; ".join(slow) or text, advice, "warn")


def _measure(ranks: Ranks, folder: Path) -> RankReport:
    device = ranks.accelerator.device
    name, id, taken = "CPU", "", 0.0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, id = properties.name, str(getattr(properties, "uuid", device.index))
        free, total = torch.accelerator.get_memory_info(device)
        taken = 1 - (free + torch.accelerator.memory_reserved(device)) / total
    seconds, error = _product(device)
    interface, address, speed = used_interface()
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    if device.type == "cuda":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return RankReport(
        rank=ranks.rank,
        host=socket.gethostname(),
        device=name,
        device_id=id,
        versions={"Python": ".".join(platform.python_version_tuple()[:2]), **versions},
        clock_s=_clock(ranks),
        sees_folder=_sees(ranks, folder),
        product_s=seconds,
        product_error=error,
        taken=max(0.0, taken),
        interface=interface,
        address=address,
        mbit_per_s=speed,
    )


def _product(device: torch.device) -> tuple[float, float]:
    """Return the seconds of a product, of a size that keeps the device busy, and the error of a small one."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator, dtype=torch.float64) for _ in range(2))
    found = (a.float().to(device) @ b.float().to(device)).double().cpu()
    error = float((found - a @ b).abs().max() / (a @ b).abs().max())
    size, dtype = (PRODUCT, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    x = torch.ones(size, size, dtype=dtype, device=device)
    return _seconds(lambda: x @ x, device), error


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of ``act`` over five times, after a first that is not counted."""
    measured = []
    for _ in range(6):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.accelerator.synchronize(device)
        measured.append(time.perf_counter() - began)
    return median(measured[1:])


def _clock(ranks: Ranks) -> float:
    """Return by how many seconds this rank's clock is ahead of that of rank 0."""
    if not ranks.is_main:
        ranks.channel.receive(0)
        ranks.channel.send(0, repr(time.time()).encode())
        return float(ranks.channel.receive(0))
    for rank in range(1, ranks.world):
        asked = time.time()
        ranks.channel.send(rank, b"?")
        there = float(ranks.channel.receive(rank))
        ranks.channel.send(rank, repr(there - (asked + time.time()) / 2).encode())
    return 0.0


def _sees(ranks: Ranks, folder: Path) -> bool:
    """Return whether a file of rank 0 in ``folder`` is there for this rank, too."""
    file = folder / ranks.broadcast_text(f".ranks-{uuid4().hex}")
    if ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    ranks.all_reduce_sum([0.0])
    end = time.monotonic() + SEEN_S
    while not (seen := file.exists()) and time.monotonic() < end:
        time.sleep(0.2)
    ranks.all_reduce_sum([0.0])
    if ranks.is_main:
        file.unlink()
    return seen


def _sum_over_ranks(ranks: Ranks) -> RankSum | None:
    if ranks.world == 1:
        return None
    device = ranks.accelerator.device
    values = torch.empty((64 if device.type == "cuda" else 4) << 18, device=device)
    values.fill_(ranks.rank + 1.0)
    dist.all_reduce(values)
    correct = bool((values == ranks.world * (ranks.world + 1) / 2).all())
    seconds = _seconds(lambda: dist.all_reduce(values), device)
    correct = not ranks.any(not correct)
    sent = 2 * (ranks.world - 1) / ranks.world * values.nbytes
    return RankSum(dist.get_backend(), correct, sent / seconds / 1e9)
