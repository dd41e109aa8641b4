"""``tidemill serve``: a model behind the protocols of OpenAI and Anthropic, for evaluation harnesses and chat clients.

The endpoint and the engine are those of agents' episodes. Here a client's request is an episode of its own, and the
client decides how its answer is sampled.
"""

import asyncio
import contextlib
import hmac
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from broker.weights.local_copy import LocalWeights
from consumers.trainer.checkpoint.store import WantedStep, step_of
from deploy.client.find import find
from deploy.export.checkpoints import exported_model
from deploy.logs import configure_logging
from deploy.offline.evaluate import started_engine
from producers.agents.capacity import EngineCapacity
from producers.agents.endpoint.server import EndpointServer
from producers.agents.protocol import CallRequest, SampledAnswer, SessionError
from producers.agents.session import PolicyHandle, Session
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import Conversation
from producers.conversation.images import EpisodeImages, ImageLimits
from producers.conversation.parsing.factory import AnswerParser
from producers.engines.base import Engine
from producers.engines.factory import prepare_engine
from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer
from schemas.config import TidemillConfig, parse_config
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FileSource, Sampling
from schemas.run_folder import config_of

_HONOURED = ("temperature", "top_p", "top_k", "seed")
_NEUTRAL = {"repetition_penalty": 1, "length_penalty": 1, "typical_p": 1, "best_of": 1, "truncate_prompt_tokens": -1}
"""Values of settings that change nothing, beside 0, false and the empty list."""
FIRST_S = 600.0
"""How long a live server waits for the first weights of its run."""
RETRY_S = 2.0
"""Seconds before another try to load new weights."""


class ServedSession(Session):
    """The session of one request, sampled as the request says; SessionError names a setting that no engine has."""

    async def complete(self, request: CallRequest) -> list[SampledAnswer]:
        """Answer a request with the sampling settings that it gives. SessionError 400 for unsupported ones."""
        asked, default = request.ignored, msgspec.structs.asdict(self._sampling)
        others = {name: value for name, value in asked.items() if name not in _HONOURED}
        if unknown := [name for name, value in others.items() if value and value != _NEUTRAL.get(name)]:
            raise SessionError(
                400, "unsupported_parameter", f"{', '.join(unknown)}: only {', '.join(_HONOURED)} are supported"
            )
        try:
            self._sampling = msgspec.convert(
                {**default, **{name: asked[name] for name in asked.keys() - others}}, Sampling
            )
        except msgspec.ValidationError as error:
            raise SessionError(400, "invalid_request_error", str(error)) from error
        return await super().complete(request)


@dataclass
class ServedSessions:
    """A new session for each request with the right key; ``api_key`` None: for any request."""

    policy: PolicyHandle
    template: ChatTemplate
    config: TidemillConfig
    api_key: str | None

    def __post_init__(self) -> None:
        self._images = ImagePlaceholders.of(self.config), ImageLimits.of(self.config)

    def find(self, token: str) -> ServedSession:
        """Return a session for one request; SessionError 401 for a wrong key."""
        if self.api_key is not None and not hmac.compare_digest(token.encode(), self.api_key.encode()):
            raise SessionError(401, "invalid_api_key", "the API key is not the one that the server was started with")
        conversation = Conversation(self.template, images=EpisodeImages(*self._images))
        return ServedSession(self.policy, conversation, Sampling(max_tokens=self.policy.max_length))


def find_served(
    what: str, step: WantedStep, max_length: int | None, engine: str | None, live: bool = False
) -> tuple[TidemillConfig, str]:
    """Return the configuration and the folder of the model that ``what`` names.

    what: a run as for ``tidemill export``, a checkpoint's folder in it, or the folder of a Hugging Face model. A
    checkpoint is exported first, unless its export is there. live: the model that the run began with.
    """
    folder = Path(what)
    if live and step is not None:
        raise ConfigError("--live follows the newest weights: give either --live or --step")
    if live:
        config = config_of(what)
        folder = Path(config.model.path)
    elif (folder / "config.json").is_file():
        config = parse_config(
            {"model": {"path": what}, "train": {"name": "jsonl"}, "reward": {"terms": [{"name": "exact"}]}}
        )
    else:
        if folder.parent.name == "checkpoints":
            what, step = str(folder.parent.parent), step_of(folder) if step is None else step
        config = config_of(what)
        folder = exported_model(config, step, lambda text: print(f"serve: {text}", file=sys.stderr))
    changed: dict[str, Any] = {}
    if max_length is not None:
        changed["model"] = config.model.model_copy(update={"max_length": max_length})
    if engine is not None:
        changed["generator"] = config.generator.model_copy(update={"engine": engine})
    return config.model_copy(update=changed), str(folder)


class LiveWeights:
    """Loads the weights that a run publishes into an engine. The run does not know this reader, nor wait for it."""

    def __init__(self, config: TidemillConfig, engine: Engine) -> None:
        self._broker = find(str(config.folder / "config.yaml"), None, config.broker.prefix)
        self._engine = engine
        self._folder = config.folder / "cache" / f"serve-{os.getpid()}"
        self._local = LocalWeights(self._broker.weights, self._folder)
        self.version = -1

    async def start(self) -> None:
        """Load the first version; InfraError if the run publishes none within FIRST_S."""
        deadline = time.monotonic() + FIRST_S
        while not await self._advance():
            if time.monotonic() > deadline:
                raise InfraError(f"the run published no weights within {FIRST_S:.0f} s")

    async def follow(self) -> None:
        """Load newer versions, until cancelled; if one can't be loaded, the version in use stays."""
        told = ""
        while True:
            try:
                await self._advance()
            except (InfraError, DataError, OSError) as error:
                if str(error) != told:
                    told = str(error)
                    print(f"serve: weights version {self.version} stays in use: {told}", file=sys.stderr)
                await asyncio.sleep(RETRY_S)

    async def _advance(self) -> bool:
        """Load the newest version, if one comes in a moment that is newer; return whether it did."""
        manifest = await asyncio.to_thread(self._broker.weights.wait_newer, self.version)
        if manifest is None:
            return False
        file = await asyncio.to_thread(self._local.fetch, manifest)
        await self._engine.load(FileSource(file), manifest.version)
        self._local.drop()
        self.version = manifest.version
        print(f"serve: weights version {self.version}", file=sys.stderr)
        return True

    def close(self) -> None:
        """Delete the fetched versions."""
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(config: TidemillConfig, path: str, address: str, api_key: str | None, live: bool = False) -> None:
    """Serve the model in ``path`` at ``address``, HOST:PORT, until SIGINT or SIGTERM; live: with newer weights."""
    if api_key is None and address.rpartition(":")[0].strip("[]") not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(f"--address {address}: other machines can reach it, so give a key with --api-key")
    configure_logging(config, "serve", "serve")
    prepare_engine(config.generator.engine, config.model.kind == "vision")
    asyncio.run(_serve(config, path, address, api_key, live))


async def _serve(config: TidemillConfig, path: str, address: str, api_key: str | None, live: bool) -> None:
    settings = config.generator.agents.model_copy(
        update={"address": address, "public_url": None, "constrained": "ignore"}
    )
    tokenizer = HfTokenizer(path, config.model.trust_remote_code)
    parser = AnswerParser.of(config.generator, tokenizer)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(started_engine(config, path, live))
        if live:
            weights = LiveWeights(config, engine)
            stack.callback(weights.close)
            await weights.start()
            following = asyncio.create_task(weights.follow())
            stack.callback(following.cancel)
        policy = PolicyHandle(
            engine=engine,
            parser=parser,
            capacity=EngineCapacity(config.generator.max_samples),
            max_length=config.model.max_length,
            max_calls=1,
            tokenizer=tokenizer,
        )
        server = EndpointServer(ServedSessions(policy, ChatTemplate(tokenizer), config, api_key), settings)
        url = await server.start()
        stack.push_async_callback(server.close)
        print(f"{path}: {url}/v1, until Ctrl-C", flush=True)
        await stopped.wait()
