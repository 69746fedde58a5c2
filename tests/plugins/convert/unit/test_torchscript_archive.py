"""Archives of TorchScript that are refused before PyTorch reads them."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest

from millstream.plugins.convert.torchscript import check_script, is_script_file
from millstream.services.errors import Failure

PLAIN = pickle.dumps((), 2)
MEMBERS = {"data.pkl": PLAIN, "constants.pkl": PLAIN, "code/__torch__.py": b"def forward(): pass", "version": b"3"}


def archive(path: Path, changes: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in {**MEMBERS, **changes}.items():
            file.writestr(f"m/{name}", content)
    return path


def test_a_plain_archive_passes(tmp_path: Path) -> None:
    path = archive(tmp_path / "m.pt", {"data/0": bytes(8), "code/__torch__.py.debug_pkl": PLAIN})
    assert is_script_file(path)
    check_script(path)


def test_other_files_are_not_torchscript(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"PK\x03\x04 and no more")
    assert not is_script_file(tmp_path / "a")
    with zipfile.ZipFile(tmp_path / "b", "w") as file:
        file.writestr("m/data.pkl", b"")
    assert not is_script_file(tmp_path / "b")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.pkl": b"cos\nsystem\n."}, "names 'os system'"),
        ({"constants.pkl": b"cbuiltins\neval\n."}, "names 'builtins eval'"),
        ({"code/__torch__.py.debug_pkl": b"ctorch.hub\nload\n."}, "names 'torch.hub load'"),
        ({"data.pkl": pickle.dumps(Path, 4)}, "no part of TorchScript"),
        ({"data.pkl": b"\xff"}, "is damaged"),
        ({"code/__torch__.py": b"x = torch.from_file('/etc/passwd')"}, "reads or writes files"),
        ({"code/__torch__.py": b"x = ops.aten.save(a, 'b')"}, "reads or writes files"),
        ({"code/__torch__.py": b"x = ops.evil.run(a)"}, "operators of 'evil'"),
        ({"code/__torch__.py": b"\xff\xfe"}, "is damaged"),
        ({"../../x": b""}, "no file of TorchScript"),
        ({"code/../../x.py": b""}, "no file of TorchScript"),
        ({"lib.so": b""}, "no file of TorchScript"),
    ],
)
def test_what_does_more_than_a_model_is_refused(tmp_path: Path, changes: dict[str, bytes], said: str) -> None:
    with pytest.raises(Failure, match=said):
        check_script(archive(tmp_path / "m.pt", changes))


def test_compressed_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="compressed"):
        check_script(archive(tmp_path / "m.pt", {"data/0": bytes(100)}, zipfile.ZIP_DEFLATED))
