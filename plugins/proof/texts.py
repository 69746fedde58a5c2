"""Follows texts from Tokenizer to TfIdfVectorizer, as skl2onnx writes them.

Tokenizer makes a matrix that is as wide as the longest text of the batch, and fills the other rows at their end. Only
TfIdfVectorizer may read it, if no text of its vocabulary is the one that fills: then it counts the same for any width.
For all other operators the matrix is mixed. Source: ONNX Runtime, docs/ContribOperators.md.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx

from millstream.plugins.proof.expression import Symbols
from millstream.plugins.proof.value import Rows, Value, rowed

_DOMAIN = "com.microsoft"


class _Tokens(NamedTuple):
    """A matrix of tokens: the layout of its rows, and the text that fills them."""

    rows: Rows
    filler: bytes


class Texts:
    """The matrices of tokens in the outermost graph, in which every name stands for one value."""

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols
        self._tokens: dict[str, _Tokens] = {}

    def follow(self, node: onnx.NodeProto, value: Value | None) -> Value | None:
        """Return the output of a node if it counts tokens, and else note whether it makes or passes on tokens.

        `value`: the first operand, where it is not mixed.
        """
        attributes = {attribute.name: attribute for attribute in node.attribute}
        name = node.input[0] if node.input else ""
        if (node.domain, node.op_type) == (_DOMAIN, "Tokenizer"):
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
