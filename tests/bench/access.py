"""access: what the check of a key costs an inference request: `python -m tests.bench.access`."""

from __future__ import annotations

import timeit

from millstream.gateway.access.gate import Gate
from millstream.services.access.document import KeyDocument, Limits, StoredSecret
from millstream.services.access.secret import derive_secret, format_key, hash_secret

CALLS = 200_000


def check_us(limits: Limits) -> float:
    """Return the microseconds of one check, with its end; the least of five rounds."""
    secret = derive_secret(b"s" * 32, "0" * 16, "")
    stored = StoredSecret(sha256=hash_secret(secret), salt="", created_at=0)
    gate = Gate("an-admin-key")
    gate.load(
        [KeyDocument(id="0" * 16, name="k", scopes=("infer:m*",), limits=limits, created_at=0, secrets=(stored,))]
    )
    credential = f"Bearer {format_key('0' * 16, secret)}".encode()

    def check() -> None:
        gate.enter_infer(credential, "model").leave()

    return min(timeit.repeat(check, number=CALLS, repeat=5)) / CALLS * 1e6


def main() -> None:
    every = Limits(requests_per_s=1e9, rows_per_s=1e9, concurrency=1000, compute_s_per_minute=1e6)
    for name, limits in (("without limits", Limits()), ("with every limit", every)):
        print(f"check of a known key, {name}: {check_us(limits):.2f} us")


if __name__ == "__main__":
    main()
