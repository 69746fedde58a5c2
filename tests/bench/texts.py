"""Measures embeddings of texts of many lengths, run by similar lengths, against the same padded to the longest."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np
import onnx

from tests.bench import servers
from tests.bench.race_models import minilm
from tests.bench.result import Figure, Result
from tests.bench.rounds import Say
from tests.bench.servers import ADMIN, Server

TEXTS, TOKENS_MAX = 64, 256
_WORDS = 30_522


def lengths() -> list[int]:
    """Return tokens of texts as searches and paragraphs have them: most are short, and some are of the longest."""
    drawn = np.exp(np.random.default_rng(9).normal(np.log(32), 0.9, TEXTS)).astype(int)
    return [*np.clip(drawn, 4, TOKENS_MAX)[:-1].tolist(), TOKENS_MAX]


def _seconds(server: Server, entries: Sequence[Sequence[int]]) -> float:
    body = json.dumps({"model": "minilm", "input": entries}).encode()
    began = time.perf_counter()
    urlopen(Request(f"{server.url}/v1/embeddings", body, {"Content-Type": "application/json"})).close()
    return time.perf_counter() - began


def text_rows(folder: Path, rounds: int, say: Say) -> Result:
    """Measure one request of many texts to an encoder of MiniLM's shape, and the same with all texts padded."""
    model = folder / "minilm.onnx"
    onnx.save(minilm(), model)
    random = np.random.default_rng(10)
    texts = [random.integers(1, _WORDS, length).tolist() for length in lengths()]
    padded = [text + [0] * (TOKENS_MAX - len(text)) for text in texts]
    found: list[tuple[float, float]] = []
    query = urlencode({"config": '{"timeout_ms_default": 600000}', "wait": 60})
    with servers.millstream(folder, "texts", {}) as server:
        where = f"{server.url}/admin/v1/models/minilm/versions?{query}"
        urlopen(Request(where, model.read_bytes(), ADMIN)).close()
        _seconds(server, texts)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}: texts by length, and padded")
            found.append((_seconds(server, texts), _seconds(server, padded)))
    own, other = (median(column) for column in zip(*found, strict=True))
    figure = Figure(
        name="embeddings of texts of many lengths, MiniLM's shape",
        measured=median(b / a for a, b in found),
        bound=2.0,
        unit="x padded ones",
        detail=f"{TEXTS / own:.0f} texts/s, padded to {TOKENS_MAX} tokens {TEXTS / other:.0f}",
    )
    return Result((figure,), ())
