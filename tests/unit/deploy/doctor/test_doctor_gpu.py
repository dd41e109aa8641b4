"""``doctor --gpu`` on an imitated device: each way in which an engine fails there is a line of its own."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from consumers.trainer.model.policy import Policy
from deploy.checks.finding import Finding
from deploy.doctor import gpu
from deploy.doctor.gpu import (
    Device,
    ProbeReference,
    check_attention,
    check_devices,
    check_engine,
    check_gpu,
    find_reference,
)
from producers.generator.weight_probe import ProbeJudge
from schemas.errors import InfraError
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model

TOTAL = 80_000_000_000
LOGPROBS = -np.linspace(0.1, 3, 60, dtype=np.float32)
REFERENCE = ProbeReference(list(range(61)), (), LOGPROBS)


@dataclass
class ImitatedCard:
    """A card and an engine on it. kept: bytes that sleep keeps. left: that the end leaves. off: nats after waking."""

    takes: int = 60_000_000_000
    kept: int = 2_000_000_000
    left: int = 0
    off: float = 0.0
    off_asleep: float = 0.0
    fails: str = ""
    taken: int = 0
    calls: list[str] = field(default_factory=list)
    lacks: dict[str, str] = field(default_factory=dict)

    def free(self) -> int:
        return TOTAL - self.taken

    async def _do(self, call: str, taken: int | None = None) -> None:
        self.calls.append(call)
        if self.fails == call:
            raise InfraError("CUDA error: an illegal memory access was encountered")
        if self.fails == f"{call} hangs":
            await asyncio.Event().wait()
        self.taken = self.taken if taken is None else taken

    async def start(self) -> None:
        await self._do("start", self.takes)

    async def pause(self) -> None:
        await self._do("pause")

    async def sleep(self) -> None:
        await self._do("sleep", self.kept)

    async def wake(self) -> None:
        await self._do("wake", self.takes)

    async def close(self) -> None:
        await self._do("close", self.left)

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        await self._do("logprobs")
        return LOGPROBS + np.float32(self.off + (self.off_asleep if "wake" in self.calls else 0.0))


def check(card: Any, memory: bool = True) -> list[Finding]:
    device = Device(card.free, TOTAL) if memory else Device(lambda: None)
    return asyncio.run(check_engine("vllm", card, REFERENCE, ProbeJudge("bfloat16"), device))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("START_S", "CALL_S", "FREE_S"):
        monkeypatch.setattr(gpu, name, 0.2)


def test_a_card_that_works_has_a_line_for_each_check() -> None:
    card = ImitatedCard()
    found = check(card)
    assert [(finding.name, finding.level) for finding in found] == [
        ("engine", "ok"),
        ("probe", "ok"),
        ("sleep", "ok"),
        ("probe after sleep", "ok"),
        ("memory given back", "ok"),
    ]
    assert card.calls == ["start", "logprobs", "pause", "sleep", "wake", "logprobs", "close"]
    assert "takes 60.0 GB" in found[0].text
    assert "gives 58.0 of 60.0 GB back" in found[2].text


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        ({"off": 0.5}, "probe", "differ by 0.5 nats"),
        ({"off": float("nan")}, "probe", "not finite"),
        ({"kept": 40_000_000_000}, "sleep", "gives 20.0 of 60.0 GB back"),
        ({"off_asleep": 0.5}, "probe after sleep", "differ by 0.5 nats"),
        ({"left": 9_000_000_000}, "memory given back", "9.0 GB of 80 are still taken"),
        ({"fails": "start"}, "engine", "illegal memory access"),
        ({"fails": "start hangs"}, "engine", "start has not returned within 0 s"),
        ({"fails": "sleep"}, "engine", "illegal memory access"),
        ({"fails": "logprobs hangs"}, "engine", "probe has not returned"),
        ({"fails": "pause hangs"}, "engine", "pause has not returned"),
        ({"fails": "wake hangs"}, "engine", "wake has not returned"),
        ({"fails": "close"}, "engine's end", "illegal memory access"),
    ],
)
def test_each_fault_of_a_card_is_a_line_with_its_meaning(change: dict[str, Any], name: str, text: str) -> None:
    card = ImitatedCard(**change)
    found = check(card)
    assert "close" in card.calls, "whatever failed"
    failed = [finding for finding in found if finding.level == "fail"]
    assert name in [finding.name for finding in failed]
    assert any(text in finding.text for finding in failed)
    assert all(finding.advice and "\n" not in finding.text for finding in failed)


def test_without_a_device_no_memory_is_judged() -> None:
    found = check(ImitatedCard(left=9_000_000_000, kept=60_000_000_000), memory=False)
    assert {finding.level for finding in found} == {"ok"}
    assert not any("GB" in finding.text for finding in found)


def test_an_engine_without_sleep_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Restless(ImitatedCard):
        sleep = None  # type: ignore[assignment]

    monkeypatch.setattr(gpu, "SleepingEngine", type("Never", (), {}))
    found = {finding.name: finding for finding in check(Restless())}
    assert "no sleep" in found["sleep"].text
    assert "probe after sleep" not in found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("""print('[{"name": "products", "level": "ok", "text": "right"}]')""", Finding("products", "ok", "right")),
        (
            """print('{"error": "trainer.x is wrong", "exit_code": 2}')""",
            Finding("ranks", "fail", "trainer.x is wrong"),
        ),
        ("raise SystemExit('tidemill: no two ranks met')", Finding("ranks", "fail", "tidemill: no two ranks met")),
        ("import os; os._exit(7)", Finding("ranks", "fail", "exit code 7")),
        ("import time; time.sleep(600)", Finding("ranks", "fail", "2 ranks have not ended within 2 s")),
    ],
)
def test_what_ranks_of_their_own_find_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, found: Finding
) -> None:
    asked: list[str] = []

    def stand_in(*arguments: str) -> list[str]:
        asked.extend(arguments)
        return [sys.executable, "-c", code]

    monkeypatch.setattr(gpu, "command", stand_in)
    monkeypatch.setattr(gpu, "RANKS_S", 2.0 if "sleep" in code else 60.0)
    (one,) = check_devices(tmp_path / "my.yaml", ["run.seed=3"], 2)
    assert (one.name, one.level, one.text) == (found.name, found.level, found.text)
    assert bool(one.advice) == (one.level == "fail")
    overrides = ["run.seed=3", "trainer.processes=2", "placement=null"]
    assert asked == ["doctor", str(tmp_path / "my.yaml"), *overrides, "--ranks", "--json"]


def test_all_checks_of_an_engine_have_one_deadline() -> None:
    card = ImitatedCard(fails="sleep hangs")
    found = asyncio.run(
        check_engine("vllm", card, REFERENCE, ProbeJudge("bfloat16"), Device(card.free, TOTAL), left_s=0.05)
    )
    assert found[-2].text == "TimeoutError: all checks together have not ended within 180 s"
    assert (card.calls[-1], found[-1].name, found[-1].level) == ("close", "memory given back", "ok")


def test_a_model_larger_than_a_card_is_a_line_and_the_engine_is_still_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path, hidden=32, layers=1)
    config = minimal_config(model={"path": str(tmp_path)}, generator={"engine": "transformers"})

    def move(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 260.00 MiB")

    monkeypatch.setattr(Policy, "to", move)
    monkeypatch.setattr(gpu, "check_devices", lambda *_: [])
    card = ImitatedCard()
    monkeypatch.setattr(gpu, "make_engine", lambda *_: card)
    found = {finding.name: finding for finding in check_gpu(tmp_path / "my.yaml", [], config, 1)}
    assert found["policy"].level == "warn"
    assert found["policy"].text == f"{tmp_path} does not fit one card, so what the engine says is not compared with it"
    assert "plan --gpu" in found["policy"].advice
    assert card.calls == ["start", "pause", "sleep", "wake", "close"]
    assert "probe" not in found


def test_a_policy_that_cannot_be_loaded_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    findings: list[Finding] = []
    assert find_reference(minimal_config(model={"path": str(tmp_path)}), torch.device("cpu"), findings) is None
    assert [(finding.name, finding.level) for finding in findings] == [("policy", "fail")]


@pytest.mark.parametrize("problem", ["", "its result is wrong"])
def test_a_kernel_that_differs_from_sdpa_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    make_tiny_model(tmp_path, hidden=32, layers=1)
    config = minimal_config(model={"path": str(tmp_path), "dtype": "bfloat16"})
    assert "sdpa, each sequence alone, on cpu" in check_attention(config, torch.device("cpu")).text
    monkeypatch.setattr(gpu, "choose_kernel", lambda *_: "flash_attn")
    monkeypatch.setattr(gpu, "try_kernel", lambda *_: problem)
    found = check_attention(config, torch.device("cuda"))
    assert found.level == ("warn" if problem else "ok")
    assert ("flash_attn: its result is wrong" if problem else "flash_attn agrees with sdpa") in found.text
