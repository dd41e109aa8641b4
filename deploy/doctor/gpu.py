"""``tidemill doctor --gpu``: whether this machine's device computes the configured model right, and can be shared.

In turns: a matrix product on each GPU and a sum over all of them, the trainer's attention kernel beside PyTorch's own
attention, the policy's log-probabilities of the probe, and the engine, which is started, probed, put to sleep, woken
and closed. After each, memory must be free again.
"""

import asyncio
import gc
import json
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from consumers.trainer.model.lora import load_policy
from consumers.trainer.model.packing import choose_kernel, try_kernel
from consumers.trainer.model.policy import DTYPES
from consumers.trainer.model.probe import probe_tokens, reference_logprobs
from deploy.checks.finding import Finding, judged, one_line
from deploy.services.main import command
from producers.engines.base import Engine, PromptImage, SleepingEngine
from producers.engines.factory import engine_name, make_engine, prepare_engine
from producers.generator.service import engine_settings
from producers.generator.weight_probe import ProbeJudge
from producers.images.settings import image_settings
from schemas.config import TidemillConfig
from schemas.errors import ConfigError, TidemillError
from schemas.images import probe_image
from schemas.model_folder import load_model_config

START_S, CALL_S, RANKS_S = 150.0, 60.0, 90.0
"""Seconds in which an engine must have started, any other call must have returned, and ranks must have ended."""
DEADLINE_S = 180.0
"""Seconds for all checks together, after which an engine that is still being checked is closed."""
FREE_S = 20.0
"""Seconds in which memory that was given back must be free: a driver may report it only after a moment."""
KEPT = 0.02
"""Share of a device's memory that may still be taken afterwards, by contexts and libraries."""
ASLEEP = 0.5
"""Share of what an engine takes that its sleep must give back, at least."""
TRAINER_FAILS = "the trainer fails in the same way: check model.path, model.dtype and the installation of PyTorch"
GENERATORS_FAIL = "generators fail in the same way: check generator.engine and generator.args"
GB = 1e9
T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """A device's memory. free: bytes that are free now; None for main memory. total: bytes of it."""

    free: Callable[[], int | None]
    total: int = 0

    async def wait_free(self, wanted: int | None) -> int | None:
        """Wait until ``wanted`` bytes are free, at most FREE_S; return how many are."""
        end = time.monotonic() + FREE_S
        while True:
            found = self.free()
            if found is None or wanted is None or found >= wanted or time.monotonic() > end:
                return found
            await asyncio.sleep(0.05)


@dataclass(frozen=True)
class ProbeReference:
    """What the trainer says to the probe. logprobs: float32 [T-1] of its tokens after the first."""

    tokens: list[int]
    images: Sequence[PromptImage]
    logprobs: npt.NDArray[np.float32]


def check_gpu(file: Path, overrides: Sequence[str], config: TidemillConfig, ranks: int) -> list[Finding]:
    """Make all checks on this machine's GPUs, or its CPU. file, overrides: for ranks. ConfigError if kind is mlp."""
    if config.model.kind == "mlp":
        raise ConfigError("--gpu checks language models, and model.kind is mlp")
    began = time.monotonic()
    findings = check_devices(file, overrides, ranks)
    prepare_engine(config.generator.engine, config.model.kind == "vision")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    read, memory = torch.accelerator.get_memory_info, Device(lambda: None)
    if device.type == "cuda":
        memory = Device(lambda: read(device)[0], read(device)[1])
    with _noting(findings, "attention", TRAINER_FAILS):
        findings.append(check_attention(config, device))
    reference = find_reference(config, device, findings)
    engine_class, settings = config.generator.engine, replace(engine_settings(config, "generator-0"), sleeps=True)
    engine = make_engine(engine_class, settings, config.base)
    judge = ProbeJudge(config.model.dtype, config.generator.probe_tolerance)
    name = engine_name(engine_class)
    left_s = max(0.0, DEADLINE_S - (time.monotonic() - began))
    return [*findings, *asyncio.run(check_engine(name, engine, reference, judge, memory, left_s))]


def check_devices(file: Path, overrides: Sequence[str], count: int) -> list[Finding]:
    """Make the checks of ``doctor --ranks`` with ``count`` ranks, in processes that then have no memory here."""
    changed = (f"trainer.processes={count}", "placement=null")
    argv = command("doctor", str(file), *overrides, *changed, "--ranks", "--json")
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=RANKS_S, check=False)
        answer = json.loads(done.stdout)
        if isinstance(answer, list):
            return [Finding(**found) for found in answer]
        text = answer["error"]
    except subprocess.TimeoutExpired:
        text = f"{count} ranks have not ended within {RANKS_S:.0f} s"
    except ValueError:
        text = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return [Finding("ranks", "fail", text, "`tidemill doctor --ranks` has the rest of its output")]


def check_attention(config: TidemillConfig, device: torch.device) -> Finding:
    """Compare the kernel that training uses here with PyTorch's attention, at the sizes of the model's heads."""
    model = config.model
    settings = load_model_config(model.path, model.trust_remote_code).get_text_config()
    kernel = choose_kernel(device, DTYPES[model.dtype])
    if kernel == "each":
        return Finding("attention", "ok", f"PyTorch's sdpa, each sequence alone, on {device.type} in {model.dtype}")
    problem = try_kernel(settings, device, DTYPES[model.dtype])
    text = f"{kernel}: {problem}" if problem else f"{kernel} agrees with sdpa, forward and backward, in {model.dtype}"
    advice = "training falls back to sdpa for each sequence, which is slower: update flash_attn, or remove it"
    return judged("attention", not problem, text, advice, "warn")


def find_reference(config: TidemillConfig, device: torch.device, findings: list[Finding]) -> ProbeReference | None:
    """Return what the trainer says to the probe; None if a finding says why it says nothing."""
    reference = None
    with _noting(findings, "policy", TRAINER_FAILS):
        try:
            reference = _score_probe(config, device)
        except torch.OutOfMemoryError:
            text = f"{config.model.path} does not fit one card, so what the engine says is not compared with it"
            advice = "a run shards it over the trainer's ranks: `tidemill plan --gpu` computes whether they are enough"
            findings.append(Finding("policy", "warn", text, advice))
    if device.type == "cuda":
        gc.collect()
        torch.accelerator.empty_cache()
    return reference


def _score_probe(config: TidemillConfig, device: torch.device) -> ProbeReference:
    policy = load_policy(config, config.model.path, config.model.dtype).to(device)
    tokens, place = probe_tokens(config, policy)
    images = image_settings(config)
    shown = [] if images is None or place is None else [PromptImage("probe", *place, probe_image(images))]
    return ProbeReference(tokens, shown, reference_logprobs(policy, tokens))


async def check_engine(
    name: str,
    engine: Engine,
    reference: ProbeReference | None,
    judge: ProbeJudge,
    memory: Device,
    left_s: float | None = None,
) -> list[Finding]:
    """Start the engine, probe it, have it sleep and wake, and close it; what comes after a failure is left out.

    reference: None if there is nothing to compare with. left_s: seconds in which all but the end must be done.
    """
    findings: list[Finding] = []
    before = memory.free()
    with _noting(findings, "engine"):
        async with asyncio.timeout(left_s):
            _, seconds = await _within(START_S, engine.start(), "start")
            taken = "" if before is None else f", takes {(before - (memory.free() or 0)) / GB:.1f} GB of the device"
            findings.append(Finding("engine", "ok", f"{name} started in {seconds:.0f} s{taken}"))
            await _probe("probe", engine, reference, judge, findings)
            await _sleep(engine, before, memory, findings)
            await _probe("probe after sleep", engine, reference, judge, findings)
    with _noting(findings, "engine's end"):
        await _within(CALL_S, engine.close(), "close")
        if before is not None:
            left = before - (await memory.wait_free(before - int(KEPT * memory.total)) or 0)
            good = left <= KEPT * memory.total
            text = f"{max(0, left) / GB:.1f} GB of {memory.total / GB:.0f} are still taken after the engine's end"
            advice = "a restarted generator would not find its memory: end the processes that nvidia-smi lists"
            findings.append(judged("memory given back", good, text, advice))
    return findings


@contextmanager
def _noting(findings: list[Finding], what: str, advice: str = GENERATORS_FAIL) -> Iterator[None]:
    """Make a finding of the error that ends this block."""
    try:
        yield
    except (TidemillError, RuntimeError, ValueError, OSError) as error:
        # That of the deadline has no text.
        why = str(error) or f"all checks together have not ended within {DEADLINE_S:.0f} s"
        findings.append(Finding(what, "fail", one_line(f"{type(error).__name__}: {why}"), advice))


async def _within(seconds: float, call: Awaitable[T], what: str) -> tuple[T, float]:
    """Await a call of the engine; return its answer and its seconds. RuntimeError if it takes longer than allowed."""
    began = time.monotonic()
    try:
        return await asyncio.wait_for(call, seconds), time.monotonic() - began
    except TimeoutError:
        raise RuntimeError(f"{what} has not returned within {seconds:.0f} s") from None


async def _probe(
    what: str, engine: Engine, reference: ProbeReference | None, judge: ProbeJudge, findings: list[Finding]
) -> None:
    if reference is None or (what != "probe" and not isinstance(engine, SleepingEngine)):
        return
    images = {"images": reference.images} if reference.images else {}
    found, _ = await _within(CALL_S, engine.logprobs(reference.tokens, **images), what)
    difference = np.abs(found - reference.logprobs)
    limit = judge.limit(len(difference))
    problem = judge.problem(difference) if np.isfinite(difference).all() else "log-probabilities are not finite"
    text = f"differs by {difference.mean():.2g} nats from the trainer on average, at most {limit:.2g} is allowed"
    advice = "every weight version would be refused: try model.dtype float32, then check generator.args"
    findings.append(judged(what, problem is None, problem or text, advice))


async def _sleep(engine: Engine, before: int | None, memory: Device, findings: list[Finding]) -> None:
    if not isinstance(engine, SleepingEngine):
        findings.append(Finding("sleep", "ok", "this engine has no sleep, so it cannot take turns on shared GPUs"))
        return
    awake = memory.free()
    await _within(CALL_S, engine.pause(), "pause")
    _, seconds = await _within(CALL_S, engine.sleep(), "sleep")
    text, good = f"asleep after {seconds:.1f} s", True
    if before is not None and awake is not None:
        wanted = awake + int(ASLEEP * (before - awake))
        given = (await memory.wait_free(wanted) or 0) - awake
        good, text = awake + given >= wanted, f"{text}, gives {given / GB:.1f} of {(before - awake) / GB:.1f} GB back"
    _, seconds = await _within(CALL_S, engine.wake(), "wake")
    advice = "the trainer would have no room in its turns: give generators GPUs of their own in placement"
    findings.append(judged("sleep", good, f"{text}; awake after {seconds:.1f} s", advice))
