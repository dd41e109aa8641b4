"""What a workflow's start leaves behind while it runs."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from producers.workflows.base import running
from schemas.system import lifecycle
from schemas.system.lifecycle import importing


class Starting:
    """A workflow that makes objects at its start, as those of a model library are."""

    async def start(self, services: Any) -> None:
        self.made = [[k] for k in range(1000)]


def watched(made: list[Any]) -> bool:
    """Whether the collector would look at it."""
    return any(found is made for found in gc.get_objects())


def run(workflow: Any) -> None:
    async def scene() -> None:
        async with running(workflow, SimpleNamespace()):  # type: ignore[arg-type]
            assert not watched(workflow.made)

    asyncio.run(scene())


def test_the_collector_looks_at_objects_of_the_start_again_only_when_the_workflow_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "_imports_aside", False)
    run(workflow := Starting())
    assert watched(workflow.made)


def test_it_does_not_look_at_the_imports_of_a_service_again() -> None:
    with importing():
        imported = [[k] for k in range(1000)]
    run(Starting())
    assert not watched(imported)
