"""Files of frameworks that no importer takes as they are get a refusal that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.services.ingest.file_kind import why_no_model, why_not_onnx
from tests.kit.wrong_files import OF_FRAMEWORKS, WRONG_FILES


@pytest.mark.parametrize("name", sorted(OF_FRAMEWORKS))
def test_the_message_names_the_kind_and_what_to_do(tmp_path: Path, name: str) -> None:
    content, says = WRONG_FILES[name]
    file = tmp_path / "model.onnx"
    file.write_bytes(content)
    why = why_not_onnx(file)
    assert why is not None
    assert says in why
    assert "\n" not in why
    assert len(why) < 400


def test_a_folder_of_weights_is_named() -> None:
    assert why_no_model(["weights.pt", "x"]) == why_no_model(["weights.pt"])
    assert "this is a PyTorch file (torch.save), not an ONNX model" in str(why_no_model(["weights.pt"]))
