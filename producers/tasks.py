"""Task messages from dataset examples and sampling settings, for the feeder and for evaluation without a broker."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.queues.dead_letters import UnusableTask
from producers.datasets.base import Dataset, Example
from schemas.codec import decode, encode
from schemas.config import SamplingConfig
from schemas.errors import ConfigError, DataError, InfraError, describe_error
from schemas.images import ImageSettings, prepare_image
from schemas.messages import Image, Kind, Sampling, Task


@dataclass(frozen=True)
class TaskLimits:
    """Limits of a task. max_bytes: of the task, and of each of its images.

    settings: how images are scaled, None: there may be none. images: where the bytes of a task's images go, by digest.
    """

    max_bytes: int
    settings: ImageSettings | None = None
    images: dict[str, bytes] = field(default_factory=dict)


def _prepare_images(files: Sequence[bytes], limits: TaskLimits) -> list[Image]:
    prepared: list[Image] = []
    for number, file in enumerate(files, start=1):
        if limits.settings is None:
            raise DataError("it has images, and model.kind is text: set it to vision, with a model that reads images")
        image, body = prepare_image(file, limits.settings, f"image {number}")
        if image.size > limits.max_bytes:
            raise DataError(
                f"image {number} of {image.width} x {image.height} pixels has {image.size} bytes,"
                f" broker.max_message_bytes is {limits.max_bytes}: lower model.max_pixels"
            )
        limits.images[image.digest] = body
        prepared.append(image)
    return prepared


def task_seed(run_seed: int, task_id: int) -> int:
    """Return the seed of a task's first sample in exact mode, below 2**48; the others have the numbers after it."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{task_id}".encode()).digest()[:6], "big")


def make_sampling(settings: SamplingConfig, seed: int | None = None) -> Sampling:
    """Return the sampling settings of a task."""
    return Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_tokens=settings.max_tokens,
        stop=list(settings.stop),
        seed=seed,
    )


def make_task(
    task_id: int,
    kind: Kind,
    example: Example,
    sampling: SamplingConfig,
    dataset: str = "",
    level: int = -1,
    limits: TaskLimits | None = None,
    seed: int | None = None,
) -> Task:
    """Make the task message of an example; DataError says what is wrong with one of its images.

    dataset: its label. level: of difficulty, -1 if the dataset has no levels. limits: of images; None leaves images
    out. seed: of its first sample.
    """
    return Task(
        task_id=task_id,
        kind=kind,
        n=sampling.n,
        sampling=make_sampling(sampling, seed),
        text=example.text,
        messages=example.messages,
        images=_prepare_images(example.images, limits) if limits is not None else [],
        data=example.data,
        dataset=dataset,
        level=level,
    )


def task_of(
    dataset: Dataset,
    label: str,
    index: int,
    task_id: int,
    kind: Kind,
    sampling: SamplingConfig,
    limits: TaskLimits,
    level: int = -1,
    seed: int | None = None,
) -> Task | UnusableTask:
    """Return the task for an example, or the reason if dataset ``label`` fails or gives a task that can't be sent."""
    try:
        task = make_task(task_id, kind, dataset[index], sampling, label, level, limits, seed)
        # Its parts are checked here, where the index is known, before a generator reads them.
        decode(encode(task, limits.max_bytes), Task, limits.max_bytes)
    except InfraError:
        raise
    except (ConfigError, DataError) as error:
        reason = str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: whatever it raises is the fate of this one example
        reason = describe_error(error)
    else:
        return task
    return UnusableTask(task_id, sampling.n, f"example {index} of dataset {label!r}: {reason}", label)
