"""Arguments that the configuration gives to plug-ins, checked against the type hints of the plug-in."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, create_model, field_validator
from pydantic_core import PydanticCustomError

from schemas.errors import ConfigError


class CheckedNumbers(BaseModel):
    """A model in which true and false are no numbers; pydantic reads them as 1 and 0."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        if _is_boolean_for_number(cls.model_fields[str(info.field_name)].annotation, value):
            raise PydanticCustomError(
                "number", "Input should be a number" if isinstance(value, bool) else "Input should be numbers"
            )
        return value


def _is_boolean_for_number(hint: Any, value: Any) -> bool:
    """Return whether a value is true or false, or has it inside, where its type hint allows numbers alone."""
    members = [member for member in _members(hint) if member is not NoneType]
    if isinstance(value, bool):
        takes = any(member in (bool, Any, object) or _names_boolean(member) for member in members)
        return not takes and any(member in (int, float) for member in members)
    kinds = [_item_type(member, value) for member in members if member not in (int, float, str)]
    # One that is not told apart here may allow them.
    if not kinds or None in kinds:
        return False
    items = value.values() if isinstance(value, Mapping) else value
    return any(all(_is_boolean_for_number(kind, item) for kind in kinds) for item in items)


def _members(hint: Any) -> list[Any]:
    """Return the types of a union, or the one type."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [member for part in get_args(hint) for member in _members(part)]
    return [hint]


def _names_boolean(member: Any) -> bool:
    return get_origin(member) is Literal and any(isinstance(one, bool) for one in get_args(member))


def _item_type(member: Any, value: Any) -> Any:
    """Return the type of the items of a type of mappings or lists, as the value is one; None if it has no such type."""
    origin, arguments = get_origin(member), get_args(member)
    if isinstance(value, Mapping):
        return arguments[1] if origin in (dict, Mapping) else None
    if isinstance(value, list | tuple) and origin in (list, tuple, Sequence) and len({*arguments} - {...}) == 1:
        return arguments[0]
    return None


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
