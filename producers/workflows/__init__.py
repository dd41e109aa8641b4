"""Workflows: how a task becomes samples, as async generators over an engine."""

from schemas.plugins import Registry

WORKFLOWS = Registry(
    "workflow",
    {
        "agent": "producers.agents.workflow:AgentWorkflow",
        "environment": "producers.episodes.environments.environment:EnvironmentLoop",
        "fragments": "producers.embodied.fragment_workflow:Fragments",
        "live": "producers.agents.live:LiveWorkflow",
        "single_turn": "producers.workflows.single_turn:SingleTurn",
        "tools": "producers.episodes.tools.tools:Tools",
    },
)
