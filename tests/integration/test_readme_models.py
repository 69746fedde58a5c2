"""The programs of docs/first-model.md, which write a trained model: the file is uploaded, batched and answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from tests.kit.stack import running_stack

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/first-model.md").read_text(), re.DOTALL)
PROGRAMS = {found[0]: block for block in BLOCKS if (found := re.findall(r'"(\w+\.(?:onnx|joblib))"', block))}
#: PyTorch is not in the tests' environment, since it is larger than all of that; where it is, its program runs, too
RUN = ["iris.joblib", *(["net.onnx"] if find_spec("torch") and find_spec("onnxscript") else [])]


def test_every_program_is_python() -> None:
    assert PROGRAMS.keys() == {"iris.joblib", "net.onnx"}
    for name, program in PROGRAMS.items():
        compile(program, name, "exec")


@pytest.mark.parametrize("name", RUN)
def test_a_model_becomes_a_file_that_serves_in_batches(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[name]], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    with running_stack(tmp_path / "home") as stack:
        command = [sys.executable, "-P", "-m", "millstream.services.cli", "--endpoint", stack.url]
        environment = child_environment({"NO_COLOR": "1"})
        allowed = ["--allow-pickle"] if name == "iris.joblib" else []
        subprocess.run([*command, "push", "m", tmp_path / name, *allowed], env=environment, check=True, timeout=240)
        document = stack.http.get("/admin/v1/models/m/versions/1").json()
        assert (document["state"], document["batching"]) == ("ready", True)
        rows = "[[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]]"
        predict = [*command, "predict", "m", "--json"]
        answer = subprocess.run(predict, env=environment, input=rows, stdout=subprocess.PIPE, text=True, check=True)
        outputs = json.loads(answer.stdout)["outputs"]
        assert {output["shape"][0] for output in outputs} == {2}
        if name == "iris.joblib":
            assert outputs[0]["data"] == [0, 2]
