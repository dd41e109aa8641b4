"""Renders the chart with Helm's own engine: ``python -m scripts.manifests`` writes deploy/kubernetes again from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
CHART, PLAIN = DEPLOY / "helm" / "tidemill", DEPLOY / "kubernetes"
FOLDERS = {"redis.yaml": "redis", "scaling.yaml": "keda"}
"""Folder of a template's objects below deploy/kubernetes; run/ for all others, turns/ for those of a whole run."""


def render(values: Mapping[str, Any], name: str, namespace: str) -> dict[str, str]:
    """Return the text of each template that makes an object, by its file's name; HelmError for wrong values."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(dict(values))
        found = chart.render(dict(values), name=name, namespace=namespace)
    texts = {Path(path).name: text for path, text in found.items()}
    return {path: text for path, text in texts.items() if path.endswith(".yaml") and text.strip()}


def plain() -> dict[Path, str]:
    """Return the files of deploy/kubernetes that are the chart's, for a run with a namespace of its own."""
    files: dict[Path, str] = {}
    for scaled in ("hpa", "keda"):
        values = {"plain": True, "priorityClasses": True, "autoscaling": {"by": scaled}}
        for path, text in render(values, "tidemill", "tidemill").items():
            files.setdefault(PLAIN / FOLDERS.get(path, "run") / path, text.strip() + "\n")
    for path, text in render({"plain": True, "run": {"enabled": True}}, "tidemill", "tidemill").items():
        files[PLAIN / "turns" / path] = text.strip() + "\n"
    return files


def main() -> None:
    """Write them."""
    for path, text in plain().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
