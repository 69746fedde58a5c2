"""Forms of one model, INT64 "x" [N, 1] -> "y" [N, 1] = x, that go wrong on one value; and a verdict that serves one.

choose(stack, "m", path)      as if a race had decided that the ONNX file at `path` serves the model "m"
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from millstream.plugins.compile.race.report import RaceReport
from millstream.plugins.compile.stored.job import Job, Jobs, RaceState, environment, new_job
from millstream.plugins.compile.stored.selection import Selections, decide
from millstream.services.device import installed_packages
from millstream.services.repository.folder import FolderRepository
from tests.kit.stack import Stack

BAD = 77  # the value on which a form goes wrong
KIND = "onnxruntime.cpu"
SUMS = 100


def here() -> str:
    """Return the environment of the workers of a stack on this machine.

    Found in a process of its own: other tests add folders of packages to the path of this one.
    """
    code = (
        "from millstream.services.device import find_device\n"
        f"from {environment.__module__} import environment\n"
        f"from {installed_packages.__module__} import installed_packages\n"
        "print(environment(find_device('cpu').fingerprint, installed_packages()))"
    )
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def choose(stack: Stack, model: str, path: Path, backend: str = "onnxruntime") -> Job:
    """Serve version 1 of a model with the file at `path`; return the race that decided it."""
    repository = FolderRepository(stack.home / "repository")
    manifest = repository.manifest(model, 1)
    jobs, selections = Jobs(repository), Selections(repository)
    race = new_job(manifest, KIND, here(), "cpu", time.time())
    locks = jobs.try_locks(race, "by hand", "cpu")
    assert locks
    try:
        running = race.model_copy(update={"state": RaceState.RUNNING})
        jobs.put(race, lambda _: running)
        folder = selections.cache(manifest, KIND, here()) / "v-1"
        folder.mkdir(parents=True)
        copyfile(path, folder / "model.onnx")
        compiled = {"files": ["model.onnx"], "backend": backend, "options": {}, "runtime": ""}
        row = {"target": "by-hand", "candidate": "v-1", "folder": "v-1", "verdict": "won", "compiled": compiled}
        report = {"baseline": "fp32", "winner": "v-1", "ratio": 2.0, "table": {"16": "v-1"}, "rows": [row]}
        assert decide(selections, jobs, manifest, race, RaceReport.model_validate(report), time.time())
    finally:
        for lock in locks:
            lock.release()
    return race


def _form(path: Path, nodes: Sequence[onnx.NodeProto], weights: Sequence[onnx.TensorProto]) -> Path:
    """Write a model that adds `nothing`, INT64 zeros that `nodes` compute, to x."""
    value = [helper.make_tensor_value_info(name, TensorProto.INT64, ["N", 1]) for name in "xy"]
    added = helper.make_node("Add", ["x", "nothing"], ["y"])
    graph = helper.make_graph([*nodes, added], "form", value[:1], value[1:], list(weights))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def _integer(name: str, value: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, np.int64), name)


def _is_bad() -> list[onnx.NodeProto]:
    return [helper.make_node("Equal", ["x", "bad"], ["is"])]


def plain(path: Path) -> Path:
    """Write a form that never goes wrong, and is slower than the others: none of them is undone for its speed."""
    sums = [helper.make_node("Add", [f"sum{at}"] * 2, [f"sum{at + 1}"]) for at in range(SUMS)]
    first = helper.make_node("Mul", ["x", "zero"], ["sum0"])
    last = helper.make_node("Identity", [f"sum{SUMS}"], ["nothing"])
    return _form(path, [first, *sums, last], [_integer("zero", 0)])


def wrong(path: Path) -> Path:
    """Write a form that answers 7 more than it should where x is BAD."""
    nodes = [*_is_bad(), helper.make_node("Where", ["is", "more", "zero"], ["nothing"])]
    return _form(path, nodes, [_integer("bad", BAD), _integer("more", 7), _integer("zero", 0)])


def raising(path: Path) -> Path:
    """Write a form that fails on BAD with an error."""
    nodes = [
        *_is_bad(),
        helper.make_node("Where", ["is", "outside", "zero"], ["index"]),
        helper.make_node("Gather", ["table", "index"], ["nothing"], axis=0),
    ]
    table = numpy_helper.from_array(np.zeros(4, np.int64), "table")
    return _form(path, nodes, [_integer("bad", BAD), _integer("outside", 9), _integer("zero", 0), table])


def crashing(path: Path) -> Path:
    """Write a form that ends the process on BAD (SIGFPE)."""
    nodes = [
        *_is_bad(),
        helper.make_node("Where", ["is", "minus", "two"], ["by"]),
        helper.make_node("Div", ["least", "by"], ["half"]),
        helper.make_node("Mul", ["half", "zero"], ["nothing"]),
    ]
    weights = [_integer("bad", BAD), _integer("minus", -1), _integer("two", 2), _integer("least", -(2**63))]
    return _form(path, nodes, [*weights, _integer("zero", 0)])


def looping(path: Path, rounds: int) -> Path:
    """Write a form that runs a loop of `rounds` on BAD: about 1 us each."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["sum", "one"], ["sum_out"])],
        "body",
        [
            helper.make_tensor_value_info(name, kind, [])
            for name, kind in (("i", TensorProto.INT64), ("go", TensorProto.BOOL), ("sum", TensorProto.INT64))
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_out", TensorProto.INT64, []),
        ],
        [_integer("one", 1)],
    )
    nodes = [
        *_is_bad(),
        helper.make_node("Where", ["is", "rounds", "once"], ["each"]),
        helper.make_node("ReduceMax", ["each"], ["times"], keepdims=0),
        helper.make_node("Loop", ["times", "true", "zero"], ["ran"], body=body),
        helper.make_node("Mul", ["ran", "zero"], ["nothing"]),
    ]
    weights = [_integer("bad", BAD), _integer("rounds", rounds), _integer("once", 1), _integer("zero", 0)]
    return _form(path, nodes, [*weights, numpy_helper.from_array(np.array(True), "true")])
