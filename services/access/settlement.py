"""settlement: how gateways tell each other what keys have used. Pure.

accounts of this gateway ─> text in Redis (expires) ─> others ─> what they let in since the last time ─> Account.settle

A text has totals since its gateway started, so that a lost or a late text loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from millstream.services.access.limits import Account, Use

#: Gateways whose use is remembered. A gateway without calls sends nothing, and later continues with its totals.
GATEWAYS_MAX = 256
_Text = dict[str, tuple[float, float, float, int, int]]
_decoder = msgspec.json.Decoder(_Text)


def write_use(accounts: Mapping[str, Account]) -> str:
    """Return the text of a gateway: what each key has used through it."""
    return msgspec.json.encode({key_id: tuple(account.use) for key_id, account in accounts.items()}).decode()


def read_use(text: str) -> dict[str, Use]:
    """Return the content of a text; empty if another release wrote it."""
    try:
        return {key_id: Use(*use) for key_id, use in _decoder.decode(text).items()}
    except msgspec.DecodeError:
        return {}


class Settlement:
    """What this gateway knows of the use of keys through the others."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, Use]] = {}  # by gateway and key, the gateway that was seen last at the end

    def apply(self, texts: Mapping[str, str], accounts: Mapping[str, Account], now: float) -> None:
        """Charge what other gateways let in since the last call.

        Args:
            texts: by gateway, of all live gateways except this one.
            accounts: by key, of this gateway.
            now: an instant of the monotonic clock.
        """
        added: dict[str, Use] = {}
        for gateway, text in texts.items():
            before = self._seen.pop(gateway, None)
            seen = self._seen[gateway] = read_use(text)
            for key_id, use in seen.items():
                # What a gateway let in before this one knew it is not charged: most of it was long ago.
                last = use if before is None else before.get(key_id, Use())
                added[key_id] = _plus(added.get(key_id, Use()), use, last)
        while len(self._seen) > GATEWAYS_MAX:
            del self._seen[next(iter(self._seen))]
        for key_id, account in accounts.items():
            account.settle(added.get(key_id, Use()), now)


def _plus(total: Use, use: Use, last: Use) -> Use:
    return Use(
        total.requests + max(0.0, use.requests - last.requests),
        total.rows + max(0.0, use.rows - last.rows),
        total.compute_s + max(0.0, use.compute_s - last.compute_s),
        total.in_flight + max(0, use.in_flight),
        total.uploads + max(0, use.uploads),
    )
