"""The example of docs/graphs.md, with the commands that it names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.kit.command_line import ROOT, Millstream
from tests.kit.stack import running_stack

PAGE = (ROOT / "docs/graphs.md").read_text()


def block(kind: str, begins: str) -> str:
    """Return the block of the page that is of a kind and begins so."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(next(text for of, text in blocks if of == kind and text.startswith(begins)))


def test_the_example_of_the_page(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", block("python", "import onnx")], cwd=tmp_path, check=True, env=os.environ)
    (tmp_path / "graph.yaml").write_text(block("yaml", "# graph.yaml\nsteps:\n  small"))
    (tmp_path / "request.json").write_text(block("json", "{"))
    commands = block("", "millstream push small").splitlines()
    with running_stack(tmp_path / "home") as stack:
        millstream = Millstream(stack.home)
        said = {}
        for command in commands:
            words = [str(tmp_path / word) if (tmp_path / word).is_file() else word for word in command.split()[1:]]
            said[command] = millstream.ok(*words)
        answer = millstream.json("predict", "cascade", "-i", tmp_path / "request.json")
    described = said["millstream describe cascade"]
    assert "large: large v1 (x = x) if max(small.score) < 0.9" in described
    assert "run by the gateway" in described
    x = np.array(json.loads((tmp_path / "request.json").read_text())["inputs"][0]["data"])
    scores = [1 / (1 + np.exp(-x @ weights)) for weights in ([2.0, -1.0, 0.5, 1.0], [0.1, 0.2, 0.3, 0.4])]
    found = [one["data"][0] for one in answer["outputs"]]
    assert np.allclose(found, scores, atol=1e-6), answer
