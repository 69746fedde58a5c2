"""Holds a manifest against the classes that KServe and Kubernetes generate from their schemas; prints what does not
fit.

python kserve_manifest.py ClassName < document.json
"""

import json
import re
import sys
from typing import Any

import kserve.models
import kubernetes.client.models

SCALARS: dict[str, Any] = {"str": str, "int": int, "bool": bool, "float": (int, float)}


def find(name: str) -> Any:
    for module in (kserve.models, kubernetes.client.models):
        if hasattr(module, name):
            return getattr(module, name)
    return None


def problems(kind: str, value: Any, where: str) -> list[str]:
    if match := re.fullmatch(r"list\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{where}: no list"]
        return [one for at, item in enumerate(value) for one in problems(match[1], item, f"{where}[{at}]")]
    if match := re.fullmatch(r"dict\(str, (.*)\)", kind):
        if not isinstance(value, dict):
            return [f"{where}: no object"]
        return [one for key, item in value.items() for one in problems(match[1], item, f"{where}.{key}")]
    if kind in SCALARS:
        return [] if isinstance(value, SCALARS[kind]) else [f"{where}: no {kind}"]
    model = find(kind)
    if model is None:
        return []
    if not isinstance(value, dict):
        return [f"{where}: no {kind}"]
    names = {key: attribute for attribute, key in model.attribute_map.items()}
    found = [f"{where}.{key}: unknown" for key in value if key not in names]
    for key in set(value) & set(names):
        found += problems(model.openapi_types[names[key]], value[key], f"{where}.{key}")
    if not found:
        try:
            model(**{names[key]: item for key, item in value.items()})
        except (ValueError, TypeError) as error:
            found.append(f"{where}: {error}")
    return found


print("\n".join(problems(sys.argv[1], json.load(sys.stdin), "")))
