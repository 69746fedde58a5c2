"""The proof that a library which computes with narrower types still gives the version's answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

from millstream.plugins.compile.narrowing import prove
from millstream.plugins.compile.targets import TARGETS
from millstream.plugins.engines.openvino.targets import NARROWS
from tests.kit import architectures

LIMIT = NARROWS.computed


def model(text: str, **constants: Any) -> onnx.ModelProto:
    """Return a graph of ONNX's text form with these constants."""
    found = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]>\n' + text)
    found.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    return found


PROVEN = {
    "indices": "g (int64[N] t) => (float[N, 4] y) { y = Gather(table, t) }",
    "indices with an offset": "g (int64[N] t) => (float[N, 4] y) { s = Add(t, one)  y = Gather(table, s) }",
    "a cast": "g (int64[N] t) => (float[N] y) { y = Cast<to = 1>(t) }",
    "a mask": "g (int64[N] t) => (float[N] y) { z = Equal(t, one)  i = Cast<to = 7>(z)  s = Add(i, i)"
    "  y = Cast<to = 1>(s) }",
    "sizes": "g (float[N, S, 4] x) => (float[N, M] y) { s = Shape(x)  n = Gather(s, zero)  m = Mul(n, k)"
    "  r = Reshape(m, minus)  h = Concat<axis = 0>(r, minus)  y = Reshape(x, h) }",
    "positions": "g (int64[N, S] t) => (float[N, S, 4] y) { p = NonZero(t)  q = ArgMax<axis = 0, keepdims = 0>(p)"
    "  y = Gather(table, t) }",
    "limited": "g (int64[N] t) => (int64[N] y) { s = Clip(t, zero, k)  y = Mul(s, s) }",
    "what nobody reads": "g (int64[N] t) => (float[N] y) { z = Mul(t, t)  y = Cast<to = 1>(t) }",
}
UNPROVEN = {
    "a product": "g (int64[N] t) => (int64[N] y) { y = Mul(t, t) }",
    "a product of INT32": "g (int32[N] t) => (int32[N] y) { y = Mul(t, t) }",
    "milliseconds": "g (int64[N] t) => (float[N, 4] y) { m = Mul(t, k)  d = Div(m, k)  o = Mod(d, k)"
    "  y = Gather(table, o) }",
    "a sum": "g (int64[N, S] t) => (int64[N] y) { y = ReduceSum<keepdims = 0>(t, one) }",
    "a large constant": "g (int64[N] t) => (bool[N] y) { y = Equal(t, large) }",
    "a float of any size": "g (float[N] x) => (int64[N] y) { y = Cast<to = 7>(x) }",
    "a float that may be NaN": "g (float[N] x) => (uint8[N] y) { z = Clip(x, low, high)  y = Cast<to = 2>(z) }",
    "FP64": "g (double[N] x) => (double[N] y) { y = Add(x, x) }",
    "UINT32": "g (int64[N] t) => (int64[N] y) { u = Cast<to = 12>(t)  v = Add(u, u)  y = Cast<to = 7>(v) }",
    "UINT8 that wraps": "g (uint8[N] x) => (uint8[N] y) { y = Add(x, x) }",
    "an index that is dropped": "g (int64[N] t) => (float[4] y, bool[N] z) { s = Mul(t, t)  z = Equal(s, one)"
    "  f = Gather(s, zero)  y = Gather(table, f) }",
    "a dimension that was declared": "g (int64[N] t, float[M, 4] x) => (float[N, 4] y, int64[N] z)"
    " <float[5, 4] w> { w = Abs(x)  s = Mul(t, t)  z = Mul(s, s)  y = Gather(w, t) }",
    "a graph inside": "g (int64[N] t) => (int64[N] y) { c = Constant<value_int = 1>()  b = Cast<to = 9>(c)"
    "  y = If (b) <then_branch = a () => (int64[N] u) { u = Mul(t, t) },"
    " else_branch = e () => (int64[N] v) { v = Abs(t) }> }",
    "an unknown operator": 'g (int64[N] t) => (int64[N] y) { y = BitShift<direction = "LEFT">(t, one) }',
}  # fmt: skip
CONSTANTS = {
    "table": np.ones((7, 4), np.float32), "zero": np.int64(0), "one": np.int64(1), "k": np.int64(1000),
    "minus": np.array([-1]), "large": np.int64(LIMIT + 1), "low": np.float32(0), "high": np.float32(255),
}  # fmt: skip


def built(text: str) -> onnx.ModelProto:
    return model(text, **{name: value for name, value in CONSTANTS.items() if f"{name}" in text})


@pytest.mark.parametrize("name", PROVEN)
def test_values_that_fit_are_proven(name: str) -> None:
    assert prove(built(PROVEN[name]), NARROWS).why == ""


@pytest.mark.parametrize("name", UNPROVEN)
def test_values_that_may_not_fit_are_not(name: str) -> None:
    why = prove(built(UNPROVEN[name]), NARROWS).why
    assert why
    assert "cannot be analysed" not in why


def test_inputs_are_bounded_by_what_the_version_refuses() -> None:
    assert prove(built(PROVEN["indices"]), NARROWS).bounds == {"t": (-7, 7)}
    assert prove(built(PROVEN["a cast"]), NARROWS).bounds == {"t": (-NARROWS.carried, NARROWS.carried)}
    assert prove(built(PROVEN["a mask"]), NARROWS).bounds == {"t": (-LIMIT, LIMIT)}


@pytest.mark.parametrize(
    "name", sorted(architectures.GRAPHS.keys() - {"fused encoder", "scan over time", "loop of five steps"})
)
def test_real_architectures_are_proven(name: str) -> None:
    assert prove(architectures.build(name), NARROWS).why == ""


@pytest.mark.parametrize("content", [b"", b"\x08\x08"])
def test_a_malformed_graph_proves_nothing_or_has_nothing_to_prove(content: bytes) -> None:
    prove(onnx.ModelProto.FromString(content), NARROWS)
    broken = built(PROVEN["sizes"])
    del broken.graph.node[1].input[:]
    assert prove(broken, NARROWS).why


def test_each_target_that_computes_by_openvino_says_what_it_narrows() -> None:
    assert {target.name for target in TARGETS if target.backend == "openvino" and target.narrows is None} == set()


# Small graphs of integers: where the proof holds, FP32 gives what 64-bit integers do.

Arrays = list[np.ndarray[Any, Any]]
Operators = dict[str, Callable[..., Any]]
BINARY: Operators = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Min": np.minimum, "Max": np.maximum}
UNARY: Operators = {"Neg": np.negative, "Abs": np.abs, "Sign": np.sign, "CumSum": np.cumsum, "ReduceMax": np.max}
OPERATORS = [*BINARY, *UNARY, "Div", "Mod", "ReduceSum", "Clip"]
STEP = st.tuples(st.sampled_from(OPERATORS), st.integers(0, 9), st.integers(0, 9))
NUMBERS = [-3, -1, 1, 2, 5, 40, 300, 4095, LIMIT // 4 + 1, LIMIT - 1, LIMIT, LIMIT + 1]
Steps = list[tuple[str, int, int]]


def graph_of(steps: Steps, constants: list[int]) -> onnx.ModelProto:
    """Return a graph that applies each step to earlier values, all of which are outputs."""
    values = ["t", *(f"c{at}" for at in range(len(constants)))]
    nodes = []
    for at, (op, one, other) in enumerate(steps):
        operands = [values[one % len(values)]]
        operands += [values[other % len(values)]] if op in {*BINARY, "Div", "Mod"} else []
        operands += {"Clip": ["c0", "c1"], "CumSum": ["zero"], "ReduceSum": ["axes"]}.get(op, [])
        nodes.append(onnx.helper.make_node(op, operands, [f"v{at}"]))
        values.append(f"v{at}")
    stored = {f"c{at}": np.array([one]) for at, one in enumerate(constants)}
    stored |= {"zero": np.array(0), "axes": np.array([0])}
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("t", TensorProto.INT64, [4])],
        [onnx.helper.make_tensor_value_info(f"v{at}", TensorProto.INT64, None) for at in range(len(steps))],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)


def evaluated(steps: Steps, constants: list[int], t: np.ndarray[Any, Any], dtype: type[np.generic]) -> Arrays:
    """Return all values, each computed in `dtype`. Raises ZeroDivisionError."""
    values: Arrays = [t.astype(dtype), *(np.array([one], dtype) for one in constants)]
    for op, one, other in steps:
        a, b = values[one % len(values)], values[other % len(values)]
        if op in {"Div", "Mod"} and not b.all():
            raise ZeroDivisionError
        if op in BINARY:
            found = BINARY[op](a, b)
        elif op == "Div":
            found = np.trunc(a / b) if dtype is np.float32 else np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
        elif op == "Mod":
            found = np.mod(a, b)
        elif op == "Clip":
            found = np.clip(a, values[1], values[2])
        else:
            found = np.sum(a) if op == "ReduceSum" else UNARY[op](a)
        values.append(np.asarray(found, dtype).reshape(-1))
    return values


@settings(max_examples=400, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=4), st.lists(st.sampled_from(NUMBERS), min_size=2, max_size=4), st.data())
def test_what_is_proven_is_the_same_in_fp32(steps: Steps, constants: list[int], data: st.DataObject) -> None:
    constants = [*sorted(constants[:2]), *constants[2:]]
    proof = prove(graph_of(steps, constants), NARROWS)
    if proof.why:
        return
    least, greatest = proof.bounds.get("t", (-(2**62), 2**62))
    numbers = st.integers(int(least), int(greatest)) | st.sampled_from([int(least), int(greatest), 0, -1])
    t = np.array(data.draw(st.lists(numbers, min_size=4, max_size=4)), np.int64)
    try:
        wide, narrow = (evaluated(steps, constants, t, dtype) for dtype in (np.int64, np.float32))
    except ZeroDivisionError:  # the version fails, too
        return
    first = 1 + len(constants)
    for (op, *_), one, other in zip(steps, wide[first:], narrow[first:], strict=True):
        np.testing.assert_array_equal(one, other.astype(np.int64), err_msg=op)
