"""What callers and damage must not do to the checks of keys: use memory without bound, learn names, open the server."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from millstream.gateway.access.gate import CREDENTIAL_BYTES_MAX, Gate
from millstream.gateway.access.principal import CALLER, shown
from millstream.gateway.catalog.snapshot import ModelView, Snapshot
from millstream.plugins.compat.sagemaker.target import default_model
from millstream.services.access import audit_log
from millstream.services.access.access_keys import AccessKeys
from millstream.services.access.audit_log import AuditLog
from millstream.services.access.document import KeyDocument, StoredSecret
from millstream.services.access.scopes import Need, Row, grants_of
from millstream.services.access.secret import derive_secret, format_key, hash_secret
from millstream.services.errors import Code, Failure
from millstream.services.model.names import NAME_CHARACTERS_MAX

ID = "0123456789abcdef"
SECRET = derive_secret(b"s" * 32, ID, "salt")
BEARER = f"Bearer {format_key(ID, SECRET)}".encode()


def document(**changed: Any) -> KeyDocument:
    stored = StoredSecret(sha256=hash_secret(SECRET), salt="salt", created_at=0)
    fields = {"id": ID, "name": "k", "scopes": ("infer:m*",), "created_at": 0, "secrets": (stored,)} | changed
    return KeyDocument.model_validate(fields)


def test_a_right_key_in_a_long_header_is_not_remembered() -> None:
    gate = Gate()
    gate.load([document()])
    for number in range(10):
        padded = b"Bearer" + b" " * (CREDENTIAL_BYTES_MAX + number) + BEARER[7:]
        assert gate.identify(padded).key_id == ID
    assert not gate._memo


def test_names_longer_than_those_of_models_are_neither_allowed_nor_remembered() -> None:
    gate = Gate()
    gate.load([document(scopes=("infer:*",))])
    principal = gate.identify(BEARER)
    for number in range(100):
        assert not principal.infers("m" * (NAME_CHARACTERS_MAX + 1 + number))
    assert not principal.models
    assert principal.infers("m" * NAME_CHARACTERS_MAX)
    with pytest.raises(Failure) as refused:
        gate.enter(principal, Row(Need.INFER), "x" * 1_000_000)
    assert len(refused.value.message) < 300
    assert grants_of(["admin"]).infers("x" * 1000)


@pytest.mark.parametrize("end", [0.0, -1.0, 999.0])
def test_an_end_in_the_past_is_an_end(end: float) -> None:
    gate = Gate(wall=lambda: 1000.0)
    stored = document().secrets[0].model_copy(update={"expires_at": end})
    for one in (document(expires_at=end), document(secrets=(stored,))):
        gate.load([one])
        with pytest.raises(Failure, match="expired"):
            gate.identify(BEARER)


def test_a_document_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    keys = AccessKeys(tmp_path)
    keys.add(document(), 1.0)
    path = tmp_path / "keys" / f"{ID}.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    assert keys.read() == ((), (ID,))


@pytest.mark.parametrize("what", ["gone", "a file", "a loop"])
def test_a_folder_of_keys_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, what: str) -> None:
    keys, folder = AccessKeys(tmp_path), tmp_path / "keys"
    assert keys.read() == ((), ())
    keys.add(document(), 1.0)
    folder.rename(tmp_path / "away")
    if what == "a file":
        folder.write_bytes(b"")
    elif what == "a loop":
        folder.symlink_to(folder)
    for call in (keys.read, keys.stamp):
        with pytest.raises(Failure) as refused:
            call()
        assert refused.value.code is Code.INTERNAL
    folder.unlink(missing_ok=True)
    (tmp_path / "away").rename(folder)
    assert [one.id for one in keys.read().documents] == [ID]


def test_an_error_that_may_end_damages_no_key(tmp_path: Path) -> None:
    keys = AccessKeys(tmp_path)
    keys.add(document(), 1.0)
    path = tmp_path / "keys" / f"{'f' * 16}.json"
    path.symlink_to("/proc/self/mem")  # reading it fails with EIO
    with pytest.raises(Failure, match="Input/output"):
        keys.read()
    path.unlink()
    path.symlink_to(path)
    assert keys.read().damaged == ("f" * 16,)
    path.unlink()
    os.mkfifo(path)  # reading it would wait
    assert keys.read().damaged == ("f" * 16,)


def test_a_document_that_is_edited_in_place_shows(tmp_path: Path) -> None:
    keys, path = AccessKeys(tmp_path), tmp_path / "keys" / f"{ID}.json"
    keys.add(document(), 1.0)
    for one in (path, path.parent):
        os.utime(one, (1000, 1000))
    before = keys.stamp()
    assert before is not None
    with path.open("a") as file:
        file.write(" ")
    os.utime(path, (2000, 2000))
    assert keys.stamp() not in {before, None}


def test_an_id_is_found_before_a_name_that_looks_like_it(tmp_path: Path) -> None:
    keys = AccessKeys(tmp_path)
    keys.add(document(), 1.0)
    keys.add(document(id="f" * 16, name=ID, created_at=2.0), 2.0)
    assert keys.find(ID).id == ID


def test_messages_name_no_model_that_the_caller_may_not_know_of() -> None:
    view = ModelView("any", 1, 1, {})
    snapshot = Snapshot(dict.fromkeys(("model-a", "secret-a", "secret-b"), view), ())
    gate = Gate()
    gate.load([document()])
    token = CALLER.set(gate.identify(BEARER))
    try:
        assert shown(["model-a", "secret-a"]) == ["model-a"]
        assert "model-a" in snapshot.did_you_mean("model-b")
        assert "secret" not in snapshot.did_you_mean("secret-c")
        with pytest.raises(Failure) as several:
            default_model(snapshot, None)
        assert "model-a" in several.value.message
        assert "secret" not in several.value.message
        for only, configured in (({"secret-a": view}, None), ({}, "secret-a")):
            with pytest.raises(Failure) as refused:
                default_model(Snapshot(only, ()), configured)
            assert refused.value.code is Code.FORBIDDEN
            assert "secret" not in refused.value.message
    finally:
        CALLER.reset(token)
    assert "secret" in snapshot.did_you_mean("secret-c")


def test_an_audit_entry_that_does_not_fit_fails_and_spoils_no_other(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "gateway")
    log.append({"at": 1})
    (path,) = (tmp_path / "audit").iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))  # a full disk writes a part, too
    try:
        with pytest.raises(Failure):
            log.append({"at": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with path.open("a") as file:
        file.write('{"at": 3, "wh')  # as a crash leaves it
    log.append({"at": 4})
    assert log.newest(10) == [{"at": 1}, {"at": 4}]


def test_files_of_gateways_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "FOLDER_FILES_MAX", 5)
    for number in range(20):
        AuditLog(tmp_path, f"pod-{number}").append({"at": number})
        os.utime(tmp_path / "audit" / f"pod-{number}.jsonl", (number, number))
    names = {path.name for path in (tmp_path / "audit").iterdir()}
    assert names == {f"pod-{number}.jsonl" for number in range(15, 20)}
