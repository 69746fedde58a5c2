"""Whatever a pickle is made of: it reaches no function that is not on the list, and runs, opens and imports nothing."""

from __future__ import annotations

import io
import warnings
from contextlib import suppress

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.plugins.convert.listed_types import _STAND_INS, _uses
from millstream.plugins.convert.pickles import read_pickle
from millstream.services.errors import Failure
from tests.kit import pickle_programs as p
from tests.kit.audit_events import dangerous_events

#: compiled classes that trust the state they are given, and may crash: the sandbox is around them
_COMPILED = ("_tree", "_loss", "_sgd_fast", "_dist_metrics", "random", "scipy")
LISTED = sorted(path for path in (*_uses(), *_STAND_INS) if not any(part in path for part in _COMPILED))
OTHERS = [
    "tests.kit.pickle_programs.trap",
    "builtins.eval",
    "builtins.getattr",
    "builtins.__import__",
    "builtins.open",
    "os.system",
    "operator.attrgetter",
    "functools.partial",
    "numpy.load",
    "numpy.memmap",
    "numpy.lib._npyio_impl.NpzFile",
    "numpy._core._ufunc_reconstruct",
    "sklearn.base.clone",
    "sklearn.linear_model._base.warnings",
]
NAMES = ["append", "extend", "add", "__setstate__", "__class__", "__reduce__", "keys", "predict", "a", "/etc/passwd"]

LEAVES = (
    st.sampled_from([p.text(name) for name in (*NAMES, "latin1", "O", "f8", "exec('x')")])
    | st.integers(-2, 9).map(p.number)
    | st.sampled_from(LISTED).map(p.named)
    | st.sampled_from(OTHERS).map(p.named)
    | st.sampled_from(OTHERS).map(lambda path: p.stacked(*path.rsplit(".", 1)))
    | st.sampled_from([p.row(), p.items(), p.table()])
)


def programs(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    few = st.lists(inner, max_size=3)
    state = st.lists(st.tuples(st.sampled_from(NAMES).map(p.text), inner), max_size=3).map(lambda two: p.table(*two))
    of_list = st.sampled_from(LISTED).map(p.named)
    made = of_list.map(p.instance)
    return (
        st.tuples(of_list | inner, few).map(lambda two: p.call(two[0], *two[1]))
        | st.tuples(inner, few).map(lambda two: p.instance(two[0], *two[1]))
        | st.tuples(made | inner, state | inner).map(lambda two: p.built(*two))
        | st.tuples(made, state, state).map(lambda three: p.built(p.built(three[0], three[1]), three[2]))
        | st.tuples(made, state, inner).map(lambda three: p.appended(p.built(three[0], three[1]), three[2]))
        | st.tuples(made, state, few).map(lambda three: p.extended(p.built(three[0], three[1]), *three[2]))
        | st.tuples(made, state, few).map(lambda three: p.added(p.built(three[0], three[1]), *three[2]))
        | st.tuples(inner, inner, inner).map(lambda three: p.with_item(*three))
        | few.map(lambda pieces: p.row(*pieces))
        | few.map(lambda pieces: p.items(*pieces))
        | state
    )


def read(content: bytes) -> None:
    with warnings.catch_warnings(), suppress(Failure, RecursionError, MemoryError):
        warnings.simplefilter("ignore")
        read_pickle(io.BytesIO(content), len(content), lambda _: None)


@given(st.recursive(LEAVES, programs, max_leaves=12).map(p.pickled))
@settings(deadline=None, derandomize=True, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
def test_a_pickle_reaches_nothing_that_is_not_listed(content: bytes) -> None:
    read(content)  # imports what its libraries import late
    with dangerous_events() as events:
        read(content)
    assert (events, p.called) == ([], [])
