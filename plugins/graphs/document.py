"""The document of a graph: its steps, where their inputs come from, and what it answers. Pure.

A graph of any form is read into this document (forms.py). What it names is resolved at upload (graph_plan.py).

steps:
  detect:    {model: detector, inputs: {image: image}}              a name without a step is an input of the graph
  recognise: {model: recogniser, inputs: {crops: detect.crops}, if: rows(detect.crops) > 0}
outputs:
  text: [recognise.text, …]                                         of several sources the first that was made
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from millstream.services.errors import Failure
from millstream.services.model.datatypes import DATATYPES
from millstream.services.model.names import check_name

STEPS_MAX = 64  # of one graph
SOURCES_MAX = 16  # of one input or output
TENSORS_MAX = 256  # inputs of a step, and inputs or outputs of a graph
NAME_CHARACTERS_MAX = 512  # of a tensor
CONDITION_CHARACTERS_MAX = 4000
RANK_MAX = 32
#: the folder of the models of the steps, beside an upload that is to become one model
STEPS = "steps"
_STEP = r"[A-Za-z_][A-Za-z0-9_-]{0,63}"

StepName = Annotated[str, Field(pattern=rf"^{_STEP}$")]
TensorName = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX)]


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


#: where a tensor comes from: "step.output", or the name of an input of the graph; the first that was made counts
Sources = Annotated[tuple[TensorName, ...], BeforeValidator(_several), Field(min_length=1, max_length=SOURCES_MAX)]


def _datatype(name: str) -> str:
    if name not in DATATYPES:
        raise ValueError(f"unknown datatype {name!r}; known: {', '.join(sorted(DATATYPES))}")
    return name


def _model(name: str) -> str:
    try:
        return check_name(name)
    except Failure as failure:
        raise ValueError(failure.message) from None


class DeclaredTensor(BaseModel):
    """What a graph says of an input or output, as far as it does. -1 in `shape` is a variable dimension."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    datatype: Annotated[str, AfterValidator(_datatype)] | None = None
    shape: Annotated[tuple[Annotated[int, Field(ge=-1)], ...], Field(max_length=RANK_MAX)] | None = None


class Step(BaseModel):
    """A call of an endpoint. `version` None: the one that serves when the graph is uploaded."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    model: Annotated[str, AfterValidator(_model)]
    version: int | None = Field(None, ge=1)
    inputs: dict[TensorName, Sources] = Field(max_length=TENSORS_MAX)
    condition: str = Field("", alias="if", max_length=CONDITION_CHARACTERS_MAX)


class Graph(BaseModel):
    """A graph.

    Args:
        form: in which it was written.
        inputs: what it says of its inputs, in their order; those that it does not name follow, as its steps name them.
        answers: what it says of its outputs.
        batching: whether its rows are independent; None: they are if those of all steps are.
        merge: make one ONNX model of it, if that answers the same and is no slower.
        ensemble: Triton's configuration that it was read from; empty: it is of another form.
        routes: the nodes of KServe that it was read from, which say what its steps take once their versions are known
            (inference_graph.resolved); empty: it is of another form.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: Literal["millstream", "triton", "kserve"] = "millstream"
    inputs: dict[TensorName, DeclaredTensor | None] = Field({}, max_length=TENSORS_MAX)
    steps: dict[StepName, Step] = Field(min_length=1, max_length=STEPS_MAX)
    outputs: dict[TensorName, Sources] = Field({}, max_length=TENSORS_MAX)
    answers: dict[TensorName, DeclaredTensor] = {}
    batching: bool | None = None
    merge: bool = False
    ensemble: dict[str, Any] = {}
    routes: dict[str, Any] = {}

    @model_validator(mode="after")
    def _answers(self) -> Self:
        if not self.outputs and not self.routes:
            raise ValueError("outputs: a graph has at least one")
        return self

    @model_validator(mode="after")
    def _merges(self) -> Self:
        inputs = [sources for step in self.steps.values() for sources in step.inputs.values()]
        several = any(len(sources) > 1 for sources in (*inputs, *self.outputs.values()))
        if self.merge and (several or any(step.condition for step in self.steps.values())):
            raise ValueError("merge: one model has no conditions, and no lists of sources")
        return self


class Reference(BaseModel):
    """A source: an output of a step, or an input of the graph (`step` None)."""

    model_config = ConfigDict(frozen=True)

    step: str | None
    tensor: str


def reference(source: str, steps: dict[str, Step]) -> Reference:
    """Return what a source names: what is before its first dot is a step, if there is one of that name."""
    before, dot, after = source.partition(".")
    if dot and before in steps:
        return Reference(step=before, tensor=after)
    return Reference(step=None, tensor=source)
