"""Backends beside ONNX Runtime: one folder each."""
