"""What is found in the text of a LightGBM model, before the library reads it: damage ends its process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millstream.plugins.convert.boosted_trees import END, text_fault

SPLITS = {
    "num_leaves": "3",
    "num_cat": "0",
    "split_feature": "0 1",
    "threshold": "0.5 1e-3",
    "decision_type": "2 2",
    "left_child": "1 -1",
    "right_child": "-2 -3",
    "leaf_value": "-0.5 0.25 inf",
}
LEAF = dict.fromkeys(SPLITS, "") | {"num_leaves": "1", "num_cat": "0", "leaf_value": "0.5"}


def tree(number: int, values: dict[str, str]) -> str:
    return f"Tree={number}\n" + "".join(f"{key}={value}\n" for key, value in values.items()) + "\n\n"


def model(*trees: dict[str, str], features: str = "größe b", sizes: str | None = None) -> str:
    texts = [tree(number, values) for number, values in enumerate(trees)]
    measured = " ".join(str(len(text.encode())) for text in texts)
    head = f"tree\nversion=v4\nmax_feature_idx=1\nfeature_names={features}\ntree_sizes={sizes or measured}\n\n"
    return head + "".join(texts) + f"{END}\n\nparameters:\n[boosting: gbdt]\nend of parameters\n"


def test_a_whole_model_has_no_fault():
    assert text_fault(model(SPLITS, LEAF, SPLITS)) is None


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda text: text[:-200], "cut short"),
        (lambda text: text.replace("Tree=0\n", "Tr"), "no tree"),
        (lambda text: text.replace("Tree=1\n", "Tree=7\n"), "tree 1 does not begin where"),
        (lambda text: text.replace("threshold=0.5 1e-3\n", "", 1), "tree 0 has no line threshold"),
        (lambda text: text.replace("tree_sizes=", "sizes="), "no line tree_sizes"),
        (lambda text: text.replace("max_feature_idx=1", "max_feature_idx=x"), "no number"),
        (lambda text: text.replace("threshold=0.5 1e-3", "threshold=0.5 1e-x"), "tree 0: threshold has a value that"),
        (lambda text: text.replace("threshold=0.5 1e-3", "threshold=0.5_1e-3"), "tree 0: threshold has"),
        (lambda text: text.replace("leaf_value=-0.5 0.25", "leaf_value=-0.50.25 "), "leaf_value has"),
        (lambda text: text.replace("left_child=1 -1", "left_child=2 -1"), "left_child names a node"),
        (lambda text: text.replace("right_child=-2 -3", "right_child=-2 -9"), "right_child names a node"),
        (lambda text: text.replace("split_feature=0 1", "split_feature=0 2"), "a feature that the model does not have"),
        (lambda text: text.replace("num_leaves=3", "num_leaves=9", 1), "split_feature has 2 values instead of 8"),
        (lambda text: text.replace("num_leaves=3", "num_leaves=", 1), "does not begin|num_leaves has 0 values"),
        (lambda text: text.replace("threshold=", "thresholx=", 1), "tree 0 has no line threshold"),
    ],
)
def test_damage_is_named(damage: Callable[[str], str], fault: str) -> None:
    found = text_fault(damage(model(SPLITS, SPLITS)))
    assert found is not None
    assert any(words in found for words in fault.split("|")), found


def test_a_header_that_names_other_trees_is_a_fault():
    assert text_fault(model(SPLITS, sizes="1 2 3")) is not None
    more = model(SPLITS, SPLITS)
    sizes = more.split("tree_sizes=")[1].split("\n")[0]
    assert "more or fewer trees" in str(text_fault(more.replace(sizes, sizes.split()[0], 1)))
