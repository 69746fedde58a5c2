"""Operators of classical machine learning (domain ai.onnx.ml), whose input is a matrix with one row per example.

Most of them treat a vector as one example, so a value with rows must be a matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx

from millstream.plugins.proof.expression import ONE, Expression, Symbols, number, product
from millstream.plugins.proof.node import Call, Rule, Rules, always_dependent, dims_of
from millstream.plugins.proof.rules.elementwise import unary
from millstream.plugins.proof.rules.normalization import same
from millstream.plugins.proof.value import Dependent, Rows, Value, free, rowed


def _examples(call: Call) -> tuple[Value, Rows | None]:
    """Return the first operand and its row layout. Raises Dependent unless it is a matrix with rows on axis 0."""
    call.only_rowed(0)
    value = call.input(0)
    if value.rows is not None and (len(dims_of(value)) != 2 or value.rows.axis != 0):
        raise Dependent("its input is not a matrix with the rows on axis 0")
    return value, value.rows


def scored(call: Call) -> list[Value]:
    """Rule of classifiers (a label and class scores per example) and regressors (targets)."""
    _, rows = _examples(call)
    if rows is None:
        return [free() for _ in range(call.outputs)]
    scores = rowed([rows.size, _columns(call)], rows)
    if call.op.endswith("Classifier"):
        return [rowed([rows.size], rows), scores]
    return [scores]


def _columns(call: Call) -> Expression:
    """Return the number of scores or targets per example; a new symbol if it is not the value of an attribute."""
    if call.op == "TreeEnsembleClassifier":
        labels = call.attribute("classlabels_int64s", None) or call.attribute("classlabels_strings", [])
        return number(len(labels)) if len(labels) > 1 else call.symbols.fresh()
    if call.op == "LinearClassifier":  # with one intercept there may be two scores
        classes = len(call.attribute("intercepts", []))
        return number(classes) if classes > 1 else call.symbols.fresh()
    if call.op in {"TreeEnsembleRegressor", "TreeEnsemble"}:
        return number(int(call.attribute("n_targets", 1)))
    return number(int(call.attribute("targets", 1))) if call.op == "LinearRegressor" else call.symbols.fresh()


def by_example(call: Call) -> list[Value]:
    """Rule of Scaler, Normalizer and Imputer, which keep the number of columns."""
    value, _ = _examples(call)
    return [same(value)]


def widened(call: Call) -> list[Value]:
    """Rule of OneHotEncoder, which adds a last axis for the categories."""
    value = call.input(0)
    categories = call.attribute("cats_int64s", None) or call.attribute("cats_strings", [])
    dims = [*dims_of(value), number(len(categories))]
    return [free(dims) if value.rows is None else rowed(dims, value.rows)]


def joined_features(call: Call) -> list[Value]:
    """Rule of FeatureVectorizer, which concatenates the columns of several matrices."""
    values = [value for value in call.inputs if value is not None]
    rows = values[0].rows
    for value in values:
        if len(dims_of(value)) != 2 or value.rows != rows or (rows is not None and rows.axis != 0):
            raise Dependent("its inputs are not all matrices with the rows on axis 0")
    dims = [dims_of(values[0])[0], call.symbols.fresh()]
    return [free(dims) if rows is None else rowed(dims, rows)]


def vectorized(call: Call) -> list[Value]:
    """Rule of TfIdfVectorizer: counts for each example."""
    value, rows = _examples(call)
    return [free() if rows is None else rowed([dims_of(value)[0], call.symbols.fresh()], rows)]


def extracted(call: Call) -> list[Value]:
    """Rule of ArrayFeatureExtractor: X at positions Y of its last axis; for a vector X the result has one row."""
    value, positions = call.input(0), call.input(1)
    if value.rows is not None and positions.rows is not None:
        raise Dependent("rows are looked up by positions in the whole batch")
    dims = dims_of(value)
    before: list[Expression] = [ONE] if len(dims) == 1 else list(dims[:-1])
    count = product(dims_of(positions))
    if positions.rows is not None:
        return [rowed([*before, count], _flattened(positions, positions.rows, len(before)))]
    if value.rows is None:
        return [free([*before, count])]
    if value.rows.axis == len(dims) - 1:
        raise Dependent("it selects some of the rows")
    return [rowed([*before, count], value.rows)]


def _flattened(value: Value, rows: Rows, axis: int) -> Rows:
    """Return the row layout after all axes are flattened into one."""
    dims = dims_of(value)
    return Rows(axis, product(dims[: rows.axis]) * rows.outer, rows.inner * product(dims[rows.axis + 1 :]))


def normalized_text(call: Call) -> list[Value]:
    """Rule of StringNormalizer: without stop words it keeps every element of a vector."""
    value = call.input(0)
    if call.attribute("stopwords", []):
        raise Dependent("it removes elements")
    if len(dims_of(value)) != 1:
        raise Dependent("it takes a matrix of one row only")
    return [same(value)]


#: text operators of the main domain
TEXT_RULES: Rules = {"StringNormalizer": Rule(normalized_text), "TfIdfVectorizer": Rule(vectorized)}

RULES: Rules = {
    "ArrayFeatureExtractor": Rule(extracted),
    "Binarizer": Rule(unary),
    "CategoryMapper": Rule(unary),
    "FeatureVectorizer": Rule(joined_features),
    "Imputer": Rule(by_example),
    "LabelEncoder": Rule(unary),
    "LinearClassifier": Rule(scored),
    "LinearRegressor": Rule(scored),
    "Normalizer": Rule(by_example),
    "OneHotEncoder": Rule(widened),
    "SVMClassifier": Rule(scored),
    "SVMRegressor": Rule(scored),
    "Scaler": Rule(by_example),
    "TreeEnsemble": Rule(scored),
    "TreeEnsembleClassifier": Rule(scored),
    "TreeEnsembleRegressor": Rule(scored),
    "ZipMap": Rule(always_dependent("its output is a list of maps, not a tensor")),
}


class _Tokens(NamedTuple):
    """A matrix of tokens: the layout of its rows, and the text that fills them."""

    rows: Rows
    filler: bytes


class Texts:
    """The matrices of tokens in the outermost graph, in which every name stands for one value.

    skl2onnx writes them from Tokenizer to TfIdfVectorizer. Tokenizer makes a matrix that is as wide as the longest text
    of the batch, and fills the other rows at their end. Only TfIdfVectorizer may read it, if no text of its vocabulary
    is the one that fills: then it counts the same for any width. For all other operators the matrix is mixed. Source:
    ONNX Runtime, docs/ContribOperators.md.
    """

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols
        self._tokens: dict[str, _Tokens] = {}

    def follow(self, node: onnx.NodeProto, value: Value | None) -> Value | None:
        """Return the output of a node if it counts tokens, and else note whether it makes or passes on tokens.

        `value`: the first operand, where it is not mixed.
        """
        attributes = {attribute.name: attribute for attribute in node.attribute}
        name = node.input[0] if node.input else ""
        if (node.domain, node.op_type) == ("com.microsoft", "Tokenizer"):
            if value is not None and value.rank == 1 and value.rows == Rows(0) and "pad_value" in attributes:
                self._tokens[node.output[0]] = _Tokens(value.rows, attributes["pad_value"].s)
            return None
        tokens = self._tokens.get(name)
        if tokens is None or node.domain not in {"", "ai.onnx"}:
            return None
        if node.op_type == "Flatten" and not attributes:
            self._tokens[node.output[0]] = tokens
        vocabulary = attributes.get("pool_strings")
        if node.op_type != "TfIdfVectorizer" or vocabulary is None or tokens.filler in vocabulary.strings:
            return None
        return rowed([tokens.rows.size, self._symbols.fresh()], tokens.rows)
