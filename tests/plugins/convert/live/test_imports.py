"""Uploads of scikit-learn's models: the import as a whole, and everything that must be refused.

The tests of other frameworks are in tests/frameworks.
"""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import uniform
from sklearn.cluster import DBSCAN, KMeans
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingClassifier, IsolationForest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier

from millstream.services.errors import Code, Failure
from millstream.services.ingest.importers import ImportOptions, read_sample
from millstream.services.ingest.upload import ModelUpload
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings
from tests.kit import pickles
from tests.kit.command_line import Millstream
from tests.kit.stack import WAIT_S, Stack
from tests.kit.wait import wait_until


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[FolderRepository]:
    root = tmp_path / "repository"
    yield FolderRepository(root)
    assert list((root / ".staging").iterdir()) == []


X, Y = load_iris(return_X_y=True)
NAMES = load_iris().target_names
ROWS = X[::10].astype(np.float32)


def iris() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression()).fit(X, NAMES[Y])


async def _upload(repository: FolderRepository, content: bytes, options: ImportOptions, settings: Settings) -> Manifest:
    async with ModelUpload(repository, settings, "iris", None, ModelConfig()) as incoming:
        incoming.options = options
        await incoming.write(content)
        return (await incoming.publish()).manifest


def uploaded(
    repository: FolderRepository, content: bytes, *, allow_pickle: bool = True, settings: Settings | None = None
) -> Manifest:
    options = ImportOptions(allow_pickle=allow_pickle)
    return asyncio.run(_upload(repository, content, options, settings or Settings()))


def refused(
    repository: FolderRepository, content: bytes, *, allow_pickle: bool = True, settings: Settings | None = None
) -> str:
    """Return the one line of the refusal; nothing may be left of the upload."""
    with pytest.raises(Failure) as caught:
        uploaded(repository, content, allow_pickle=allow_pickle, settings=settings)
    assert caught.value.code is Code.INVALID, caught.value.message
    assert "\n" not in caught.value.message
    assert list(repository.models()) == []
    return caught.value.message


def test_a_pipeline_becomes_a_version_with_its_samples(repository: FolderRepository) -> None:
    model = iris()
    manifest = uploaded(repository, pickles.dumped(model))
    folder = repository.local_path("iris", 1)
    assert manifest.source_format == "onnx"
    assert [spec.name for spec in manifest.signature.outputs] == ["label", "probabilities"]
    assert manifest.signature.batching
    record = manifest.imported
    assert record is not None
    assert (record.importer, record.rows > 10, record.difference < 1e-4) == ("scikit-learn", True, True)
    assert record.producer.startswith("scikit-learn ")
    assert (folder / "source" / "model").read_bytes() == pickles.dumped(model)
    assert record.samples is not None
    sample = read_sample(folder / record.samples)
    assert set(sample.inputs) == {"input"}
    assert set(sample.outputs) == {"label", "probabilities"}
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {"manifest.json", "source/model", "imported/model.onnx", "imported/samples.npz"}


OTHER_KINDS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "regressor": (lambda: Ridge().fit(X, Y), ["variable"]),
    "clusterer": (lambda: KMeans(3, n_init=1, random_state=0).fit(X), ["label", "scores"]),
    "transformer": (lambda: PCA(2).fit(X), ["variable"]),
    "several outputs": (
        lambda: MultiOutputClassifier(LogisticRegression(max_iter=500)).fit(X, np.stack([Y, Y > 0], 1)),
        ["label", "probabilities_0", "probabilities_1"],
    ),
    "scores alone": (lambda: LinearSVC().fit(X, Y), ["label", "probabilities"]),
    "boosted by histograms": (
        lambda: HistGradientBoostingClassifier(max_iter=5).fit(X, Y),
        ["label", "probabilities"],
    ),
    "outliers": (lambda: IsolationForest(n_estimators=10, random_state=0).fit(X), ["label", "scores"]),
    "search": (
        lambda: GridSearchCV(LogisticRegression(max_iter=500), {"C": [1, 2]}).fit(X, Y),
        ["label", "probabilities"],
    ),
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_other_kinds_of_estimators_agree(repository: FolderRepository, name: str) -> None:
    make, outputs = OTHER_KINDS[name]
    manifest = uploaded(repository, pickles.dumped(make()))
    assert [spec.name for spec in manifest.signature.outputs] == outputs


@pytest.mark.parametrize("compress", [0, 3, ("gzip", 3), ("bz2", 3), ("xz", 3), ("lzma", 3)])
def test_every_compression_of_joblib_is_read(repository: FolderRepository, compress: object) -> None:
    assert uploaded(repository, pickles.dumped(iris(), compress=compress)).imported is not None


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_of_pickle_is_read(repository: FolderRepository, protocol: int) -> None:
    assert uploaded(repository, pickle.dumps(iris(), protocol=protocol)).imported is not None


TEXTS = [
    "cheap pills now",
    "meeting at noon",
    "cheap offer now",
    "lunch at noon",
    "win money now",
    "notes of the meeting",
]
SPAM = [1, 0, 1, 0, 1, 0]


def test_texts_are_classified_as_scikit_learn_does(stack: Stack, tmp_path: Path) -> None:
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(TEXTS, SPAM)
    (tmp_path / "spam.joblib").write_bytes(pickles.dumped(model))
    Millstream(tmp_path, key=stack.key).ok(
        "push", "spam", tmp_path / "spam.joblib", "--endpoint", stack.url, "--allow-pickle"
    )
    stack.settled("spam", 1)
    described = stack.http.get("/v2/models/spam").json()["inputs"]
    assert [(one["name"], one["datatype"]) for one in described] == [("input", "BYTES")]
    asked = ["CHEAP Money", "the meeting at noon", "ÉTÉ à Noon"]
    shape = [len(asked), 1] if len(described[0]["shape"]) == 2 else [len(asked)]
    tensor = {"name": "input", "shape": shape, "datatype": "BYTES", "data": asked}
    reply = stack.http.post("/v2/models/spam/infer", json={"inputs": [tensor]}).json()
    outputs = {output["name"]: output["data"] for output in reply["outputs"]}
    assert outputs["label"] == model.predict(asked).tolist()
    assert np.allclose(outputs["probabilities"], model.predict_proba(asked).ravel(), rtol=1e-3, atol=1e-5)


def test_a_pickle_needs_permission(repository: FolderRepository) -> None:
    assert "--allow-pickle" in refused(repository, pickles.dumped(iris()), allow_pickle=False)


@pytest.mark.parametrize("name", pickles.HOSTILE)
def test_a_hostile_pickle_is_one_line(repository: FolderRepository, name: str) -> None:
    content, says = pickles.HOSTILE[name]
    assert says in refused(repository, content)
    assert not Path("/tmp/millstream-was-here").exists()


def damaged(model: Any, value: float) -> Any:
    model.coef_ = np.full_like(model.coef_, value)
    return model


def searched() -> Any:
    """A search that holds what it drew from: a distribution, which executes text of its state when it is loaded."""
    return RandomizedSearchCV(LogisticRegression(max_iter=500), {"C": uniform(1, 2)}, n_iter=1).fit(X, Y)


def torchserve(name: str) -> bytes:
    """An archive of TorchServe whose model has this name."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": {"serializedFile": name}}))
        archive.writestr(name, b"x")
    return content.getvalue()


def mlserver(uri: str) -> bytes:
    """A folder of MLServer, zipped, whose settings name this file."""
    content = io.BytesIO()
    settings = {"implementation": "mlserver_sklearn.SKLearnModel", "parameters": {"uri": uri}}
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("model-settings.json", json.dumps(settings))
    return content.getvalue()


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a custom transformer": (pickles.custom, "needs tests.kit.pickles.Squared"),
    "cut short": (lambda: pickles.dumped(iris())[:-200], "broken or cut short"),
    "cut short and compressed": (lambda: pickles.dumped(iris(), compress=3)[:-200], "broken or cut short"),
    "a dictionary": (lambda: pickles.dumped({"model": iris()}), "save the estimator itself"),
    "not fitted": (lambda: pickles.dumped(LogisticRegression()), "is it fitted?"),
    "NaN alone": (lambda: pickles.dumped(damaged(Ridge().fit(X, Y), np.nan)), "nothing but NaN"),
    "NaN alone, labels": (
        lambda: pickles.dumped(damaged(LogisticRegression(max_iter=500).fit(X, Y), np.nan)),
        "nothing but NaN",
    ),
    "infinity alone": (lambda: pickles.dumped(damaged(Ridge().fit(X, Y), np.inf)), "nothing but NaN"),
    "a file of the server": (lambda: pickles.estimator_with(np.memmap, "/etc/passwd", "u1", "r"), "calls ndarray"),
    "a distribution": (lambda: pickles.dumped(searched()), "needs scipy.stats._distn_infrastructure"),
    "a folder as a file": (lambda: torchserve("."), "cannot be read: File exists ('serialized')"),
    "a name too long": (lambda: torchserve("a" * 3000), "cannot be read: File name too long"),
    "a path too long": (lambda: mlserver("a" * 5000), "cannot be read: File name too long"),
    "no converter": (lambda: pickles.dumped(DBSCAN().fit(X)), "which neither predicts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused(repository: FolderRepository, name: str) -> None:
    content, says = REFUSED[name]
    assert says in refused(repository, content())


def test_a_newer_scikit_learn_is_named(repository: FolderRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sklearn.base.__version__", "99.1.0")
    content = pickles.dumped(iris())
    assert "saved by scikit-learn 99.1.0" in refused(repository, content)


def test_limits_of_an_import_have_settings(repository: FolderRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pickles.dumped(iris())
    assert "MILLSTREAM_CHECK_S_MAX" in refused(repository, content, settings=Settings(check_s_max=0.002))
    monkeypatch.setattr(Settings, "import_memory_bytes_max", 256 << 20)
    message = refused(repository, content)
    assert "256 MiB" in message or "MILLSTREAM_CHECK_MEMORY_BYTES_MAX" in message


def with_zeros(size_bytes: int) -> Any:
    model = LogisticRegression().fit([[0.0], [1.0]], [0, 1])
    model.extra_ = np.zeros(size_bytes, np.uint8)
    return model


@pytest.mark.parametrize("compress", [3, ("gzip", 3), ("bz2", 9), ("xz", 1)])
def test_files_of_an_import_are_bounded_together(
    repository: FolderRepository, monkeypatch: pytest.MonkeyPatch, compress: object
) -> None:
    bomb = pickles.dumped(with_zeros(96 << 20), compress=compress)
    assert len(bomb) < 1 << 20
    monkeypatch.setattr(Settings, "import_disk_bytes_max", 16 << 20)
    message = refused(repository, bomb)
    assert "its files take more than 16 MiB" in message
    assert "MILLSTREAM_UPLOAD_BYTES_MAX" in message


def test_a_claim_of_a_million_columns_is_refused_at_once(repository: FolderRepository) -> None:
    model = LogisticRegression(max_iter=500).fit(X, Y)
    model.n_features_in_ = 1 << 20
    assert "takes 1048576 columns" in refused(repository, pickles.dumped(model))


def test_several_imports_at_once_do_not_mix(stack: Stack, tmp_path: Path) -> None:
    """Good ones are served and bad ones refused, each with its own reason."""
    good = {f"together-{depth}": DecisionTreeClassifier(max_depth=depth).fit(X, Y) for depth in (1, 2, 3)}
    bad = {name: pickles.HOSTILE[name] for name in ("os.system", "a persistent id", "zeros, compressed")}
    bodies = {name: pickles.dumped(model) for name, model in good.items()}
    bodies |= {f"bad-{at}": content for at, (content, _) in enumerate(bad.values())}

    def push(name: str) -> tuple[int, Any]:
        params: dict[str, str | float] = {"wait": WAIT_S, "allow_pickle": "true"}
        reply = stack.http.post(f"/admin/v1/models/{name}/versions", params=params, content=bodies[name])
        return reply.status_code, reply.json()

    with ThreadPoolExecutor(len(bodies)) as threads:
        replies = dict(zip(bodies, threads.map(push, bodies), strict=True))
    for name, model in good.items():
        assert replies[name][0] == 201, replies[name]
        stack.settled(name, 1)
        tensor = {"name": "input", "shape": list(ROWS.shape), "datatype": "FP32", "data": ROWS.ravel().tolist()}
        outputs = stack.http.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]}).json()["outputs"]
        assert outputs[0]["data"] == model.predict(ROWS).tolist()
    for at, (_, says) in enumerate(bad.values()):
        status, document = replies[f"bad-{at}"]
        assert (status, says in document["error"]) == (400, True), document

    def left() -> list[str]:
        return [name for name in replies if stack.http.get(f"/admin/v1/models/{name}").status_code != 404]

    # The other gateway may know the versions of a moment ago, when they were being imported.
    wait_until(lambda: set(left()) == set(good), what="nothing is left of the bad ones")


def test_push_imports_in_one_command(stack: Stack, tmp_path: Path) -> None:
    model = iris()
    (tmp_path / "iris.joblib").write_bytes(pickles.dumped(model))
    command = Millstream(tmp_path, key=stack.key)
    push = ("push", "iris-pushed", tmp_path / "iris.joblib", "--endpoint", stack.url)
    assert "--allow-pickle" in command.fails(*push)
    assert "from scikit-learn" in command.ok(*push, "--allow-pickle")
    stack.settled("iris-pushed", 1)
    tensor = {"name": "input", "shape": list(ROWS.shape), "datatype": "FP32", "data": ROWS.ravel().tolist()}
    reply = stack.http.post("/v2/models/iris-pushed/infer", json={"inputs": [tensor]}).json()
    outputs = {output["name"]: output["data"] for output in reply["outputs"]}
    assert outputs["label"] == model.predict(ROWS).tolist()
    assert np.allclose(outputs["probabilities"], model.predict_proba(ROWS).ravel(), rtol=1e-3, atol=1e-5)
    described = stack.http.get("/admin/v1/models/iris-pushed").json()
    assert described["versions"][0]["imported"]["importer"] == "scikit-learn"
    assert json.dumps(described)
