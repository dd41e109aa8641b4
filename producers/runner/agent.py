"""The agent that users give: its import, the checks of its parameters, and the clients it may ask for."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .connection import UserCodeError, describe
from .loading import load

PARAMETERS = ("task", "client", "base_url", "api_key", "episode")


class Agent:
    """An agent, a function or a class. parameters: the PARAMETERS that it takes. coroutine: whether it is async."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.name, self._args = setup["run"], setup["args"]
        self._found: Any = load(self.name, Path(setup["base"]), setup["search"])
        owner: Any = self._found
        if inspect.isclass(owner):
            self._check_built(owner)
            function, given = getattr(owner, "run", None), {}
            if not callable(function):
                raise UserCodeError(f"{self.name}: the class has no method run")
            bound = isinstance(inspect.getattr_static(owner, "run"), (staticmethod, classmethod))
        elif callable(owner):
            bound, function, given = True, owner, dict(self._args)
        else:
            raise UserCodeError(f"{self.name} must be a function or a class, is {type(owner).__name__}")
        inner = inspect.unwrap(function)
        if inspect.isasyncgenfunction(inner) or inspect.isgeneratorfunction(inner):
            raise UserCodeError(f"{self.name}: run must return its result, it yields")
        self.coroutine = any(map(inspect.iscoroutinefunction, (inner, type(inner).__call__)))
        self.parameters = self._names(function, given, skip=0 if bound else 1)

    def build(self) -> Callable[..., Any]:
        """Return the function that is called for each episode, with ``parameters`` by name."""
        if not inspect.isclass(self._found):
            function, args = self._found, self._args
            return lambda **given: function(**args, **given)
        try:
            built: Any = self._found(**self._args)
        except (Exception, SystemExit) as error:
            raise UserCodeError(f"{self.name} cannot be built: {describe(error)}") from error
        return built.run  # type: ignore[no-any-return]

    def _check_built(self, owner: Any) -> None:
        try:
            inspect.signature(owner).bind(**self._args)
        except TypeError as error:
            raise UserCodeError(f"{self.name} cannot be built with args {self._args}: {error}") from None
        except ValueError:
            return

    def _names(self, function: Any, given: dict[str, Any], skip: int) -> tuple[str, ...]:
        """Return the PARAMETERS that a function takes; the first ``skip`` of its parameters are bound."""
        try:
            parameters = list(inspect.signature(function).parameters.values())[skip:]
        except ValueError:
            raise UserCodeError(f"{self.name}: its parameters can't be read") from None
        allowed = ", ".join(PARAMETERS)
        kind = inspect.Parameter
        by_name = {p.name for p in parameters if p.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)}
        variadic = (kind.VAR_KEYWORD, kind.VAR_POSITIONAL)
        for parameter in parameters:
            filled = parameter.name in by_name and (parameter.name in PARAMETERS or parameter.name in given)
            if not filled and parameter.default is kind.empty and parameter.kind not in variadic:
                raise UserCodeError(f"{self.name}: parameter {parameter.name} is not one of {allowed}, nor in args")
        takes_any = any(parameter.kind is kind.VAR_KEYWORD for parameter in parameters)
        for name in given:
            if name in PARAMETERS or not (name in by_name or takes_any):
                raise UserCodeError(f"{self.name} takes no args {name!r} beside {allowed}")
        return tuple(name for name in PARAMETERS if name in by_name)


class Clients:
    """Clients of the policy's endpoint. They share connections, because building a client with its own takes 20 ms."""

    def __init__(self, name: str, coroutine: bool) -> None:
        try:
            import openai
        except ImportError as error:
            raise UserCodeError(
                f"{name} asks for client, and {sys.executable} has no openai: {describe(error)}"
            ) from None
        # The generator delays its answer while it loads new weights; the episode's deadline is the limit.
        wait = openai.Timeout(None, connect=10.0)
        # A client that is closed leaves the connections open, because other episodes use the same.
        shared: Any
        if coroutine:
            shared = openai.DefaultAsyncHttpxClient(timeout=wait)
            self._make: Any = openai.AsyncOpenAI
            shared.aclose = _close_nothing
        else:
            shared = openai.DefaultHttpxClient(timeout=wait)
            self._make = openai.OpenAI
            shared.close = lambda: None
        self._settings = {"http_client": shared, "timeout": wait}

    def client(self, base_url: str, api_key: str) -> Any:
        return self._make(base_url=base_url, api_key=api_key, **self._settings)


async def _close_nothing() -> None:
    pass
