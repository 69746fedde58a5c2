"""Imports encoders of Hugging Face: embeddings, classification of texts, tokens, images and recordings.

folder ─> read without its libraries ─> transformers, offline ─> samples of several lengths ─> ONNX
tokenizer.json ─> checked, its truncation as sentence-transformers does it ─> beside the model, for texts of requests
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.plugins.convert.base import Imported, Importer
from millstream.plugins.convert.huggingface_folder import TOKENIZER, Folder, is_folder, member_patterns, read_folder
from millstream.plugins.convert.huggingface_media import GIVEN, convert_media
from millstream.plugins.convert.huggingface_model import (
    MASK,
    TYPES,
    Encoder,
    answer_of,
    find_head,
    import_transformers,
    load_encoder,
)
from millstream.plugins.convert.onnx_export import CannotExport, Export, export, import_torch, sample
from millstream.services.errors import invalid
from millstream.services.ingest.importers import IMPORTED, Array, ImportOptions, Members, Sample, Source

TOKENIZER_BYTES_MAX = 64 << 20  # gateways read no larger one
#: a tokenizer that cannot encode this is damaged
_TEXT = "Hello, world: 1 Grüße."
_TOKENIZER_OF_MLFLOW = ("components", "tokenizer")  # beside the model's folder
#: rows and tokens of the samples: several lengths, one row and one token
TOKENS_SHORT, TOKENS_PADDED = 5, 9  # of the trial that pads
#: tokens up to which a model without positions is padded: as many as a text may have
PADDED_MAX = 8192
_SHAPES = ((3, 9), (2, 24), (1, 1), (4, 5))


class HuggingFaceImporter(Importer):
    """The importer of folders with config.json, safetensors and tokenizer.json."""

    name = "Hugging Face"
    extra = "huggingface"
    modules = ("torch", "onnxscript", "transformers", "safetensors", "tokenizers")
    marks = frozenset({"config.json"})
    rehearsal = "millstream.plugins.convert.onnx_export:load_torch"

    def recognises(self, source: Source) -> bool:
        return is_folder(source.path)

    def may_be_of(self, names: Collection[str]) -> bool:
        return super().may_be_of(names) and "metadata.json" not in names  # which Keras writes

    def members(self, folder: Path) -> Members:
        return Members(member_patterns(folder))

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        folder = read_folder(source.path, options)
        torch = import_torch()
        transformers = import_transformers()
        head = find_head(transformers, folder, options)
        if head.task in GIVEN:
            return convert_media(torch, transformers, source, folder, head)
        encoder = load_encoder(torch, transformers, folder, head)
        samples = _samples(torch, encoder)
        answer = answer_of(encoder.config, encoder.task, samples[0].outputs[encoder.output].shape[-1])
        padding = _padding_notes(torch, encoder)
        notes = [*encoder.notes, *padding, *answer.notes]
        rows, tokens = torch.export.Dim.DYNAMIC, torch.export.Dim.DYNAMIC
        arguments = _arrays(encoder, 2, 8, np.random.default_rng(2))
        try:
            files = export(
                torch,
                Export(
                    encoder.module,
                    encoder.inputs,
                    (encoder.output,),
                    tuple(torch.from_numpy(array) for array in arguments),
                    tuple({0: rows, 1: tokens} for _ in encoder.inputs),
                ),
                source.folder,
            )
        except CannotExport as error:
            raise invalid(f"the model cannot be exported to ONNX: {error}") from error
        tokenizer, note = tokenizer_files(source, folder, encoder.vocabulary, encoder.positions)
        notes += [note] if note else []
        return Imported(
            files[0],
            "onnx",
            samples,
            encoder.versions,
            tuple(notes),
            files=(*files[1:], *tokenizer),
            rtol=1e-3,
            atol=1e-4,
            embeddings=(encoder.output,) if encoder.task == "embeddings" else (),
            classes=answer.classes,
            labels=answer.labels,
            padded_max=0 if padding else encoder.positions or PADDED_MAX,
        )


def _arrays(encoder: Encoder, rows: int, tokens: int, generator: np.random.Generator) -> list[Array]:
    return token_arrays(encoder.inputs, encoder.vocabulary, (rows, tokens), generator)


def token_arrays(
    names: Sequence[str], vocabulary: int, shape: tuple[int, int], generator: np.random.Generator
) -> list[Array]:
    """Return token ids, a mask with rows of different lengths, and types, for the inputs that the model has."""
    rows, tokens = shape
    above = max(min(vocabulary or 100, 30_000), 4)
    ids = generator.integers(min(3, above - 1), above, (rows, tokens))
    lengths = np.maximum(tokens - np.arange(rows) * max(tokens // 3, 1), 1)
    mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
    types = generator.integers(0, 2, (rows, tokens))
    by_name = {MASK: mask, TYPES: types}
    return [np.asarray(by_name.get(name, ids), np.int64) for name in names]


def _samples(torch: Any, encoder: Encoder) -> list[Sample]:
    generator = np.random.default_rng(1)
    try:
        return [
            sample(torch, encoder.answer, encoder.inputs, (encoder.output,), _arrays(encoder, rows, tokens, generator))
            for rows, tokens in _SHAPES
            if tokens <= (encoder.positions or tokens)
        ]
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise invalid(f"the model does not run on token ids with an attention mask: {text}") from error


def _padding_notes(torch: Any, encoder: Encoder) -> list[str]:
    def answer(arrays: Sequence[Array]) -> Array:
        return sample(torch, encoder.answer, encoder.inputs, (encoder.output,), arrays).outputs[encoder.output]

    return padding_notes(answer, encoder.inputs, encoder.vocabulary, embeds=encoder.task == "embeddings")


def padding_notes(
    answer: Callable[[Sequence[Array]], Array], names: Sequence[str], vocabulary: int, *, embeds: bool
) -> list[str]:
    """Return a note if padding changes the answers. Raises Failure(INVALID) if it changes embeddings."""
    short = token_arrays(names, vocabulary, (1, TOKENS_SHORT), np.random.default_rng(3))
    alone = answer(short)
    together = answer([np.pad(array, ((0, 0), (0, TOKENS_PADDED - TOKENS_SHORT))) for array in short])
    if alone.ndim == 3:
        together = together[:, :TOKENS_SHORT]
    if np.allclose(alone, together, rtol=1e-3, atol=1e-4):
        return []
    if embeds:
        raise invalid(
            "padding changes what the model answers, though its attention mask is 0 there: texts of different "
            "lengths could not be embedded together"
        )
    return ["Padding changes what the model answers: send texts of one length in a request."]


def tokenizer_files(source: Source, folder: Folder, vocabulary: int, positions: int) -> tuple[Sequence[Path], str]:
    """Write the tokenizer as the model's author used it; returns the file, and a note where there is none.

    `vocabulary`, `positions`: tokens that the model has, and the longest sequence; 0: not known.
    """
    places = (folder.path, source.path, source.path.parent.joinpath(*_TOKENIZER_OF_MLFLOW))
    path = next((place / TOKENIZER for place in places if (place / TOKENIZER).is_file()), None)
    if path is None:
        return (), (
            "The folder has no tokenizer.json, so the model takes token ids and no texts; "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it."
        )
    from tokenizers import Tokenizer, normalizers

    if path.stat().st_size > TOKENIZER_BYTES_MAX:
        raise invalid(f"tokenizer.json has more than {TOKENIZER_BYTES_MAX} bytes")
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
        tokenizer.encode(_TEXT)
    except BaseException as error:  # the library is in Rust: a panic is not an Exception
        raise invalid(f"tokenizer.json cannot be read: {' '.join(str(error).split())[:200]}") from None
    largest = max(tokenizer.get_vocab().values(), default=0)
    if vocabulary and largest >= vocabulary:
        raise invalid(
            f"tokenizer.json has the token {largest} and the model has {vocabulary} tokens: it belongs to another model"
        )
    if folder.lower_case:
        normal = tokenizer.normalizer
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([normal] if normal else [])])
    limits = [limit for limit in (folder.tokens_max, positions) if limit]
    if limits:
        tokenizer.enable_truncation(min(limits))
    tokenizer.no_padding()
    written = source.folder / IMPORTED / TOKENIZER
    tokenizer.save(str(written))
    return (written,), ""
