"""Agents that show the policy images: from the endpoint through generator and broker to a training step."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from consumers.trainer.data.groups import Group
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step.build import build_train_step
from deploy.offline.tiny_vision_model import write_tiny_vision_model
from producers.engines.base import PromptImage
from schemas.config import TidemillConfig
from schemas.images import prepare_image, read_image_settings
from schemas.messages import ChatMessage, ContentPart, Sampling, Score, Task, Trajectory
from tests.support.broker.prompt_groups import claim_batch, train_record
from tests.support.configurations import minimal_config
from tests.support.models.pictures import PAD, picture
from tests.support.producers.generator_service import Engine, begin_run, make_engine, read_published, running_generator

AGENT = '''
import base64, json, urllib.error, urllib.request

def ask(base_url, messages, path="/chat/completions", **more):
    body = json.dumps({"model": "policy", "max_tokens": 8, "messages": messages, **more}).encode()
    request = urllib.request.Request(base_url + path, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)

def image(path):
    with open(path, "rb") as file:
        return base64.b64encode(file.read()).decode()

def run(task, base_url, episode):
    """The task's own image, then one that the agent has found; an address in the internet is refused."""
    messages = list(task["messages"])
    assert messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    messages.append(ask(base_url, messages)["choices"][0]["message"])
    wrong = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/cat.png"}}]}
    try:
        ask(base_url, [*messages, wrong])
    except urllib.error.HTTPError as error:
        assert error.code == 400
        episode.metrics(refused=float("is not fetched from anywhere" in json.load(error)["error"]["message"]))
    url = {"url": "data:image/png;base64," + image("SEEN")}
    parts = [{"type": "text", "text": "and"}, {"type": "image_url", "image_url": url}]
    messages.append({"role": "user", "content": parts})
    messages.append(ask(base_url, messages)["choices"][0]["message"])
    messages.append({"role": "user", "content": "sure?"})
    ask(base_url, messages)
    return float(episode.id.endswith("-1"))
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_vision_model(folder, spread=0.02)
    return folder


def make_config(model: Path, folder: Path) -> TidemillConfig:
    (folder / "seen.png").write_bytes(picture("blue", 60, 90))
    (folder / "agent.py").write_text(textwrap.dedent(AGENT).replace("SEEN", str(folder / "seen.png")))
    workflow = {"name": "agent", "args": {"run": f"{folder}/agent.py:run"}}
    return minimal_config(
        run={"name": "g", "folder": str(folder / "run")},
        model={"path": str(model), "kind": "vision", "dtype": "float32", "max_length": 1000},
        train={"name": "jsonl", "args": {"path": "none"}},
        sampling={"n": 2, "max_tokens": 8},
        generator={"engine": "scripted", "workflow": workflow, "agents": {"grace_s": 0}},
        trainer={"steps": 9, "micro_batch_tokens": 400},
    )


class SeeingEngine(Engine):
    """A scripted engine that remembers what it was shown."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shown: list[list[PromptImage]] = []

    async def generate(self, prompt_ids: Any, sampling: Any, images: Any = (), **more: Any) -> Any:
        self.shown.append(list(images))
        for image in images:
            assert set(prompt_ids[image.start : image.end]) == {PAD}
        return await super().generate(prompt_ids, sampling, **more)


async def test_an_agents_images_are_trained_and_freed_with_a_group(broker: Broker, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path)
    settings = read_image_settings(model)
    image, body = prepare_image(picture("red"), settings)
    seen, seen_body = prepare_image(picture("blue", 60, 90), settings)
    training = begin_run(broker, tmp_path)
    task = Task(
        task_id=0,
        kind="train",
        n=2,
        sampling=Sampling(max_tokens=8),
        messages=[ChatMessage("user", [ContentPart("image"), ContentPart("text", "what?")])],
        images=[image],
    )
    assert broker.ledger.admit_all([task], images={image.digest: body}).answer == "ok"
    found: list[Trajectory] = []
    engine = SeeingEngine(make_engine(config, min_length=4, max_length=8)._settings)

    async with running_generator(config, broker, engine):
        found.extend(await read_published(broker, 2))
    assert [[one.digest for one in shown] for shown in sorted(engine.shown, key=len)] == [
        *[[image.digest]] * 2,
        *[[image.digest, seen.digest]] * 4,
    ]
    for trajectory in found:
        assert (trajectory.calls, trajectory.metrics["refused"], len(trajectory.rows())) == (3, 1.0, 1)
        assert [one.digest for one in trajectory.images] == [image.digest, seen.digest]
        assert trajectory.loss_mask.numpy()[: trajectory.images[1].start].any(), "the second stands after an answer"
        (said,) = [one for one in trajectory.data["messages"] if isinstance(one["content"], list) and "and" in str(one)]
        assert said["content"][1] == {"type": "image", "digest": seen.digest}
    files = broker.images.fetch([image.digest, seen.digest])
    assert files == {image.digest: body, seen.digest: seen_body}

    ranks = Ranks(timeout_s=60.0)
    with ranks.watchdog():
        group = Group(0, [(one, one.reward or 0.0) for one in found], files)
        metrics = RankGroup(config, build_train_step(config, ranks)).train([group], 1).metrics
    assert metrics["tokens"] == sum(int(one.loss_mask.numpy().sum()) for one in found)

    rewards = broker.score_queue("r")
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10)])
    record = train_record(training, claim_batch(training))
    assert len(broker.images.fetch([image.digest, seen.digest])) == 2, "a trainer may have to replay the step"
    training.commit_steps([record])
    assert not broker.connection.client.exists(broker.connection.keys.images)
