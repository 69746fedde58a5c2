"""The classes and functions that a scikit-learn model's file may name, by full name, and what it may do with each.

(module, name) ─> on the list? ─> Listed: the object, and whether it may be held, rebuilt from its state, or called

Nothing is listed by the beginning of its name: numpy, scipy and scikit-learn have functions that run strings, import by
name, open files and load pickles, and scipy's distributions execute text of their state (rv_generic.__setstate__).
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, cast

from millstream.services.errors import invalid

#: libraries whose classes a model's file may need
LIBRARIES = ("sklearn", "numpy", "scipy", "xgboost", "lightgbm", "catboost")


class Use(IntEnum):
    """What a file may do with what it names; each includes those before."""

    HOLD = 1  # keep it as the value of an attribute
    REBUILD = 2  # make an instance without its constructor, and set its state
    CALL = 3  # call it with arguments of the file


class Listed(NamedTuple):
    """A class or function on the list. `found` stands for it: a function of this module where its own does too much."""

    found: Any
    use: Use


#: modules all of whose own classes are values of estimators: kernels, losses, links, splits, optimizers
_VALUES = (
    "sklearn._loss.link",
    "sklearn._loss.loss",
    "sklearn.ensemble._hist_gradient_boosting.binning",
    "sklearn.ensemble._hist_gradient_boosting.predictor",
    "sklearn.gaussian_process.kernels",
    "sklearn.metrics._dist_metrics",
    "sklearn.metrics._scorer",
    "sklearn.model_selection._split",
    "sklearn.neural_network._stochastic_optimizers",
    "sklearn.utils._metadata_requests",
)
#: compiled classes, whose pickles call them with numbers
_COMPILED = ("sklearn._loss._loss", "sklearn.linear_model._sgd_fast")
_REBUILT = (
    "sklearn.calibration._CalibratedClassifier",
    "sklearn.cluster._birch._CFNode",
    "sklearn.cluster._birch._CFSubcluster",
    "sklearn.cluster._bisect_k_means._BisectingTree",
    "sklearn.compose._column_transformer.make_column_selector",
    "sklearn.neighbors._ball_tree.BallTree",
    "sklearn.neighbors._kd_tree.KDTree",
    "sklearn.utils._bunch.Bunch",
    "scipy.interpolate._bsplines.BSpline",
    "scipy.interpolate._interpolate.interp1d",
    "xgboost.core.Booster",
    "xgboost.sklearn.XGBClassifier",
    "xgboost.sklearn.XGBModel",
    "xgboost.sklearn.XGBRanker",
    "xgboost.sklearn.XGBRFClassifier",
    "xgboost.sklearn.XGBRFRegressor",
    "xgboost.sklearn.XGBRegressor",
    "lightgbm.basic.Booster",
    "lightgbm.sklearn.LGBMClassifier",
    "lightgbm.sklearn.LGBMModel",
    "lightgbm.sklearn.LGBMRanker",
    "lightgbm.sklearn.LGBMRegressor",
    "catboost.core.CatBoost",
    "catboost.core.CatBoostClassifier",
    "catboost.core.CatBoostRanker",
    "catboost.core.CatBoostRegressor",
)
_SPARSE_KINDS = ("bsr", "coo", "csc", "csr", "dia")
_SPARSE = [f"scipy.sparse._{kind}.{kind}_{form}" for kind in _SPARSE_KINDS for form in ("array", "matrix")]
_CALLED = (
    "builtins.bytearray",
    "builtins.bytes",
    "builtins.complex",
    "builtins.frozenset",
    "builtins.range",
    "builtins.set",
    "builtins.slice",
    "collections.Counter",
    "collections.OrderedDict",
    "collections.deque",
    "datetime.date",
    "datetime.datetime",
    "datetime.timedelta",
    "datetime.timezone",
    "decimal.Decimal",
    "numpy.dtype",
    "numpy._core.multiarray.scalar",
    "numpy._core.numeric._frombuffer",
    "sklearn.tree._tree.Tree",
)
_HELD = (
    "builtins.bool",
    "builtins.dict",
    "builtins.float",
    "builtins.int",
    "builtins.list",
    "builtins.object",
    "builtins.str",
    "builtins.tuple",
    "numpy.mean",
    "numpy.median",
    "numpy.ndarray",
    "numpy.ma.MaskedArray",
    "numpy.ma.core.MaskedArray",
    "numpy.random._generator.Generator",
    "numpy.random.bit_generator.SeedSequence",
    "numpy.random.mtrand.RandomState",
    "scipy._lib.array_api_compat.numpy._aliases.asarray",
    "sklearn.cluster._kmeans._kmeans_single_elkan",
    "sklearn.cluster._kmeans._kmeans_single_lloyd",
    "sklearn.feature_selection._mutual_info.mutual_info_classif",
    "sklearn.feature_selection._mutual_info.mutual_info_regression",
    "sklearn.feature_selection._univariate_selection.chi2",
    "sklearn.feature_selection._univariate_selection.f_classif",
    "sklearn.feature_selection._univariate_selection.f_oneway",
    "sklearn.feature_selection._univariate_selection.f_regression",
    "sklearn.feature_selection._univariate_selection.r_regression",
)
#: modules under their names in Python 2, in numpy before its release 2 and in scipy before 1.8
_RENAMED = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
    **{f"scipy.sparse.{kind}": f"scipy.sparse._{kind}" for kind in _SPARSE_KINDS},
}

_MAPPED = "numpy.memmap"  # of an array that was mapped from a file when it was saved: it is read as a plain one


def find_listed(module: str, name: str) -> Listed | None:
    """Return what a file names by module and name; None if that is not on the list.

    Raises Failure(INVALID) for a name on the list that the installed libraries do not have.
    """
    module = _RENAMED.get(module, module)
    path = f"{module}.{name}"
    stand_in = _STAND_INS.get(path)
    if stand_in is not None:
        return Listed(stand_in, Use.CALL)
    use = _uses().get(path)
    if path == _MAPPED:
        return find_listed("numpy", "ndarray")
    if use is None or "." in name:
        return None
    try:
        return Listed(getattr(import_module(module), name), use)
    except (ImportError, AttributeError) as error:
        raise invalid(f"the model needs {path}, which the library here does not have: {error}") from error


_EXPORT = "or export the model to ONNX where it was made, with a converter of your own, and push that file"


def refusal(module: str, name: str) -> str:
    """Return why a file may not name this, and what its owner can do."""
    what = f"{module}.{name}"[:200]
    if module.partition(".")[0] in LIBRARIES:
        return (
            f"the model needs {what}, which is not among the estimators and values that a model's file may hold: "
            f"save the fitted estimator without it, {_EXPORT}"
        )
    return (
        f"the model needs {what}, which is no part of {', '.join(LIBRARIES[:-1])} or {LIBRARIES[-1]}: classes and "
        f"functions of others cannot be converted; rebuild that step with the library's own ones, {_EXPORT}"
    )


@cache
def _uses() -> Mapping[str, Use]:
    """Return the list: full name -> use."""
    uses = dict.fromkeys(_HELD, Use.HOLD) | dict.fromkeys(_names_of_types(), Use.HOLD)
    uses |= dict.fromkeys(_scores(), Use.HOLD)
    values = [one for module in _VALUES for one in _own(module)]
    uses |= dict.fromkeys((*_REBUILT, *_SPARSE, *_estimators(), *values), Use.REBUILD)
    compiled = [one for module in _COMPILED for one in _own(module)]
    return uses | dict.fromkeys((*_CALLED, *compiled), Use.CALL)


def _estimators() -> Iterator[str]:
    """Yield the names of scikit-learn's estimators, those included that others hold and that are not public."""
    from sklearn.base import BaseEstimator
    from sklearn.utils import all_estimators

    all_estimators()  # imports them all
    left = [BaseEstimator]
    while left:
        for kind in left.pop().__subclasses__():
            left.append(kind)
            if kind.__module__.startswith("sklearn.") and kind.__module__ in sys.modules:
                yield f"{kind.__module__}.{kind.__qualname__}"


def _own(module: str) -> list[str]:
    """Return the names of the classes that a module of scikit-learn defines; none if this release has it not."""
    try:
        members = vars(import_module(module))
    except ImportError:
        return []
    return [f"{module}.{name}" for name, one in members.items() if inspect.isclass(one) and one.__module__ == module]


def _scores() -> Iterator[str]:
    """Yield the names of the functions behind scikit-learn's scorers, which a search holds."""
    from sklearn.metrics import get_scorer, get_scorer_names

    for name in get_scorer_names():
        function = get_scorer(name)._score_func
        yield f"{function.__module__}.{function.__name__}"


def _names_of_types() -> Iterator[str]:
    """Yield the names of numpy's scalar types and bit generators."""
    import numpy as np

    left: list[type] = [np.generic, *np.random.BitGenerator.__subclasses__()]
    for kind in left:
        left += kind.__subclasses__() if issubclass(kind, np.generic) else ()
        if kind.__module__.startswith("numpy"):
            yield f"{kind.__module__}.{kind.__name__}"


def new_instance(kind: Any) -> Any:
    """Return an instance made without its constructor. Raises Failure(INVALID) for anything but a class."""
    if not isinstance(kind, type):
        raise invalid("the model's file makes an instance of what is no class")
    return cast("Callable[[type], Any]", kind.__new__)(kind)


def set_state(instance: Any, state: Any) -> None:
    """Set the state of an instance as pickle does, with the method of its class, never one of its attributes."""
    method = getattr(type(instance), "__setstate__", None)
    if method is not None:
        method(instance, state)
    elif isinstance(state, dict):
        instance.__dict__.update(state)
    elif state:
        raise invalid(f"the model's file has a state of {type(instance).__name__} that it cannot have")


def _reconstruct_plain(kind: Any, base: Any, state: Any) -> Any:
    """Stand for copyreg._reconstructor, which calls methods of `base`."""
    if not isinstance(kind, type) or base not in (object, dict, list, tuple, set, frozenset, int, float, str):
        raise invalid("the model's file makes an instance of what is no class")
    if base is object:
        return new_instance(kind)
    instance = base.__new__(kind, state)
    base.__init__(instance, state)
    return instance


def _decode(text: Any, encoding: Any) -> bytes:
    """Stand for _codecs.encode, with which old protocols of pickle write bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise invalid("the model's file has bytes in an encoding that pickle does not write")
    return text.encode("latin-1")


def _defaultdict(factory: Any = None, *entries: Any) -> Any:
    if factory not in (None, int, float, str, list, dict, set, tuple, OrderedDict) or entries:
        raise invalid("the model's file has a defaultdict that calls what is no plain type")
    return defaultdict(factory)


def _array(kind: Any, shape: Any, code: Any) -> Any:
    """Stand for numpy's _reconstruct: an empty array, whose state follows."""
    import numpy as np

    if kind is not np.ndarray:
        raise invalid("the model's file has an array of a class that is no plain array")
    return np.ndarray(shape, code)


def _masked_array(kind: Any, base: Any, shape: Any, code: Any) -> Any:
    import numpy as np

    if kind is not np.ma.MaskedArray or base is not np.ndarray:
        raise invalid("the model's file has a masked array of a class that is no plain array")
    return np.ma.MaskedArray(np.ndarray(shape, code))


def bit_generator(kind: Any = "MT19937", *_: Any) -> Any:
    """Return a bit generator of numpy by its name or class. Raises Failure(INVALID)."""
    import numpy as np

    if isinstance(kind, np.random.BitGenerator):
        return kind
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    found = getattr(np.random, name, None)
    if not (isinstance(found, type) and issubclass(found, np.random.BitGenerator)) or kind not in (name, found):
        raise invalid("the model's file has a random generator that numpy does not have")
    return found()


def _generator(kind: Any = "MT19937", *_: Any) -> Any:
    import numpy as np

    return np.random.Generator(bit_generator(kind))


def _random_state(kind: Any = "MT19937", *_: Any) -> Any:
    import numpy as np

    return np.random.RandomState(bit_generator(kind))


def _unpickle_compiled(kind: Any, _checksum: Any, state: Any) -> Any:
    """Stand for the functions that Cython writes to unpickle a class."""
    instance = new_instance(kind)
    if state:
        set_state(instance, state)
    return instance


#: full name -> what is called in its place: these functions call or import what their arguments say
_STAND_INS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _decode,
    "collections.defaultdict": _defaultdict,
    "copyreg._reconstructor": _reconstruct_plain,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.ma.core._mareconstruct": _masked_array,
    "numpy.random._pickle.__bit_generator_ctor": bit_generator,
    "numpy.random._pickle.__generator_ctor": _generator,
    "numpy.random._pickle.__randomstate_ctor": _random_state,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _unpickle_compiled,
    "sklearn._loss._loss.__pyx_unpickle_CyHalfMultinomialLoss": _unpickle_compiled,
    "sklearn.metrics._dist_metrics.newObj": new_instance,
    "sklearn.neighbors._ball_tree.newObj": new_instance,
    "sklearn.neighbors._kd_tree.newObj": new_instance,
}
