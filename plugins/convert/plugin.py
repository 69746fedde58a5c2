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
    file_kinds=("millstream.plugins.convert.file_kinds:KINDS",),
    importers=(
        "millstream.plugins.convert.mlflow:MlflowImporter",
        "millstream.plugins.convert.torchserve:TorchServeImporter",
        "millstream.plugins.convert.mlserver:MLServerImporter",
        "millstream.plugins.convert.tensorflow:VersionedFolderImporter",
        "millstream.plugins.convert.huggingface_onnx:HuggingFaceOnnxImporter",
        "millstream.plugins.convert.boosted_trees:XgboostImporter",
        "millstream.plugins.convert.boosted_trees:LightgbmImporter",
        "millstream.plugins.convert.boosted_trees:CatboostImporter",
        "millstream.plugins.convert.pickles:PickleImporter",
        "millstream.plugins.convert.skops_files:SkopsImporter",
        "millstream.plugins.convert.torch_program:TorchProgramImporter",
        "millstream.plugins.convert.torchscript:TorchScriptImporter",
        "millstream.plugins.convert.keras:KerasImporter",
        "millstream.plugins.convert.huggingface:HuggingFaceImporter",
        "millstream.plugins.convert.tensorflow:SavedModelImporter",
        "millstream.plugins.convert.tensorflow:TensorFlowLiteImporter",
    ),
)
