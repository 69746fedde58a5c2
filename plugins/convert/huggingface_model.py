"""Loads an encoder of Hugging Face, as a module of PyTorch that takes token ids and returns what is served.

input_ids, attention_mask [, token_type_ids] ─> encoder ─> states ─> pooling, dense layers, length 1 ─> vectors
For the checker process only: it imports PyTorch and transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from millstream.plugins.convert.huggingface_folder import Folder, Pipeline, positions_of
from millstream.plugins.convert.huggingface_heads import LOGITS, Head, Task, find_head
from millstream.services.errors import invalid
from millstream.services.ingest.importers import ImportOptions

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"


class Encoder(NamedTuple):
    """A loaded model.

    Args:
        config: as transformers read it.
        answer: called with the tensors of `inputs`; returns the one output.
        module: computes the same in a form whose rows the model check can prove independent, where there is one.
    """

    task: Task
    config: Any
    inputs: tuple[str, ...]
    output: str
    answer: Any
    module: Any
    vocabulary: int
    positions: int
    versions: str
    notes: Sequence[str]


def import_transformers() -> Any:
    """Return the module transformers. Raises Failure(INVALID) with what to install."""
    try:
        import safetensors.torch  # noqa: F401 - transformers imports it late
        import transformers
    except ImportError as error:
        raise invalid(
            f"transformers cannot be loaded where the gateway runs ({error}): install millstream[huggingface]"
        ) from error
    return transformers


def load_encoder(torch: Any, transformers: Any, folder: Folder, options: ImportOptions) -> Encoder:
    """Load the model. Raises Failure(INVALID) if it is unknown, incomplete, or would run code that is not allowed."""
    head = find_head(transformers, folder, options)
    model, notes = _load(torch, transformers, folder, head)
    parameters = inspect.signature(model.forward).parameters
    if IDS not in parameters or MASK not in parameters:
        raise invalid(f"the model takes no {IDS} and {MASK}: only encoders of text are imported")
    types = TYPES in parameters and (getattr(model.config, "type_vocab_size", 0) or 0) > 1
    names = (IDS, MASK, TYPES) if types else (IDS, MASK)
    output, finish = _finish(torch, folder, head)
    answer = _wrapped(torch, model, finish, types=types, wide=False)
    module = _wrapped(torch, model, finish, types=types, wide=True)
    return Encoder(
        head.task,
        model.config,
        names,
        output,
        answer,
        module if _agree(torch, answer, module, len(names)) else answer,
        int(getattr(model.config, "vocab_size", 0) or 0),
        positions_of(model.config.to_dict()),
        f"transformers {transformers.__version__}, torch {torch.__version__}",
        notes,
    )


def _load(torch: Any, transformers: Any, folder: Folder, head: Head) -> tuple[Any, Sequence[str]]:
    """Return the model and notes. Raises Failure(INVALID) unless the class has a place for each weight of the folder,
    and the folder a weight for each place.
    """
    try:
        model, found = getattr(transformers, head.loader).from_pretrained(
            str(folder.path),
            local_files_only=True,
            use_safetensors=not folder.pickled,
            trust_remote_code=head.code,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        if "ignore_mismatched_sizes" in text:
            raise invalid("the folder's weights are not those of its config.json: some have other shapes") from error
        raise invalid(f"transformers {transformers.__version__} cannot load the model: {text}") from error
    name = type(model).__name__
    if not head.code and folder.pipeline is None and folder.architecture not in {"", name}:
        raise invalid(f"config.json names the architecture {folder.architecture[:80]!a}, and transformers loads {name}")
    # The states are computed without the pooler, which many files lack.
    pooler = "pooler." if head.task == "embeddings" else None
    missing = [key for key in found["missing_keys"] if pooler is None or not key.startswith(pooler)]
    wrong = [str(key) for key in (*missing, *(entry[0] for entry in found["mismatched_keys"]))]
    if wrong:  # transformers gives such weights random values
        raise invalid(
            f"the folder's weights are not those of its config.json: {min(wrong)[:80]!a} is missing or of another shape"
        )
    dropped = sorted(map(str, found["unexpected_keys"]))
    if dropped and folder.pipeline is None:
        raise invalid(
            f"the folder has {len(dropped)} weights that {name} has no place for, {dropped[0][:80]!a} among them: a "
            "head would be left out; config.json has to name the architecture that was saved"
        )
    notes = [f"{len(dropped)} weights that modules.json does not use are left out, as {dropped[0]}."] if dropped else []
    return model.eval(), notes


def _wrapped(torch: Any, model: Any, finish: Callable[[Any, Any], Any], *, types: bool, wide: bool) -> Any:
    """Return a module of the inputs' tensors.

    Some heads find the end of a text, and some models number positions, by the padding token alone: where the mask is
    0 the model is given that token, whatever a caller padded with.

    `wide`: gives the model the mask that it adds to attention scores, so that it does not build one. The graph of that
    is long, and the analysis of rows does not follow it.
    """
    padding = getattr(model.config, "pad_token_id", None)
    padding = padding if type(padding) is int and 0 < padding < (getattr(model.config, "vocab_size", 0) or 0) else 0

    class Served(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
            mask = attention_mask
            if padding:
                input_ids = torch.where(mask > 0, input_ids, padding)
            if wide:
                mask = (1.0 - mask[:, None, None, :].to(torch.float32)) * torch.finfo(torch.float32).min
            named = {TYPES: token_type_ids} if types else {}
            return finish(self.model(**{IDS: input_ids, MASK: mask}, **named, return_dict=True), attention_mask)

    return Served().eval()


def _agree(torch: Any, one: Any, other: Any, inputs: int) -> bool:
    """Return whether two modules give equal answers for a masked row, and the second takes what the first does."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 4, 4]])
    arguments = (ids, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), torch.zeros_like(ids))[:inputs]
    try:
        with torch.inference_mode():
            return bool(torch.allclose(one(*arguments), other(*arguments), rtol=1e-4, atol=1e-5))
    except Exception:  # a model that takes no such mask raises what its author chose
        return False


def _finish(torch: Any, folder: Folder, head: Head) -> tuple[str, Callable[[Any, Any], Any]]:
    if head.task != "embeddings":
        return LOGITS, lambda found, _: found.logits
    if folder.pipeline is None:
        return "last_hidden_state", lambda found, _: found.last_hidden_state
    pipeline = folder.pipeline
    layers = _layers(torch, pipeline)

    def embed(found: Any, mask: Any) -> Any:
        states = found.last_hidden_state
        vectors = torch.cat([_pooled(torch, states, mask, mode) for mode in pipeline.pooling], 1)
        for layer in layers:
            vectors = layer(vectors)
        if pipeline.normalize:
            vectors = vectors / (vectors * vectors).sum(1, keepdim=True).sqrt().clamp(min=1e-12)
        return vectors

    return "sentence_embedding", embed


def _pooled(torch: Any, states: Any, mask: Any, mode: str) -> Any:
    """Return one vector for each row. Source: sentence-transformers, Pooling."""
    weights = mask[:, :, None].to(states.dtype)
    if mode == "cls":
        return states[:, 0]
    if mode == "max":
        return torch.where(weights > 0, states, torch.full_like(states, -1e9)).amax(1)
    total, count = (states * weights).sum(1), weights.sum(1).clamp(min=1e-9)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


def _layers(torch: Any, pipeline: Pipeline) -> Sequence[Any]:
    from safetensors.torch import load_file

    layers = []
    for dense in pipeline.dense:
        weights = {
            name.removeprefix("linear."): tensor.float()
            for name, tensor in load_file(dense.folder / "model.safetensors").items()
        }
        if set(weights) - {"bias"} != {"weight"} or weights["weight"].ndim != 2:
            raise invalid(
                f"the weights of the Dense module {dense.folder.name[:80]!a} are not those of one linear layer"
            )
        out, into = weights["weight"].shape
        linear = torch.nn.Linear(into, out, bias="bias" in weights)
        linear.load_state_dict(weights)
        layers.append(torch.nn.Sequential(linear, getattr(torch.nn, dense.activation)()).eval())
    return layers
