"""Samples of a tiny vision model by a real vLLM engine, run as a process of its own: ``python -m ... MODEL OUT COUNT``.

A process of its own, because what stands in for torchvision has to be there before transformers is imported.
"""

import asyncio
import io
import sys
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image as Pillow

from producers.engines.base import EngineSettings, PromptImage
from producers.engines.vllm.engine import VllmEngine
from schemas.config import LoraConfig
from schemas.images import prepare_image, probe_image, read_image_settings
from schemas.messages import FileSource, PlacedImage, Sampling
from tests.support.producers.vision_episodes import VisionEpisode, play_vision_episodes

EPISODES = 24


class VisionSample(msgspec.Struct):
    """A sample: tokens with its prompt, log-probabilities of what was sampled, and its images with their files."""

    tokens: list[int]
    prompt: int
    logprobs: list[float]
    images: list[PlacedImage]
    files: dict[str, bytes]


class Found(msgspec.Struct):
    """Samples, and the probe's log-probabilities with the fixed picture and with another one."""

    samples: list[VisionSample]
    probe_tokens: list[int]
    probe: list[float]
    other: list[float]
    reloaded: list[float]
    episodes: list[VisionEpisode]


def picture(rng: np.random.Generator) -> bytes:
    """A photograph of noise, of any size, as a JPEG file."""
    height, width = rng.integers(30, 180, 2)
    file = io.BytesIO()
    Pillow.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()


async def sample(folder: Path, count: int, weights: Path | None, lora: LoraConfig | None = None) -> Found:
    """Sample ``count`` answers, and play as many episodes as there are for more than a few; then load ``weights``."""
    settings = read_image_settings(folder)
    engine = VllmEngine(
        EngineSettings(str(folder), "float32", 512, 16, images=settings, frozen_vision=True, report_every=4, lora=lora)
    )
    await engine.start()
    rng = np.random.default_rng(0)
    asked = []
    for number in range(count):
        ids: list[int] = [8, 20, 30]
        images: list[PromptImage] = []
        files: dict[str, bytes] = {}
        for _ in range(number % 3):
            image, body = prepare_image(picture(rng), settings)
            tokens = settings.tokens(image.width, image.height)
            images.append(PromptImage(image.digest, len(ids) + 1, len(ids) + 1 + tokens, body))
            ids += [3, *[6] * tokens, 4, *rng.integers(20, 200, int(rng.integers(1, 6))).tolist()]
            files[image.digest] = body
        asked.append((ids, images, files))
    done = await asyncio.gather(
        *(
            engine.generate(ids, Sampling(max_tokens=24, seed=number), images=images)
            for number, (ids, images, _) in enumerate(asked)
        )
    )
    samples = [
        VisionSample(
            [*ids, *completion.tokens],
            len(ids),
            completion.logprobs.tolist(),
            [PlacedImage(image.digest, image.start, image.end) for image in images],
            files,
        )
        for (ids, images, files), (completion,) in zip(asked, done, strict=True)
    ]
    probe = [3, 6, 6, 6, 6, 4, 50, 60, 70, 80]
    fixed = probe_image(settings)
    swapped = io.BytesIO()
    Pillow.open(io.BytesIO(fixed)).rotate(90).save(swapped, "PNG")
    episodes = await play_vision_episodes(engine, folder, settings, min(EPISODES, count))
    found = [
        (await engine.logprobs(probe, [PromptImage(name, 1, 5, data)])).tolist()
        for name, data in (("probe", fixed), ("other", swapped.getvalue()))
    ]
    reloaded: list[float] = []
    if weights is not None:
        await engine.load(FileSource(weights), 1)
        reloaded = (await engine.logprobs(probe, [PromptImage("probe", 1, 5, fixed)])).tolist()
    await engine.close()
    return Found(samples, probe, *found, reloaded, episodes)


if __name__ == "__main__":
    given, rank = sys.argv[4:5], sys.argv[5:6]
    adapter = LoraConfig(rank=int(rank[0])) if rank else None
    found = asyncio.run(sample(Path(sys.argv[1]), int(sys.argv[3]), Path(given[0]) if given else None, adapter))
    Path(sys.argv[2]).write_bytes(msgspec.msgpack.encode(found))
