"""What the command line says of how a version wants to be called, and that its example is answered."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import joblib
import lightgbm
import numpy as np
import pandas as pd
import pytest
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from tests.frameworks.test_huggingface import fast_tokenizer, small
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras reads it when it is imported

import keras

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]

PEOPLE = pd.DataFrame(
    {"age": np.arange(60.0) % 37, "sex": ["female", "male", "male"] * 20, "fare": np.arange(60.0) % 11}
)
SURVIVED = (PEOPLE["sex"] == "female").astype(int)


def trees(folder: Path) -> Path:
    table = PEOPLE.assign(sex=PEOPLE["sex"].astype("category"))
    model = lightgbm.LGBMClassifier(n_estimators=4, min_child_samples=5, verbose=-1).fit(table, SURVIVED)
    model.booster_.save_model(folder / "trees.txt")
    return folder / "trees.txt"


def pipeline(folder: Path) -> Path:
    columns = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore"), ["sex"]), (StandardScaler(), ["age", "fare"])
    )
    joblib.dump(make_pipeline(columns, LogisticRegression()).fit(PEOPLE, SURVIVED), folder / "pipeline.joblib")
    return folder / "pipeline.joblib"


def classifier(folder: Path) -> Path:
    small(folder / "text", "BertForSequenceClassification", id2label={0: "bad", 1: "good"}, label2id=None)
    fast_tokenizer("WordLevel", ["a good film"]).save_pretrained(folder / "text")
    return folder / "text"


def encoder(folder: Path) -> Path:
    small(folder / "ids", "BertModel")
    return folder / "ids"


def network(folder: Path) -> Path:
    layers = keras.layers
    image = keras.Input((16, 16, 3), name="image")
    keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(image))).save(folder / "network.keras")
    return folder / "network.keras"


@pytest.mark.parametrize(
    ("made", "kind", "takes"),
    [
        (trees, "columns", "a table with the columns age, sex, fare"),
        (pipeline, "columns", "a table with the columns"),
        (classifier, "text", "texts, which are tokenized here"),
        (encoder, "tokens", "token ids, since it has no tokenizer"),
        (network, "image", "images of 16 x 16, RGB, channels last"),
    ],
)
def test_a_version_says_what_it_takes(stack: Stack, tmp_path: Path, made: Any, kind: str, takes: str) -> None:
    name = made.__name__
    millstream = Millstream(stack.home)
    pushed = " ".join(millstream.ok("push", name, made(tmp_path), "--allow-pickle").split())
    assert f"takes {takes}" in pushed
    assert f"takes {takes}" in " ".join(millstream.ok("describe", name).split())
    usage = json.loads(millstream.ok("describe", name, "--json"))["versions"][0]["usage"]
    assert usage["kind"] == kind
    if usage["example"] is not None:
        reply = stack.http.post(f"/v2/models/{name}/infer", json=usage["example"])
        assert reply.status_code == 200, reply.text
    assert "version 1" in millstream.ok("predict", name, "--example")
    if kind == "columns":
        assert usage["example"] is not None
        assert {one["name"] for one in usage["example"]["inputs"]} == set(PEOPLE)
