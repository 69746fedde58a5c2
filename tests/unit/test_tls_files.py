"""The files of TLS listeners: what is refused, and when a certificate is valid."""

from __future__ import annotations

import os
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from millstream.services.errors import Failure
from millstream.services.settings import Settings
from millstream.services.tls.files import FILE_BYTES_MAX, TlsFiles
from millstream.services.tls.identity import CHAIN_MAX, load_identity, pem_blocks, validity
from tests.kit.certificates import Authority, Pair, encrypted
from tests.kit.tls import CERTIFICATES
from tests.kit.tools import program

CERTIFICATE, KEY = CERTIFICATES / "server.pem", CERTIFICATES / "server.key"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def refusal(certificate: Path, key: Path, client_ca: Path | None = None) -> str:
    with pytest.raises(Failure) as caught:
        load_identity(TlsFiles(certificate, key, client_ca))
    assert "\n" not in caught.value.message
    return caught.value.message


def test_without_files_there_is_no_tls() -> None:
    assert TlsFiles.of(Settings()) is None
    assert TlsFiles.of(Settings(tls_cert_file="", tls_key_file="")) is None


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"tls_cert_file": "a.pem"}, "set without MILLSTREAM_TLS_KEY_FILE: set it to the file"),
        ({"tls_key_file": "a.key"}, "set without MILLSTREAM_TLS_CERT_FILE: set it to the file"),
        ({"tls_client_ca_file": "ca.pem"}, "set MILLSTREAM_TLS_CERT_FILE and MILLSTREAM_TLS_KEY_FILE, or unset it"),
    ],
)
def test_half_of_the_settings_is_refused(given: dict[str, Any], advice: str) -> None:
    with pytest.raises(Failure, match=advice):
        TlsFiles.of(Settings(**given))


def test_a_pair_is_loaded() -> None:
    identity = load_identity(TlsFiles(CERTIFICATE, KEY, CERTIFICATES / "ca.pem"))
    assert identity.context.verify_mode is ssl.CERT_REQUIRED
    assert identity.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert identity.context.options & ssl.OP_NO_RENEGOTIATION
    assert not identity.expired(time.time())
    assert load_identity(TlsFiles(CERTIFICATE, KEY)).context.verify_mode is ssl.CERT_NONE
    assert KEY.read_text() not in repr(identity)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    assert "MILLSTREAM_TLS_CERT_FILE" in refusal(tmp_path, KEY)  # a folder
    assert "No such file" in refusal(CERTIFICATE, tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(CERTIFICATE, tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(FILE_BYTES_MAX + 1))
    assert f"larger than {FILE_BYTES_MAX}" in refusal(tmp_path / "large", KEY)


def test_other_contents_are_refused(tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.write_bytes(CERTIFICATE.read_bytes()[:200])
    assert "contains no certificate" in refusal(half, KEY)
    assert "contains no certificate" in refusal(KEY, KEY)
    assert "contains no private key" in refusal(CERTIFICATE, CERTIFICATE)
    half.write_bytes(KEY.read_bytes()[:100] + b"-----END PRIVATE KEY-----")
    assert "MILLSTREAM_TLS_KEY_FILE" in refusal(CERTIFICATE, half)
    half.write_bytes(b"")
    assert "contains no certificate" in refusal(CERTIFICATE, KEY, half)
    damaged = CERTIFICATE.read_text().splitlines()
    half.write_text("\n".join([*damaged[:3], *damaged[-2:]]))
    assert "its first certificate cannot be read" in refusal(half, KEY)


def test_a_bundle_of_authorities_is_no_chain(tmp_path: Path) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_bytes(CERTIFICATE.read_bytes() * CHAIN_MAX)
    load_identity(TlsFiles(chain, KEY))
    chain.write_bytes(CERTIFICATE.read_bytes() * (CHAIN_MAX + 1))
    assert f"at most {CHAIN_MAX}" in refusal(chain, KEY)


@pytest.mark.needs("openssl")
def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    assert "the key is not that of the certificate" in refusal(authority.issue().certificate, authority.issue().key)
    assert "the key is not that of the certificate" in refusal(CERTIFICATE, authority.issue(kind="rsa").key)


@pytest.mark.needs("openssl")
def test_a_key_with_a_passphrase_is_refused_without_a_question(authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue()
    (tmp_path / "key").write_bytes(encrypted(pair.key))
    assert "store the key without a passphrase" in refusal(pair.certificate, tmp_path / "key")


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("kind", ["ec", "rsa"])
@pytest.mark.parametrize("days", [-1, 30, 36500])  # the last one is after 2049, from when a year has four digits
def test_the_validity_is_that_of_openssl(authority: Authority, kind: str, days: int) -> None:
    pair: Pair = authority.issue(kind=kind, days=days)
    command = [program("openssl"), "x509", "-in", str(pair.certificate), "-noout", "-dates"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    begins, ends = (line.partition("=")[2] for line in said.splitlines())
    read = validity(pem_blocks(pair.certificate.read_bytes())[0])
    assert list(read) == [ssl.cert_time_to_seconds(begins), ssl.cert_time_to_seconds(ends)]
    assert load_identity(TlsFiles(*pair)).expired(time.time()) == (days < 0)  # expired ones are loaded, too


@pytest.mark.parametrize("cut", range(0, 120, 7))
def test_a_damaged_certificate_is_no_crash(cut: int) -> None:
    der = ssl.PEM_cert_to_DER_cert(pem_blocks(CERTIFICATE.read_bytes())[0])
    with pytest.raises(ValueError, match=r"cut off|validity|time data"):
        validity(ssl.DER_cert_to_PEM_cert(der[:cut]))
