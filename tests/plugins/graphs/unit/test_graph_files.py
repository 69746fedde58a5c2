"""What is a graph's text, and what of it is refused, with the name of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.plugins.graphs.forms import BYTES_MAX, is_graph_file, parse, read_graph
from millstream.plugins.graphs.structure import Structure
from millstream.services.errors import Code, Failure
from tests.kit import models

GRAPH = """
# two steps
steps:
  detect: {model: detector, version: 3, inputs: {image: image}}
  read:
    model: reader
    inputs: {crops: detect.crops}
    if: rows(detect.crops) > 0
outputs:
  text: [read.text, detect.nothing]
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(text: str, path: Path) -> str:
    with pytest.raises(Failure) as caught:
        Structure(read_graph(write(path / "graph.yaml", text)))
    assert caught.value.code is Code.INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_graph_is_recognised_by_its_text(tmp_path):
    assert is_graph_file(write(tmp_path / "a", GRAPH))
    assert is_graph_file(write(tmp_path / "b", json.dumps({"steps": {}, "outputs": {}})))


@pytest.mark.parametrize(
    "text", ["", "steps:\n  a: 1\n", "outputs: {}", "notes on steps: and outputs: of a graph", "{}"]
)
def test_other_texts_are_no_graphs(tmp_path, text):
    assert not is_graph_file(write(tmp_path / "a", text))


def test_a_model_is_no_graph(tmp_path):
    assert not is_graph_file(models.scale(tmp_path / "m.onnx"))
    (tmp_path / "zeros").write_bytes(b"steps:\noutputs:\n\0")
    assert not is_graph_file(tmp_path / "zeros")


def test_what_a_graph_says_is_read(tmp_path):
    graph = read_graph(write(tmp_path / "graph.yaml", GRAPH))
    assert list(graph.steps) == ["detect", "read"]
    assert graph.steps["detect"].version == 3
    assert graph.steps["read"].inputs == {"crops": ("detect.crops",)}
    assert graph.steps["read"].condition == "rows(detect.crops) > 0"
    assert graph.outputs == {"text": ("read.text", "detect.nothing")}
    again = parse(json.loads(graph.model_dump_json(by_alias=True, exclude_defaults=True)))
    assert again == graph


STEP = "steps:\n  a: {model: m, inputs: {x: x}}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps: [\noutputs: 1", "is not YAML"),
        (f"{STEP}outputs: {{y: a.y}}\nextra: 1", "there is no field 'extra'"),
        ("steps:\n  a: {modle: m, inputs: {}}\noutputs: {y: a.y}", "steps.a: there is no field 'modle': did you"),
        ("steps:\n  a: {inputs: {}}\noutputs: {y: a.y}", "steps.a.model: Field required"),
        ("steps:\n  a b: {model: m, inputs: {}}\noutputs: {y: a.y}", "steps.a b"),
        ("steps:\n  a: {model: ../m, inputs: {}}\noutputs: {y: a.y}", "steps.a.model"),
        ("steps: {}\noutputs: {y: a.y}", "steps:"),
        (f"{STEP}outputs: {{}}", "outputs:"),
        (f"{STEP}outputs: {{y: b.y}}", "output 'y': 'b.y' is no output of a step: there is no step 'b'"),
        (f"{STEP}outputs: {{y: x}}", "output 'y': 'x' is no output of a step"),
        (f"{STEP}  a: {{model: n, inputs: {{x: x}}}}\noutputs: {{y: a.y}}", "'a' occurs twice"),
        ('{"steps": {"a": 1, "a": 2}, "outputs": {}}', "'a' occurs twice"),
        ("steps: &a\n  b: {model: m, inputs: {x: x}}\nmore: *a\noutputs: {y: b.y}", "aliases"),
        ("steps:\n  a: {model: m, inputs: {x: detct.y}}\noutputs: {y: a.y}", "there is no step 'detct'"),
        ("inputs: {image: }\nsteps:\n  a: {model: m, inputs: {x: imag}}\noutputs: {y: a.y}", "did you mean 'image'"),
        (f"inputs: {{x: , z: }}\n{STEP}outputs: {{y: a.y}}", "input 'z': no step reads it"),
        ("steps:\n  a: {model: m, inputs: {x: x}, if: 'import os'}\noutputs: {y: a.y}", "step 'a': the condition"),
        (
            "steps:\n  a: {model: m, inputs: {x: b.y}}\n  b: {model: m, inputs: {x: a.y}}\noutputs: {y: a.y}",
            "the steps 'a', 'b' wait for each other",
        ),
        ("steps:\n  a: {model: m, inputs: {x: a.y}}\noutputs: {y: a.y}", "the steps 'a' wait for each other"),
        (
            "steps:\n  a: {model: m, inputs: {x: x}}\n  b: {model: m, inputs: {x: a.y}}\noutputs: {y: a.y}",
            "step 'b': no output of the graph needs it",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, text, says):
    assert says in refusal(text, tmp_path)


def test_a_graph_is_bounded(tmp_path):
    many = "".join(f"  s{n}: {{model: m, inputs: {{x: x}}}}\n" for n in range(65))
    assert "steps" in refusal(f"steps:\n{many}outputs: {{y: s0.y}}", tmp_path)
    sources = ", ".join(["a.y"] * 17)
    assert "outputs.y" in refusal(f"{STEP}outputs: {{y: [{sources}]}}", tmp_path)
    assert "larger than" in refusal(GRAPH + "#" * BYTES_MAX, tmp_path)
    deep = "[" * 5000
    assert "not YAML" in refusal(f"steps: {deep}\noutputs: 1", tmp_path)
    assert "not JSON" in refusal('{"steps": ' + "[" * 100_000, tmp_path)
