"""Finds damage in the text of a LightGBM model, which ends the process of the library that reads it. Pure.

Format: LightGBM's `GBDT::SaveModelToString` and `Tree::ToString`. A header of KEY=VALUE lines, with the bytes of each
tree in `tree_sizes`; the trees; `end of trees`.
"""

from __future__ import annotations

from collections.abc import Mapping

END = "end of trees"
_FIRST = "\nTree=0\n"
#: lists of a tree with one element for each split
_OF_SPLITS = ("split_feature", "threshold", "decision_type", "left_child", "right_child")
_CHILDREN = ("left_child", "right_child")


def text_fault(text: str) -> str | None:
    """Return what is wrong with the text of a model, for people; None: nothing that this finds."""
    end = text.find(END)
    if end < 0:
        return f"it was cut short: it has no `{END}`"
    first = text.find(_FIRST, 0, end)
    if first < 0:
        return "it has no tree"
    head = _values(text[:first])
    try:
        sizes = [int(word) for word in head["tree_sizes"].split()]
        features = int(head["max_feature_idx"]) + 1
    except KeyError as error:
        return f"its header has no line {error.args[0]}"
    except ValueError:
        return "its header has no number where one should be"
    data = text[first + 1 : end].encode()
    at = 0
    for number, size in enumerate(sizes):
        fault = _tree_fault(data[at : at + size], number, features)
        if fault is not None:
            return fault
        at += size
    return None if len(data) == at else "it has more or fewer trees than its header says"


def _tree_fault(data: bytes, number: int, features: int) -> str | None:
    if not data.startswith(b"Tree=%d\n" % number):
        return f"tree {number} does not begin where the header says"
    values = _values(data.decode(errors="replace"))
    lists: dict[str, list[float]] = {}
    for name in ("num_leaves", *_OF_SPLITS, "leaf_value"):
        if name not in values:
            return f"tree {number} has no line {name}"
        try:
            lists[name] = [float(word) for word in values[name].split()]
        except ValueError:
            return f"tree {number}: {name} has a value that is no number"
        leaves = lists["num_leaves"][0] if lists["num_leaves"] else 0
        wanted = {"num_leaves": 1, "leaf_value": leaves}.get(name, leaves - 1)
        if len(lists[name]) != wanted:
            return f"tree {number}: {name} has {len(lists[name])} values instead of {wanted:g}"
    for name in _CHILDREN:
        if not all(-leaves <= child < leaves - 1 for child in lists[name]):
            return f"tree {number}: {name} names a node that it does not have"
    if not all(0 <= feature < features for feature in lists["split_feature"]):
        return f"tree {number} splits by a feature that the model does not have"
    return None


def _values(text: str) -> Mapping[str, str]:
    """Return the KEY=VALUE lines of a text."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key: value for key, equals, value in pairs if equals}
