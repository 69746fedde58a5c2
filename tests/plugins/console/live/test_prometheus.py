"""The longer history, from a real Prometheus that scrapes the installation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit import models
from tests.kit.prometheus import LivePrometheus
from tests.kit.stack import running_stack
from tests.kit.wait import wait_until

DATA = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.mark.needs("prometheus")
def test_the_history_of_hours_comes_from_prometheus(tmp_path: Path) -> None:
    targets = tmp_path / "targets.json"
    targets.write_text("[]")
    folder = tmp_path / "prometheus"
    folder.mkdir()
    scrape = {"job_name": "millstream", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
    with LivePrometheus(folder, {}, rules=False, scrapes=[scrape]) as prometheus:
        settings = {"console_prometheus_url": prometheus.url}
        with running_stack(tmp_path, settings=settings) as stack:
            stack.push("m", models.scale(tmp_path / "m.onnx", 2.0, 4))
            targets.write_text(json.dumps([{"targets": [f"127.0.0.1:{stack.port}"]}]))
            assert stack.http.get("/console/api/session").json()["prometheus"] is True

            def history(**asked: str) -> dict[str, Any]:
                assert stack.http.post("/v2/models/m/infer", json=DATA).status_code == 200
                assert stack.http.post("/v2/models/m/infer", json=DATA | {"inputs": []}).status_code == 400
                reply = stack.http.get("/console/api/history", params={"hours": "1", **asked})
                assert reply.status_code == 200, reply.text
                found: dict[str, Any] = reply.json()
                return found

            def known(name: str) -> bool:
                return any(history(model="m")[name]) and any(history()[name])

            for name in ("requests_per_s", "p50_s", "p99_s"):
                wait_until(lambda: known(name), what=f"{name} is known")  # noqa: B023
            found = history()
            assert len(found["at"]) == 241
            assert found["step_s"] == 15
            assert not any(found["failed_per_s"]), "calls that their callers got wrong did not fail"
            assert any(value is not None for value in found["busy"])
            assert any(value is not None for value in found["queue_rows"])
