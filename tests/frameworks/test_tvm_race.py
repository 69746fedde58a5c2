"""A whole race that names TVM, in a running product: both of its candidates are compiled, judged and measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from millstream.client.client import Client
from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.races import processes, raise_priorities
from tests.kit.stack import running_stack
from tests.kit.wait import wait_until

pytestmark = pytest.mark.frameworks

RACE = "/admin/v1/models/mlp/versions/1/race"
ENDED = {"decided", "failed", "cancelled"}


@pytest.mark.timeout(2400)
def test_a_race_that_names_tvm_comes_to_a_verdict(tmp_path: Path) -> None:
    x = np.random.default_rng(5).standard_normal((3, 64)).astype(np.float32)
    with (
        running_stack(tmp_path, models={"mlp": models.mlp(tmp_path / "mlp.onnx")}) as stack,
        Client(stack.url, key=stack.key) as client,
    ):
        command = Millstream(stack.home)
        wanted = client.predict("mlp", {"input": x})["output"]
        command.ok(
            "race",
            "mlp",
            "--targets",
            "tvm",
            "--accept-random-samples",
            "--no-wait",
            "--json",
        )

        def over() -> bool:
            raise_priorities(stack)
            return stack.http.get(RACE).json()["state"] in ENDED

        wait_until(over, 2000, "the race is over")
        report = json.loads(command.ok("race", "mlp", "--show", "--json"))
        assert report["state"] == "decided", report
        assert [row["target"] for row in report["rows"]] == ["tvm", "tvm"]
        for row in report["rows"]:
            assert row["verdict"] in {"won", "lost"}, row
            assert row["ratio"] > 0, row
            assert row["cosine_min"] is None or row["cosine_min"] > 0.999
        if report["winner"]:
            wait_until(lambda: report["winner"] in stack.http.get("/admin/v1/models/mlp/versions/1").text)
        np.testing.assert_allclose(client.predict("mlp", {"input": x})["output"], wanted, rtol=1e-3, atol=1e-4)
        assert not processes(stack)
