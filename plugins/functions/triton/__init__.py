"""Models of Triton's Python backend, as they are: `class TritonPythonModel` in the file `model.py`."""
