"""Write the Grafana dashboards: `python -m deploy.grafana.build [FOLDER]`, by default over those that are committed.

Each page is a module here, and each expression is in one place; tests run every one of them against a live Prometheus.
The Kubernetes component `monitoring` has them, and the rules of Prometheus, as objects that its operators read:
`kubernetes.yaml` in FOLDER, by default in the component's folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy.grafana.autoscaling import AUTOSCALING
from deploy.grafana.drawing import draw
from deploy.grafana.model import MODEL
from deploy.grafana.overview import OVERVIEW
from deploy.grafana.races import RACES
from deploy.grafana.workers import WORKERS

DEPLOY = Path(__file__).parents[1]
COMMITTED = DEPLOY / "grafana/dashboards"
OBJECTS = "kubernetes.yaml"
COMPONENT = DEPLOY / "kubernetes/components/monitoring"
PAGES = (OVERVIEW, MODEL, WORKERS, AUTOSCALING, RACES)


def build(folder: Path) -> None:
    """Write a file for each page, and remove those of pages that are gone."""
    written = {f"{page.name}.json": draw(page) for page in PAGES}
    for path in folder.glob("*.json"):
        if path.name not in written:
            path.unlink()
    for name, text in written.items():
        (folder / name).write_text(text)


def objects() -> str:
    """Return the rules and dashboards as objects of Kubernetes, in YAML."""
    found = [_rules(path) for path in sorted((DEPLOY / "prometheus/rules").glob("*.yml"))]
    found += [_dashboard(f"{page.uid}", json.loads(draw(page))) for page in PAGES]
    head = "# Written by `make dashboards`, from ../../../prometheus/rules and ../../../grafana.\n"
    return head + yaml.safe_dump_all(found, sort_keys=False, width=120)


def _rules(path: Path) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": f"millstream-{path.stem}"},
        "spec": yaml.safe_load(path.read_text()),
    }


def _dashboard(name: str, board: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        # the label by which the sidecar of Grafana's chart finds dashboards
        "metadata": {"name": f"{name}-dashboard", "labels": {"grafana_dashboard": "1"}},
        "data": {f"{name}.json": json.dumps(board, separators=(",", ":"))},
    }


if __name__ == "__main__":
    asked = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    build(asked or COMMITTED)
    ((asked or COMPONENT) / OBJECTS).write_text(objects())
