"""What docs/migrating.md says to push is served as it stands there."""

from __future__ import annotations

import io
import re
from pathlib import Path

import joblib
import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.tree import DecisionTreeClassifier

from tests.plugins.functions.served import answers, check, loaded, texts

PAGE = Path(__file__).parents[4] / "docs" / "migrating.md"
PUSHED = re.findall(r"```python\n# service\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
ROWS, KINDS = load_iris(return_X_y=True)
COLUMNS = ("sepal", "width", "petal", "depth")
#: a word of an example -> inputs and outputs
CASES = {
    "number**2": ({"number": np.array([3.0])}, [[9.0]]),
    "rows: Annotated": ({"rows": ROWS[::40]}, [KINDS[::40].tolist()]),
    "sepal": (
        dict(zip(("sepal", "width", "petal", "depth"), ROWS[::40].T.copy(), strict=True)),
        [KINDS[::40].tolist()],
    ),
    "Sentiment": ({"text": texts("good good bad", "bad")}, [[1, -1]]),
    "Order": ({"order": texts('{"prices": [1, 2], "tax": 1}')}, [[b'{"total": 6.0}']]),
}


@pytest.mark.parametrize("word", CASES)
def test_what_the_page_pushes_answers(tmp_path: Path, word: str) -> None:
    (source,) = (one for one in PUSHED if word in one)
    inputs, outputs = CASES[word]
    written = io.BytesIO()
    joblib.dump(DecisionTreeClassifier(random_state=0).fit(ROWS, KINDS), written)
    with loaded(check(tmp_path, source, files={"model.joblib": written.getvalue()})) as instance:
        assert answers(instance, inputs) == outputs


def test_every_example_of_the_page_is_tried() -> None:
    assert len(PUSHED) == len(CASES)
