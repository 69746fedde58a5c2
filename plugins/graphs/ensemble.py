"""Triton's ensembles: a configuration with `ensemble_scheduling`, in its JSON form, read into a Graph. Pure.

configuration ─> as Triton checks it by itself ─> Graph
signatures of the steps' versions ─> as Triton checks them against it (check_models)

Messages are Triton's, which its clients and tests compare. Source: triton-inference-server/core,
model_config_utils.cc (ValidateEnsembleSchedulingConfig) and ensemble_scheduler/ensemble_utils.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from millstream.plugins.graphs.document import DeclaredTensor, Graph, Step
from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES
from millstream.services.model.signature import Signature, TensorSpec

Shape = tuple[int, ...]


class _Tensor:
    """An ensemble tensor as the configuration connects it: `before` are those that it is computed from."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_output = self.ready = False
        self.before: list[_Tensor] = []
        self.after: list[_Tensor] = []


def is_ensemble(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of an ensemble."""
    return config.get("platform") == "ensemble" or "ensemble_scheduling" in config


def read_ensemble(config: Mapping[str, Any]) -> Graph:
    """Return the graph of an ensemble's configuration. Raises Failure(INVALID) with Triton's message."""
    name = str(config.get("name", ""))
    _check_fields(config, name)
    steps = config.get("ensemble_scheduling", {}).get("step", [])
    if not steps:
        raise invalid(f"must specify 'step' for ensemble '{name}'")
    _check_flow(config, _connected(steps, name), name)
    names = list(_step_names(steps))
    sources: dict[str, str] = {}
    for step, step_name in zip(steps, names, strict=True):
        sources |= {tensor: f"{step_name}.{output}" for output, tensor in step["output_map"].items()}
    return Graph(
        form="triton",
        inputs={one["name"]: _declared(one, config) for one in config.get("input", [])},
        steps={
            step_name: Step(
                model=step["model_name"],
                version=_version(step),
                inputs={given: (sources.get(tensor, tensor),) for given, tensor in step["input_map"].items()},
            )
            for step, step_name in zip(steps, names, strict=True)
        },
        outputs={one["name"]: (sources[one["name"]],) for one in config.get("output", [])},
        answers={one["name"]: _declared(one, config) for one in config.get("output", [])},
        batching=_rows_max(config) > 0,
        ensemble=dict(config),
    )


def _check_fields(config: Mapping[str, Any], name: str) -> None:
    if config.get("backend"):
        raise invalid(f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type")
    if "ensemble_scheduling" not in config:
        raise invalid(f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble")
    if config.get("platform") != "ensemble":
        raise invalid(f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble")
    if config.get("instance_group"):
        raise invalid(f"instance group should not be specified for ensemble '{name}'")
    if "optimization" in config:
        raise invalid(f"optimization should not be specified for ensemble '{name}'")
    if config.get("model_warmup"):
        raise invalid(f"model_warmup can not be specified for ensemble '{name}'")
    for one in (*config.get("input", []), *config.get("output", [])):
        if "reshape" in one:
            raise invalid(f"reshape of '{one['name']}' is not supported for ensemble '{name}'")


def _connected(steps: Sequence[Mapping[str, Any]], name: str) -> dict[str, _Tensor]:
    """Return the ensemble tensors by name. Raises Failure(INVALID)."""
    tensors: dict[str, _Tensor] = {}
    for number, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not step.get(field):
                raise invalid(f"must specify '{field}' in step {number} of ensemble '{name}'")
        made: list[_Tensor] = []
        for tensor in step["output_map"].values():
            found = tensors.setdefault(tensor, _Tensor(tensor))
            if found.is_output:
                raise invalid(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' "
                    f"step {number}"
                )
            found.is_output = True
            made.append(found)
        for tensor in step["input_map"].values():
            read = tensors.setdefault(tensor, _Tensor(tensor))
            for output in made:
                output.before.append(read)
                read.after.append(output)
    return tensors


def _check_flow(config: Mapping[str, Any], tensors: Mapping[str, _Tensor], name: str) -> None:
    """Raise Failure(INVALID) unless every output is computed from the inputs, and every tensor is of use."""
    todo: list[_Tensor] = []
    for one in config.get("input", []):
        if (found := tensors.get(one["name"])) is None:
            raise invalid(f"ensemble input '{one['name']}' for ensemble {name}' is not used")
        found.ready = True
        todo.append(found)
    while todo:
        for following in todo.pop(0).after:
            if not following.ready and all(one.ready for one in following.before):
                following.ready = True
                todo.append(following)
    outputs = [one["name"] for one in config.get("output", [])]
    _check_outputs(outputs, tensors, name)
    for tensor in tensors.values():
        if tensor.name not in outputs and not (tensor.ready and tensor.after):
            raise invalid(f"ensemble tensor '{tensor.name}' is unused in ensemble '{name}'")


def _check_outputs(outputs: Sequence[str], tensors: Mapping[str, _Tensor], name: str) -> None:
    for output in outputs:
        if (found := tensors.get(output)) is None:
            raise invalid(f"ensemble output '{output}' for ensemble {name}' is not used")
        if not found.ready:
            source = _not_ready_source(found)
            why = f": at least one of its depending tensors, '{source}', is not connected" if source != output else ""
            raise invalid(f"output '{output}' for ensemble '{name}' is not written{why}")


def _not_ready_source(tensor: _Tensor) -> str:
    """Return the last tensor before one that is not written which is not written either."""
    seen: set[str] = set()
    while True:
        before = next((one for one in tensor.before if not one.ready and one.name not in seen), None)
        if before is None:
            return tensor.name
        seen.add(before.name)
        tensor = before


def _step_names(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield names for the steps, which have none: those of their models, numbered where a model runs again."""
    known: set[str] = set()
    for step in steps:
        model = re.sub(r"[^A-Za-z0-9_-]", "_", step["model_name"])[:56]
        first = model if re.match("[A-Za-z_]", model) else f"_{model}"
        name, count = first, 1
        while name in known:
            count += 1
            name = f"{first}_{count}"
        known.add(name)
        yield name


def _version(step: Mapping[str, Any]) -> int | None:
    version = int(step.get("model_version", -1))
    return version if version > 0 else None


def _rows_max(config: Mapping[str, Any]) -> int:
    return int(config.get("max_batch_size", 0))


def _declared(tensor: Mapping[str, Any], config: Mapping[str, Any]) -> DeclaredTensor:
    dims = tuple(int(dim) for dim in tensor.get("dims", ()))
    shape = (-1, *dims) if _rows_max(config) > 0 else dims
    kind = str(tensor.get("data_type", "")).removeprefix("TYPE_")
    return DeclaredTensor(datatype=BYTES if kind == "STRING" else kind, shape=shape)


class _Inferred(NamedTuple):
    """What is known of an ensemble tensor, and from which model."""

    model: str
    datatype: str
    dims: Shape
    full: Shape  # with the rows, if the model has them


def check_models(graph: Graph, names: Sequence[str], signatures: Sequence[Signature], rows_max: Sequence[int]) -> None:
    """Check an ensemble against the versions of its steps. Raises Failure(INVALID) with Triton's message.

    Args:
        graph: of an ensemble.
        names: of the steps' models.
        signatures: of the steps' versions.
        rows_max: the max_batch_size of their configurations; 0: they have none.
    """
    config = graph.ensemble
    name = str(config.get("name", ""))
    tensors: dict[str, _Inferred] = {}
    for declared in (graph.inputs, graph.answers):
        for tensor, spec in declared.items():
            if spec is not None and spec.shape is not None:
                dims = spec.shape[1:] if graph.batching else spec.shape
                tensors[tensor] = _Inferred(name, spec.datatype or "", dims, spec.shape)
    steps = config["ensemble_scheduling"]["step"]
    for step, model, signature, of_step in zip(steps, names, signatures, rows_max, strict=True):
        if of_step and of_step < _rows_max(config):
            raise invalid(
                f"ensemble {name} allows maximum batch size {_rows_max(config)}, but it contains model {model} which "
                f"only allows maximum batch size to be {of_step}"
            )
        try:
            _check_step(step, model, signature, tensors)
        except Failure as failure:
            raise invalid(f"in ensemble {name}, {failure.message}") from None


def _check_step(step: Mapping[str, Any], model: str, signature: Signature, tensors: dict[str, _Inferred]) -> None:
    inputs = {spec.name: spec for spec in signature.inputs}
    for given, tensor in step["input_map"].items():
        if given not in inputs:
            raise invalid(f"ensemble tensor {tensor} is mapping to non-existing input {given} in model {model}")
    for spec in signature.inputs:
        mapped = step["input_map"].get(spec.name)
        if mapped is not None:
            _check_consistent(mapped, _inferred(model, spec, signature), tensors)
        elif not spec.optional:
            raise invalid(f"input {spec.name} in model {model} is not mapped to any ensemble tensors")
    outputs = {spec.name: spec for spec in signature.outputs}
    for made, tensor in step["output_map"].items():
        if made not in outputs:
            raise invalid(f"ensemble tensor {tensor} is mapped from non-existing output {made} in model {model}")
        _check_consistent(tensor, _inferred(model, outputs[made], signature), tensors)


def _inferred(model: str, spec: TensorSpec, signature: Signature) -> _Inferred:
    return _Inferred(model, spec.datatype, spec.shape[1:] if signature.batching else spec.shape, spec.shape)


def _check_consistent(tensor: str, found: _Inferred, tensors: dict[str, _Inferred]) -> None:
    known = tensors.setdefault(tensor, found)
    if known.datatype != found.datatype:
        raise invalid(
            f"ensemble tensor {tensor}: inconsistent data type: {_type_name(known.datatype)} is inferred from model "
            f"{known.model} while {_type_name(found.datatype)} is inferred from model {found.model}"
        )
    if not _agree(known.dims, found.dims) and not _agree(known.full, found.full):
        raise invalid(
            f"ensemble tensor {tensor}: inconsistent shape: {_dims(known.full)} is inferred from model {known.model} "
            f"while {_dims(found.full)} is inferred from model {found.model}"
        )


def _agree(one: Shape, other: Shape) -> bool:
    return len(one) == len(other) and all(a == b or -1 in {a, b} for a, b in zip(one, other, strict=True))


def _type_name(datatype: str) -> str:
    return "TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}"


def _dims(shape: Shape) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
