"""Files that users upload in place of an ONNX model, written by the real libraries where these are installed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import joblib
import numpy as np
from sklearn.linear_model import LogisticRegression

ROOT = Path(__file__).parents[2]
ONNX = (ROOT / "examples" / "digits" / "digits.onnx").read_bytes()


def zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(members: Mapping[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def scikit() -> LogisticRegression:
    return LogisticRegression().fit(np.array([[0.0], [1.0]]), np.array([0, 1]))


def dumped(write: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def safetensors() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def frozen_graph() -> bytes:
    node = b"\x0a\x05input\x12\x0bPlaceholder"
    return b"\x0a" + bytes([len(node)]) + node


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
_TORCH = {"net/data.pkl": b"\x80\x02}q\x00.", "net/version": b"3\n", "net/data/0": bytes(64)}

#: name -> content, and a part of the message that it gets
WRONG_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "pickle": (pickle.dumps({"weights": [1, 2]}), "a pickle, not an ONNX model: load it where it was made"),
    "pickle-text": (pickle.dumps({"weights": [1, 2]}, protocol=0), "a pickle, not"),
    "scikit": (pickle.dumps(scikit()), "a pickle of a scikit-learn model, not an ONNX model: load it where it was"),
    "joblib": (dumped(lambda file: joblib.dump(scikit(), file)), "skl2onnx.to_onnx(model, X[:1])"),
    "joblib-zlib": (dumped(lambda file: joblib.dump(scikit(), file, compress=3)), "compressed with zlib"),
    "joblib-gzip": (dumped(lambda file: joblib.dump(scikit(), file, compress=("gzip", 3))), "compressed with gzip"),
    "joblib-xz": (dumped(lambda file: joblib.dump(scikit(), file, compress=("xz", 3))), "scikit-learn model, compr"),
    "joblib-bz2": (dumped(lambda file: joblib.dump(scikit(), file, compress=("bz2", 3))), "scikit-learn model, compr"),
    "html": (
        b"\n<!DOCTYPE html>\n<html><title>Sign in</title></html>",
        "an HTML page, not an ONNX model: the download",
    ),
    "html-bom": (b"\xef\xbb\xbf<html></html>", "an HTML page"),
    "s3-error": (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', "an error message of an object"),
    "openvino": (b'<?xml version="1.0"?>\n<net name="net" version="11"></net>', "an OpenVINO model"),
    "lfs": (_POINTER, "a Git LFS pointer, not an ONNX model: run `git lfs pull`"),
    "dvc": (b"outs:\n- md5: 3863d0e317dee0a55c4e59d2ec0eef33\n  path: model.onnx\n", "`dvc pull`"),
    "json": (b'{"error": "not found"}', "this is JSON"),
    "xgboost": (b'{"learner": {"attributes": {}}}', "convert_xgboost"),
    "lightgbm": (b"tree\nversion=v4\nnum_class=1\n", "convert_lightgbm"),
    "text": (b"404: Not Found", "this is text, not an ONNX model ('404: Not Found')"),
    "unicode": ("модель не найдена\n".encode(), "this is text, not an ONNX model ('модель не найдена')"),
    "onnx-text": (b'<ir_version: 8, opset_import: ["" : 17]>\nagraph (float[N] x) => (float[N] y) {}', "text form"),
    "safetensors": (safetensors(), "a safetensors file, not an ONNX model: it has weights and no graph"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(64), "a GGUF model"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(64), "tf2onnx.convert --keras"),
    "tflite": (b"\x1c\0\0\0TFL3" + bytes(64), "tf2onnx.convert --tflite"),
    "ort": (b"\x1c\0\0\0ORTM" + bytes(64), "ORT format"),
    "tensorrt": (b"ftrt" + bytes(64), "a TensorRT engine, not an ONNX model: push the ONNX file it was built from"),
    "saved-model": (
        b"\x08\x01\x12\x20\x0a\x1e\x12\x0a\x0a\x08\x0a\x06VarHandleOp\x22\x05serve",
        "tf2onnx.convert --saved-",
    ),
    "frozen-graph": (frozen_graph(), "a TensorFlow graph"),
    "torch": (zipped(_TORCH), "a PyTorch file (torch.save), not an ONNX model: load it into its model class"),
    "torch-1.5": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", "a PyTorch file (torch.save)"),
    "torchscript": (zipped({**_TORCH, "net/constants.pkl": b"", "net/code/a.py": b""}), "a TorchScript file"),
    "keras": (zipped({"metadata.json": b"{}", "config.json": b"{}", "model.weights.h5": b""}), "format='onnx'"),
    "saved-model-zip": (zipped({"a/saved_model/saved_model.pb": b"", "a/saved_model/variables/x": b""}), "SavedModel"),
    "saved-model-tar": (tarred({"saved_model.pb": b"\x08\x01"}), "SavedModel"),
    "pickle-in-tar": (tarred({"model.pkl": pickle.dumps(1)}, "w:gz"), "a pickle"),
    "npz": (dumped(lambda file: np.savez(file, x=np.zeros(2))), "an array of numpy"),
    "npy": (dumped(lambda file: np.save(file, np.zeros(2))), "an array of numpy"),
    "zip": (zipped({"notes.md": b"hello"}), "nothing in it is known as one (notes.md)"),
    "gzip": (gzip.compress(ONNX), "compressed with gzip, no archive: run gunzip"),
    "bzip2": (bz2.compress(ONNX), "compressed with bzip2, no archive: run bunzip2"),
    "xz": (lzma.compress(ONNX), "compressed with xz, no archive: run unxz"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(64), "an image"),
    "elf": (b"\x7fELF" + bytes(64), "a program or library"),
    "half": (ONNX[: len(ONNX) // 2], "this ONNX model was cut short: it needs at least"),
    "start": (ONNX[:9], "this ONNX model was cut short"),
}

#: those that the plug-in convert knows
OF_FRAMEWORKS = frozenset(
    {
        *("frozen-graph", "gguf", "hdf5", "joblib", "joblib-bz2", "joblib-xz", "keras", "lightgbm", "openvino"),
        *("safetensors", "saved-model", "saved-model-zip", "scikit", "tflite", "torch", "torch-1.5", "torchscript"),
        "xgboost",
    }
)
