"""Exports small models of Hugging Face with Optimum. python of_optimum.py FOLDER"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import transformers
from optimum.exporters.onnx import onnx_export_from_model

TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    image = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    resnet = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    small = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    models = {
        "encoder": (transformers.BertModel(transformers.BertConfig(**TEXT)), "feature-extraction"),
        "classifier": (
            transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**TEXT)),
            "text-classification",
        ),
        "resnet": (
            transformers.ResNetForImageClassification(transformers.ResNetConfig(**resnet)),
            "image-classification",
        ),
        "vision transformer": (
            transformers.ViTForImageClassification(transformers.ViTConfig(**image, image_size=32, patch_size=8)),
            "image-classification",
        ),
        "GPT-2": (transformers.GPT2LMHeadModel(transformers.GPT2Config(**small)), "text-generation"),
    }
    for name, (model, task) in models.items():
        onnx_export_from_model(model.eval(), output=folder / "export", task=task, do_validation=False)
        (folder / "export" / "model.onnx").rename(folder / f"Optimum; {name}.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
