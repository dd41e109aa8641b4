"""What the scorer knows about a reward function beyond its signature.

A plain function needs none of this: it runs in a killable worker process with a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def reward(
    *,
    inline: bool | Callable[..., bool] = False,
    needs: tuple[str, str] | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Declare what a reward function is like.

    inline: its time is bounded by the length of its input, so it runs in the service's own
    process without a deadline; or a function of its arguments that says so.
    needs: the import it cannot do without, and the extra of tidemill that brings it.
    check: called with the arguments of the configuration, ValueError when one is wrong.
    """

    def declare(function: F) -> F:
        function.inline = inline  # type: ignore[attr-defined]
        function.needs = needs  # type: ignore[attr-defined]
        function.check = check  # type: ignore[attr-defined]
        return function

    return declare
