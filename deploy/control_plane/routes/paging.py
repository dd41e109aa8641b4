"""The parameters by which every list is read, as a type for routes; deploy/control_plane/web/paging.py has the rule."""

# Annotations are looked at where they stand: they name the list's own limit.

from typing import Annotated, Any

from fastapi import Depends, Query

from deploy.control_plane.web.paging import Order, Page


def page_of(default: int, most: int) -> Any:
    """Return the parameters of a list with its own ``limit``, as a type for routes."""

    def read(
        cursor: Annotated[
            str | None, Query(max_length=300, description="`next` of the page before; without it the first page.")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=most, description="At most so many.")] = default,
        order: Annotated[Order, Query(description="From the oldest on, or from the newest back.")] = "oldest",
    ) -> Page:
        return Page(limit, cursor, order)

    return Depends(read)
