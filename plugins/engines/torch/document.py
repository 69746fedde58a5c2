"""Reads the document of a program of torch.export, models/model.json, and refuses what PyTorch would execute of it.

models/model.json ─> operators, expressions, guards, names are of known kinds ─> Program: inputs, outputs, graph

To load a program, PyTorch 2.13 (torch/_export/serde/serialize.py) evaluates symbolic sizes as Python (sympy.sympify),
takes any attribute of the module torch as an operator (torch.os.system is one), imports what pytrees name, and puts
names and guards into code that it executes. Accepted is what torch.export.save writes for a program of tensors.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any, NamedTuple

from millstream.plugins.engines.torch.archive import MODEL, open_program
from millstream.services.errors import invalid

FORMAT = "torch-export"
NESTED_MAX = 200  # levels of the document
EXPRESSION_CHARACTERS_MAX = 10_000

#: v2 datatypes by ScalarType of torch/_export/serde/schema.py
_DATATYPES = {
    1: "UINT8", 2: "INT8", 3: "INT16", 4: "INT32", 5: "INT64", 6: "FP16", 7: "FP32", 8: "FP64", 12: "BOOL",
    13: "BF16", 28: "UINT16", 34: "UINT32", 35: "UINT64",
}  # fmt: skip
_NAME = re.compile(r"[\w.+:/ -]*")
_IDENTIFIER = re.compile(r"(?:[A-Za-z_][\w.]*)?")
_OPERATOR = re.compile(
    r"torch\.ops\.(?:aten|prims|quantized_decomposed|torchvision)\.(?!from_file\b)[a-z_A-Z]\w*(?:\.\w+)?"
    r"|torch\.ops\.higher_order\.(?:cond|while_loop|map_impl|scan|wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|torch\.(?:_sym_sqrt|sym_(?:int|float|max|min|not|ite|sum|sqrt)|_C\._set_grad_enabled)"
    r"|_operator\.(?:add|sub|mul|truediv|floordiv|mod|pow|neg|pos|getitem|eq|ne|lt|le|gt|ge|and_|or_|not_|abs|index)"
    r"|math\.(?:ceil|floor|trunc|sqrt)"
)
#: functions in expressions: those of sympy and of torch.utils._sympy.functions that torch.export writes
_FUNCTIONS = frozenset(
    """
    Symbol Integer Float Rational Max Min Abs Add Mul Pow Eq Ne Lt Le Gt Ge And Or Not GreaterThan LessThan
    StrictGreaterThan StrictLessThan Equality Unequality FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt
    FloorToInt CeilDiv LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv TruncToFloat TruncToInt RoundToInt
    RoundDecimal ToFloat Identity floor ceiling
    """.split()  # noqa: SIM905
)
_SYMBOL = re.compile(r"_?(?:s|u|z|zu|zuf|zf|i|f)\d+")
_TREE_TYPES = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"})
_EXPRESSION_NODES = (
    ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.keyword, ast.BinOp, ast.UnaryOp, ast.BoolOp,
    ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_GUARD_NODES = (*_EXPRESSION_NODES, ast.Attribute, ast.Subscript)
_GUARD_ATTRIBUTES = frozenset({"size", "stride", "storage_offset", "ndim", "shape"})
#: keys of text that PyTorch keeps and never evaluates
_FREE_TEXT = frozenset({"metadata", "as_string", "as_strings", "torch_version", "stack_trace"})


class ProgramTensor(NamedTuple):
    """An input or output. `dims`: a number, or the expression of a variable size."""

    name: str
    datatype: str
    dims: tuple[int | str, ...]


class Program(NamedTuple):
    """What a file says about its program.

    Args:
        inputs: in the order of the program.
        outputs: in the order of the program; "output_0", … unless it returns a dictionary, whose keys are their names.
        graph: nodes, and the values that they read and write, as in models/model.json.
        constants: names of values that are weights, buffers and constants.
        opset, schema, made_by: versions of the operators, of the document, and of the PyTorch that wrote it.
    """

    inputs: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...]
    graph: Mapping[str, Any]
    constants: frozenset[str]
    output_values: tuple[str, ...]
    opset: int
    schema: int
    made_by: str


def read_program(path: Path) -> Program:
    """Check the file at `path` and return its program.

    Raises Failure(INVALID) with one line if it is damaged, or if its load could execute what it should not. OSError.
    """
    with open_program(path) as document:
        return _program(document)


def _program(document: Any) -> Program:
    _check(document, 0)
    for guard in document.get("guards_code") or ():
        _check_guard(guard)
    module = document["graph_module"]
    if module.get("treespec_namedtuple_fields"):
        raise invalid("the program takes or returns a named tuple: use tensors, or a dictionary of tensors as result")
    graph, signature = module["graph"], module["signature"]
    call = module["module_call_graph"][0]["signature"]
    names = _output_names(call["out_spec"])
    inputs, constants = _inputs(signature["input_specs"], graph, call)
    values = _output_values(signature["output_specs"])
    if len(names) != len(values):
        raise invalid("the program returns something else than tensors, a tuple of them or a dictionary of them")
    outputs = tuple(_tensor(value, name, graph) for value, name in zip(values, names, strict=True))
    made_by = str(document.get("torch_version", ""))[:100]
    opset = int(document["opset_version"].get("aten", 0))
    schema = int(document["schema_version"]["major"])
    return Program(inputs, outputs, graph, constants, tuple(values), opset, schema, made_by)


def _check(value: Any, depth: int, key: str = "") -> None:
    """Refuse any text in the document that PyTorch would evaluate, import or put into code."""
    if depth > NESTED_MAX:
        raise invalid(f"{MODEL} is nested more than {NESTED_MAX} levels deep")
    if isinstance(value, dict):
        for name, one in value.items():
            if name == "as_custom_obj":
                raise invalid("the program has objects other than tensors: only tensors can be served")
            if name in _FREE_TEXT:
                continue
            if not _NAME.fullmatch(name):
                raise invalid(f"{MODEL}: {name[:80]!a} is no name")
            _check(one, depth + 1, name)
    elif isinstance(value, list):
        for one in value:
            _check(one, depth + 1, key)
    elif isinstance(value, str):
        _check_text(value, key)


def _check_text(text: str, key: str) -> None:
    if key in {"target", "as_operator"}:
        if not _OPERATOR.fullmatch(text):
            raise invalid(f"the operator {text[:100]!a} is not one of ATen's: only those can be served")
    elif key == "expr_str":
        _check_expression(text)
    elif key in {"in_spec", "out_spec"}:
        _check_tree(_tree(text), 0)
    elif key in {"name", "as_name"}:
        if not _IDENTIFIER.fullmatch(text) or iskeyword(text):
            raise invalid(f"{MODEL}: {text[:80]!a} is no name of a tensor")
    elif key != "guards_code" and not _NAME.fullmatch(text):
        raise invalid(f"{MODEL}: {key} is {text[:80]!a}, which is no name")


def _parse(text: str, what: str) -> ast.AST:
    if len(text) > EXPRESSION_CHARACTERS_MAX:
        raise invalid(f"a {what} of the program has more than {EXPRESSION_CHARACTERS_MAX} characters")
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise invalid(f"a {what} of the program is none: {text[:80]!a}") from error


def _check_expression(text: str) -> None:
    for node in ast.walk(_parse(text, "symbolic size")):
        good = isinstance(node, _EXPRESSION_NODES)
        if isinstance(node, ast.Name):
            good = (
                node.id in _FUNCTIONS
                or node.id in {"True", "False", "oo", "int_oo"}
                or bool(_SYMBOL.fullmatch(node.id))
            )
        elif isinstance(node, ast.Call):
            good = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        elif isinstance(node, ast.Constant):
            good = isinstance(node.value, (int, float)) or bool(_SYMBOL.fullmatch(str(node.value)))
        if not good:
            raise invalid(f"a symbolic size of the program is not served: {text[:80]!a}")


def _check_guard(text: Any) -> None:
    for node in ast.walk(_parse(str(text), "guard")):
        good = isinstance(node, _GUARD_NODES)
        if isinstance(node, ast.Name):
            good = node.id == "L" or node.id in _FUNCTIONS
        elif isinstance(node, ast.Attribute):
            good = node.attr in _GUARD_ATTRIBUTES
        elif isinstance(node, ast.Constant):
            good = isinstance(node.value, (int, float)) or bool(_NAME.fullmatch(str(node.value)))
        if not good:
            raise invalid(f"a guard of the program is not served: {str(text)[:80]!a}")


def _tree(text: str) -> Any:
    return json.loads(text)[1] if text else {"type": None, "context": None, "children_spec": []}


def _check_tree(spec: Any, depth: int) -> None:
    if depth > NESTED_MAX or spec["type"] not in _TREE_TYPES:
        raise invalid(f"the program takes or returns a {str(spec['type'])[:80]!a}: use tensors, lists and dictionaries")
    for one in spec["children_spec"]:
        _check_tree(one, depth + 1)


def _output_names(out_spec: str) -> list[str]:
    spec = _tree(out_spec)
    children = spec["children_spec"]
    if spec["type"] is None:
        return ["output_0"]
    if any(one["type"] is not None for one in children):
        raise invalid("the program returns nested results: return tensors, a tuple of them or a dictionary of them")
    if spec["type"] in {"builtins.dict", "collections.OrderedDict"}:
        return [str(key) for key in json.loads(spec["context"])]
    return [f"output_{position}" for position in range(len(children))]


def _inputs(specs: Sequence[Any], graph: Any, call: Any) -> tuple[tuple[ProgramTensor, ...], frozenset[str]]:
    spec = _tree(call["in_spec"])
    nested = [one for group in spec["children_spec"] for one in group["children_spec"] if one["type"] is not None]
    if nested:
        raise invalid("the program takes nested arguments: export it with tensors as arguments")
    inputs, constants = [], set()
    for one in specs:
        ((kind, detail),) = one.items()
        if kind != "user_input":
            constants.add(str(detail["arg"]["name"]) if "name" in detail["arg"] else str(detail["arg"]))
            continue
        ((form, argument),) = detail["arg"].items()
        if form != "as_tensor":
            raise invalid("the program takes an argument that is no tensor: export it with tensors as arguments")
        inputs.append(_tensor(argument["name"], argument["name"], graph))
    return tuple(inputs), frozenset(constants)


def _output_values(specs: Sequence[Any]) -> list[str]:
    values = []
    for one in specs:
        ((kind, detail),) = one.items()
        if kind == "buffer_mutation":
            raise invalid(
                "the program changes its buffers, so that answers would depend on earlier requests: export it after "
                "model.eval()"
            )
        if kind == "user_output":
            ((form, argument),) = detail["arg"].items()
            if form != "as_tensor":
                raise invalid("the program returns something else than tensors")
            values.append(str(argument["name"]))
    return values


def _tensor(value: str, name: str, graph: Any) -> ProgramTensor:
    meta = graph["tensor_values"][value]
    datatype = _DATATYPES.get(meta["dtype"])
    if datatype is None:
        raise invalid(f"tensor {name[:80]!r} has elements of a type that v2 cannot carry")
    return ProgramTensor(name, datatype, tuple(_dim(size) for size in meta["sizes"]))


def _dim(size: Any) -> int | str:
    if "as_int" in size:
        return int(size["as_int"])
    return re.sub(r"Symbol\('(\w+)'[^)]*\)", r"\1", size["as_expr"]["expr_str"])
