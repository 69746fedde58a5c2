"""Write the Grafana dashboards: `python -m deploy.grafana.build [FOLDER]`, by default over those that are committed.

Each page is a module here, and each expression is in one place; tests run every one of them against a live Prometheus.
"""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.grafana.autoscaling import AUTOSCALING
from deploy.grafana.drawing import draw
from deploy.grafana.model import MODEL
from deploy.grafana.overview import OVERVIEW
from deploy.grafana.races import RACES
from deploy.grafana.workers import WORKERS

COMMITTED = Path(__file__).parent / "dashboards"
PAGES = (OVERVIEW, MODEL, WORKERS, AUTOSCALING, RACES)


def build(folder: Path) -> None:
    """Write a file for each page, and remove those of pages that are gone."""
    written = {f"{page.name}.json": draw(page) for page in PAGES}
    for path in folder.glob("*.json"):
        if path.name not in written:
            path.unlink()
    for name, text in written.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else COMMITTED)
