"""What a workflow's start leaves behind while it runs."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

from producers.workflows.base import running


class Starting:
    """A workflow that makes objects at its start, as those of a model library are."""

    async def start(self, services: Any) -> None:
        self.made = [[k] for k in range(1000)]


def test_the_collector_looks_at_objects_of_the_start_again_only_when_the_workflow_has_ended() -> None:
    workflow: Any = Starting()

    def watched() -> bool:
        return any(found is workflow.made for found in gc.get_objects())

    async def scene() -> None:
        async with running(workflow, SimpleNamespace()):  # type: ignore[arg-type]
            assert not watched()

    asyncio.run(scene())
    assert watched()
