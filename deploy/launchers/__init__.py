"""Ways to start a run: on this machine, on Ray, on Slurm, or with a launcher of yours."""

from schemas.plugins import Registry

LAUNCHERS = Registry(
    "launcher",
    {
        "local": "deploy.launchers.local:Local",
        "ray": "deploy.launchers.ray:Ray",
        "slurm": "deploy.launchers.slurm:Slurm",
    },
)
