"""A generator is killed while it samples: each attempt is a child of the episode, and the rest is as without a kill."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from consumers.trainer.records.traces import TraceLog
from schemas.config import BrokerConfig, TidemillConfig, TraceConfig
from schemas.messages import Trajectory
from schemas.messages.moments import trace_id
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.generator_service import (
    begin_run,
    make_config,
    make_engine,
    make_task,
    read_published,
    running_generator,
    wait_until,
)
from tests.support.runs.light_service import start_service
from tests.support.servers.scripted_server import serving

N, FLUSH = 2, 50
STARTING = """
import os
from producers.engines.scripted import ScriptedEngine


class Starting(ScriptedEngine):
    '''Tells the test that it samples.'''

    def _step(self, samples, progress):
        super()._step(samples, progress)
        open(os.environ["STARTED"], "w").close()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


async def kill_one(folder: Path, config: TidemillConfig, name: str, url: str, saved: Callable[[], object]) -> None:
    """Start a generator, and kill it when it samples and what it ``saved`` is there."""
    file, started = folder / f"{name}.yaml", folder / f"{name}-started"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    victim = start_service("generator", file, name, url, STARTED=str(started))
    try:
        await wait_until(lambda: victim.poll() is not None or (started.exists() and saved()), 60)
        assert victim.poll() is None, f"{name} has ended by itself"
    finally:
        victim.kill()
        await asyncio.to_thread(victim.wait, 10)


def spans_of(samples: Sequence[Trajectory]) -> dict[int, list[dict[str, Any]]]:
    """The spans of each sample as a receiver gets them when a step has trained it."""
    with serving((200, {})) as receiver:
        log = TraceLog(TraceConfig(url=receiver.url, share=1.0), "g", "m")
        log.trained(1, 0.1, [(body, 1.0) for body in samples])
        log.close()
    (body,) = receiver.requests
    spans = body["resourceSpans"][0]["scopeSpans"][0]["spans"]
    return {sample: [one for one in spans if one["traceId"] == trace_id("g", 0, sample).hex()] for sample in range(N)}


def describe(spans: Sequence[dict[str, Any]]) -> Counter[tuple[str, str, str]]:
    """How often the name, with the generator's, is below this parent."""
    by_id = {span["spanId"]: span for span in spans}
    assert len(by_id) == len(spans), "two spans with one id"

    def name(span: dict[str, Any]) -> tuple[str, str]:
        known = {one["key"]: one["value"] for one in span["attributes"]}
        return span["name"], known.get("tidemill.generator", {}).get("stringValue", "")

    return Counter(
        (*name(span), ":".join(name(by_id[span["parentSpanId"]])) if "parentSpanId" in span else "") for span in spans
    )


EPISODE = "invoke_agent episode:"
WITHOUT_KILLS = Counter(
    {
        ("invoke_agent episode", "", ""): 1,
        ("admitted", "", EPISODE): 1,
        ("attempt", "heir", EPISODE): 1,
        ("chat m", "", "attempt:heir"): 1,
        ("train step 1", "", EPISODE): 1,
    }
)
SAVED, LOST = {("attempt", "g-saved", EPISODE): 1, ("chat m", "", "attempt:g-saved"): 1}, ("attempt", "", EPISODE)


@pytest.mark.parametrize(
    ("kills", "more"),
    [
        ([], {}),
        (["g-saved"], SAVED),
        (["g-lost", "g-lost-again"], {LOST: 2}),
        (["g-saved", "g-lost"], {**SAVED, LOST: 1}),
        (["g-returned", "g-lost"], {("attempt", "g-returned", EPISODE): 1, LOST: 1}),
    ],
    ids=["none", "saved", "two that saved nothing", "saved, then nothing", "returned, then nothing"],
)
async def test_each_attempt_is_a_child(
    kills: list[str],
    more: dict[tuple[str, str, str], int],
    model: Path,
    make_broker: Callable[..., Broker],
    server: EmbeddedServer,
    tmp_path: Path,
) -> None:
    prefix = f"traced-{'-'.join(kills)}"
    broker = make_broker("g", prefix=prefix)
    begin_run(broker, tmp_path, make_task(0, n=N))
    (tmp_path / "starting.py").write_text(STARTING)

    def config_of(name: str) -> TidemillConfig:
        args = {"token_s": 0.01, "min_length": 900, "max_length": 900}
        flush = FLUSH if name == "g-saved" else None
        made = make_config(model, tmp_path, flush_every=flush, lease_s=1, engine="starting.py:Starting", args=args)
        return made.model_copy(update={"trace": TraceConfig(), "broker": BrokerConfig(prefix=prefix)})

    def kept() -> bool:
        parts = broker.partials("g").load_partials(0, range(N))
        return len(parts) == N and all(len(part.tokens) for part in parts)

    for name in kills:
        if name == "g-returned":
            engine = make_engine(config_of(name), min_length=900, max_length=900, token_s=0.01)
            async with running_generator(config_of(name), broker, engine, name):
                await engine.generating.wait()
        else:
            await kill_one(tmp_path, config_of(name), name, server.url, kept if name == "g-saved" else lambda: True)
    config = config_of("heir")
    async with running_generator(config, broker, make_engine(config, min_length=5, max_length=5), "heir"):
        samples = await read_published(broker, N)
    for spans in spans_of(samples).values():
        found = describe(spans)
        if "g-returned" in kills:
            found.pop(("chat m", "", "attempt:g-returned"), None)
        assert found == WITHOUT_KILLS + Counter(more)
        first, *rest = spans
        assert all(first["startTimeUnixNano"] <= span["startTimeUnixNano"] for span in rest)
        attempts = [span for span in spans if span["name"] == "attempt"]
        assert all(int(span["startTimeUnixNano"]) < int(span["endTimeUnixNano"]) for span in attempts)
