"""Ways to start a run: on this machine, on Ray, Slurm or Kubernetes, or with a launcher of yours."""

from schemas.plugins import Registry

LAUNCHERS = Registry(
    "launcher",
    {
        "kubernetes": "deploy.launchers.kubernetes:Kubernetes",
        "local": "deploy.launchers.local:Local",
        "ray": "deploy.launchers.ray:Ray",
        "slurm": "deploy.launchers.slurm:Slurm",
    },
)
