"""The list of what a model's file may name, and attempts to get more out of it: nothing runs, opens or imports."""

from __future__ import annotations

import inspect
import io
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import joblib
import numpy as np
import pytest
import scipy.stats  # noqa: F401 - imported before events are watched
from sklearn.datasets import load_iris
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.feature_selection import SelectKBest, f_classif
from sklearn.pipeline import make_pipeline

from millstream.plugins.convert.listed_types import _STAND_INS, Use, _uses, find_listed, new_instance, set_state
from millstream.plugins.convert.pickles import read_pickle
from millstream.services.errors import Failure
from tests.kit import pickle_programs as p
from tests.kit.audit_events import dangerous_events

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.InconsistentVersionWarning")

X, Y = load_iris(return_X_y=True)
TRAP = p.named("tests.kit.pickle_programs.trap")
CODE = "open('/tmp/millstream-was-here', 'w')"
ESTIMATOR = p.named("sklearn.linear_model._base.LinearRegression")
OURS = "sklearn.linear_model._base.LinearRegression"


def nothing(_: object) -> None:
    pass


def load(content: bytes) -> Any:
    return read_pickle(io.BytesIO(content), len(content), nothing)


def installed() -> dict[str, Any]:
    """What the list has of the libraries that are here."""
    found = {}
    for path in _uses():
        module, _, name = path.rpartition(".")
        try:
            listed = find_listed(module, name)
        except Failure:  # of another library or release
            continue
        assert listed is not None
        found[path] = listed
    return found


def test_the_list_has_classes_and_functions_of_numbers_alone() -> None:
    found = installed()
    assert len(found) > 400
    functions = {path: one for path, one in found.items() if not isinstance(one.found, type)}
    assert {one.use for path, one in functions.items() if not path.startswith("numpy._core.")} == {Use.HOLD}
    for path, one in functions.items():
        assert isinstance(one.found, types.FunctionType | types.BuiltinFunctionType) or callable(one.found)
        parts = path.split(".")
        assert parts[0] in {"numpy", "sklearn", "scipy"}, path
        names = set(inspect.signature(one.found).parameters) if hasattr(one.found, "__code__") else set()
        assert not names & {"filename", "file", "fname", "path", "module", "code", "cmd", "command", "func"}, path
    for path in (
        "numpy.load",
        "numpy.memmap",
        "numpy.lib._npyio_impl.NpzFile",
        "numpy.lib._datasource.DataSource",
        "numpy._core._ufunc_reconstruct",
        "numpy.testing._private.utils.runstring",
        "scipy.stats._continuous_distns.norm_gen",
        "scipy.stats._distn_infrastructure.rv_frozen",
        "sklearn.datasets._base.load_files",
        "sklearn.utils._testing.TempMemmap",
        "builtins.eval",
        "builtins.getattr",
        "operator.attrgetter",
        "functools.partial",
        "joblib.memory.Memory",
    ):
        module, _, name = path.rpartition(".")
        if path != "numpy.memmap":  # stands for a plain array
            assert find_listed(module, name) is None, path
    mapped = find_listed("numpy", "memmap")
    assert mapped is not None
    assert (mapped.found, mapped.use) == (np.ndarray, Use.HOLD)


ARGUMENTS: list[tuple[Any, ...]] = [
    (),
    ("/etc/passwd",),
    (CODE,),
    ("os", "system"),
    (exec, CODE),
    (type("Kind", (), {}), object, None),
    ("latin1", "latin1"),
    ({"_parse_arg_template": CODE, "__setstate__": exec, "func": exec, "_object": CODE},),
    (np.zeros(3), "/etc/passwd"),
    (open, "/etc/passwd"),
]


def test_calling_anything_on_the_list_runs_opens_and_imports_nothing() -> None:
    called = [one.found for path, one in installed().items() if one.use is Use.CALL]
    rebuilt = [one.found for path, one in installed().items() if one.use is Use.REBUILD]
    for _ in range(2):  # the first time imports what the libraries import late
        with dangerous_events() as events, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for function in (*called, *_STAND_INS.values()):
                for arguments in ARGUMENTS:
                    try:
                        function(*arguments)
                    except Exception:
                        continue
            for kind in rebuilt:
                for arguments in ARGUMENTS[1:]:
                    try:
                        set_state(new_instance(kind), arguments[0])
                    except Exception:
                        continue
    assert events == []


def distribution() -> bytes:
    """A frozen distribution, whose state has text that scipy executes."""
    made = p.instance(p.named("scipy.stats._continuous_distns.norm_gen"))
    return p.built(made, p.table((p.text("_parse_arg_template"), p.text(CODE))))


def with_attribute(name: str, value: bytes) -> bytes:
    return p.built(p.instance(ESTIMATOR), p.table((p.text(name), value)))


def npz() -> bytes:
    return p.call(
        p.named("builtins.dict"),
        p.call(p.named("numpy.lib._npyio_impl.NpzFile"), p.text("/proc/self/fd/3"), p.number(0), p.number(1)),
    )


PROGRAMS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a function": (lambda: p.call(TRAP, p.text("x")), "needs tests.kit.pickle_programs.trap"),
    "a function as a value": (lambda: with_attribute("a", TRAP), "needs tests.kit.pickle_programs.trap"),
    "code of numpy": (
        lambda: p.call(p.named("numpy.testing._private.utils.runstring"), p.text(CODE), p.table()),
        "needs numpy.testing._private.utils.runstring",
    ),
    "a second pickle": (npz, "needs numpy.lib._npyio_impl.NpzFile"),
    "a file": (lambda: p.call(p.named("numpy.memmap"), p.text("/etc/passwd")), "calls ndarray"),
    "a ufunc by name": (
        lambda: p.call(p.named("numpy._core._ufunc_reconstruct"), p.text("os"), p.text("system")),
        "needs numpy._core._ufunc_reconstruct",
    ),
    "text that scipy executes": (distribution, "needs scipy.stats._continuous_distns.norm_gen"),
    "a path with dots": (lambda: p.stacked("sklearn.base", "copy.os.system"), "needs sklearn.base.copy.os.system"),
    "a method by dots": (lambda: p.stacked("sklearn.linear_model._base", "LinearRegression.fit"), "needs sklearn"),
    "a module's module": (lambda: p.named("sklearn.base.warnings"), "needs sklearn.base.warnings"),
    "another name of a class": (lambda: p.named("sklearn.pipeline.clone"), "needs sklearn.pipeline.clone"),
    "a constructor": (lambda: p.call(ESTIMATOR), "calls LinearRegression"),
    "a constructor of Python 2": (lambda: p.old_instance(OURS, p.text("x")), "in a way of Python 2"),
    "an object of Python 2": (lambda: p.old_object(ESTIMATOR, p.text("x")), "in a way of Python 2"),
    "an instance with arguments": (lambda: p.instance(ESTIMATOR, p.text("x")), "with arguments"),
    "an instance of a function": (
        lambda: p.instance(p.named("sklearn.feature_selection._univariate_selection.f_classif")),
        "calls f_classif",
    ),
    "append of an attribute": (
        lambda: p.appended(with_attribute("append", p.named("builtins.bytes")), p.number(5)),
        "fills a LinearRegression",
    ),
    "extend of an attribute": (
        lambda: p.extended(with_attribute("extend", p.named("builtins.bytes")), p.number(5)),
        "fills a LinearRegression",
    ),
    "add of an attribute": (
        lambda: p.added(with_attribute("add", p.named("builtins.bytes")), p.number(5)),
        "fills a LinearRegression",
    ),
    "an item of an estimator": (
        lambda: p.with_item(p.instance(ESTIMATOR), p.text("a"), p.number(5)),
        "fills a LinearRegression",
    ),
    "a changed class": (lambda: p.built(ESTIMATOR, p.table((p.text("predict"), ESTIMATOR))), "changes a class"),
    "slots": (
        lambda: p.built(
            p.instance(p.named("sklearn._loss.link.IdentityLink")),
            p.row(pickle.NONE, p.table((p.text("__class__"), ESTIMATOR))),
        ),
        "a state of IdentityLink",
    ),
    "a generator that calls": (
        lambda: p.call(p.named("numpy.random._pickle.__generator_ctor"), p.text("seed"), p.named("builtins.bytes")),
        "a random generator that numpy does not have",
    ),
    "a generator of a class": (
        lambda: p.call(p.named("numpy.random._pickle.__bit_generator_ctor"), ESTIMATOR),
        "a random generator that numpy does not have",
    ),
    "another base": (
        lambda: p.call(p.named("copyreg._reconstructor"), ESTIMATOR, ESTIMATOR, p.text("x")),
        "an instance of what is no class",
    ),
    "a factory": (
        lambda: p.call(p.named("collections.defaultdict"), ESTIMATOR),
        "a defaultdict that calls",
    ),
    "an encoding": (
        lambda: p.call(p.named("_codecs.encode"), p.text("x"), p.text("zlib")),
        "an encoding that pickle does not write",
    ),
    "an array of a class": (
        lambda: p.call(p.named("numpy._core.multiarray._reconstruct"), ESTIMATOR, p.row(p.number(0)), p.text("b")),
        "an array of a class",
    ),
    "an extension": (lambda: pickle.EXT1 + b"\x01", "extensions"),
    "a persistent id": (lambda: p.text("x") + pickle.BINPERSID, "outside of it"),
    "a buffer": (lambda: pickle.NEXT_BUFFER, "broken"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pickle_gets_no_more_than_the_list_says(name: str) -> None:
    program, said = PROGRAMS[name]
    content = p.pickled(program())
    load(p.pickled(p.instance(ESTIMATOR)))  # imports everything
    with dangerous_events() as events, pytest.raises(Failure, match=said.replace(".", r"\.")):
        load(content)
    assert (events, p.called) == ([], [])


def test_state_is_set_by_the_class_and_never_by_an_attribute() -> None:
    """A first state leaves a callable where pickle looks for the method of the second one."""
    first = with_attribute("__setstate__", p.named("builtins.bytes"))
    found = load(p.pickled(p.built(first, p.table((p.text("a"), p.number(5))))))
    assert found.a == 5


def test_a_nested_pickle_of_joblib_is_read_by_the_same_rules() -> None:
    file = io.BytesIO()
    joblib.dump(np.array([Calls(), 1], object), file)
    with pytest.raises(Failure, match=r"needs tests\.kit\.pickle_programs\.trap"):
        load(file.getvalue())
    assert p.called == []


class Calls:
    def __reduce__(self) -> Any:
        return p.trap, ("x",)


@pytest.mark.parametrize("protocol", range(6))
def test_what_estimators_are_made_of_is_on_the_list(protocol: int) -> None:
    model = make_pipeline(SelectKBest(f_classif, k=3), HistGradientBoostingClassifier(max_iter=3)).fit(X, Y)
    assert np.array_equal(load(pickle.dumps(model, protocol)).predict(X), model.predict(X))
