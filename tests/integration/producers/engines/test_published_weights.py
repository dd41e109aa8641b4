"""Weights of a trainer's real steps, as adapters or deltas, are loaded by a real engine and pass each probe."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim import AdamW

from broker.client import Broker
from broker.flow.fencing import term_number
from broker.weights.delta_writer import DeltaWriter
from broker.weights.transports import make_transport
from consumers.trainer.context import TrainerContext
from consumers.trainer.leadership import Leadership
from consumers.trainer.model.hf_weights import check_published, named_weights
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.probe import reference_logprobs
from consumers.trainer.publishing import WeightPublisher
from consumers.trainer.records.evaluation_log import EvaluationLog
from consumers.trainer.step.build import build_train_step
from producers.engines.base import EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from producers.generator.orders import OrderFollower
from producers.generator.weight_updates import WeightUpdater
from schemas.codec import Array
from schemas.config import LoraConfig, ModelConfig, TidemillConfig
from schemas.digests import base_digest
from schemas.errors import ConfigError, DataError
from schemas.messages import FileSource, Manifest, Probe, Sampling
from schemas.system.lifecycle import StopFlag
from tests.support.broker.trainer_sessions import take_over
from tests.support.configurations import minimal_config
from tests.support.models.adapters import ALPHA, RANK, compute_logprobs, merge_adapter, write_adapter
from tests.support.models.families import OTHERS, make_family
from tests.support.models.tiny_model import make_tiny_model
from tests.support.models.weight_files import write_weights
from tests.support.trainer.trajectories import make_groups

MORE = functools.partial(pytest.param, marks=pytest.mark.matrix("the same conversions under other names"))
REFUSED = {"axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "granitemoehybrid", "kimi_linear", "lfm2_moe"} | {
    *("minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text")
}
"""Families with layers that the engine transformers refuses by name."""
PROMPT = [5, 90, 17, 200, 33, 8]
LORA = LoraConfig(rank=RANK, alpha=ALPHA)
PROBE = [5, 9, 40, 41, 80, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), tied=True)


@asynccontextmanager
async def running_engine(model: Path, **settings: Any) -> AsyncIterator[TransformersEngine]:
    defaults = {"max_length": 256, "max_samples": 16, "lora": LORA, **settings}
    engine = TransformersEngine(EngineSettings(str(model), "float32", **defaults))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def test_each_version_is_the_model_with_that_adapter(model: Path, tmp_path: Path) -> None:
    async with running_engine(model) as engine:
        np.testing.assert_allclose(
            await engine.logprobs(PROMPT), compute_logprobs(merge_adapter(model, None), PROMPT), atol=1e-4
        )
        seen = []
        for version in (1, 2, 1):
            file = write_adapter(model, tmp_path / f"v{version}.safetensors", seed=version)
            await engine.load(FileSource(file), version)
            want = compute_logprobs(merge_adapter(model, file), PROMPT)
            np.testing.assert_allclose(await engine.logprobs(PROMPT), want, atol=1e-4)
            seen.append(want)
        assert abs(seen[0] - seen[1]).max() > 0.1


@pytest.mark.parametrize("recompute", [False, True])
async def test_spans_name_the_adapter_that_made_each_token(model: Path, tmp_path: Path, recompute: bool) -> None:
    one, two = (write_adapter(model, tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2))

    async with running_engine(model, recompute=recompute) as engine:
        await engine.load(FileSource(one), 1)
        await engine.pause()
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200), n=8))
        await engine.resume()
        async with asyncio.timeout(30):
            while not engine._batch.rows:  # noqa: ASYNC110 - a test's look inside, there is no event for it
                await asyncio.sleep(0.001)
        await engine.load(FileSource(two), 2)
        completions = await running
        versions = {tuple(span.version for span in completion.spans) for completion in completions}
        assert (1, 2) in versions
        models = {1: merge_adapter(model, one), 2: merge_adapter(model, two)}
        for completion in completions:
            for span in completion.spans:
                if not recompute and span.version == 2:
                    continue  # by keys and values of both
                want = compute_logprobs(models[span.version], PROMPT + completion.tokens)[len(PROMPT) - 1 :]
                inside = slice(span.start, span.end)
                np.testing.assert_allclose(completion.logprobs[inside], want[inside], atol=1e-3)


async def test_a_file_that_does_not_fit_is_refused_and_the_old_one_stays(model: Path, tmp_path: Path) -> None:
    good = write_adapter(model, tmp_path / "good", seed=1)
    others = {
        "is not an adapter": model / "model.safetensors",
        r"lora_A of .* is \[8, 256\], not \[4, 256\]": write_adapter(model, tmp_path / "rank", seed=2, rank=8),
        "of other layers than the version before": write_adapter(model, tmp_path / "some", 2, targets=["q_proj"]),
    }

    async with running_engine(model) as engine:
        await engine.load(FileSource(good), 1)
        for message, file in others.items():
            with pytest.raises(DataError, match=message):
                await engine.load(FileSource(file), 2)
        assert engine.version == 1
        np.testing.assert_allclose(
            await engine.logprobs(PROMPT), compute_logprobs(merge_adapter(model, good), PROMPT), atol=1e-4
        )


def configuration(folder: Path, model: Path, broker: Broker, dtype: str, transport: str) -> TidemillConfig:
    return minimal_config(
        run={"name": broker.connection.keys.base.strip("{}").partition(":")[2], "folder": str(folder)},
        model={"path": str(model), "dtype": dtype, "max_length": 64},
        sampling={"n": 2, "max_tokens": 16},
        trainer={
            "lora": {"rank": RANK, "alpha": ALPHA},
            "optimizer": {"lr": 1e-5},
            "publish": {"transport": transport, "max_chain": 2},
        },
    )


@pytest.mark.parametrize(("dtype", "transport"), [("float32", "file"), ("bfloat16", "redis")])
async def test_a_generator_follows_a_trainer_of_an_adapter_and_passes_every_probe(
    model: Path, broker: Broker, tmp_path: Path, dtype: str, transport: str
) -> None:
    config = configuration(tmp_path / "run", model, broker, dtype, transport)
    step = build_train_step(config)
    context = TrainerContext.create(config, "trainer", broker, step)
    leadership = Leadership(context, EvaluationLog(config.folder))
    leadership.take_over(saved=0)
    publisher = WeightPublisher(context, leadership)
    engine = TransformersEngine(
        EngineSettings(str(model), dtype, max_length=64, max_samples=4, lora=config.trainer.lora)
    )
    pause, stop = OrderFollower(broker, engine), StopFlag()
    updates = WeightUpdater(config, "g", broker, engine, tmp_path / "in", pause)

    def train_and_publish(version: int) -> None:
        if version:
            context.rank_group.train(make_groups([3, 4], seed=version), version - 1)
        context.progress.step = context.progress.version = version
        publisher.publish(wait=True)

    await engine.start()
    await pause.follow(None)
    following = asyncio.create_task(updates.run(stop))
    try:
        async with asyncio.timeout(90):
            for version in range(5):
                await asyncio.to_thread(train_and_publish, version)
                assert await updates.wait_ready(version), "checked by its probe"
    finally:
        stop.set()
        await following
        await engine.close()
    publisher.close()
    newest = broker.weights.newest()
    assert newest is not None
    assert newest.adapter is not None
    assert (newest.adapter.rank, newest.adapter.alpha, newest.adapter.base) == (RANK, ALPHA, base_digest(model))
    assert len(newest.tensors) == 2 * 7 * 2
    assert newest.state.size < sum(p.numel() for p in step.policy.parameters()) * getattr(torch, dtype).itemsize / 3
    assert any(manifest.delta for manifest in broker.weights.published()) == (transport == "redis")


class Learner:
    """A policy that takes small steps and publishes each."""

    def __init__(self, broker: Broker, model: Path, folder: Path) -> None:
        self._store, self._folder = broker.weights, folder
        self._leader_term = take_over(broker).leader_term
        transport = make_transport(broker.connection, "redis", folder)
        self._publication = broker.weight_publication(transport, 2, DeltaWriter(folder, max_chain=2))
        self._policy = Policy(load_model(str(model), "float32"))
        self._optimizer = AdamW(self._policy.parameters(), lr=1e-5)
        folder.mkdir()

    def publish(self, version: int) -> Manifest:
        tokens = torch.randint(100, (2, 32), generator=torch.Generator().manual_seed(version))
        scores = self._policy(tokens, tokens[:, 1:], torch.ones(2, 31, dtype=torch.bool))
        self._optimizer.zero_grad()
        (-scores.logprobs.mean()).backward()
        self._optimizer.step()
        file = self._folder / f"part-{version}-t{term_number(self._leader_term)}"
        tensors = write_weights(self._policy, file, "bfloat16")
        self._publication.publish(
            file,
            version=version,
            step=version,
            leader_term=self._leader_term,
            tensors=tensors,
            probe=Probe(tokens=Array.of(PROBE, "i4"), logprobs=Array.of(reference_logprobs(self._policy, PROBE), "f4")),
        )
        newest = self._store.newest()
        assert newest is not None
        return newest


@pytest.fixture
def config(tmp_path: Path) -> TidemillConfig:
    return minimal_config(
        run={"name": "engine", "folder": str(tmp_path / "run")},
        model={"path": str(tmp_path / "model"), "dtype": "bfloat16", "max_length": 64},
        sampling={"n": 2, "max_tokens": 16},
        trainer={"publish": {"transport": "redis"}},
    )


async def test_an_engine_follows_a_chain_of_deltas(config: TidemillConfig, broker: Broker, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    learner, stop = Learner(broker, model, tmp_path / "out"), StopFlag()
    engine = TransformersEngine(EngineSettings(str(model), "bfloat16", max_length=64, max_samples=4))
    pause = OrderFollower(broker, engine)
    updates = WeightUpdater(config, "g", broker, engine, tmp_path / "in", pause)

    await engine.start()
    await pause.follow(None)
    following = asyncio.create_task(updates.run(stop))
    try:
        async with asyncio.timeout(60):
            for version in range(1, 7):
                manifest = await asyncio.to_thread(learner.publish, version)
                assert (manifest.delta is None) == (version == 1)
                assert await updates.wait_ready(version), "checked by its probe"
    finally:
        stop.set()
        await following
        await engine.close()
    assert [m.whole for m in broker.weights.published()][-3:] == [True, False, False]


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "gpt_neox", "gpt_oss", "mixtral", "qwen3_moe", *map(MORE, sorted(OTHERS.keys() - REFUSED))],
)
async def test_what_a_trainer_publishes_of_a_mixture_is_what_engines_compute(tmp_path: Path, family: str) -> None:
    """A version changes the answers to the trainer's own, buffers that are saved with the model included."""
    folder = make_family(tmp_path / "model", family)
    policy = Policy(load_model(folder, "float32"))
    check_published(policy, ModelConfig(path=str(folder)))
    with torch.no_grad():
        for _, tensor in named_weights(policy):
            tensor.add_(0.02 * torch.randn_like(tensor))
    write_weights(policy, tmp_path / "v1.safetensors", "float32")
    async with running_engine(folder, lora=None) as engine:
        before = await engine.logprobs(PROBE)
        await engine.load(FileSource(tmp_path / "v1.safetensors"), 1)
        after = await engine.logprobs(PROBE)
    np.testing.assert_allclose(after, reference_logprobs(policy, PROBE), atol=1e-4)
    assert abs(after - before).max() > 0.01


def test_tensors_that_transformers_leaves_out_by_design_may_be_missing(tmp_path: Path) -> None:
    """Layers for speculative decoding stay in the engine as they were loaded; any other gap is an error."""
    folder = make_family(tmp_path / "model", "qwen3_next")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.zeros(4, 4)}, folder / "model.safetensors", {"format": "pt"})
    policy = Policy(load_model(folder, "float32"))
    check_published(policy, ModelConfig(path=str(folder)))
    save_file(tensors | {"extra.weight": torch.zeros(4, 4)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"engines would reject what the trainer publishes.* lacks extra\.weight"):
        check_published(policy, ModelConfig(path=str(folder)))
