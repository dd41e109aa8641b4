"""The differences between servers: how to launch them, and how their requests and answers read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from producers.engines.base import Ability, EngineSettings
from producers.engines.http.client import Body, ServerClient
from producers.engines.http.server import PrivatePlace
from producers.engines.http.streamed_sample import StreamedSample
from producers.engines.request_gate import SampleCall
from schemas.errors import ConfigError

LACKS: Mapping[Ability, str] = {
    "output_tokens": "only the engines vllm and transformers do",
    "lora": "the server loads whole models only",
    "growing_versions": "the server reports the versions of tokens only at the end of a sample",
    "cache_usage": "the server does not report how full its cache is",
}
"""Abilities that both servers lack."""


class Dialect(Protocol):
    """One server's protocol. Methods that ask the server raise Refused for an error, InfraError if it is lost."""

    lacks: Mapping[Ability, str]
    path: str
    """The route of a request for a sample, which answers with a stream of events."""

    def command(self, settings: EngineSettings, folder: Path, place: PrivatePlace) -> list[str]:
        """Return the command that serves the model in ``folder``; ConfigError names a wrong ``settings.args``."""

    def client(self, place: PrivatePlace, key: str | None) -> ServerClient:
        """Return the connection to the server that the command launched. key: the one that the user set."""

    def environment(self) -> dict[str, str]:
        """Return environment variables that the server needs; those already set take precedence."""

    async def check(self, client: ServerClient, settings: EngineSettings, folder: Path) -> str:
        """Return the server's name and release. ConfigError unless it can be trained with. folder: of the model."""

    def request(self, name: str, call: SampleCall[None], index: int, every: int, salt: str) -> Body:
        """Build the request for one sample. every: tokens between two events. salt: separates prefix caches."""

    def read(self, sample: StreamedSample, event: Body) -> None:
        """Add an event of the stream to its sample. InfraError if the event can't be read."""

    async def pause(self, client: ServerClient, recompute: bool) -> None:
        """Stop sampling; returns when no more tokens are sampled. recompute: drop keys and values in flight."""

    async def resume(self, client: ServerClient) -> None:
        """Resume sampling."""

    async def load(self, client: ServerClient, path: Path, version: int, recompute: bool, deadline_s: float) -> None:
        """Replace all weights of a paused server by those at ``path``, a file or a model's folder."""

    async def abort(self, client: ServerClient, names: Sequence[str], paused: bool) -> None:
        """End these requests; their streams end with the tokens they have."""

    async def logprobs(self, client: ServerClient, ids: Sequence[int], salt: str) -> list[float]:
        """Return the log-probability of each token after the first, at temperature 1."""


def options(args: Mapping[str, Any], ours: Mapping[str, str], negative: bool) -> list[str]:
    """Return the server's options for ``generator.args``. ConfigError names one of ``ours``, with the reason.

    ``tensor_parallel_size: 2`` becomes ``--tensor-parallel-size 2``. True is the option alone. False is ``--no-`` with
    the option if the server supports that (``negative``), else it is left out. Lists are several values, mappings JSON.
    """
    arguments: list[str] = []
    for name, value in args.items():
        plain = name.replace("-", "_")
        if plain in ours:
            raise ConfigError(f"generator.args.{name} can't be set: {ours[plain]}")
        option = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(option)
        elif value is False:
            arguments += [f"--no-{option[2:]}"] if negative else []
        elif isinstance(value, Mapping):
            arguments += [option, json.dumps(value)]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            arguments += [option, *map(str, value)]
        elif value is not None:
            arguments += [option, str(value)]
    return arguments


def missing_options(arguments: Sequence[str], defaults: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the default options, each with its values, that ``arguments`` do not set."""
    given = {*arguments, *(f"--{name[5:]}" for name in arguments if name.startswith("--no-"))}
    return [word for option, values in defaults.items() if option not in given for word in (option, *values)]


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model's config.json, with the settings of its text model on top. ConfigError if it can't be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {folder}: {error}") from error
    return {**config, **(config.get("text_config") or {})}


def has_gpu() -> bool:
    """Tell whether this machine has a GPU of NVIDIA or AMD, without loading a library."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
