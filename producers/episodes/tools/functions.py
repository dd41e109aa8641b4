"""Python functions as tools: what the policy reads about them, and a call with arguments that it wrote."""

import asyncio
import inspect
import json
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import pydantic

from producers.conversation.images import Content, content_of
from producers.conversation.messages import function_schema
from producers.episodes.user_code import DeadlineExceeded, call_user
from schemas.errors import ConfigError, DataError, describe_error, printable

_CALLABLE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ToolError(Exception):
    """A call has no result; the text says why, for the policy."""


class ToolLost(DataError):
    """A tool lacks something it needs: the sample fails, since the policy is not to blame."""


class Tool(Protocol):
    """Something that the policy may call."""

    async def call(self, arguments: str, timeout_s: float) -> Content:
        """Call the tool. arguments: JSON that the policy wrote. ToolError if they are wrong, or it failed. ToolLost."""


class ToolSource(ABC):
    """Tools of one origin. schemas: what the policy reads, by name; complete after ``start``."""

    schemas: dict[str, dict[str, Any]]

    async def start(self) -> None:  # noqa: B027 - most have nothing to begin
        """Begin what lives as long as the generator. ConfigError if it can't be had."""

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[dict[str, Tool]]:
        """Open the tools for one episode, which end with it."""

    async def close(self) -> None:  # noqa: B027 - nor to end
        """End what ``start`` began."""


M = TypeVar("M", bound=pydantic.BaseModel)


def read_arguments(model: type[M], arguments: str, name: str) -> M:
    """Read the arguments of a call; ToolError says what is wrong with them."""
    try:
        return model.model_validate_json(arguments)
    except pydantic.ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5])
        raise ToolError(f"wrong arguments of {name}: {wrong}") from error


def read_settings(model: type[M], settings: Mapping[str, Any] | None, where: str) -> M:
    """Read the settings of a source. ConfigError, which begins with ``where``, names the first wrong setting."""
    try:
        return model.model_validate(settings or {})
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"{where}.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from error


class FunctionTool:
    """A function, ``async`` or not, by its name.

    schema: what the policy reads, in the form of chat completions: the docstring, and parameters from type hints and
    defaults. ConfigError when a parameter has no type hint, or one that JSON can't have.
    """

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        if not callable(function) or inspect.isclass(function):
            raise ConfigError(f"{where} must be a function, is {type(function).__name__}")
        self.name = str(getattr(function, "__name__", where.rpartition(":")[2]))
        self._function = function
        self._arguments = _arguments_model(function, where)
        try:
            parameters = self._arguments.model_json_schema()
        except pydantic.errors.PydanticUserError as error:
            raise ConfigError(f"{where}: its parameters have no JSON schema: {describe_error(error)}") from error
        self.schema = function_schema(self.name, inspect.getdoc(function) or "", _without_titles(parameters))

    async def call(self, arguments: str, timeout_s: float) -> Content:
        """Return the result: text or images, all else as JSON. ToolError for wrong arguments, or if it fails.

        InfraError and ConfigError are passed on.
        """
        values = read_arguments(self._arguments, arguments, self.name)
        keywords = {field.alias or name: getattr(values, name) for name, field in type(values).model_fields.items()}
        try:
            result = await call_user(self._function, timeout_s, **keywords)
            content = await asyncio.to_thread(content_of, result)
            if isinstance(content, str) or (content and any(part["type"] != "text" for part in content)):
                return content
            return printable(json.dumps(result, ensure_ascii=False, default=str))
        except DeadlineExceeded as error:
            raise ToolError(f"{self.name} {error}") from error


def _arguments_model(function: Callable[..., Any], where: str) -> type[pydantic.BaseModel]:
    """Make a model of the function's arguments. Its fields are numbered: a parameter may be called ``json``."""
    try:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"{where}: its parameters can't be read: {describe_error(error)}") from error
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters.values()):
        if parameter.kind not in _CALLABLE:
            raise ConfigError(f"{where}: parameter {parameter} can't be given by its name, and a tool's must")
        if parameter.name not in hints:
            raise ConfigError(f"{where}: parameter {parameter.name} needs a type hint, which the policy reads")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[f"argument_{number}"] = (hints[parameter.name], pydantic.Field(default, alias=parameter.name))
    try:
        return pydantic.create_model("Arguments", __config__=pydantic.ConfigDict(extra="forbid"), **fields)
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        raise ConfigError(f"{where}: its type hints can't be used: {describe_error(error)}") from error


def _without_titles(schema: Any) -> Any:
    """Leave out titles that pydantic adds; a property may be called ``title``."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(one) for name, one in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title" and not (key == "additionalProperties" and value is False)
    }
