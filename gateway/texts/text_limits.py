"""How many texts, bytes and tokens a request may have, before work of that size is done for it. Pure.

bytes of the texts ─> tokenizer ─> tokens of each text, and of all ─> padded to the longest
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.services.errors import invalid

#: texts of a request to a version that does not batch; rows_max bounds those of other versions
TEXTS_MAX = 2048
#: one text, in UTF-8; a tokenizer needs about a hundred times as much memory
TEXT_BYTES_MAX = 256 << 10
#: all texts of a request
TEXTS_BYTES_MAX = 4 << 20
TOKENS_MAX = 8192  # of one text
TOKENS_TOTAL_MAX = 300_000
#: texts times the tokens of the longest: all are padded to its length; 8 MiB of INT64 for each input
PADDED_TOKENS_MAX = 1 << 20


def check_bytes(name: str, texts: Sequence[str]) -> None:
    """Raise Failure(INVALID) for a text, or texts together, of too many bytes.

    Args:
        name: of the member that has them, for the message.
        texts: in UTF-8 without a surrogate.
    """
    total = 0
    for index, text in enumerate(texts):
        size_bytes = len(text) if text.isascii() else len(text.encode())
        check_text_bytes(name, index, size_bytes)
        total += size_bytes
    check_total_bytes(name, total)


def check_text_bytes(name: str, index: int, size_bytes: int) -> None:
    """Raise Failure(INVALID) for a text of too many bytes."""
    if size_bytes > TEXT_BYTES_MAX:
        raise invalid(f"'{name}[{index}]' has {size_bytes} bytes: at most {TEXT_BYTES_MAX}")


def check_total_bytes(name: str, size_bytes: int) -> None:
    """Raise Failure(INVALID) for texts of too many bytes together."""
    if size_bytes > TEXTS_BYTES_MAX:
        raise invalid(f"'{name}' has {size_bytes} bytes: at most {TEXTS_BYTES_MAX} in a request")


def check_tokens(name: str, counts: Sequence[int]) -> None:
    """Raise Failure(INVALID) for a text without a token, and for too many tokens in a text, or in all texts."""
    for index, count in enumerate(counts):
        if not count:
            raise invalid(f"'{name}[{index}]' has no token")
        if count > TOKENS_MAX:
            raise invalid(f"'{name}[{index}]' has {count} tokens: at most {TOKENS_MAX}")
    if sum(counts) > TOKENS_TOTAL_MAX:
        raise invalid(f"'{name}' has {sum(counts)} tokens: at most {TOKENS_TOTAL_MAX} in a request")


def check_padded(rows: int, width: int) -> None:
    """Raise Failure(INVALID) for rows that are too many for the longest of them.

    Args:
        rows: texts of a run.
        width: tokens of each, with the padding.
    """
    if rows * width > PADDED_TOKENS_MAX:
        raise invalid(
            f"{rows} texts padded to the {width} tokens of the longest have {rows * width} tokens: at most "
            f"{PADDED_TOKENS_MAX}; send fewer texts together, or none that is so long"
        )
