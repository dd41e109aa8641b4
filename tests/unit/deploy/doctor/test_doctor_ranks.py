"""What ranks report of themselves is compared: each thing that would stop or slow a training is named with its rank."""

from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from deploy.doctor import ranks
from deploy.doctor.ranks import RankReport, RankSum, check_ranks, compare
from deploy.planning.cards import recognize_card
from schemas.config import ParallelConfig
from schemas.errors import InfraError
from tests.support.configurations import minimal_config

SUM = RankSum("nccl", correct=True, gb_per_s=180.0)
GOOD = [
    RankReport(
        rank=rank,
        host=f"node-{rank // 2}",
        device="H100",
        device_id=f"uuid-{rank}",
        versions={"Python": "3.11", "torch": "2.13.0", "nccl": "2.27"},
        clock_s=0.001 * rank,
        sees_folder=True,
        product_s=0.002,
        product_error=3e-4,
        taken=0.01,
        interface="eth0",
        address=f"10.0.0.{rank // 2 + 1}",
        mbit_per_s=100_000,
    )
    for rank in range(4)
]


def problems(reports: list[RankReport], collective: RankSum | None = SUM) -> list[tuple[str, str, str]]:
    found = compare(reports, collective, Path("/shared/run"))
    assert all(bool(finding.advice) == (finding.level != "ok") for finding in found)
    return [(finding.name, finding.level, finding.text) for finding in found if finding.level != "ok"]


def test_equal_ranks_have_no_problem() -> None:
    assert problems(GOOD) == []
    assert problems(GOOD[:1], None) == []
    texts = {finding.name: finding.text for finding in compare(GOOD, SUM, Path("/shared/run"))}
    assert texts["ranks"] == "4 on 2 machines: 4 x H100"
    assert texts["network"] == "node-0: eth0 10.0.0.1, 100 Gbit/s; node-1: eth0 10.0.0.2, 100 Gbit/s"
    assert texts["sum over ranks"] == "180.00 GB/s of each rank over nccl"


@pytest.mark.parametrize(
    ("change", "name", "level", "text"),
    [
        ({"device_id": "uuid-2"}, "ranks", "fail", "several use node-1 uuid-2"),
        ({"versions": {"Python": "3.11", "torch": "2.12.1", "nccl": "2.27"}}, "torch", "fail", "2.12.1 on rank 3"),
        ({"versions": {"Python": "3.11", "torch": "2.13.0"}}, "nccl", "fail", "none on rank 3 on node-1"),
        ({"clock_s": -4.0}, "clocks", "warn", "rank 3 on node-1 is -4.00 s from rank 0"),
        ({"sees_folder": False}, "run.folder", "fail", "rank 3 on node-1: no file that rank 0 writes"),
        ({"product_error": 0.5}, "products", "fail", "rank 3 on node-1 is off by 0.5"),
        ({"product_error": float("nan")}, "products", "fail", "rank 3 on node-1 is off by nan"),
        ({"product_s": 0.005}, "speed", "warn", "rank 3 on node-1 takes 2.5 times the usual time"),
        ({"taken": 0.4}, "device memory", "warn", "rank 3 on node-1: 40% of H100 in use"),
    ],
)
def test_a_rank_that_differs_is_named(change: dict[str, object], name: str, level: str, text: str) -> None:
    (found,) = problems([*GOOD[:3], msgspec.structs.replace(GOOD[3], **change)])
    assert found[:2] == (name, level)
    assert text in found[2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"interface": "docker0", "mbit_per_s": 1000}, "node-1: docker0 10.0.0.2, 1 Gbit/s"),
        ({"mbit_per_s": 0}, "node-1: eth0 10.0.0.2, of unknown speed"),
        ({"interface": "", "address": "", "mbit_per_s": 0}, "node-1: not found"),
    ],
    ids=["slower", "unknown", "none"],
)
def test_machines_whose_networks_differ_are_named(change: dict[str, object], text: str) -> None:
    ((name, level, found),) = problems([*GOOD[:2], *(msgspec.structs.replace(one, **change) for one in GOOD[2:])])
    assert (name, level) == ("network", "warn")
    assert found == f"node-0: eth0 10.0.0.1, 100 Gbit/s; {text}"


def test_a_wrong_sum_is_a_problem() -> None:
    assert problems(GOOD, msgspec.structs.replace(SUM, correct=False)) == [
        ("sum over ranks", "fail", "wrong result over nccl")
    ]


@pytest.mark.parametrize(("rate", "level"), [(180.0, "ok"), (20.0, "warn")])
def test_a_sum_on_one_machine_is_compared_with_its_link(rate: float, level: str) -> None:
    here = [msgspec.structs.replace(one, host="node-0", device="NVIDIA H100 80GB HBM3") for one in GOOD]
    found = compare(here, msgspec.structs.replace(SUM, gb_per_s=rate), Path("/shared/run"))[-1]
    assert (found.name, found.level) == ("sum over ranks", level)
    assert found.text == f"{rate:.2f} GB/s of each rank over nccl, {rate / 450:.0%} of the 450 of h100's link"


def test_products_are_compared_with_the_data_sheet_of_their_device() -> None:
    assert "products reach 56% of h100's 989 TFLOP/s" in [one.text for one in compare(GOOD, SUM, Path("/run"))]
    throttled = [msgspec.structs.replace(one, product_s=0.01) for one in GOOD]
    assert problems(throttled) == [("speed", "warn", "products reach 11% of h100's 989 TFLOP/s")]


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA GH200 480GB", None),
        ("CPU", None),
    ],
)
def test_a_card_is_known_by_its_drivers_name(device: str, card: str | None) -> None:
    assert recognize_card(device) == card


def test_ranks_on_processors_may_share_one_and_differ_in_speed() -> None:
    cpus = [msgspec.structs.replace(one, device="CPU", device_id="", product_s=0.001 * (one.rank + 1)) for one in GOOD]
    assert problems(cpus) == []


def test_ranks_that_do_not_meet_are_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(timeout_s: float, parallel: ParallelConfig) -> None:
        """As PyTorch says it; a real group that fails would leave its traces in this process."""
        raise dist.DistStoreError(f"Timed out after {timeout_s:.0f} seconds waiting for clients. 1/2 clients joined.")

    monkeypatch.setattr(ranks, "Ranks", join)
    with pytest.raises(InfraError, match=r"did not meet within 120 s: .*1/2 clients joined"):
        check_ranks(minimal_config())
