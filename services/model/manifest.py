"""The documents of the repository: manifest (describes a version) and endpoint (resolves a model's name). Pure.

models/<model>/endpoint.json             Endpoint: mutable, replaced with compare-and-set on `generation`
models/<model>/<version>/manifest.json   Manifest: immutable
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millstream.services.model.preparation import Preparation
from millstream.services.model.signature import Classes, Signature, answered

ROWS_MAX_DEFAULT = 64
ROWS_MAX = 65536  # of one run, whatever a configuration says
LEVELS_MAX = 1024  # priority levels of a version
SIZES_MAX = 64  # preferred batch sizes of a version
WARMUPS_MAX = 64  # warm-up requests of a version
COLUMNS_MAX = 65_536  # names of the columns of a table that a version takes
CATEGORIES_MAX = 100_000  # of all columns of a version
ColumnName = Annotated[str, Field(max_length=512)]
POOLS_MAX = 16  # pools that a version or an endpoint names
PREPARED_MAX = 16  # inputs that are prepared
LABELS_MAX = 16  # labels of an endpoint
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:-]{0,62}")


class QueuePolicy(BaseModel):
    """How requests of one priority wait.

    If a version has a policy other than the default, the timeout of a request is not its deadline, as in Triton.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_ms_default: float = Field(
        0, ge=0, description="Longest wait of a request; 0: only the deadline of the version limits it."
    )
    timeout_action: Literal["reject", "delay"] = Field(
        "reject", description="What happens then: reject the request, or let it wait behind all others."
    )
    timeout_override: bool = Field(False, description="Whether the timeout of a request may shorten the wait.")
    requests_max: int = Field(0, ge=0, description="Requests that may wait in one gateway; 0: only the lane's limit.")


class WarmupInput(BaseModel):
    """One input of a warm-up request.

    Args:
        shape: without the rows.
        fill: zeros, random numbers, or the bytes of `file`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    datatype: str
    shape: tuple[int, ...]
    fill: Literal["zero", "random", "file"] = "zero"
    file: str | None = Field(None, description="Path below the version's folder of a file in raw form.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(dim < 0 for dim in self.shape):
            raise ValueError("the shape of a warm-up input has no variable dimension")
        if (self.fill == "file") != (self.file is not None):
            raise ValueError('a file belongs to the fill "file", and to no other')
        return self


class Warmup(BaseModel):
    """A request that a version must answer before it is ready."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    rows: int = Field(1, ge=0, description="Rows; 0 for versions that do not batch.")
    count: int = Field(1, ge=1, le=1000)
    inputs: dict[str, WarmupInput] = {}


class Pooling(BaseModel):
    """How an output (rows, tokens, dim) becomes one embedding for each row."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Literal["mean", "cls", "last"] = Field(
        "mean", description="Their mean without padding, the first one, or the last one that is no padding."
    )
    normalize: bool = Field(True, description="Whether embeddings are scaled to length 1.")


class ModelConfig(BaseModel):
    """Configuration of a version (the `config` part of an upload). Every field has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batching: bool | None = Field(None, description="Whether requests share runs; default: the check decides.")
    rows_max: int = Field(ROWS_MAX_DEFAULT, ge=1, le=ROWS_MAX, description="Largest number of rows in one run.")
    pools: tuple[str, ...] = Field(
        (),
        max_length=POOLS_MAX,
        description="Worker pools that may serve the version, the preferred one first; empty: all that can run it.",
    )
    timeout_ms_default: float = Field(
        30_000, gt=0, le=3_600_000, description="Timeout of a request that sets none, from its arrival."
    )
    queue_delay_ms_max: float = Field(
        0, ge=0, le=10_000, description="Longest wait of a batch for more rows on an idle system; 0: none."
    )
    rows_preferred: tuple[int, ...] = Field((), description="Batch sizes that are sent without further waiting.")
    instances_max: int = Field(
        0, ge=0, description="Workers of each pool that load the version, on each machine; 0: all."
    )
    priority_levels: int = Field(
        0,
        ge=0,
        le=LEVELS_MAX,
        description="Number of priorities; 1 comes first, and a request with an unknown priority gets the default. "
        "0: any number is a priority.",
    )
    priority_default: int = Field(0, ge=0, description="Priority of a request that sets none.")
    queue: QueuePolicy = Field(QueuePolicy(), description="How requests wait.")
    queue_by_priority: dict[int, QueuePolicy] = Field({}, description="How requests of single priorities wait.")
    run_ms_max: float | None = Field(
        None,
        gt=0,
        le=3_600_000,
        description="Time that one run may take; default: MILLSTREAM_WORKER_RUN_S_MAX, and while other models wait 20 "
        "times what its runs usually take, at least 1 s; first runs 20 times the warm-up, at least 5 s.",
    )
    warmup: tuple[Warmup, ...] = Field((), description="Requests that the version must answer before it is ready.")
    labels: dict[str, str] = Field({}, description="Output -> file with its class names, one per line.")
    classes: Classes | None = Field(
        None, description="Output with a score for each class: a label and a score are answered in its place."
    )
    prepare: dict[str, Preparation] = Field(
        {},
        max_length=PREPARED_MAX,
        description="Inputs that requests may give as encoded files, and how they are made.",
    )

    pooling: Pooling | None = Field(
        None,
        description="How embeddings are made of outputs; default: the mean of tokens, normalised, of such outputs.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        levels = self.priority_levels
        if levels and not 1 <= self.priority_default <= levels:
            raise ValueError(f"priority_default must be one of the {levels} priority_levels, 1 to {levels}")
        if not levels and self.priority_default:
            raise ValueError("priority_default needs priority_levels")
        if wrong := [level for level in self.queue_by_priority if not 1 <= level <= (levels or LEVELS_MAX)]:
            raise ValueError(f"queue_by_priority: {wrong[0]} is no priority, they are 1 to {levels or LEVELS_MAX}")
        if wrong := [rows for rows in self.rows_preferred if not 1 <= rows <= self.rows_max]:
            raise ValueError(f"rows_preferred: {wrong[0]} is not between 1 and rows_max, which is {self.rows_max}")
        if len(self.rows_preferred) > SIZES_MAX:
            raise ValueError(f"rows_preferred: at most {SIZES_MAX} sizes")
        if len(self.warmup) > WARMUPS_MAX:
            raise ValueError(f"warmup: at most {WARMUPS_MAX} requests")
        if len(set(self.pools)) != len(self.pools):
            raise ValueError("pools: each pool is named once")
        return self


class SourceFile(BaseModel):
    """One file of a version: path below the version's folder, bytes, sha256 in hex."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size_bytes: int
    sha256: str


class Batching(BaseModel):
    """Whether requests share runs of a version, and why.

    Args:
        decided: proven (an analysis of the graph shows that rows are independent, and trial runs agree), requested (by
            the configuration, without a proof), unmerged (requests have rows, but each runs alone) or off (each request
            runs alone, without rows).
        reason: why batching is not proven, or off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    decided: Literal["proven", "requested", "unmerged", "off"] = "off"
    reason: str = ""


class TrialInputs(BaseModel):
    """Inputs of one row with which the model check ran the model.

    Args:
        size: every variable dimension but the rows.
        fill: every element.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int = Field(ge=1, le=1024)
    fill: Literal[0, 1]


class ColumnCategories(BaseModel):
    """The categories that a column had when the model was fitted.

    Args:
        values: in the order of their codes; empty: they are not known, and the column cannot be given by name.
        coded: the model takes their codes, numbers from 0 on, in their place; NaN for a missing one.
        unseen: what the framework does with another value: refuses it, or takes it for a missing one; or the converted
            model does what the framework does.
        empty_is_missing: an empty text is a missing value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    values: tuple[ColumnName | bool | int | float, ...] = Field((), max_length=CATEGORIES_MAX)
    coded: bool = False
    unseen: Literal["refused", "missing", "model"] = "model"
    empty_is_missing: bool = False


class ImportFacts(BaseModel):
    """What a model of another framework was made from, and how it wants to be called.

    Args:
        importer: the framework's name: "scikit-learn".
        producer: framework and converter, with their versions.
        rtol: largest relative difference between the outputs of the source framework and of the converted model.
        atol: largest absolute difference, added to the relative one.
        columns: names of the columns of the table that the version takes: of the one input, in its order, or each an
            input; empty: they have none.
        columns_without_null: those in which a DataFrame may have no null: integers in MLflow's signature.
        categories: by name, of the columns that have them.
        embeddings: outputs whose rows are directions: which of their elements is the largest means nothing.
        prepare: inputs that requests may give as encoded files, as the configuration of a version has them.
        padded_max: tokens of a row up to which padding that the attention mask hides changes no answer, as the import
            has shown within its tolerance; 0: it has not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    importer: str = Field(max_length=1000)
    producer: str = Field(max_length=1000)
    rtol: float = Field(ge=0, le=1)
    atol: float = Field(ge=0)
    columns: tuple[ColumnName, ...] = Field((), max_length=COLUMNS_MAX)
    columns_without_null: tuple[ColumnName, ...] = Field((), max_length=COLUMNS_MAX)
    categories: dict[ColumnName, ColumnCategories] = Field({}, max_length=COLUMNS_MAX)
    embeddings: tuple[str, ...] = Field((), max_length=64)
    prepare: dict[str, Preparation] = Field({}, max_length=PREPARED_MAX)
    padded_max: int = Field(0, ge=0, le=1 << 20)


class ImportRecord(ImportFacts):
    """How a version was made from a model of another framework, and how well their outputs agree.

    Args:
        rows: rows that were compared.
        output: the output that differs most, relative to the tolerance.
        difference: its largest absolute difference.
        samples: path below the version's folder of the inputs and the framework's outputs (.npz); None: too large.
    """

    rows: int = Field(ge=0)
    output: str = Field(max_length=1000)
    difference: float
    samples: str | None = Field(None, max_length=1000)


class VersionPart(BaseModel):
    """A version that a step of a composed version runs.

    Args:
        step: the step's name.
        content_id: of the version when the composed one was uploaded; another one of its number does not stand for it.
        named: the upload named the version. Otherwise it was the one that served then.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: str
    model: str
    version: int
    content_id: str
    named: bool = False

    @property
    def label(self) -> str:
        """The step in messages: "step 'detect' (model yolo v3)"."""
        return f"step '{self.step}' (model {self.model} v{self.version})"


class Manifest(BaseModel):
    """An immutable version of a model.

    Args:
        digest: sha256 (hex) of the uploaded bytes.
        served: path below the version's folder of the ONNX file that workers load (the source, or a rewritten variant).
        files: every file that a worker reads, with digests.
        origin: folder of the files of a version that is served in place; None: the version's own folder.
        url: the file or folder that a client named to have it uploaded; None: the client sent the bytes.
        trial: inputs that are known to run; None: no generated input does.
        index_ranges: of inputs that are indices of a table: the least and the greatest value that a request may send.
        triton: Triton model configuration of the version, in JSON form; empty: none.
        parts: versions that a composed version runs, one for each step: gateways run it, and no worker loads it.
        options: of the load of its own file (workers/backends/base.py), beside those of the worker.
        merged: versions that it was made of at its upload, one for each step; it needs them no longer.
        streams: how many requests an instance answers at once, each in 0 to n parts; 0: each has one answer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    model: str
    version: int
    created: float = Field(description="Seconds since the epoch.")
    digest: str
    source_format: str = "onnx"
    served: str
    files: tuple[SourceFile, ...]
    signature: Signature
    config: ModelConfig
    opset: int
    ir_version: int
    producer: str = ""
    batching: Batching = Field(Batching(), description="Whether requests share runs, and why.")
    notes: tuple[str, ...] = Field((), description="Remarks of the check, one sentence each.")
    imported: ImportRecord | None = Field(None, description="Made from a model of another framework.")
    origin: str | None = None
    url: str | None = None
    trial: TrialInputs | None = None
    index_ranges: dict[str, tuple[int, int]] = {}
    triton: dict[str, Any] = {}
    parts: tuple[VersionPart, ...] = ()
    options: dict[str, str] = {}
    merged: tuple[VersionPart, ...] = ()
    streams: int = 0

    @property
    def is_told(self) -> bool:
        """Whether its runs are told what callers say of requests beside their tensors: it is code with options."""
        return bool(self.options)

    @cached_property
    def answered(self) -> Signature:
        """The signature that callers see; `signature` is the model's."""
        return answered(self.signature, self.config.classes)

    @property
    def prepare(self) -> Mapping[str, Preparation]:
        """What is done with inputs that requests give as encoded files: declared, else as the import found it."""
        return self.config.prepare or (self.imported.prepare if self.imported is not None else {})

    @cached_property
    def content_id(self) -> str:
        """Identifies this version's content and names its lane. Differs when a deleted version number is used again."""
        return f"{self.model}:{self.version}:{self.digest[:8]}{int(self.created * 1000) & 0xFFFFFF:06x}"

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other fields, as pydantic does; what follows from them is computed anew."""
        copied = super().model_copy(update=update, deep=deep)
        for computed in ("content_id", "answered"):
            copied.__dict__.pop(computed, None)
        return copied


class EndpointPlacement(BaseModel):
    """Where and how often a model is loaded, and whose it is.

    It holds for each of its versions that serves; `instances_min` and `pin` for the active one (`placement_of`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pools: tuple[str, ...] = Field(
        (),
        max_length=POOLS_MAX,
        description="Pools that may serve the model, the preferred one first; empty: those of the version.",
    )
    instances_min: int = Field(0, ge=0, le=1024, strict=True, description="Instances that are always loaded.")
    instances_max: int = Field(0, ge=0, le=1024, strict=True, description="Most instances in a pool; 0: no limit.")
    idle_s: float = Field(
        0,
        strict=True,
        ge=0,
        le=31_536_000,
        description="Seconds without a call until it is unloaded; 0: only if memory is short.",
    )
    pin: bool = Field(False, strict=True, description="Whether a loaded instance stays, also when memory is short.")
    owner: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$",
        description="Name of the API key that uploaded its first version, which an admin may change; empty: none.",
    )
    labels: dict[str, str] = Field({}, max_length=LABELS_MAX, description="What its users say of it: name -> value.")

    @model_validator(mode="before")
    @classmethod
    def _from_before(cls, document: Any) -> Any:
        """Read a document of a release that captured rows of live requests."""
        if isinstance(document, dict) and "capture_samples" in document:
            return {name: value for name, value in document.items() if name != "capture_samples"}
        return document

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.instances_max and self.instances_min > self.instances_max:
            raise ValueError(
                f"instances_min is {self.instances_min}, more than instances_max, which is {self.instances_max}"
            )
        if len(set(self.pools)) != len(self.pools):
            raise ValueError("pools: each pool is named once")
        if self.pin and self.idle_s:
            raise ValueError("pin keeps an instance loaded, idle_s unloads it: set one of them")
        if wrong := [text for text in (*self.labels, *self.labels.values()) if not _LABEL.fullmatch(text)]:
            raise ValueError(
                f"labels: {wrong[0][:80]!r}: a label's name and value have 1 to 63 letters (A-Z, a-z), digits, '.', "
                "'_', '/', '@', ':' and '-', and begin with a letter or a digit"
            )
        return self


class Endpoint(BaseModel):
    """The versions that a model's public name resolves to.

    Args:
        generation: incremented by each change; compare-and-set uses it.
        active: the version that was activated last.
        previous: the version that serves until `active` is ready.
        loaded: the versions that are served; None: all; empty: the model is unloaded.
        source: the Triton repository that contains the model, which is served in place; None: it was uploaded.
        failure: why the last load failed; empty: it did not.
        placement: where and how often it is loaded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    generation: int = 0
    active: int | None = None
    previous: int | None = None
    loaded: tuple[int, ...] | None = None
    source: str | None = None
    failure: str = ""
    placement: EndpointPlacement = EndpointPlacement()

    def with_active(self, version: int) -> Self:
        """Return the endpoint with `version` active and loaded; the version that was active becomes `previous`."""
        loaded = self.loaded if self.serves(version) else (*(self.loaded or ()), version)
        return self.model_copy(update={"active": version, "previous": self.active, "loaded": loaded})

    def with_owner(self, owner: str) -> Self:
        """Return the endpoint with an owner: the name of an API key; "": none."""
        return self.model_copy(update={"placement": self.placement.model_copy(update={"owner": owner})})

    def placement_of(self, version: int) -> EndpointPlacement:
        """Return what holds for a version: only the active one is always loaded, or stays when memory is short."""
        if version == self.active:
            return self.placement
        return self.placement.model_copy(update={"instances_min": 0, "pin": False})

    def serves(self, version: int) -> bool:
        """Return whether calls of the version are answered: it is loaded, or its first call loads it."""
        return self.loaded is None or version in self.loaded

    def preloaded(self, versions: Iterable[int]) -> set[int]:
        """Return those of `versions` that workers load before they are called.

        Of an uploaded model these are the active version and the newest one, which may be activated next; of a model
        in place, or one that Triton's repository API loaded in part, all that serve.
        """
        serving = {version for version in versions if self.serves(version)}
        if self.source is not None or self.loaded is not None:
            return serving
        return serving & {self.active, max(serving, default=None)}
