"""The parameters by which every list is read, as a type for routes; deploy/control_plane/web/paging.py has the rule."""

from typing import Annotated, Any

from fastapi import Depends, Query

from deploy.control_plane.web.paging import Order, Page

Cursor = Annotated[
    str | None, Query(max_length=300, description="`next` of the page before; without it the first page.")
]


def page_of(default: int, most: int) -> Any:
    """Return the parameters of a list with its own ``limit``, as a type for routes."""

    def read(
        cursor: Cursor = None,
        limit: Annotated[int, Query(ge=1, le=most, description="At most so many.")] = default,
        order: Annotated[Order, Query(description="From the oldest on, or from the newest back.")] = "oldest",
    ) -> Page:
        return Page(limit, cursor, order == "newest")

    return Depends(read)


Few = Annotated[Page, page_of(1000, 1000)]
