"""Workflows: how a task becomes samples, as async generators over an engine."""

from schemas.plugins import Registry

WORKFLOWS = Registry(
    "workflow",
    {
        "agent": "producers.agents.workflow:AgentWorkflow",
        "environment": "producers.loops.environment:EnvironmentLoop",
        "single_turn": "producers.workflows.single_turn:SingleTurn",
        "tools": "producers.loops.tools:Tools",
    },
)
