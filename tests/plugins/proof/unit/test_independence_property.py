"""Whatever the analysis proves is so: rows alone, together, in another order and beside extreme rows give the same."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnx
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from millstream.plugins.proof.analysis import prove
from millstream.plugins.proof.batch_rewrite import with_variable_rows
from tests.kit.independence import assert_independent, load, run_alone
from tests.kit.random_graphs import Graph, graphs

#: a longer run: INDEPENDENCE_EXAMPLES=50000
EXAMPLES = int(os.environ.get("INDEPENDENCE_EXAMPLES", "500"))

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]


def inputs(graph: Graph, rows: int, seed: int, extreme: int | None = None) -> Feeds:
    """Random rows; that at `extreme` has values that spread."""
    rng = np.random.default_rng(seed)
    feeds: Feeds = {}
    for name, tail in graph.inputs.items():
        if name == "k":
            feeds[name] = rng.integers(0, 9, (rows, *tail))
            continue
        feeds[name] = rng.uniform(-3, 3, (rows, *tail)).astype(np.float32)
        if extreme is not None:
            feeds[name][extreme] = rng.choice([np.nan, np.inf, -np.inf, 3e38, 0.0], tail or None)
    return feeds


def check(graph: Graph, rows: int, seed: int, extreme: bool, original: onnx.ModelProto | None = None) -> None:
    """Every row of a run of all gives what it gives alone, in `original` if given, and what it gives in another order.

    A row with NaN is only in the way of others: ONNX Runtime's ReduceMax of NaN and infinity is the one or the other,
    by the number of rows.
    """
    feeds = inputs(graph, rows, seed, extreme=rows - 1 if extreme else None)
    try:
        running = load(graph.model)
        alone = run_alone(load(original) if original else running, feeds, graph.inputs)
    except Exception:  # it runs for three rows, with which it was made, and not for one: it answers nothing wrongly
        event("does not run on one row")
        return
    note(onnx.printer.to_text(graph.model))
    unlike = [row for row in range(rows) if any(np.isnan(feeds[name][row]).any() for name in graph.inputs)]
    assert_independent(running, feeds, graph.inputs, alone, unlike)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(), st.integers(2, 4), st.integers(0, 99), st.booleans())
def test_what_is_proven_is_so(graph: Graph, rows: int, seed: int, extreme: bool):
    found = prove(graph.model, list(graph.inputs))
    event("proven" if found.proven else f"ended by {found.culprit.partition(' ')[0]}")
    if found.proven:
        check(graph, rows, seed, extreme)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(rows=1), st.integers(2, 4), st.integers(0, 99), st.booleans())
def test_a_rewritten_batch_of_one_answers_as_the_original(graph: Graph, rows: int, seed: int, extreme: bool):
    fixed = onnx.ModelProto.FromString(graph.model.SerializeToString())
    for value in fixed.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 1
    rewritten = with_variable_rows(fixed)
    changed = any(name.startswith("millstream_rows") for node in rewritten.graph.node for name in node.output)
    found = prove(rewritten, list(graph.inputs))
    if found.proven:
        event("proven after a change" if changed else "proven")
        check(graph._replace(model=rewritten), rows, seed, extreme, fixed)
