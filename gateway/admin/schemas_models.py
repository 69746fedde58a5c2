"""The JSON documents of the admin API about models and versions, made from a snapshot. Pure.

Manifests, snapshots and records are internal and may change; callers may rely on these documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from millstream.gateway.catalog.snapshot import ModelView, Replica, Snapshot, VersionView, versions_text
from millstream.services.errors import Subject, not_found
from millstream.services.model.manifest import ImportRecord, Manifest
from millstream.services.model.usage import Usage, usage_of
from millstream.services.repository.variants import Report
from millstream.services.repository.verdicts import why_unmerged
from millstream.services.wire.records import State

RUN_ERRORS_MAX = 20  # of a version


class UploadForm(TypedDict):
    """A form with the model's file."""

    model: bytes
    config: NotRequired[Annotated[str, Field(description="Settings of the version, as JSON.")]]


class Tensor(BaseModel, from_attributes=True):
    """A named input or output. -1 in `shape` is a variable dimension; if the version batches, dimension 0 is rows."""

    name: str
    datatype: str
    shape: list[int]
    on_request: bool = Field(False, description="Of an output: it is answered only to requests that name it.")


class VersionInstance(BaseModel):
    """A version that one worker has loaded, or is loading."""

    worker: str
    state: State
    reason: str | None = None
    profile: dict[int, float] = Field({}, description="Rows of a run -> measured seconds.")
    size_bytes: int
    variant: str | None = Field(None, description="Compiled forms that serve, which won a race; null: its own file.")

    @classmethod
    def of(cls, replica: Replica) -> Self:
        one = replica.instance
        fields = {"worker": replica.worker.id, "size_bytes": one.resident_bytes, "variant": one.variant or None}
        return cls.model_validate(dict(one) | fields)


class Variant(BaseModel):
    """What a device's library compiled from a version, from the report beside it."""

    name: str = Field(description="Its folder: target and key.")
    target: str
    runtime: str = Field(description="What compiled it, with versions.")
    device: str = Field(description="Fingerprint of the device that it was compiled for.")
    flags: dict[str, str] = {}
    seconds: float = Field(description="That it took to compile; of engines, the load that compiled them.")
    size_bytes: int
    refused: str | None = Field(None, description="Why it is not used.")

    @classmethod
    def of(cls, name: str, report: Report) -> Self:
        size_bytes = sum(file.size_bytes for file in report.files)
        fields = {"name": name, "size_bytes": size_bytes, "refused": report.refused or None}
        return cls.model_validate(dict(report) | fields)


class RaceSummary(BaseModel):
    """What the last race of a version found, on one kind of worker."""

    kind: str
    state: str
    winner: str | None = Field(None, description="Candidate that won; null: nothing changed, or there is no verdict.")
    ratio: float = Field(1.0, description="Times as fast as the version's own file.")
    serving: bool = Field(description="Whether workers of this kind follow the verdict.")
    undone: str | None = Field(None, description="Why the winner serves no longer.")


class LoadFailure(BaseModel):
    """Why workers of one kind do not load a version any more: its loads ended processes, or did not end."""

    kind: str = Field(description='Backend and device, like "onnxruntime.cuda"; "every": all kinds.')
    reason: str
    failed_at: float = Field(description="Seconds since the epoch.")


class ImportedModel(BaseModel):
    """The framework whose model a version was made from, and how well the outputs of both agree."""

    importer: str = Field(description='Its name: "scikit-learn".')
    producer: str = Field(description="Framework and converter, with their versions.")
    rows: int = Field(description="Rows whose outputs were compared.")
    output: str = Field(description="The output that differs most, relative to the tolerance.")
    difference: float = Field(description="Its largest absolute difference.")
    rtol: float = Field(description="Relative tolerance.")
    atol: float = Field(description="Absolute tolerance, added to the relative one.")
    embeddings: tuple[str, ...] = Field((), description="Outputs of which races compare the direction alone.")

    @classmethod
    def of(cls, record: ImportRecord | None) -> Self | None:
        return None if record is None else cls.model_validate(record.model_dump(exclude={"samples"}))


class StepMeasured(BaseModel):
    """What the gateways of the machine measured of a step of a graph. Times are seconds of answered steps."""

    answered: int
    skipped: int = Field(description="Times that it did not run, as its condition or what it needs did not hold.")
    withdrawn: int = Field(description="Times that the request ended before it: another step failed, for example.")
    failed: dict[str, int] = Field(description="Code -> times that it failed so.")
    p50_s: float | None = Field(description="Median from its submission to its answer; null: it never answered.")
    p99_s: float | None = None
    queue_s: float | None = Field(description="Mean wait for its run.")
    run_s: float | None = Field(description="Mean of its runs, which requests share.")


class VersionError(BaseModel):
    """An error of runs, as its callers got it."""

    worker: str
    at: float = Field(description="When it last came, in seconds since the epoch.")
    text: str
    count: int = Field(description="How often it came lately with this text.")


class VersionStep(BaseModel, from_attributes=True):
    """A step of a graph, and the version that it runs."""

    step: str = Field(description="Its name in the graph.")
    model: str
    version: int
    measured: StepMeasured | None = Field(None, description="null: it never ran; not in the list of all models.")


class Version(BaseModel):
    """A version of a model. Of an upload in progress only the name, the number and the state are known."""

    model: str
    version: int | None = Field(description="null: an upload whose number is given when it is published.")
    state: State
    reason: str | None = Field(
        None,
        description="Why the state is failed; of a single version on standby, what keeps workers from loading it now.",
    )
    digest: str | None = Field(None, description="sha256 of the uploaded bytes, in hex.")
    size_bytes: int | None = None
    created: float | None = Field(None, description="Seconds since the epoch.")
    pools: list[str] = Field([], description="Pools that may serve it, the preferred one first.")
    active: bool = Field(False, description="The activated version; `serving` of the model is the one that answers.")
    batching: bool | None = None
    batching_decided: Literal["proven", "requested", "unmerged", "off"] | None = Field(
        None,
        description="Whether independent rows are proven, batching was asked for without a proof, requests with rows "
        "run alone, or batching is off.",
    )
    batching_reason: str | None = Field(None, description="Why it is off, or not proven.")
    rows_max: int | None = None
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    usage: Usage | None = Field(None, description="How it wants to be called; not in the list of all models.")
    errors: list[VersionError] = Field(
        [],
        description="The last ones of runs in workers that have it, the newest first, for those who may change it; not "
        "in the list of all models.",
    )
    load_failures: list[LoadFailure] = Field(
        [], description="Kinds of workers that do not load it until it is activated or loaded again."
    )
    notes: list[str] = Field([], description="What the check found worth saying.")
    imported: ImportedModel | None = Field(None, description="null: it was uploaded as it is served.")
    instances: list[VersionInstance] = []
    variants: list[Variant] = Field([], description="Compiled forms; not in the list of all models.")
    races: list[RaceSummary] = Field([], description="The last one first; not in the list of all models.")
    steps: list[VersionStep] = Field([], description="Of a graph: the versions that it runs.")
    function: dict[str, Any] | None = Field(
        None,
        description="Of a function: its file, Python and packages (null: the server's own), and what it may do; not in "
        "the list of all models.",
    )
    graph: dict[str, Any] | None = Field(
        None, description="Of a graph: its document, with where each input comes from; not in the list of all models."
    )

    @classmethod
    def of(cls, view: VersionView, *, active: bool) -> Self:
        manifest = view.manifest
        off = view.verdict.batching_off
        return cls(
            model=manifest.model,
            version=manifest.version,
            state=view.state,
            reason=view.reason,
            digest=manifest.digest,
            size_bytes=sum(file.size_bytes for file in manifest.files),
            created=manifest.created,
            pools=list(view.pools),
            active=active,
            batching=manifest.signature.batching and not why_unmerged(manifest, view.verdict),
            batching_decided="off" if off else manifest.batching.decided,
            batching_reason=off or manifest.batching.reason or None,
            rows_max=manifest.config.rows_max,
            inputs=[Tensor.model_validate(spec) for spec in manifest.signature.inputs],
            outputs=[Tensor.model_validate(spec) for spec in manifest.answered.outputs],
            load_failures=[
                LoadFailure(kind=kind or "every", reason=known.failed, failed_at=known.failed_at)
                for kind, known in view.verdict.failures.items()
            ],
            notes=list(manifest.notes),
            imported=ImportedModel.of(manifest.imported),
            instances=[VersionInstance.of(replica) for replica in view.replicas],
            steps=[VersionStep.model_validate(part) for part in (*manifest.parts, *manifest.merged)],
        )


class UploadedVersion(Version):
    """The version of an upload."""

    existing: bool = Field(
        False, description="It was there, with the upload's bytes and configuration: the upload made no version."
    )


class Model(BaseModel):
    """A model and its versions by number, uploads in progress included."""

    name: str
    active: int | None = Field(description="The activated version.")
    serving: int | None = Field(description="The version that answers requests without a version.")
    source: str | None = Field(None, description="The folder of models from which it is served in place.")
    reason: str | None = Field(None, description="Why its last load failed.")
    unloaded: bool = Field(False, description="It does not answer until it is loaded.")
    owner: str = Field("", description="Name of the API key that uploaded its first version; empty: none.")
    labels: dict[str, str] = {}
    versions: list[Version]


class Models(BaseModel):
    """All models, by name."""

    models: list[Model]


def run_errors(view: VersionView) -> list[VersionError]:
    """Return the last errors of a version's runs, of all its workers, the newest first."""
    found = [
        VersionError(worker=replica.worker.id, **one.model_dump())
        for replica in view.replicas
        for one in replica.instance.errors
    ]
    return sorted(found, key=lambda one: one.at, reverse=True)[:RUN_ERRORS_MAX]


def published(manifest: Manifest, snapshot: Snapshot, *, existing: bool) -> UploadedVersion:
    """Return the document of the version of an upload, even if the snapshot does not have it yet."""
    model = snapshot.models.get(manifest.model)
    view = model.versions.get(manifest.version) if model else None
    if view is None or view.manifest.content_id != manifest.content_id:
        view = VersionView(manifest=manifest, state=State.PENDING, reason=None, replicas=())
    document = UploadedVersion.of(view, active=model is not None and model.active == manifest.version)
    return document.model_copy(update={"usage": usage_of(manifest), "existing": existing})


def models(snapshot: Snapshot, uploads: Mapping[tuple[str, int | None], State]) -> Models:
    """Return the document of all models that have a version, an endpoint or an upload in progress."""
    names = set(snapshot.models) | {model for model, _ in uploads}
    return Models(models=[_model(name, snapshot.models.get(name), uploads) for name in sorted(names)])


def model(name: str, snapshot: Snapshot, uploads: Mapping[tuple[str, int | None], State]) -> Model:
    """Return the document of one model. Raises Failure(NOT_FOUND)."""
    if not any(uploading == name for uploading, _ in uploads):
        snapshot.model(name)
    return _model(name, snapshot.models.get(name), uploads)


def version(name: str, number: int, snapshot: Snapshot, uploads: Mapping[tuple[str, int | None], State]) -> Version:
    """Return the document of one version. Raises Failure(NOT_FOUND)."""
    documents = model(name, snapshot, uploads).versions
    for document in documents:
        if document.version == number:
            return document
    known = [document.version for document in documents if document.version is not None]
    raise not_found(
        f"Request for unknown model: '{name}' version {number} is not found; {versions_text(known)}", Subject.VERSION
    )


def _model(name: str, view: ModelView | None, uploads: Mapping[tuple[str, int | None], State]) -> Model:
    published_versions = view.versions if view else {}
    active = view.active if view else None
    versions = [Version.of(version, active=number == active) for number, version in published_versions.items()]
    versions += [
        Version(model=name, version=number, state=state)
        for (uploading, number), state in uploads.items()
        if uploading == name and number not in published_versions
    ]
    # an upload without a number will get the highest number
    versions.sort(key=lambda document: (document.version is None, document.version or 0))
    return Model(
        name=name,
        active=active,
        serving=view.serving if view else None,
        source=view.source if view else None,
        reason=(view.failure or None) if view else None,
        unloaded=view.unloaded if view else False,
        owner=view.placement.owner if view else "",
        labels=view.placement.labels if view else {},
        versions=versions,
    )
