"""The targets of ONNX Runtime on CPUs: the version's own file with other settings, and INT8 weights.

onnxruntime: threads from 1 to the share, an arena for activations, and memory patterns; threads never spin

static:  prepare ─> calibrate on samples ─> QDQ, U8 activations, S8 weights ─> too inaccurate: leave out the worst nodes
dynamic: prepare ─> S8 weights; scales of activations are computed at each run, from the whole batch
QOperator with S8 activations is no candidate: it took 20 times as long as FP32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from millstream.plugins.compile.calibration import ROWS_MAX, Feed, can_be_sampled, cosine, read_feeds
from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Subject
from millstream.plugins.compile.targets.base import Target, runtime_version
from millstream.services.device import find_device
from millstream.services.errors import invalid

MODEL = "int8.onnx"
THREADS_MAX = 8  # numbers of threads to try: powers of two, up to the share
INSTALL = "pip install 'millstream[cpu]' onnx"
COSINE_MIN = 0.999  # of an output on the samples; below, nodes are left in floating point
ROUNDS_MAX = 5  # of leaving out nodes, twice as many in each
FIRST_SHARE = 0.05  # of the nodes, in the first round
LOSS_ROWS = 4  # rows for which the loss of each tensor is computed: all tensors are kept in memory
_NO_MEMORY = re.compile(r"bad_alloc|failed to allocate", re.IGNORECASE)  # in messages of ONNX Runtime
HISTOGRAM_ROWS = (64, 16, 4)  # rows for calibration by histograms, which keeps all tensors: fewer if memory is short
OPSET_MIN, OPSET = 13, 17  # per channel needs the former; older models are converted to the latter
MATRICES = ("MatMul", "Gemm", "Conv")
NOTHING_QUANTIZED = "the model has no operator that can be quantized"
_NO_RANGES = "Histogram has not been collected"  # in the library's error for a model without such an operator
#: Products of 8-bit numbers without saturation: without these instructions weights get 7 bits.
_EXACT = frozenset({"avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm", "asimd"})


def _flags(**flags: str | bool) -> Flags:
    return {**flags, "reduce_range": True} if not _EXACT & set(find_device("cpu").features) else dict(flags)


class OnnxRuntimeSettings(Target):
    """Compiles nothing: each candidate is a set of options for the backend. Outputs differ by rounding at most."""

    name = backend = "onnxruntime"
    modules: ClassVar = {"onnxruntime": "pip install 'millstream[cpu]'"}

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return the settings that differ from those that the version is served with now."""
        found: list[Flags] = [{"threads": subject.threads, "arena": True, "memory_pattern": True}]
        for threads in thread_numbers(subject.threads)[1:]:
            found += [{"threads": threads}, {"threads": threads, "arena": True, "memory_pattern": True}]
        return found

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Return the options; no file is written."""
        return Compiled(
            backend=self.backend,
            options=candidate.flags,
            runtime=runtime_version("onnxruntime", "onnxruntime-gpu"),
        )


def thread_numbers(share: int) -> list[int]:
    """Return numbers of threads worth a try, the share first: powers of two, up to it."""
    powers = [1 << bit for bit in range(share.bit_length()) if 1 << bit < share]
    return [share, *reversed(powers)][:THREADS_MAX]


class Int8Target(Target):
    """What the targets of ONNX Runtime's quantizers are."""

    backend = "onnxruntime"
    lossy = True
    modules: ClassVar = dict.fromkeys(("onnxruntime", "onnx"), INSTALL)


class Int8Static(Int8Target):
    """Quantizes activations with scales from samples."""

    name = "onnxruntime-int8-static"

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return each way to choose ranges, and one that quantizes products of matrices alone."""
        if not can_be_sampled(subject):
            return ()
        return [
            _flags(calibration="minmax", operators="all"),
            _flags(calibration="minmax", operators="matrices"),
            _flags(calibration="percentile", operators="all"),
            _flags(calibration="entropy", operators="all"),
        ]

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Quantize, and leave out the nodes that hurt most until the outputs are close enough. See `Target`."""
        histograms = candidate.flags["calibration"] != "minmax"
        with TemporaryDirectory() as scratch:
            source = prepare(subject.path, Path(scratch))
            notes: tuple[str, ...] = ()
            for rows in HISTOGRAM_ROWS if histograms else (ROWS_MAX,):
                search = _Search(
                    source, folder / MODEL, Path(scratch), candidate.flags, read_feeds(samples, subject, rows)
                )
                try:
                    notes = search.run(batching=subject.signature.batching)
                    break
                except Exception as error:
                    if rows == HISTOGRAM_ROWS[-1] or not histograms or not _found_no_memory(error):
                        raise
        return Compiled(files=(MODEL,), backend=self.backend, runtime=runtime_version("onnxruntime"), notes=notes)


class Int8Dynamic(Int8Target):
    """Quantizes activations at each run. Their scales depend on all rows of the run."""

    name = "onnxruntime-int8-dynamic"

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return scales by channel; by tensor they were no faster and far less accurate."""
        return [_flags(per_channel=True)]

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Quantize the weights of products of matrices. See `Target`."""
        from onnxruntime.quantization import QuantType, quantize_dynamic

        with TemporaryDirectory() as scratch:
            quantize_dynamic(
                prepare(subject.path, Path(scratch)),
                folder / MODEL,
                op_types_to_quantize=["MatMul", "Gemm", "Attention", "LSTM", "Gather", "EmbedLayerNormalization"],
                per_channel=True,
                reduce_range=bool(candidate.flags.get("reduce_range", False)),
                weight_type=QuantType.QInt8,
            )
        _check_quantized(folder / MODEL)
        return Compiled(files=(MODEL,), backend=self.backend, runtime=runtime_version("onnxruntime"))


def prepare(path: Path, scratch: Path) -> Path:
    """Return a copy of the model with shapes, constant folding and an operator set that quantization needs."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(str(path))
    versions = {entry.domain: entry.version for entry in model.opset_import}
    if versions.get("", OPSET) < OPSET_MIN:
        from onnx import version_converter

        model.ir_version = max(model.ir_version, 8)  # the converter takes initializers that are no inputs from then on
        model = version_converter.convert_version(model, OPSET)
    # Given as a file: of a model in memory it moves the weights elsewhere, and leaves them there when it fails.
    source, prepared = scratch / "source.onnx", scratch / "prepared.onnx"
    onnx.save(model, source)
    try:
        quant_pre_process(source, prepared)
    except Exception:  # symbolic shapes need sympy, and fail for some graphs
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
    fused = onnx.load(str(prepared))
    if _flatten_biases(fused):
        onnx.save(fused, prepared)
    return prepared


def _flatten_biases(model: Any) -> bool:
    """Give each constant bias of Gemm one dimension, as many numbers as the output has columns. Returns if one had not.

    Those of scikit-learn's networks are [1, columns], and scales by channel are computed for one dimension only.
    """
    from onnx import numpy_helper

    constants = {one.name: one for one in model.graph.initializer}
    names = {entry.name for entry in model.graph.input}
    changed = False
    for node in list(model.graph.node):
        if node.op_type != "Gemm" or len(node.input) < 3 or node.input[2] in names:
            continue
        weight, bias = (constants.get(name) for name in node.input[1:3])
        if weight is None or bias is None or len(bias.dims) == 1:
            continue
        transposed = any(one.name == "transB" and one.i for one in node.attribute)
        columns = weight.dims[0 if transposed else 1]
        values = numpy_helper.to_array(bias)
        if values.size != 1 and not values.size == values.shape[-1] == columns:  # else it differs by row
            continue
        name = f"{bias.name}:flat:{columns}"
        if name not in constants:
            flat = numpy_helper.from_array(np.broadcast_to(values.ravel(), (columns,)).copy(), name)
            model.graph.initializer.append(flat)
            constants[name] = flat
        node.input[2], changed = name, True
    return changed


def _found_no_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


def _check_quantized(path: Path) -> None:
    """Raise Failure(INVALID) if nothing in the model was quantized."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    if not any("Quant" in node.op_type or "Integer" in node.op_type for node in model.graph.node):
        raise invalid(NOTHING_QUANTIZED)


class FeedReader:
    """Inputs for calibration, in the form that ONNX Runtime wants."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Feed | None:
        """Return the inputs of the next run; None after the last."""
        return next(self._feeds, None)


class _Search:
    """Quantizes a model repeatedly, and leaves out more of the nodes that hurt until its outputs are close enough.

    Args:
        source: the prepared model.
        path: where the best one is written.
        scratch: folder for other files.
        flags: of the candidate.
        feeds: inputs for calibration, and for the comparison of outputs.
    """

    def __init__(self, source: Path, path: Path, scratch: Path, flags: Flags, feeds: Sequence[Feed]) -> None:
        self._source, self._path, self._scratch = source, path, scratch
        self._flags = flags
        self._feeds = feeds
        self._expected = outputs(source, feeds)

    def run(self, *, batching: bool) -> tuple[str, ...]:
        """Write the best model; returns notes about it. `batching`: the first dimension of every input is rows."""
        excluded: list[str] = []
        try:
            self._quantize(self._path, excluded)
        except ValueError as error:
            if _NO_RANGES in str(error):
                raise invalid(NOTHING_QUANTIZED) from error
            raise
        _check_quantized(self._path)
        best, best_excluded = self._cosine(self._path), 0
        loss_feeds = _first_rows(self._feeds, LOSS_ROWS) if batching else self._feeds[:1]
        ranked = self._ranked(loss_feeds) if best < COSINE_MIN else []
        share = FIRST_SHARE
        for _ in range(ROUNDS_MAX):
            number = max(1, int(len(ranked) * share))
            if best >= COSINE_MIN or len(excluded) >= len(ranked):
                break
            excluded = ranked[:number]
            trial = self._scratch / "trial.onnx"
            self._quantize(trial, excluded)
            found = self._cosine(trial)
            if found > best:
                best, best_excluded = found, len(excluded)
                trial.replace(self._path)
            share *= 2
        left_out = f"; {best_excluded} of {len(ranked)} nodes are left in floating point" if best_excluded else ""
        return (f"cosine {best:.5f} on the calibration samples{left_out}",)

    def _quantize(self, path: Path, excluded: Sequence[str]) -> None:
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

        methods = {
            "minmax": CalibrationMethod.MinMax,
            "percentile": CalibrationMethod.Percentile,
            "entropy": CalibrationMethod.Entropy,
        }
        quantize_static(
            self._source,
            path,
            FeedReader(self._feeds),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(MATRICES) if self._flags["operators"] == "matrices" else None,
            per_channel=True,
            reduce_range=bool(self._flags.get("reduce_range", False)),
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=list(excluded),
            calibrate_method=methods[str(self._flags["calibration"])],
        )

    def _cosine(self, path: Path) -> float:
        found = outputs(path, self._feeds)
        return min((cosine(one, other) for one, other in zip(self._expected, found, strict=True)), default=1.0)

    def _ranked(self, feeds: Sequence[Feed]) -> list[str]:
        """Return the names of the nodes by the loss that quantizing their tensors causes, the worst first."""
        from onnxruntime.quantization import qdq_loss_debug as debug

        kept = []
        for number, path in enumerate((self._path, self._source)):
            augmented = self._scratch / f"augmented-{number}.onnx"
            debug.modify_model_output_intermediate_tensors(path, augmented)
            kept.append(debug.collect_activations(str(augmented), feeds))
        errors = debug.compute_activation_error(_in_both(debug.create_activation_matching(*kept)))
        # Both are ratios of signal to noise in dB: of the tensor's own quantization, and with all before it.
        loss = {name: min(error.values()) for name, error in errors.items()}
        return _nodes_by(loss, self._source)


def _in_both(matching: dict[str, Any]) -> dict[str, Any]:
    return {name: tensors for name, tensors in matching.items() if tensors.get("float")}


def _nodes_by(loss: dict[str, float], path: Path) -> list[str]:
    """Return the nodes that read or write a tensor with a loss, by the smallest ratio of their tensors."""
    import onnx

    found: dict[str, float] = {}
    for node in onnx.load(str(path), load_external_data=False).graph.node:
        ratios = [loss[name] for name in (*node.input, *node.output) if name in loss]
        if ratios and node.name:
            found[node.name] = min(ratios)
    return sorted(found, key=lambda name: (found[name], name))


def _first_rows(feeds: Sequence[Feed], rows: int) -> list[Feed]:
    return [{name: array[:rows] for name, array in feeds[0].items()}]


def outputs(path: Path, feeds: Sequence[Feed]) -> list[np.ndarray[Any, Any]]:
    """Return the floating-point outputs of all runs, one after the other, each as one row of numbers."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    runs = [[np.asarray(array) for array in session.run(None, feed)] for feed in feeds]
    together = [np.concatenate([one.ravel() for one in parts]) for parts in zip(*runs, strict=True)]
    return [array.astype(np.float64) for array in together if array.dtype.kind == "f"]
