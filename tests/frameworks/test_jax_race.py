"""A race between XLA and IREE for a function of JAX, in a running product."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from millstream.client.client import Client
from tests.kit import jax_models
from tests.kit.command_line import Millstream
from tests.kit.races import raise_priorities
from tests.kit.stack import running_stack
from tests.kit.wait import wait_until

pytestmark = pytest.mark.frameworks

ENDED = {"decided", "failed", "cancelled"}


@pytest.mark.timeout(1500)
def test_a_race_measures_iree_and_settings_of_xla(tmp_path: Path) -> None:
    from jax import export

    path = jax_models.cnn(tmp_path / "cnn.jax")
    x = np.random.default_rng(5).standard_normal((3, 16, 16, 3)).astype(np.float32)
    wanted = np.asarray(export.deserialize(bytearray(path.read_bytes())).call(x))
    with running_stack(tmp_path, pools="jax=1,backend=jax") as stack, Client(stack.url, key=stack.key) as client:
        command = Millstream(stack.home)
        command.ok("push", "cnn", path, "--config", '{"batching": true}')
        command.ok(
            "race",
            "cnn",
            "--targets",
            "iree",
            "--accept-random-samples",
            "--no-wait",
            "--json",
        )

        def over() -> bool:
            raise_priorities(stack)
            return stack.http.get("/admin/v1/models/cnn/versions/1/race").json()["state"] in ENDED

        wait_until(over, 1000, "the race is over")
        report = command.json("race", "cnn", "--show")
        rows = {(row["target"], row["verdict"]) for row in report["rows"]}
        assert {target for target, _ in rows} >= {"iree"}
        assert {verdict for target, verdict in rows if target == "iree"} & {"won", "lost"}, report
        np.testing.assert_allclose(client.predict("cnn", {"x": x})["output_0"], wanted, rtol=1e-4, atol=1e-5)
