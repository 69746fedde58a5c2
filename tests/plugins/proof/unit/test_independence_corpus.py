"""The models of the onnx package: which are proven, which operator ends other proofs, and that proofs hold in runs."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest

from millstream.plugins.proof.analysis import prove
from millstream.plugins.proof.batch_rewrite import with_variable_rows
from millstream.services.ingest.graph import fixed_inputs
from tests.kit.independence import assert_independent, load, run_alone

DATA = Path(onnx.__file__).parent / "backend/test/data"
FILES = sorted(
    [*DATA.glob("light/*.onnx"), *(path for path in DATA.glob("*/*/model.onnx") if path.parts[-3] != "real")]
)

#: what ends the proof of a model whose batch was made variable, of those that are not proven
ENDED = {
    # the batch of the target, which is an input, meets that of the data
    "pytorch-converted/test_PoissonNLLLLoss_no_reduce": "Mul",
    "pytorch-operator/test_operator_add_broadcast": "Add",
    "pytorch-operator/test_operator_add_size1_right_broadcast": "Add",
    "pytorch-operator/test_operator_addmm": "Gemm",
    "pytorch-operator/test_operator_mm": "Gemm",
    # parameters of a layer that has no batch
    "pytorch-operator/test_operator_non_float_params": "Add",
    "pytorch-operator/test_operator_params": "Add",
    # the first axis is cut
    "pytorch-operator/test_operator_chunk": "Split",
    "pytorch-operator/test_operator_index": "Slice",
    # the shape is an input
    **{f"simple/test_expand_shape_model{number}": "Expand" for number in (1, 2, 3, 4)},
    # scalars
    "simple/test_gradient_of_add": "input 'a'",
    "simple/test_gradient_of_add_and_mul": "input 'a'",
    # lists of tensors
    "simple/test_sequence_model1": "SequenceInsert",
    **{f"simple/test_sequence_model{number}": "SequenceConstruct" for number in (2, 3, 4, 5)},
    **{f"simple/test_sequence_model{number}": "SplitToSequence" for number in (6, 7, 8)},
}


def named(path: Path) -> str:
    return str(path.relative_to(DATA)).removesuffix("/model.onnx").removesuffix(".onnx")


@pytest.mark.parametrize("path", FILES, ids=named)
def test_model_of_the_onnx_package(path: Path):
    model = onnx.load(path)
    stored = fixed_inputs(model.graph)
    inputs = [value.name for value in model.graph.input if value.name not in stored]
    case = path.parts[-2]
    removes = "strnorm" in case and "nostopwords" not in case
    expected = "StringNormalizer" if removes else ENDED.get(named(path), "")
    found = prove(with_variable_rows(model), inputs)
    assert (found.proven, found.culprit.partition(" (")[0]) == (not expected, expected)


#: operators with a backend case that is proven when its first axis, or that of all inputs, holds rows
PROVEN_OPERATORS = """
Abs Acos Acosh Add And ArgMax ArgMin ArrayFeatureExtractor Asin Asinh Atan Atanh Attention AveragePool
BatchNormalization Binarizer BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu
CenterCropPad Clip Col2Im Concat Constant ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh DFT DepthToSpace
DequantizeLinear Det Div Dropout Einsum Elu Equal Erf Exp Expand Flatten Floor GRU Gather GatherElements GatherND
Gelu Gemm GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish
Hardmax Identity InstanceNormalization IsInf IsNaN LRN LSTM LabelEncoder LayerNormalization LeakyRelu Less
LessOrEqual Log LogSoftmax LpNormalization LpPool MatMul MatMulInteger Max MaxPool Mean Min Mish Mod Mul Neg Not
OneHot Or PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear RMSNormalization RNN Range Reciprocal ReduceMax
ReduceMean ReduceSum RegexFullMatch Relu Reshape Resize ReverseSequence RotaryEmbedding Round STFT Scan Scatter
ScatterElements Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt
Squeeze StringConcat Sub Sum SwiGLU Swish Tan Tanh TfIdfVectorizer ThresholdedRelu TopK Transpose TreeEnsemble Trilu
Unsqueeze Where Xor
"""


def variable(case_model: onnx.ModelProto, rows: list[str]) -> onnx.ModelProto:
    """The model with any number of rows in `rows`."""
    model = onnx.ModelProto()
    model.CopyFrom(case_model)
    for value in model.graph.input:
        if value.name in rows:
            value.type.tensor_type.shape.dim[0].dim_param = "rows"
    for value in model.graph.output:
        if value.type.WhichOneof("value") == "tensor_type":
            value.type.tensor_type.ClearField("shape")
    return model


def batched(model: onnx.ModelProto, arrays: list[np.ndarray]) -> list[list[str]]:
    """Which inputs may have rows: the first, or all of the first one's length."""
    names = [value.name for value in model.graph.input]
    declared = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    able = [name for name, array in zip(names, arrays, strict=True) if declared[name] and isinstance(array, np.ndarray)]
    if not able or able[0] != names[0]:
        return []
    sizes = {name: len(array) for name, array in zip(names, arrays, strict=True) if name in able}
    choices = [able[:1], [name for name in able if sizes[name] == sizes[able[0]]]]
    return [choice for index, choice in enumerate(choices) if choice not in choices[:index]]


def test_what_is_proven_of_the_backend_cases_is_so():
    """Each case of the ONNX backend tests, its first axis taken as rows: 1,884 cases of all operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    proven: set[str] = set()
    compared = 0
    for case in cases:
        assert case.model is not None
        names = [value.name for value in case.model.graph.input]
        arrays = list(case.data_sets[0][0]) if case.data_sets else []
        if len(names) != len(arrays) or not names:
            continue
        for rows in batched(case.model, arrays):
            model = variable(case.model, rows)
            if not prove(model, rows).proven:
                continue
            proven.update(node.op_type for node in model.graph.node)
            compared += agrees(model, dict(zip(names, arrays, strict=True)), rows)
    assert compared > 700
    assert set(PROVEN_OPERATORS.split()) - proven == set()


def agrees(model: onnx.ModelProto, feeds: dict[str, np.ndarray], rows: list[str]) -> bool:
    """Whether ONNX Runtime runs the case on one row; then rows together must give the same."""
    try:
        running = load(model)
        alone = run_alone(running, feeds, rows)
    except Exception:  # not supported there, or not for one row
        return False
    assert_independent(running, feeds, rows, alone)
    return True
