"""What a worker refuses of a program that reached the repository without the check of an upload."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest

from millstream.plugins.engines.torch.torch_program import tensors_only
from millstream.services.errors import Code, Failure
from millstream.workers.backends import get_backend
from tests.contract.backend_cases import signature
from tests.kit import odd_programs, torch_library, torch_models

pytestmark = pytest.mark.needs("torch")

PAIR = signature(
    [("a", "FP32", (-1, 4)), ("b", "FP32", (-1, 4))], [("sum", "FP32", (-1, 4)), ("diff", "FP32", (-1, 4))]
)


def test_what_a_load_could_execute_is_refused_by_workers_too(tmp_path: Path) -> None:
    content = torch_models.sum_and_difference(tmp_path / "good.pt2").read_bytes()
    made, path = tmp_path / "made", tmp_path / "bad.pt2"
    for name, (change, refusal) in odd_programs.dangerous(str(made)).items():
        path.write_bytes(odd_programs.rewritten(content, change))
        with pytest.raises(Failure) as caught:
            get_backend("torch").load(path, PAIR, "cpu", 1)
        assert caught.value.code is Code.MODEL
        assert refusal in caught.value.message, name
        assert not made.exists(), name


def test_pytorch_unpickles_tensors_alone_while_a_program_is_loaded(tmp_path: Path) -> None:
    torch_library.add()
    import torch

    made, load = tmp_path / "made", torch.load
    with tensors_only(torch), pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(pickle.dumps(odd_programs.Boom(str(made)), protocol=2)), weights_only=False)
    assert not made.exists()
    assert torch.load is load
