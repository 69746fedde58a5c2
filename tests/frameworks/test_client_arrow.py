"""Tables of polars and pyarrow, and .parquet files, sent by the client and the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet

from millstream import Client
from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, assert_nothing_left, running_stack

pytestmark = pytest.mark.frameworks

ROWS = pd.DataFrame({"x1": [0.5, None, 2], "x0": ["ü", "😀", "ü"], "x2": [1, 2, 3]}, index=["a", "b", "c"])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("models")
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        running.push("table", models.identities(folder / "table.onnx", ("BYTES", "FP32", "INT64"), columns=1))
        yield running
        assert_nothing_left(running)


TABLES: dict[str, Any] = {
    "polars": pl.from_pandas(ROWS),
    "polars, categories": pl.from_pandas(ROWS).with_columns(pl.col("x0").cast(pl.Categorical)),
    "pyarrow": pa.Table.from_pandas(ROWS, preserve_index=False),
    "pyarrow, categories": pa.Table.from_pandas(ROWS.astype({"x0": "category"}), preserve_index=False),
    "pandas on pyarrow": ROWS.convert_dtypes(dtype_backend="pyarrow"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_answered_by_one_of_its_kind(stack: Stack, name: str) -> None:
    given = TABLES[name]
    with Client(stack.url, key=stack.key) as client:
        answer = client.predict("table", given)
    assert type(answer) is type(given)
    assert list(answer["y0"].to_pylist() if name.startswith("pyarrow") else answer["y0"]) == ["ü", "😀", "ü"]
    np.testing.assert_array_equal(np.asarray(answer["y1"], np.float64), [0.5, np.nan, 2])
    assert np.asarray(answer["y2"]).tolist() == [1, 2, 3]


def test_the_command_reads_and_writes_parquet(stack: Stack, tmp_path: Path) -> None:
    command = Millstream(stack.home)
    ROWS.astype({"x0": "category"}).to_parquet(tmp_path / "rows.parquet")  # the index is a column of the file
    command.ok("predict", "table", "-i", tmp_path / "rows.parquet", "-o", tmp_path / "out.parquet")
    answer = pd.read_parquet(tmp_path / "out.parquet")
    assert (answer["y0"].tolist(), answer["y2"].tolist()) == (["ü", "😀", "ü"], [1, 2, 3])
    none = pa.Table.from_pandas(ROWS.assign(x0=pd.Categorical(["a", None, "b"])))
    parquet.write_table(none, tmp_path / "none.parquet")
    assert "input 'x0': value 1 is missing" in command.fails("predict", "table", "-i", tmp_path / "none.parquet")
