"""DataFrames of pandas and images of Pillow, sent by the client and the command as they are; answers as the library's.

tests/frameworks/test_client_arrow.py does the same with polars and pyarrow.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import xgboost
from PIL import Image
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from millstream import Client, Failure, ServerError
from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.stack import WAIT_S, Stack, assert_nothing_left, running_stack

pytestmark = pytest.mark.frameworks

IRIS: Any = load_iris(as_frame=True)
FLOWERS: Any = IRIS.data.set_index("flower " + IRIS.data.index.astype(str))
SPECIES = IRIS.target_names[IRIS.target]
NAMED = LogisticRegression(max_iter=500).fit(FLOWERS, SPECIES)
NAMELESS = LinearRegression().fit(FLOWERS.to_numpy(), IRIS.target)
RIDES = pd.DataFrame(
    {
        "city": ["Zürich", "Genève", "😀", "Zürich"] * 10,
        "unused": "text",
        "age": np.arange(40.0),
        "fare": np.arange(40) ** 2,
    }
)
MIXED = make_pipeline(
    ColumnTransformer([("text", OneHotEncoder(), ["city"]), ("numbers", StandardScaler(), ["age", "fare"])]),
    LogisticRegression(),
).fit(RIDES, [0, 1, 0, 0] * 10)
COLOURS = pd.DataFrame({"colour": pd.Categorical(["red", "blue", None, "green"] * 20), "size": np.arange(80.0)})
CODED = xgboost.XGBClassifier(n_estimators=8, enable_categorical=True).fit(COLOURS, [0, 1, 1, 0] * 20)
TREES = xgboost.XGBClassifier(n_estimators=8).fit(FLOWERS, IRIS.target)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("models")
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        for name, model in {"named": NAMED, "nameless": NAMELESS, "mixed": MIXED}.items():
            joblib.dump(model, folder / name)
            with Client(running.url, key=running.key) as client:
                client.push(name, folder / name, allow_pickle=True, wait_s=WAIT_S)
        for name, trees in {"trees": TREES, "coded": CODED}.items():
            trees.save_model(folder / f"{name}.json")
            running.push(name, folder / f"{name}.json")
        for name, datatype, shape in (
            ("first", "UINT8", ("N", 3, 8, 9)),
            ("last", "UINT8", ("N", "H", "W", 3)),
            ("grey", "UINT8", ("N", 8, 9, 1)),
            ("floats", "FP32", ("N", 3, 8, 9)),
        ):
            running.push(name, models.identity(folder / f"{name}.onnx", datatype, shape))
        yield running
        assert_nothing_left(running)


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, key=stack.key) as client:
        yield client


def test_a_dataframe_is_answered_by_one_with_the_same_index(client: Client) -> None:
    rows = FLOWERS[FLOWERS.columns[::-1]].sample(frac=1, random_state=1)  # columns and rows in another order
    answer = client.predict("named", rows)
    assert answer.index.equals(rows.index)
    assert answer["label"].tolist() == NAMED.predict(FLOWERS.loc[rows.index]).tolist()
    scores = answer[[f"probabilities_{at}" for at in range(3)]].to_numpy()
    assert np.allclose(scores, NAMED.predict_proba(FLOWERS.loc[rows.index]), rtol=1e-3, atol=1e-5)
    none = client.predict("named", FLOWERS[:0])
    assert (len(none), "label" in none.columns) == (0, True)


@pytest.mark.parametrize("model", ["named", "trees"])
def test_names_of_columns_are_matched_in_each_kind_of_table(client: Client, model: str) -> None:
    rows = FLOWERS[FLOWERS.columns[::-1]].reset_index(drop=True)
    expected = (NAMED if model == "named" else TREES).predict_proba(FLOWERS)
    records = client.predict(model, rows.to_dict("records"))
    assert np.allclose([row["probabilities"] for row in records], expected, rtol=1e-3, atol=1e-5)
    columns = client.predict(model, rows.to_dict("list"))
    assert np.allclose(columns["probabilities"], expected, rtol=1e-3, atol=1e-5)
    one = rows.iloc[0].to_dict()
    assert np.allclose(client.predict(model, one)["probabilities"], expected[:1], rtol=1e-3, atol=1e-5)
    with pytest.raises(Failure, match="column 'petal' is unknown"):
        client.predict(model, rows.rename(columns={"petal width (cm)": "petal"}))
    with pytest.raises(Failure, match=r"column 'petal width \(cm\)' is missing"):
        client.predict(model, rows.drop(columns="petal width (cm)"))


def test_each_kind_of_column_gives_the_same_answer(client: Client) -> None:
    rows = RIDES[:6]
    expected = MIXED.predict_proba(rows)
    for changed in (
        rows,
        rows.assign(city=rows["city"].astype("category")),
        rows.assign(city=rows["city"].astype("string"), fare=rows["fare"].astype("Int64")),
        rows.assign(age=rows["age"].astype(object), fare=rows["fare"].astype("Float32")),
        rows[["fare", "city", "unused", "age"]],
        rows.assign(unused=1),
    ):
        answer = client.predict("mixed", changed)
        assert np.allclose(answer[["probabilities_0", "probabilities_1"]], expected, rtol=1e-3, atol=1e-5)
    for wrong, says in (
        (rows.assign(city=[None] * 6), "input 'city': value 0 is missing"),
        (rows.assign(age=pd.Timestamp("2020-01-01")), "input 'age': dates .* cannot be sent as FP32"),
        (rows.assign(age="old"), "input 'age': 'old' cannot be sent as FP32"),
        (rows.set_axis(["city", "unused", "age", "age"], axis="columns"), "the table has 2 columns 'age'"),
        (rows.set_axis(pd.MultiIndex.from_product([["a"], rows.columns]), axis="columns"), "whose name is no text"),
        (rows.drop(columns="age"), "age"),
        (rows.rename(columns={"age": "Age"}), "'Age'.* did you mean 'age'"),
    ):
        with pytest.raises(Failure, match=says) as failure:
            client.predict("mixed", wrong)
        assert "\n" not in failure.value.message


def test_missing_values_reach_a_model_that_takes_them(client: Client) -> None:
    rows = FLOWERS[::10].copy()
    rows.iloc[::2, 1] = None
    expected = TREES.predict_proba(rows)
    for given in (rows, rows.convert_dtypes()):
        answer = client.predict("trees", given)
        assert np.allclose(np.asarray(answer["probabilities_1"]), expected[:, 1], rtol=1e-3, atol=1e-5)


def test_categories_are_sent_as_text_and_a_missing_one_as_missing(client: Client) -> None:
    expected = CODED.predict_proba(COLOURS)[:, 1]
    for given in (COLOURS, COLOURS.astype({"colour": "string"})[["size", "colour"]], COLOURS.astype(object)):
        answer = client.predict("coded", given)
        assert np.allclose(answer["probabilities_1"], expected, rtol=1e-3, atol=1e-5)
    with pytest.raises(Failure, match="has 'pink' in row 0, a category that the model was not fitted with"):
        client.predict("coded", [{"colour": "pink", "size": 1}])


def test_a_table_for_a_model_without_names_is_read_by_position(client: Client) -> None:
    expected = NAMELESS.predict(FLOWERS.to_numpy())
    for rows in (FLOWERS, pd.DataFrame(FLOWERS.to_numpy()), FLOWERS.to_numpy(), FLOWERS.to_numpy().tolist()):
        answer: Any = client.predict("nameless", rows)
        found = answer.to_numpy() if isinstance(answer, pd.DataFrame) else answer.array
        assert np.allclose(found.ravel(), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(Failure, match="the table has 3 columns, and input 'input' of nameless takes 4"):
        client.predict("nameless", FLOWERS.iloc[:, :3])


def test_a_column_of_lists_is_an_input_of_several_values(client: Client) -> None:
    rows = pd.DataFrame({"x": [np.arange(27).reshape(3, 3, 3)] * 2}, index=["a", "b"])
    answer = client.predict("last", rows)
    assert (answer.index.tolist(), answer["y"].tolist()) == (["a", "b"], [rows["x"]["a"].tolist()] * 2)
    with pytest.raises(Failure, match="its lists differ in length"):
        client.predict("last", rows.assign(x=[[1, 2], [3]]))


def test_the_command_reads_and_writes_tables(stack: Stack, tmp_path: Path) -> None:
    command = Millstream(stack.home)
    rows = FLOWERS[FLOWERS.columns[::-1]].reset_index(drop=True)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    rows.to_json(tmp_path / "rows.json")
    rows.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    for name in ("rows.csv", "rows.json", "rows.jsonl"):
        command.ok("predict", "named", "-i", tmp_path / name, "-o", tmp_path / "out.csv")
        assert pd.read_csv(tmp_path / "out.csv")["label"].tolist() == NAMED.predict(FLOWERS).tolist()
    rows.to_csv(tmp_path / "index.csv")
    assert "to_csv(index=False)" in command.fails("predict", "named", "-i", tmp_path / "index.csv")


def picture(**more: Any) -> Any:
    pixels = np.random.default_rng(1).integers(0, 256, (8, 9, 3)).astype(np.uint8)
    return Image.fromarray(pixels, **more)


def encoded(image: Any, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def test_images_are_sent_as_their_pixels(client: Client, stack: Stack, tmp_path: Path) -> None:
    image = picture()
    (tmp_path / "image.png").write_bytes(encoded(image))
    wanted = np.asarray(image)
    for given in (image, encoded(image), tmp_path / "image.png", str(tmp_path / "image.png"), image.convert("RGBA")):
        assert np.array_equal(client.predict("first", given).array, wanted.transpose(2, 0, 1)[None])
        assert np.array_equal(client.predict("last", [given, given]).array, np.stack([wanted, wanted]))
        assert np.array_equal(client.predict("last", {"x": given}).array, wanted[None])
    assert np.array_equal(client.predict("grey", image).array[0, :, :, 0], np.asarray(image.convert("L")))
    command = Millstream(stack.home)
    command.ok("predict", "first", "-i", tmp_path / "image.png", "-o", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as out:
        assert np.array_equal(out["y"], wanted.transpose(2, 0, 1)[None])


def test_what_would_be_a_guess_about_an_image_is_refused(client: Client) -> None:
    image = picture()
    for model, given, says in (
        ("floats", image, r"does not say how pixels become its values .* np.asarray\(image\).transpose\(2, 0, 1\)"),
        ("first", image.resize((20, 10)), r"has 20 x 10 pixels, .* such as image.resize\(\(9, 8\)\)"),
        ("first", Image.new("RGBA", (9, 8)), "transparent in places"),
        ("first", Image.new("I;16", (9, 8)), "values of mode I;16"),
        ("last", [image, image.resize((3, 3))], "the images have different sizes"),
        ("last", encoded(image)[:200], "the bytes cannot be decoded as an image"),
        ("last", b"text", "its format is unknown"),
        ("named", image, "not an image or the bytes of a file"),
    ):
        with pytest.raises(Failure, match=says) as failure:
            client.predict(model, given)
        assert not isinstance(failure.value, ServerError)
        assert "\n" not in failure.value.message
