"""True and false are no numbers where a type hint allows numbers alone, and are what they are anywhere else."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, create_model

from schemas.arguments import CheckedNumbers


class Switch(BaseModel):
    on: bool


def read(hint: Any, value: Any) -> Any:
    return create_model("Read", __base__=CheckedNumbers, value=(hint, ...)).model_validate({"value": value}).value


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, True),
        (float | None, False),
        (int | str, True),
        (Annotated[int, Field(gt=0)] | None, True),
        (list[int], [1, True]),
        (tuple[float, float], [0.1, True]),
        (tuple[int, ...], [True]),
        (list[list[int]], [[1], [True]]),
        (dict[str, float], {"a": True}),
        (dict[str, dict[str, float]], {"a": {"b": False}}),
        (list[int] | str, [True]),
    ],
)
def test_a_boolean_is_no_number(hint: Any, value: Any) -> None:
    with pytest.raises(ValidationError, match=r"Input should be (a number|numbers)"):
        read(hint, value)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (bool | int, True),
        (Any, True),
        (Literal[True] | int, True),
        (object | int, True),
        (dict | int, {"a": True}),
        (dict | float | None, {"a": True}),
        (dict[str, Any] | int, {"a": True}),
        (dict[str, object] | float, {"a": True}),
        (list | int, [True]),
        (tuple[int, object], (1, True)),
        (list[bool] | int, [True]),
        (list[int], [1, 2]),
    ],
)
def test_a_boolean_may_stand_where_others_than_numbers_may(hint: Any, value: Any) -> None:
    assert read(hint, value) == value


@pytest.mark.parametrize("hint", [Switch | float, dict[str, int | Switch] | int])
def test_a_model_may_have_booleans(hint: Any) -> None:
    value = {"on": True} if hint == Switch | float else {"a": {"on": True}}
    found = read(hint, value)
    assert (found if isinstance(found, Switch) else found["a"]).on is True
