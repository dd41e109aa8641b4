"""Arguments that the configuration gives to plug-ins, checked against the type hints of the plug-in."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, create_model, field_validator
from pydantic_core import PydanticCustomError

from schemas.errors import ConfigError


class CheckedNumbers(BaseModel):
    """A model in which true and false are no numbers; pydantic reads them as 1 and 0."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        few = [*value.values()] if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        if any(isinstance(one, bool) for one in few):
            kind = cls.model_fields[str(info.field_name)].annotation
            if _names(kind, (int, float)) and not _names(kind, (bool, Any)):
                raise PydanticCustomError(
                    "number", "Input should be a number" if few == [value] else "Input should be numbers"
                )
        return value


def _names(hint: Any, kinds: tuple[Any, ...]) -> bool:
    """Return whether a type hint is one of the kinds, or has one of them in it."""
    return hint in kinds or any(_names(part, kinds) for part in get_args(hint))


class _Arguments(CheckedNumbers):
    model_config = ConfigDict(arbitrary_types_allowed=True, alias_generator=lambda field: field.removeprefix("arg_"))


def convert_arguments(
    where: str, function: Callable[..., Any], args: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Any]:
    """Convert arguments to the types that the hints of a function, or of a class's constructor, declare.

    names: parameters to check; one without a default must be among ``args``. One without a hint is not converted.
    ConfigError begins with ``where`` and names each wrong argument, its value and what is allowed.
    """
    parameters = inspect.signature(function).parameters
    named = {name: parameters[name] for name in names}
    try:
        values = _model(function, named).model_validate(args)
    except ValidationError as error:
        raise ConfigError(_explain(where, args, error)) from error
    return {name: getattr(values, f"arg_{name}") if name in named else value for name, value in args.items()}


def _model(function: Callable[..., Any], named: Mapping[str, inspect.Parameter]) -> type[BaseModel]:
    """Return a pydantic model of the parameters, with prefixed names that can't clash with pydantic's own."""
    try:
        hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    except (NameError, TypeError):
        hints = {}  # a user's hints that only a type checker can resolve: names are still checked
    fields: dict[str, Any] = {
        f"arg_{name}": (hints.get(name, Any), ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in named.items()
    }
    return create_model("Arguments", __base__=_Arguments, **fields)


def _explain(where: str, args: Mapping[str, Any], error: ValidationError) -> str:
    """Describe each wrong argument, with all kinds that are allowed."""
    allowed: dict[str, list[str]] = {}
    for item in error.errors():
        allowed.setdefault(str(item["loc"][0]), []).append(item["msg"].removeprefix("Input should be "))
    mistakes = [
        f"argument {name!r}: {args[name]!r} is not allowed, must be {' or '.join(kinds)}"
        if name in args
        else f"argument {name!r} is required and missing"
        for name, kinds in allowed.items()
    ]
    return "; ".join(f"{where}: {mistake}" for mistake in mistakes)
