"""Objects of Kubernetes: read from YAML, and checked by Kubernetes' own schemas, each of which is read once."""

import functools
import json
from collections.abc import Iterable
from typing import Any

import kubernetes_validate
import yaml

kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_objects(text: str) -> list[dict[str, Any]]:
    """All documents of a file that are not empty."""
    return [document for document in yaml.load_all(text, Loader=_Loader) if document]


def check_schemas(objects: Iterable[dict[str, Any]]) -> None:
    """Kubernetes has no schemas of objects of KEDA and of the Prometheus operator."""
    for document in objects:
        if document["apiVersion"].partition("/")[0] not in ("keda.sh", "monitoring.coreos.com"):
            _check(json.dumps(document))


@functools.cache
def _check(document: str) -> None:
    kubernetes_validate.validate(json.loads(document), kubernetes_validate.latest_version(), strict=True)
