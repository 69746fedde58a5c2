"""Makes a text of what the model beside it answers: the likeliest class of each place, by CTC."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CHARACTERS = Path(__file__).with_name("characters.txt").read_text(encoding="utf-8").split("\n")


class Read(NamedTuple):
    text: str
    score: float


def post(scores: NDArray[np.float32]) -> Read:
    classes = scores.argmax(axis=1)
    kept = [at for at, one in enumerate(classes) if one and (at == 0 or one != classes[at - 1])]  # 0 is no character
    text = "".join(CHARACTERS[classes[at]] for at in kept)
    return Read(text, float(scores.max(axis=1)[kept].mean()) if kept else 0.0)
