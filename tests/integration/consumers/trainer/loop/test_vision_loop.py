"""A whole trainer on groups with images: its recorded steps, and images whose bytes were changed in the broker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from broker.client import Broker
from broker.queues.tasks import TaskQueue
from consumers.trainer.checkpoint.batch_files import BatchFiles
from consumers.trainer.data.groups import Group
from consumers.trainer.loop import Trainer
from consumers.trainer.step.build import build_train_step
from deploy.export.checkpoints import replay_steps
from deploy.offline.tiny_vision_model import write_tiny_vision_model
from schemas.config import TidemillConfig, parse_config
from schemas.images import ImageSettings, prepare_image, read_image_settings
from schemas.messages import ChatMessage, ContentPart, Sampling, Task
from schemas.system.lifecycle import StopFlag
from tests.support.trainer.deterministic_run import STEPS, Pipeline, make_config
from tests.support.trainer.trainer_loop import trained
from tests.support.trainer.vision_steps import make_group

pytestmark = pytest.mark.integration


class Pictures:
    """Groups of a task's number, with one image each or two."""

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings

    def group(self, task_id: int) -> Group:
        return make_group(task_id, [(60, 90), (30, 30)][: 1 + task_id % 2], self._settings)

    def task(self, task_id: int) -> tuple[Task, dict[str, bytes]]:
        files = self.group(task_id).images
        images = [prepare_image(body, self._settings)[0] for body in files.values()]
        message = ChatMessage("user", [*[ContentPart("image")] * len(images), ContentPart("text", "what?")])
        task = Task(task_id=task_id, kind="train", n=2, sampling=Sampling(), messages=[message], images=images)
        return task, dict(files)

    def generate(self, tasks: TaskQueue, task_id: int, version: int) -> None:
        tasks.publish(task_id, [trajectory for trajectory, _ in self.group(task_id).samples])


@pytest.fixture
def config(broker: Broker, tmp_path: Path) -> TidemillConfig:
    model = tmp_path / "model"
    write_tiny_vision_model(model)
    settings = make_config(tmp_path / "run", model, broker, record=True, checkpoint={"every": 2, "keep": 9})
    settings["model"] |= {"kind": "vision", "max_length": 256}
    return parse_config(settings)


def train(config: TidemillConfig, broker: Broker) -> None:
    torch.manual_seed(config.run.seed)
    Trainer(config, "trainer", broker, build_train_step(config)).run(StopFlag())


def test_recorded_steps_with_images_come_out_equal_without_the_broker(
    config: TidemillConfig, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = Pictures(read_image_settings(Path(config.model.path)))
    with Pipeline(broker, pictures.generate, make_task=pictures.task):
        train(config, broker)
    broker.purge()
    assert replay_steps(config, "", 2, None) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"equal: steps 2 to {STEPS - 1} of run ")
    assert "to the bit" in told
    batches = BatchFiles(config.folder)
    record = batches.read(3)
    group = record.groups[0]
    names = list(group.images)
    group.images[names[0]] = next(iter(pictures.group(100).images.values()))
    batches.write(record)
    assert replay_steps(config, "", 2, None) == 1, "another picture is another step"
    assert capsys.readouterr().out.startswith("NOT EQUAL")


def test_an_image_that_was_changed_after_generation_is_not_trained_on_and_its_group_is_made_again(
    config: TidemillConfig, broker: Broker, tmp_path: Path
) -> None:
    pictures = Pictures(read_image_settings(Path(config.model.path)))
    connection, changed = broker.connection, list[bytes]()

    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        if task_id == 3 and not changed:
            (name, *_), other = pictures.group(3).images, next(iter(pictures.group(100).images.values()))
            connection.client.hset(connection.keys.images, name, other)
            changed.append(other)
        pictures.generate(tasks, task_id, version)

    with Pipeline(broker, generate, make_task=pictures.task):
        train(config, broker)
    assert changed
    assert any(event.name == "broker_mended" for event in broker.events.tail(100))
    assert trained(tmp_path) == dict.fromkeys(range(2 * STEPS), 1)
    trained_images = [
        body
        for step in range(STEPS)
        for group in BatchFiles(config.folder).read(step).groups
        for body in group.images.values()
    ]
    assert changed[0] not in trained_images
    assert not connection.client.exists(connection.keys.images)
