"""What every backend must do, run against each of them. What one of them adds is in test_backend_NAME.py."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from millstream.services.errors import Code, Failure
from millstream.services.extras import backends
from millstream.services.process.process_memory import resident_bytes
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array, Stop, Terminated
from tests.contract.backend_cases import (
    CASES,
    ENDLESS,
    EVERY,
    TORCH,
    TRITON,
    Case,
    on_server,
    push_remote_models,
    same,
    signature,
    some,
)
from tests.kit import torch_library
from tests.kit.stack import Stack, running_stack

WEIGHT_BYTES = 48 * 2**20


def those(wanted: Callable[[Case], object]) -> pytest.MarkDecorator:
    """Run a test for the backends for which `wanted` is true: what it tests is not in the contract of the others."""
    chosen = [pytest.param(case, id=case.name, marks=case.marks) for case in CASES if wanted(case)]
    return pytest.mark.parametrize("case", chosen, indirect=True)


@pytest.fixture(params=[pytest.param(case, id=case.name, marks=case.marks) for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    found = request.param
    assert isinstance(found, Case)
    if found is TRITON:
        return on_server(request.getfixturevalue("server").grpc)
    if found is TORCH:
        torch_library.add()
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Millstream itself, which speaks Triton's protocol."""
    folder = tmp_path_factory.mktemp("server")
    with running_stack(folder) as stack:
        push_remote_models(stack, folder)
        yield stack


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("datatype", EVERY)
def test_a_datatype_comes_back_as_it_went_in_or_is_refused(
    case: Case, tmp_path: Path, datatype: str, rows: int
) -> None:
    if datatype not in case.datatypes:
        with pytest.raises(Failure, match=datatype) as caught:
            case.load_identity(tmp_path, datatype)
        assert caught.value.code is Code.MODEL
        return
    instance = case.load_identity(tmp_path, datatype)
    given = some(datatype, rows)
    (taken,) = instance.run({"x": given})
    assert taken.dtype == given.dtype
    assert taken.shape == given.shape
    assert taken.tolist() == given.tolist()


@pytest.mark.parametrize("datatype", ["FP32", "BF16"])
def test_arrays_that_are_read_only_or_not_in_order_are_taken(case: Case, tmp_path: Path, datatype: str) -> None:
    datatype = datatype if datatype in case.datatypes else "FP16"  # numpy has no BF16, nor has Python
    instance = case.load_identity(tmp_path, datatype)
    given = some(datatype, 6)[::2, ::-1]
    given.flags.writeable = False
    (taken,) = instance.run({"x": given})
    assert taken.tolist() == given.tolist()


def test_outputs_share_no_memory_with_inputs_or_with_the_next_run(case: Case, tmp_path: Path) -> None:
    instance = case.load_identity(tmp_path)
    given, other = some("FP32", 2), 100 + some("FP32", 2)
    (taken,) = instance.run({"x": given})
    assert not np.shares_memory(given, taken)
    instance.run({"x": other})
    assert taken.tolist() == given.tolist()


def test_batches_of_changing_size_run(case: Case, tmp_path: Path) -> None:
    instance = case.load_identity(tmp_path)
    for rows in (3, 8, 1, 0, 64, 2):
        given = some("FP32", rows)
        assert instance.run({"x": given})[0].tolist() == given.tolist()


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param({}, id="missing"),
        pytest.param({"x": some("FP32", 1), "z": some("FP32", 1)}, id="unknown name"),
        pytest.param({"x": np.ones((1, 3), np.float32)}, id="other width"),
        pytest.param({"x": np.ones((1, 2, 1), np.float32)}, id="other rank"),
        pytest.param({"x": np.ones((1, 2), np.float64)}, id="other datatype"),
        pytest.param({"x": np.array([[b"a", b"b"]], dtype=object)}, id="text"),
    ],
)
def test_wrong_inputs_are_a_failure_of_the_model_and_the_next_run_works(
    case: Case, tmp_path: Path, inputs: dict[str, Array]
) -> None:
    instance = case.load_identity(tmp_path)
    with pytest.raises(Failure) as caught:
        instance.run(inputs)
    assert caught.value.code in {Code.INVALID, Code.MODEL}  # where the library says that it is the input
    assert str(tmp_path) not in caught.value.message
    given = some("FP32", 2)
    assert instance.run({"x": given})[0].tolist() == given.tolist()


def test_a_missing_input_is_named_so(case: Case, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="missing"):
        case.load_identity(tmp_path).run({})


@pytest.mark.parametrize("kept_elsewhere", [False, True])
def test_a_file_that_was_deleted_meanwhile_is_a_failure_of_the_model(
    case: Case, tmp_path: Path, kept_elsewhere: bool
) -> None:
    home = tmp_path / "home" if kept_elsewhere else None
    with pytest.raises(Failure, match="gone") as caught:
        get_backend(case.name, home).load(tmp_path / "gone", same(), case.device, 1)
    assert caught.value.code is Code.MODEL


@pytest.mark.parametrize("content", [b"\x08\x08 not a model", b"", b"{"])
def test_a_file_that_is_no_model_is_refused(case: Case, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(Failure, match="broken") as caught:
        get_backend(case.name).load(path, same(), case.device, 1)
    assert caught.value.code is Code.MODEL
    assert "\n" not in caught.value.message
    assert str(tmp_path) not in caught.value.message


@those(lambda case: not case.any_device)
def test_a_device_that_it_cannot_use_is_refused(case: Case, tmp_path: Path) -> None:
    path = case.identity(tmp_path, "FP32")
    for device in ("tpu", "cuda:99", "cpu:1"):
        with pytest.raises(Failure, match=device) as caught:
            get_backend(case.name).load(path, same(), device, 1)
        assert caught.value.code is Code.UNAVAILABLE


def test_a_backend_can_be_prepared_again_and_counts_no_memory_of_a_cpu(case: Case) -> None:
    backend = get_backend(case.name)
    for _ in range(2):
        backend.prepare(case.device)
    assert backend.device_bytes("cpu") == 0


def test_what_a_backend_compiles_for_a_device_does_not_change(case: Case) -> None:
    assert get_backend(case.name).target(case.device) == get_backend(case.name).target(case.device)


def test_a_loaded_instance_is_not_lost(case: Case, tmp_path: Path) -> None:
    instance = case.load_identity(tmp_path)
    assert instance.lost == ""
    instance.run({"x": some("FP32", 1)})
    assert instance.lost == ""


def test_a_closed_instance_refuses_to_run_and_closing_twice_is_harmless(case: Case, tmp_path: Path) -> None:
    instance = case.load_identity(tmp_path)
    assert instance.size_bytes >= 0
    instance.close()
    instance.close()
    with pytest.raises(Failure, match="unloaded") as caught:
        instance.run({"x": some("FP32", 1)})
    assert caught.value.code is Code.UNAVAILABLE


def test_a_rebuilt_instance_runs(case: Case, tmp_path: Path) -> None:
    instance = case.load_identity(tmp_path)
    instance.run({"x": some("FP32", 5)})
    instance.rebuild()
    given = some("FP32", 3)
    assert instance.run({"x": given})[0].tolist() == given.tolist()


@those(lambda case: case.endless)  # the runs of others always end
def test_a_run_is_terminated_from_another_thread_and_the_next_one_works(case: Case, tmp_path: Path) -> None:
    assert case.endless is not None
    numbers = signature([("x", "INT64", (-1, 1))], [("y", "INT64", (-1, 1))])
    instance = get_backend(case.name).load(case.endless(tmp_path), numbers, case.device, 1)
    ended: list[type[Exception]] = []

    def run() -> None:
        try:
            instance.run({"x": np.array([[ENDLESS]])})
        except Exception as error:
            ended.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():  # again and again: the run may begin later than the first call
        instance.terminate()
        thread.join(0.05)
    assert ended == [Terminated]
    with contextlib.suppress(Terminated):  # which the contract allows
        instance.run({"x": np.array([[1]])})
    assert instance.run({"x": np.array([[1], [2]])})[0].tolist() == [[1], [2]]


def test_a_load_ends_if_its_end_was_requested(case: Case, tmp_path: Path) -> None:
    stop = Stop()
    stop.request("it is no longer wanted")
    with pytest.raises(Failure) as caught:
        get_backend(case.name).load(case.identity(tmp_path, "FP32"), same(), case.device, 1, stop)
    assert caught.value.code is Code.MODEL


@those(lambda case: case.weighty)  # of others, another process holds the model
def test_loading_and_closing_gives_memory_back(case: Case, tmp_path: Path) -> None:
    assert case.weighty is not None
    path = case.weighty(tmp_path, WEIGHT_BYTES)
    column = signature([("x", "FP32", (-1, 1))], [("y", "FP32", (-1, 1))])

    def cycle() -> int:
        instance = get_backend(case.name).load(path, column, case.device, 1)
        instance.run({"x": np.ones((4, 1), np.float32)})
        instance.close()
        return resident_bytes()

    cycle()
    after_one = cycle()
    assert [cycle() for _ in range(3)][-1] < after_one + 10 * 2**20


@those(lambda case: case.threads)  # others have no threads of their own, or those of the process
def test_threads_are_those_asked_for(case: Case, tmp_path: Path) -> None:
    """In a process of its own: threads of others come and go here."""
    counted = subprocess.run(
        [sys.executable, "-P", "-c", THREADS, case.name, case.identity(tmp_path, "FP32"), same().model_dump_json()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert counted.stdout.split() == ["0", "2"], counted.stderr


THREADS = """
import sys
from pathlib import Path
import numpy as np
from millstream.services.model.signature import Signature
from millstream.workers.backends import get_backend

path, signature = Path(sys.argv[2]), Signature.model_validate_json(sys.argv[3])
backend = get_backend(sys.argv[1])
counts, kept = [], []

def load(threads):
    instance = backend.load(path, signature, "cpu", threads)
    instance.run({"x": np.ones((100, 2), np.float32)})
    kept.append(instance)

load(1)
for threads in (1, 3):
    before = len(list(Path("/proc/self/task").iterdir()))
    load(threads)
    counts.append(len(list(Path("/proc/self/task").iterdir())) - before)
print(*counts)
"""


@pytest.mark.plugins
def test_every_backend_names_its_formats() -> None:
    assert {name: get_backend(name).name for name in backends()} == {name: name for name in backends()}
    compiled_alone = {"tvm"}  # no version has its format
    assert {name for name in backends() if not get_backend(name).formats} == compiled_alone


@pytest.mark.plugins
def test_every_backend_is_tested() -> None:
    in_frameworks = {"iree", "jax", "tvm"}  # tests/frameworks: test_backends_of_jax.py, test_tvm.py
    assert {case.name for case in CASES} | in_frameworks == set(backends())


@pytest.mark.plugins
def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(
        Failure, match="unknown backend 'caffe'; known: iree, jax, onnxruntime, openvino, python, simulated, torch, "
    ):
        get_backend("caffe")


def test_importing_the_backends_imports_no_library() -> None:
    modules = "sys, millstream.workers.backends, millstream.workers.models.profiler"
    libraries = {"jax", "iree", "onnxruntime", "onnx", "openvino", "torch", "tritonclient", "grpc", "tvm"}
    code = f"import {modules}; print({libraries} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_an_option_that_a_backend_does_not_know_is_refused(case, tmp_path):
    path = case.identity(tmp_path, case.datatypes[0])
    for options, message in (
        ({"turbo": True}, f"the backend {case.name} has no option 'turbo'; known: "),
        ({"threads": True}, "'threads'"),
        ({"threads": 0}, "'threads'"),
    ):
        with pytest.raises(Failure, match=re.escape(message)) as caught:
            get_backend(case.name).load(path, same(case.datatypes[0]), case.device, 1, None, options)
        assert caught.value.code is Code.INVALID
