"""What differs between servers: how one is launched, and how each request and answer reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from producers.engines.base import Ability, EngineSettings
from producers.engines.http.client import Body, ServerClient
from producers.engines.http.streamed_sample import GrowingSample
from schemas.errors import ConfigError
from schemas.messages import Sampling


class Dialect(Protocol):
    """One server's protocol. Methods that ask the server raise Refused for an error, InfraError when it is lost."""

    lacks: Mapping[Ability, str]
    path: str
    """Of a request for a sample, which answers with a stream of events."""

    def command(self, settings: EngineSettings, folder: Path, host: str, port: int) -> list[str]:
        """Program and arguments that serve the model in ``folder``; ConfigError names a wrong ``settings.args``."""
        ...

    def environment(self, settings: EngineSettings) -> dict[str, str]:
        """Variables that the server needs; those that are set already win."""
        ...

    async def check(self, client: ServerClient, settings: EngineSettings, folder: Path) -> str:
        """Name and release of the server. ConfigError unless it has what training needs. folder: of the model."""
        ...

    def request(
        self, name: str, ids: Sequence[int], sampling: Sampling, index: int, max_tokens: int, every: int, salt: str
    ) -> Body:
        """The request for one sample. every: tokens between two events. salt: nothing is cached across two."""
        ...

    def read(self, sample: GrowingSample, event: Body) -> None:
        """Add an event of the stream to its sample. InfraError for one that makes no sense."""
        ...

    async def pause(self, client: ServerClient, recompute: bool) -> None:
        """Stop sampling; returns when no token is sampled any more. recompute: drop keys and values in flight."""
        ...

    async def resume(self, client: ServerClient) -> None:
        """Go on."""
        ...

    async def set_version(self, client: ServerClient, version: int) -> None:
        """Name the weights that the server has."""
        ...

    async def load(self, client: ServerClient, path: Path, version: int, recompute: bool, deadline_s: float) -> None:
        """Replace all weights of a paused server by those at ``path``, a file or a model's folder."""
        ...

    async def abort(self, client: ServerClient, names: Sequence[str], paused: bool) -> None:
        """End these requests; their streams end with what there is."""
        ...

    async def logprobs(self, client: ServerClient, ids: Sequence[int], salt: str) -> list[float]:
        """Log-probability of each token after the first, at temperature 1."""
        ...


def options(args: Mapping[str, Any], ours: Mapping[str, str], negative: bool) -> list[str]:
    """The server's options for ``generator.args``; ConfigError names one of ``ours``, which say why they can't be set.

    ``tensor_parallel_size: 2`` is ``--tensor-parallel-size 2``; true is the option alone, and false ``--no-`` with the
    option where the server knows that (``negative``), else nothing; lists are several values, mappings JSON.
    """
    found: list[str] = []
    for name, value in args.items():
        plain = name.replace("-", "_")
        if plain in ours:
            raise ConfigError(f"generator.args.{name} can't be set: {ours[plain]}")
        option = "--" + name.replace("_", "-")
        if value is True:
            found.append(option)
        elif value is False:
            found += [f"--no-{option[2:]}"] if negative else []
        elif isinstance(value, Mapping):
            found += [option, json.dumps(value)]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            found += [option, *map(str, value)]
        elif value is not None:
            found += [option, str(value)]
    return found


def has_gpu() -> bool:
    """Whether this machine shows a GPU of NVIDIA or AMD, without loading a library for it."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
