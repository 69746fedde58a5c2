"""Models of other frameworks, converted to what a worker runs."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="convert",
    extras={
        "tensorflow": ("tensorflow", "tf2onnx"),
        "pytorch": ("torch", "onnxscript"),
        "huggingface": ("torch", "onnxscript", "safetensors", "tokenizers", "transformers"),
        "keras": ("torch", "onnxscript", "h5py", "keras"),
        "scikit-learn": ("pandas", "sklearn", "skl2onnx"),
        "xgboost": ("xgboost", "onnxmltools", "skl2onnx"),
        "lightgbm": ("lightgbm", "onnxmltools", "skl2onnx"),
        "catboost": ("catboost",),
        "mlflow": ("yaml",),
    },
)
