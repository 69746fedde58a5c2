"""Files of skops that do more than hold a fitted estimator, written node by node. Real ones are in tests/frameworks."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from millstream.plugins.convert.skops_files import load_skops
from millstream.services.errors import Failure
from tests.kit.audit_events import dangerous_events

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.InconsistentVersionWarning")

Node = dict[str, Any]
CODE = "open('/tmp/millstream-was-here', 'w')"
LINEAR = ("sklearn.linear_model._base", "LinearRegression")


def node(loader: str, module: str, name: str, **more: Any) -> Node:
    return {"__loader__": loader, "__module__": module, "__class__": name, **more}


def value(content: Any) -> Node:
    return node("JsonNode", "builtins", "str", content=json.dumps(content), is_json=True)


def items(*nodes: Node, kind: str = "list") -> Node:
    return node(f"{kind.capitalize()}Node", "builtins", kind, content=list(nodes))


def kind(module: str, name: str) -> Node:
    return node("TypeNode", module, name)


def table(types: Node | None = None, **content: Node) -> Node:
    types = types or items(*[kind("builtins", "str") for _ in content])
    return node("DictNode", "builtins", "dict", content=content, key_types=types)


def estimator(**attributes: Node) -> Node:
    return node("ObjectNode", *LINEAR, content=table(**attributes))


def array(file: str = "a.npy", module: str = "numpy", name: str = "ndarray") -> Node:
    return node("NdArrayNode", module, name, type="numpy", file=file)


def npy(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, content, **options)
    return file.getvalue()


MEMBERS = {"a.npy": npy(np.arange(3.0)), "objects.npy": npy(np.array([len, 1], object), allow_pickle=True)}


def written(path: Path, schema: Node, *, protocol: Any = 2) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in MEMBERS.items():
            archive.writestr(name, content)
        archive.writestr("schema.json", json.dumps({**schema, "protocol": protocol, "_skops_version": "0.16"}))
    return path


def load(path: Path) -> Any:
    return load_skops(path, lambda _: None)


def test_an_estimator_is_built_from_its_nodes(tmp_path: Path) -> None:
    shared = value([1, 2]) | {"__id__": 7}
    schema = estimator(
        coef_=array(),
        intercept_=array(name="float64") | {"file": "a.npy"},
        fit_intercept=value(True),
        first=shared,
        second={**shared, "content": "null"},
        names=items(value("a"), value("b"), kind="tuple"),
        _sklearn_version=value("1.9.1"),
    )
    found = load(written(tmp_path / "f", schema))
    assert type(found) is LinearRegression
    assert found.coef_.tolist() == [0, 1, 2]
    assert found.first is found.second
    assert found.names == ("a", "b")


def reduced(module: str, name: str, *arguments: Node) -> Node:
    return node("ConstructorFromReduceNode", module, name, content=items(*arguments, kind="tuple"))


def called(loader: str, module: str, name: str, *arguments: Node) -> Node:
    reduce = {"args": items(*arguments, kind="tuple")}
    return node(loader, module, name, __reduce__=reduce, content=table())


HOSTILE: dict[str, tuple[Callable[[], Node], str]] = {
    "a constructor": (lambda: reduced("numpy.testing._private.utils", "runstring", value(CODE)), "calls what it names"),
    "a listed constructor": (lambda: reduced(*LINEAR, value(CODE)), "calls what it names"),
    "a method": (
        lambda: node("MethodNode", *LINEAR, content={"func": "fit", "obj": estimator()}),
        "calls what it names",
    ),
    "a partial function": (
        lambda: node("PartialNode", "functools", "partial", content={}),
        "calls what it names",
    ),
    "an operator": (
        lambda: node("OperatorFuncNode", "operator", "attrgetter", attrs=items(value("x"))),
        "calls what it names",
    ),
    "a kind that is not known": (lambda: node("OtherNode", "builtins", "dict"), "calls what it names"),
    "a function": (lambda: node("FunctionNode", "os", "system"), "needs os.system"),
    "a function of numpy": (
        lambda: estimator(a=node("FunctionNode", "numpy.testing._private.utils", "runstring")),
        "needs numpy.testing._private.utils.runstring",
    ),
    "a function of protocol 0": (
        lambda: node("FunctionNode", "x", "y", content={"module_path": "os", "function": "system"}),
        "needs os.system",
    ),
    "a type": (lambda: kind("subprocess", "Popen"), "needs subprocess.Popen"),
    "a path with dots": (lambda: kind("sklearn.base", "copy.os"), "needs sklearn.base.copy.os"),
    "a class of numpy": (lambda: node("ObjectNode", "numpy", "memmap"), "needs numpy.memmap"),
    "an npz file": (
        lambda: items(value("/proc/self/fd/3")) | {"__module__": "numpy.lib._npyio_impl", "__class__": "NpzFile"},
        "needs numpy.lib._npyio_impl.NpzFile",
    ),
    "text that scipy executes": (
        lambda: node(
            "ObjectNode",
            "scipy.stats._continuous_distns",
            "norm_gen",
            content=table(_parse_arg_template=value(CODE)),
        ),
        "needs scipy.stats._continuous_distns.norm_gen",
    ),
    "a list of a class": (
        lambda: items(value(1)) | {"__module__": LINEAR[0], "__class__": LINEAR[1]},
        "needs sklearn.linear_model._base.LinearRegression",
    ),
    "a dictionary of a class": (
        lambda: table() | {"__module__": LINEAR[0], "__class__": LINEAR[1]},
        "needs sklearn.linear_model._base.LinearRegression",
    ),
    "keys that are called": (lambda: table(items(kind(*LINEAR)), a=value(1)), "keys are neither text nor numbers"),
    "keys that are called, by number": (
        lambda: items(
            items(kind(*LINEAR)) | {"__id__": 5},
            table(items(kind("builtins", "str")) | {"__id__": 5}, a=value(1)),
        ),
        "keys are neither text nor numbers",
    ),
    "a tree of a function": (
        lambda: called("TreeNode", "sklearn.feature_selection._univariate_selection", "f_classif", value(1)),
        "needs sklearn.feature_selection._univariate_selection.f_classif",
    ),
    "a loss of another class": (lambda: called("LossNode", *LINEAR, value(1)), "needs sklearn.linear_model"),
    "an array of a class": (lambda: array(module="numpy", name="matrix"), "needs numpy.matrix"),
    "an array of an estimator": (lambda: array(module=LINEAR[0], name=LINEAR[1]), "needs sklearn.linear_model"),
    "an array with a pickle": (lambda: array("objects.npy"), "broken or cut short: ValueError: Object arrays"),
    "a factory": (
        lambda: node(
            "DefaultDictNode",
            "collections",
            "defaultdict",
            content={"main": table(), "default_factory": kind(*LINEAR)},
        ),
        "a defaultdict that calls",
    ),
    "a generator that calls": (
        lambda: node(
            "RandomGeneratorNode",
            "numpy.random._generator",
            "Generator",
            content={"bit_generator": table(bit_generator=value("seed")), "seed_seq": table()},
        ),
        "a random generator that numpy does not have",
    ),
    "an object that holds itself": (
        lambda: items(
            value(1) | {"__id__": 3, "__loader__": "ListNode", "__class__": "list", "content": [{"__id__": 3}]}
        ),
        "holds itself",
    ),
    "a member that is missing": (lambda: array("b.npy"), "broken or cut short"),
    "no node": (lambda: {"__loader__": "JsonNode"}, "broken or cut short"),
}


@pytest.mark.parametrize("protocol", [0, 1, 2])
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_part_of_a_fitted_estimator_is_refused(tmp_path: Path, name: str, protocol: int) -> None:
    make, said = HOSTILE[name]
    path = written(tmp_path / "f", make(), protocol=protocol)
    load(written(tmp_path / "good", estimator(coef_=array())))  # imports everything
    with dangerous_events() as events, pytest.raises(Failure, match=said):
        load(path)
    opened = [event for event in events if not event.startswith(f"open ({str(path)!r}")]
    assert opened == []
    assert not Path("/tmp/millstream-was-here").exists()


@pytest.mark.parametrize("protocol", [3, -1, "2", None, [2]])
def test_other_protocols_are_refused(tmp_path: Path, protocol: Any) -> None:
    with pytest.raises(Failure, match="a protocol that is not known here"):
        load(written(tmp_path / "f", estimator(), protocol=protocol))


def test_of_two_members_of_a_name_one_is_read(tmp_path: Path) -> None:
    """What is checked is what is built: the file is read once."""
    path = written(tmp_path / "f", estimator(coef_=array()))
    hostile = {**reduced("os", "system", value("true")), "protocol": 2, "_skops_version": "0.16"}
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("schema.json", json.dumps(hostile))
    with pytest.raises(Failure, match="calls what it names"):
        load(path)


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "f", estimator(coef_=array()))
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(Failure, match="broken or cut short"):
        load(path)
