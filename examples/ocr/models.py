"""Copies the models of the package rapidocr to FOLDER, and what the reader has beside its own.

python examples/ocr/models.py FOLDER
"""

import shutil
import sys
from pathlib import Path

import onnxruntime
import rapidocr

MODELS = Path(rapidocr.__file__).parent / "models"


def main(folder: Path) -> None:
    """Write FOLDER/detector.onnx, FOLDER/angle.onnx and the folder FOLDER/reader."""
    reader = folder / "reader"
    shutil.copytree(Path(__file__).parent / "reader", reader, dirs_exist_ok=True)
    shutil.copy(MODELS / "PP-OCRv6_det_small.onnx", folder / "detector.onnx")
    shutil.copy(MODELS / "ch_ppocr_mobile_v2.0_cls_mobile.onnx", folder / "angle.onnx")
    shutil.copy(MODELS / "PP-OCRv6_rec_small.onnx", reader / "model.onnx")
    characters = onnxruntime.InferenceSession(reader / "model.onnx").get_modelmeta().custom_metadata_map["character"]
    (reader / "characters.txt").write_text("\n".join(["", *characters.splitlines(), " "]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
