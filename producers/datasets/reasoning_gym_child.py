"""The process behind the reasoning_gym dataset: JSON lines both ways on the socket that is stdin.

First line: the recipe (task, size, seed, params). Then {"index": i} for each problem.
Started with PYTHONHASHSEED=0, so that a recipe and an index always give the same problem.
"""

import difflib
import hashlib
import json
import os
import sys
from typing import Any

from schemas.errors import describe_error


def build(recipe: dict[str, Any]) -> Any:
    """Build the task's dataset; ValueError says what is wrong with the recipe."""
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"needs the reasoning-gym package: pip install 'tidemill[data]' ({error})") from error
    task, params = recipe["task"], dict(recipe["params"])
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"one of {', '.join(sorted(DATASETS))}"
        raise ValueError(f"unknown task {task!r}: {hint}")
    allowed = [name for name in DATASETS[task][1].__dataclass_fields__ if name not in ("size", "seed")]
    for name in params:
        if name not in allowed:
            raise ValueError(f"task {task!r} has no parameter {name!r}: one of {', '.join(allowed)}")
    try:
        if task == "composite":
            params["datasets"] = [DatasetSpec(**spec) for spec in params.get("datasets") or []]
        return reasoning_gym.create_dataset(task, size=recipe["size"], seed=recipe["seed"], **params)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {task!r} refuses its parameters: {error}") from error


def digest(entry: dict[str, Any]) -> str:
    """Fingerprint of a problem, by which the scorer knows that it made the same one."""
    return hashlib.blake2b(repr((entry["question"], entry["answer"])).encode(), digest_size=8).hexdigest()


def problem(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what the dataset needs of an entry."""
    answer = entry["answer"]
    return {"question": entry["question"], "answer": None if answer is None else str(answer), "digest": digest(entry)}


def main() -> None:
    """Serve the entries of a dataset: JSON lines in on stdin, answers out on the same socket."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(0), "wb", buffering=0)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")

    try:
        dataset = build(json.loads(requests.readline()))
    except ValueError as error:
        reply({"error": " ".join(str(error).split())})
        return
    reply({"ready": True})
    for line in requests:
        try:
            reply(problem(dataset[json.loads(line)["index"]]))
        except Exception as error:  # noqa: BLE001 - several tasks raise for single seeds, with types of all kinds
            reply({"error": describe_error(error)})


if __name__ == "__main__":
    main()
    sys.exit(0)
