"""Writes docs/top.svg: what `millstream top` shows of two models under load (`make pictures`)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.kit import models, v2
from tests.kit.command_line import ROOT, Millstream
from tests.kit.load import constant_load
from tests.kit.stack import running_stack

PICTURE = ROOT / "docs" / "top.svg"


def main() -> None:
    """Start the product, call two models, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "classifier": models.mlp(Path(folder, "mlp.onnx")),
            "doubler": models.scale(Path(folder, "scale.onnx")),
        }
        with running_stack(Path(folder), gateways=2, pools="cpu=2", controller=True, models=files) as stack:
            wide = v2.request({"input": np.ones((1, 64), np.float32)})
            small = v2.request({"x": np.ones((1, 2), np.float32)})
            with (
                constant_load(stack.port, "/v2/models/classifier/infer", [wide], callers=12, pause_s=0) as load,
                constant_load(stack.port, "/v2/models/doubler/infer", [small], callers=3, pause_s=0),
            ):
                load.more(100)
                print(Millstream(stack.home).ok("top", "--once", "--svg", PICTURE, "--endpoint", stack.url))
        assert {one.status for one in load.answers} == {200}


if __name__ == "__main__":
    main()
