"""What the driver's program nvidia-smi says of this machine's GPUs: their memory, which processes have it, its version.

Where it is missing, fails or does not answer, nothing is known.
"""

import os

from schemas.system.processes import ask

VISIBLE = "CUDA_VISIBLE_DEVICES"


def ask_driver(query: str) -> list[list[str]]:
    """Return the lines of an answer that have a value for each field of a query such as ``gpu=index,memory.free``."""
    text = ask(["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"])
    lines = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [line for line in lines if len(line) == query.count(",") + 1 and line[0]]


def free_memory() -> dict[str, int]:
    """Return the free bytes of each GPU that this process may use, by its index; {} if they are unknown."""
    return {index: int(free) << 20 for index, (free,) in _ask_of_visible("memory.free").items() if free.isdigit()}


def describe_gpus() -> dict[str, str]:
    """Return the version of the ``driver``, and as ``gpu`` the names of those that this process may use; {} if none."""
    found = _ask_of_visible("driver_version,name").values()
    return {"driver": min(found)[0], "gpu": ", ".join(sorted({name for _, name in found}))} if found else {}


def _ask_of_visible(fields: str) -> dict[str, list[str]]:
    """Return the values of fields for each GPU that this process may use, by its index."""
    named = os.environ.get(VISIBLE)
    visible = None if named is None else {name.strip() for name in named.split(",")}
    lines = ask_driver(f"gpu=index,uuid,{fields}")
    return {index: values for index, uuid, *values in lines if visible is None or visible & {index, uuid}}


def memory_by_process() -> dict[int, int]:
    """Return the bytes of GPU memory that each process has, by its number."""
    used: dict[int, int] = {}
    for pid, mib in ask_driver("compute-apps=pid,used_memory"):
        if pid.isdigit() and mib.isdigit():
            used[int(pid)] = used.get(int(pid), 0) + (int(mib) << 20)
    return used
