"""The pure parts of access: limits, settlement, documents, signatures, the gate; and the files of keys and audit."""

from __future__ import annotations

import json
import stat
import threading
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from millstream.gateway.access.gate import MEMO_MAX, Gate
from millstream.plugins.compat.sagemaker import sigv4
from millstream.services.access import audit_log
from millstream.services.access.access_keys import AccessKeys
from millstream.services.access.audit_log import AuditLog
from millstream.services.access.document import KeyDocument, Limits, StoredSecret
from millstream.services.access.limits import DEBT_S_MAX, Account, LimitReached, Settlement, Use, write_use
from millstream.services.access.scopes import Need, check_scope
from millstream.services.access.secret import access_secret, derive_secret, format_key, hash_secret
from millstream.services.errors import Code, Failure
from millstream.services.settings import Settings

ID = "0123456789abcdef"
SECRET = derive_secret(b"s" * 32, ID, "salt")


def document(**changed: Any) -> KeyDocument:
    stored = StoredSecret(sha256=hash_secret(SECRET), salt="salt", created_at=0)
    fields = {"id": ID, "name": "k", "scopes": ("infer:m",), "created_at": 0, "secrets": (stored,)} | changed
    return KeyDocument.model_validate(fields)


def header(secret: str = SECRET, key_id: str = ID) -> bytes:
    return f"Bearer {format_key(key_id, secret)}".encode()


def account(**limits: Any) -> Account:
    return Account("k", Limits(**limits), 0.0)


def entered(one: Account, now: float) -> bool:
    try:
        one.enter(now)
    except LimitReached:
        return False
    return True


def test_a_rate_holds_over_time_and_says_when_to_come_back() -> None:
    one = account(requests_per_s=10)
    allowed = sum(entered(one, step / 1000) for step in range(10_000))
    assert 100 <= allowed <= 110
    with pytest.raises(LimitReached) as refused:
        one.enter(10.0)
        one.enter(10.0)
    assert 0 < (refused.value.retry_after_s or 0) <= 0.1
    assert dict(refused.value.headers)["ratelimit-policy"] == '"requests";q=10;w=1'


def test_rows_and_compute_are_paid_afterwards_and_debts_are_bounded() -> None:
    one = account(rows_per_s=10, compute_s_per_minute=6)
    one.enter(0.0)
    one.add_rows(10 + 1000, 0.0)  # the bucket, and a hundred seconds of the rate
    assert not entered(one, 99.0)
    assert entered(one, 101.0)
    one.add_compute(12.0)
    assert not entered(one, 102.0)
    assert entered(one, 102.0 + 61)
    one.add_compute(1e9)
    assert not entered(one, 200.0 + DEBT_S_MAX - 61)
    assert entered(one, 200.0 + DEBT_S_MAX + 1)


def test_rows_that_would_take_too_long_are_refused_and_not_charged() -> None:
    one = account(rows_per_s=10)
    most = int(10 * DEBT_S_MAX) + 10
    with pytest.raises(Failure, match="fewer rows in one request") as never:
        one.add_rows(most + 1, 0.0)
    assert never.value.code is Code.TOO_LARGE
    assert entered(one, 0.0)
    one.add_rows(most, 0.0)
    with pytest.raises(LimitReached, match="try again in 100 s") as later:  # it was let in before those rows were known
        one.add_rows(1000, 0.0)
    assert later.value.retry_after_s == pytest.approx(100.0)
    one.add_rows(1000, 100.1)
    assert one.rows == most + 1000
    assert not entered(one, DEBT_S_MAX + 99)
    assert entered(one, DEBT_S_MAX + 101)


def test_calls_at_once_end_when_they_leave() -> None:
    one = account(concurrency=2)
    assert [entered(one, 0.0) for _ in range(3)] == [True, True, False]
    one.leave()
    assert entered(one, 0.0)
    one.settle(Use(in_flight=5), 0.0)
    one.leave()
    assert not entered(one, 0.0)


def test_two_gateways_settle_and_an_idle_one_is_not_charged_for_the_past() -> None:
    accounts = [{ID: account(requests_per_s=10)} for _ in range(2)]
    settlements = [Settlement(), Settlement()]
    allowed = 0
    for step in range(20_000):  # 20 s
        now = step / 1000
        allowed += sum(entered(one[ID], now) for one in accounts)
        if step % 200 == 0:
            texts = [write_use(one) for one in accounts]
            settlements[0].apply({"b": texts[1]}, accounts[0], now)
            settlements[1].apply({"a": texts[0]}, accounts[1], now)
    assert 190 <= allowed <= 10 * 20 + 2 * 10 + 10
    fresh, late = {ID: account(requests_per_s=10)}, Settlement()
    late.apply({"a": write_use(accounts[0])}, fresh, 0.0)
    assert entered(fresh[ID], 0.0)
    late.apply({"a": "damaged"}, fresh, 0.0)


def test_the_gate_remembers_right_keys_only_and_forgets_revoked_ones() -> None:
    gate, now = Gate("admin", wall=lambda: clock[0], monotonic=lambda: clock[0]), 1000.0
    clock = [now]
    gate.load([document()])
    principal = gate.identify(header())
    assert gate.identify(header()) is principal
    for number in range(1000):
        with pytest.raises(Failure, match="not a valid key"):
            gate.identify(header(key_id=f"{number:016x}"))
    with pytest.raises(Failure, match="not a valid key"):
        gate.identify(header("A" * 43))
    assert list(gate._memo) == [header()]
    for number in range(MEMO_MAX + 10):
        gate.identify(b"Bearer" + b" " * (number // 100 + 1) + header()[7:] + b" " * (number % 100))
    assert 0 < len(gate._memo) <= MEMO_MAX
    assert gate.identify(b"Bearer admin").grants.admin
    gate.load([document(generation=2, scopes=("infer:other",))])
    assert not principal.infers("m")
    assert principal.infers("other")
    gate.load([document(revoked_at=1.0, secrets=())])
    assert not principal.live
    with pytest.raises(Failure, match="revoked"):
        gate.identify(header())
    assert gate.enforced
    gate.load([document(expires_at=now + 1)])
    gate.identify(header())
    clock[0] = now + 2
    with pytest.raises(Failure, match="expired"):
        gate.identify(header())
    gate.load([], others=True)  # a damaged document is a key, too
    assert gate.enforced


def test_the_key_of_metrics_reads_metrics_and_nothing_else() -> None:
    gate = Gate("admin", metrics_key="scraper")
    assert not gate.enforced
    gate.load([document()])
    grants = gate.identify(b"Bearer scraper").grants
    assert [need for need in Need if grants.allows(need)] == [Need.OPEN, Need.METRICS]
    assert not gate.identify(b"Bearer scraper").infers("m")
    for credential in (b"Bearer scrape", b"Bearer scraper2", b"Bearer "):
        with pytest.raises(Failure):
            gate.identify(credential)
    with pytest.raises(Failure):
        Gate("admin").identify(b"Bearer scraper")


def test_a_cap_on_priority_bounds_requests_without_one_too() -> None:
    gate = Gate()
    gate.load([document(priority_max=3)])
    principal = gate.identify(header())
    assert [principal.capped(priority) for priority in (0, 1, 3, 7)] == [3, 3, 3, 7]


def test_a_rotated_key_keeps_two_secrets_and_a_shorter_end() -> None:
    one = document()
    for number in range(1, 4):
        stored = StoredSecret(sha256=f"{number:064x}", salt="", created_at=float(number))
        one = one.rotated(stored, grace_s=10.0 / number)
        assert len(one.secrets) == 2
    assert [secret.expires_at for secret in one.secrets] == [3 + 10 / 3, None]
    assert one.generation == 4
    with pytest.raises(Failure) as refused:
        one.revoked(5.0).rotated(one.secrets[-1], 1)
    assert refused.value.code is Code.CONFLICT


@pytest.mark.parametrize("scope", ["", "infer:", "infer:a b", "infer:[a]", "models:all", "Admin", "infer:" + "*" * 129])
def test_unknown_scopes_are_refused(scope: str) -> None:
    with pytest.raises(Failure):
        check_scope(scope)


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/endpoints/m/invocations", ""),
        ("/endpoints/a%20b/invocations", "b=2&a=1&c"),
        ("/", "a=1&a-b=2&a=0"),
        ("//endpoints/./x/../m//invocations/", ""),
    ],
)
def test_signatures_are_those_of_botocore(path: str, query: str) -> None:
    request = AWSRequest(
        "POST",
        f"http://127.0.0.1:8000{path}{'?' * bool(query)}{query}",
        data=b"body",
        headers={"Content-Type": "text/plain", "X-Amzn-Thing": "a   b"},
    )
    SigV4Auth(Credentials(f"mr_{ID}", SECRET), "sagemaker", "eu-west-1").add_auth(request)
    headers = [(name.lower(), str(value)) for name, value in request.headers.items()] + [("host", "127.0.0.1:8000")]
    sent = sigv4.SignedRequest("POST", path, query, headers, sha256(b"body").hexdigest())
    signature = sigv4.parse_signature(request.headers["Authorization"])
    signed_at = datetime.strptime(request.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    sigv4.verify(signature, sent, SECRET, signed_at)
    for wrong in (
        sent._replace(body_sha256=sha256(b"other").hexdigest()),
        sent._replace(headers=[*headers, ("x-amzn-sagemaker-target-model", "other")]),
        sent._replace(headers=[*headers, ("x-amz-content-sha256", "UNSIGNED-PAYLOAD")]),
        sent._replace(method="PUT"),
        sent._replace(path="/other"),
        sent._replace(query="x=1"),
    ):
        with pytest.raises(Failure):
            sigv4.verify(signature, wrong, SECRET, signed_at)
    for instant in (signed_at - 901, signed_at + 901):
        with pytest.raises(Failure, match="clock"):
            sigv4.verify(signature, sent, SECRET, instant)


@pytest.mark.parametrize(
    "text",
    [
        "AWS4-HMAC-SHA256",
        "AWS4-HMAC-SHA256 Credential=a/20200101/r/s/aws4_request, SignedHeaders=host, Signature=" + "0" * 64,
        "AWS4-HMAC-SHA256 Credential=a/b/r/s/aws4_request, SignedHeaders=host;x-amz-date, Signature=0",
    ],
)
def test_malformed_signatures_are_refused(text: str) -> None:
    with pytest.raises(Failure) as refused:
        sigv4.parse_signature(text)
    assert refused.value.code is Code.UNAUTHENTICATED


def test_keys_on_disk_survive_damage_and_have_unique_names(tmp_path: Path) -> None:
    keys = AccessKeys(tmp_path)
    assert not keys.read().any
    keys.add(document(), 1.0)
    with pytest.raises(Failure, match="there is a key"):
        keys.add(document(id="f" * 16), 1.0)
    with pytest.raises(Failure, match="revoke it first"):
        keys.forget("k", 1.0)
    (tmp_path / "keys" / "ffffffffffffffff.json").write_text("{")
    assert keys.read().damaged == ("ffffffffffffffff",)
    assert keys.change("k", lambda one: one.revoked(2.0)).revoked_at == 2.0
    keys.add(document(id="e" * 16), 3.0)
    assert keys.find("k").id == "e" * 16
    assert keys.find(f"mr_{ID}").id == ID
    assert keys.forget(ID, 4.0) is not None
    assert keys.forget("f" * 16, 4.0) is None
    assert keys.read().damaged == ()
    assert SECRET not in "".join(path.read_text() for path in (tmp_path / "keys").glob("*.json"))
    with pytest.raises(Failure) as missing:
        keys.find("../../x")
    assert missing.value.code is Code.NOT_FOUND


def test_the_access_secret_is_made_once_and_private(tmp_path: Path) -> None:
    settings, found = Settings(home=tmp_path), []
    threads = [threading.Thread(target=lambda: found.append(access_secret(settings))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert stat.S_IMODE((tmp_path / "access.key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["access.key"]
    (tmp_path / "access.key").write_text("short")
    with pytest.raises(Failure, match="damaged"):
        access_secret(settings)


def test_the_audit_log_is_bounded_and_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "FILE_BYTES_MAX", 2000)
    logs = [AuditLog(tmp_path, f"host/gateway {number}") for number in range(2)]
    for number in range(400):
        logs[number % 2].append({"at": number, "what": "x" * 40, "changes": []})
    files = sorted((tmp_path / "audit").iterdir())
    assert len(files) == 8
    assert sum(file.stat().st_size for file in files) <= 8 * 2000
    assert [entry["at"] for entry in logs[0].newest(5)] == [395, 396, 397, 398, 399]
    with files[0].open("a") as file:
        file.write('{"cut')
    assert logs[0].newest(1)[0]["at"] == 399
    logs[0].append({"at": 500, "changes": ["y" * 20_000]})
    assert logs[0].newest(1) == [{"at": 500, "changes": ["(too long)"]}]
    assert json.loads(files[-1].read_text().splitlines()[0])["what"]
