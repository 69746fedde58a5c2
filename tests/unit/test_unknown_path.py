"""What a 404 says about a path that no route has."""

from __future__ import annotations

import pytest

from millstream.gateway.http.errors import path_advice

RULE = "a model name has no slash: use 1 to 128 letters, digits, '.', '_' or '-'"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v2/models/team/model/infer", RULE),
        ("/v2/models/team/model/versions/1/infer", RULE),
        ("/v1/models/team/model:predict", RULE),
        ("/admin/v1/models/team/model/versions", RULE),
        ("/v2/repository/models/team/model/load", RULE),
        ("/v2/models/m/inference", "did you mean 'infer'?"),
        ("/v2/models/m/generatestream", "did you mean 'generate_stream'"),
        ("/v2/models/m/infer/", "ends with a slash"),
        ("/v2/models//infer", "no model name"),
    ],
)
def test_the_advice_fits_the_path(path: str, says: str) -> None:
    assert says in path_advice(path)


@pytest.mark.parametrize("path", ["/", "/nowhere", "/v2", "/v2/models", "/v2/models/m", "/v2/models/m/versions/1/x"])
def test_other_paths_get_none(path: str) -> None:
    assert path_advice(path) == ""


def test_the_advice_is_bounded() -> None:
    assert len(path_advice("/v2/models/m/" + "x" * 100_000)) < 500
