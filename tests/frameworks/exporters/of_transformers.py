"""Exports small models of transformers with PyTorch's two exporters. python of_transformers.py FOLDER"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
SMALL: dict[str, Any] = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}


class Tokens(torch.nn.Module):
    """The first output of a model of token ids and a mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask)[0]


def models() -> dict[str, Any]:
    return {
        "BERT": transformers.BertModel(transformers.BertConfig(**SIZES)),
        "RoBERTa": transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**SIZES)),
        "DeBERTa": transformers.DebertaV2Model(transformers.DebertaV2Config(**SIZES)),
        "GPT-2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL, use_cache=False)),
        "Llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, num_key_value_heads=1, use_cache=False)
        ),
    }


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    ids = torch.randint(5, 50, (2, 8))
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"verbose": False, "external_data": False}
    for name, made in models().items():
        model = Tokens(made.eval())
        dims = {0: torch.export.Dim("rows"), 1: torch.export.Dim("length", min=2, max=64)}
        path = str(folder / f"transformers, `dynamo=True`; {name}.onnx")
        torch.onnx.export(model, (ids, mask), path, dynamo=True, dynamic_shapes=(dims, dims), **options)
        path = str(folder / f"transformers, `dynamo=True`, example of one row; {name}.onnx")
        torch.onnx.export(model, (ids[:1], mask[:1]), path, dynamo=True, **options)
        axes = {given: {0: "rows", 1: "length"} for given in ("ids", "mask")} | {"out": {0: "rows"}}
        path = str(folder / f"transformers, `dynamo=False`; {name}.onnx")
        names: dict[str, Any] = {"input_names": ["ids", "mask"], "output_names": ["out"], "dynamic_axes": axes}
        torch.onnx.export(model, (ids, mask), path, dynamo=False, **names, **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
