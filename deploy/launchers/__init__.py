"""Ways to start a run: on this machine, on engines that people already have, or their own."""

from schemas.plugins import Registry

LAUNCHERS = Registry(
    "launcher",
    {
        "local": "deploy.launchers.local:Local",
        "ray": "deploy.launchers.ray:Ray",
        "slurm": "deploy.launchers.slurm:Slurm",
    },
)
