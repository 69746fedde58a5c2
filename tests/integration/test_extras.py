"""What an installation says that lacks the packages of a role, shown in environments that really lack them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from millstream.services.environment import child_environment
from millstream.services.extras import extras
from tests.kit.framework_environment import REQUIREMENTS
from tests.kit.role_environment import PROJECT, ROOT, build_wheel, install, locked, make_environment, needed_by

GATEWAY_ALONE = {"fastapi", "grpcio", "tokenizers"}
#: modules that are used where they are installed, and which no image has: of further backends of a worker, and of the
#: check of programs and of imported models
IMPORTERS = {
    *("sklearn", "skl2onnx", "skops", "joblib", "pandas", "xgboost", "lightgbm", "catboost", "onnxmltools"),
    *("yaml", "onnxscript", "transformers", "safetensors", "keras", "h5py"),
}
OPTIONAL = {
    "gateway": {"torch", "jax", "jaxlib", "openvino", "tensorflow", "tf2onnx", "nncf", "iree", "tvm"} | IMPORTERS,
    "worker": {"openvino", "torch", "tritonclient", "grpc", "jax", "jaxlib", "nncf", "iree", "onnx", "tvm"},
}
#: extras whose packages the tests' environment has; the others are in no lock file
HEAVY = {
    *("nncf", "torch", "jax", "iree", "tvm", "tensorflow", "scikit-learn", "xgboost", "lightgbm", "catboost"),
    *("pytorch", "huggingface", "keras"),
}
#: modules whose first part several distributions share
SHARED = {"google.protobuf": "protobuf", "opentelemetry.sdk": "opentelemetry-sdk"} | {
    f"opentelemetry.exporter.otlp.proto.{way}": f"opentelemetry-exporter-otlp-proto-{way}" for way in ("grpc", "http")
}
INSTALLED = [extra for extra in extras() if extra not in HEAVY]
LOCKS = {
    "gateway": ("gateway", "embeddings", "media", "tracing", "cpu"),
    "worker-cpu": ("worker", "cpu"),
    "worker-gpu": ("worker", "gpu"),
    "serving": ("gateway", "worker", "cli", "embedded", "embeddings", "media", "tracing", "cpu"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


class Installed:
    """The wheel in an environment of its own, with some of the packages that it can use."""

    def __init__(self, folder: Path, wheel: Path, packages: set[str]) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.python = make_environment(folder / "venv", packages, compiled=True)
        install(self.python, wheel)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, "-P", *arguments],
            cwd=self.folder,
            env=child_environment({"NO_COLOR": "1", "COLUMNS": "200", "PATH": "/nowhere"}),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def millstream(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "millstream.services.cli", *arguments)


def assert_one_line(done: subprocess.CompletedProcess[str], install: str) -> None:
    assert done.returncode == 1, done
    assert done.stdout == "" or json.loads(done.stdout)["error"]["message"] in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert f"pip install '{install}'" in done.stderr


def test_command_line_without_its_extra_names_the_extra(tmp_path: Path, wheel: Path) -> None:
    base = Installed(tmp_path, wheel, needed_by())
    assert_one_line(base.millstream("--help"), "millstream[cli]")
    script = subprocess.run(
        [tmp_path / "venv/bin/millstream", "up"], capture_output=True, text=True, timeout=300, check=False
    )
    assert_one_line(script, "millstream[cli]")


def test_client_alone_runs_its_commands_and_names_what_up_needs(tmp_path: Path, wheel: Path) -> None:
    client = Installed(tmp_path, wheel, needed_by("cli"))
    done = client.millstream("version")
    assert (done.returncode, done.stderr) == (0, "")
    assert_one_line(client.millstream("up"), "millstream[gateway,worker,cpu]")
    assert_one_line(client.millstream("serve", "."), "millstream[gateway,worker,cpu]")
    doctor = client.millstream("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
    assert checks["Packages"]["state"] == "fail"
    assert "millstream[gateway,worker]" in checks["Packages"]["advice"]
    assert "Redis" not in checks
    refused = client.millstream("models", "--endpoint", "http://127.0.0.1:1")
    assert refused.stderr.startswith("error: ")
    assert "Traceback" not in refused.stderr


def test_the_python_client_needs_its_extra_alone(tmp_path: Path, wheel: Path) -> None:
    program = "from millstream import Client\nClient('http://127.0.0.1:1', retries=0).models()"
    base = Installed(tmp_path / "base", wheel, needed_by())
    done = base.run("-c", program)
    assert done.returncode == 1
    said = "ImportError: packages are missing (httpx2, orjson): pip install 'millstream[client]'"
    assert done.stderr.splitlines()[-1] == said
    assert "During handling" not in done.stderr
    assert base.run("-c", "from millstream import Failure, ServerError").returncode == 0
    client = Installed(tmp_path / "client", wheel, needed_by("client"))
    done = client.run("-c", program)
    assert "ConnectionFailed: no server answers at http://127.0.0.1:1" in done.stderr.splitlines()[-1]
    assert "rich" not in needed_by("client")


def test_worker_and_gateway_name_the_extras_that_they_lack(tmp_path: Path, wheel: Path) -> None:
    base = Installed(tmp_path, wheel, needed_by())
    assert_one_line(base.run("-m", "millstream.workers"), "millstream[worker]")
    assert_one_line(base.run("-m", "millstream.gateway"), "millstream[gateway,cpu]")


def test_without_onnx_runtime_nothing_is_started(tmp_path: Path, wheel: Path) -> None:
    extras = [extra for extra in INSTALLED if extra != "cpu"]
    rest = Installed(tmp_path, wheel, needed_by(*extras))
    for arguments in (("up",), ("up", "--json"), ("serve", ".")):
        assert_one_line(rest.millstream(*arguments), "millstream[cpu]")
    assert_one_line(rest.run("-m", "millstream.gateway"), "millstream[cpu]")
    assert_one_line(rest.run("-m", "millstream.workers"), "millstream[cpu]")
    assert not (tmp_path / ".millstream").exists()


def test_up_without_a_redis_names_the_embedded_one(tmp_path: Path, wheel: Path) -> None:
    extras = [extra for extra in INSTALLED if extra not in ("embedded", "embeddings")]
    done = Installed(tmp_path, wheel, needed_by(*extras)).millstream("up", "--http-port", "0", "--grpc-port", "-1")
    assert_one_line(done, "millstream[embedded]")


def test_text_without_a_tokenizer_library_names_the_extra(tmp_path: Path, wheel: Path) -> None:
    gateway = Installed(tmp_path, wheel, needed_by("gateway", "cpu"))
    code = (
        "from types import SimpleNamespace as S\n"
        "from millstream.services.errors import Failure\n"
        "from millstream.plugins.prepare.gateway.tokenizers import Tokenizers\n"
        "import asyncio, pathlib; pathlib.Path('tokenizer.json').touch()\n"
        "manifest = S(model='m', version=1, served='model.onnx', content_id='c')\n"
        "tokenizers = Tokenizers(S(local_path=lambda *_: pathlib.Path('.')))\n"
        "try: asyncio.run(tokenizers.encode(manifest, ['text']))\n"
        "except Failure as failure: print(failure.code, failure.message)\n"
    )
    done = gateway.run("-c", code)
    assert done.stderr == ""
    assert done.stdout.startswith("unsupported ")
    assert "pip install 'millstream[embeddings]'" in done.stdout


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_of_a_role_is_what_its_extras_need(lock: str) -> None:
    needed = needed_by(*LOCKS[lock])
    assert locked(lock) == ({*needed} - {"onnxruntime"} | {"onnxruntime-gpu"} if lock == "worker-gpu" else needed)


@pytest.mark.parametrize("lock", ["worker-cpu", "worker-gpu"])
def test_a_workers_lock_has_nothing_of_a_gateways(lock: str) -> None:
    assert locked(lock).isdisjoint(GATEWAY_ALONE)
    assert locked("gateway") > GATEWAY_ALONE


def test_versions_of_images_are_those_of_the_tests() -> None:
    tested = pins("dev")
    for lock in (*LOCKS, "build"):  # build: what `make run` installs beside serving
        assert pins(lock) - {pin for pin in pins(lock) if pin.startswith("onnxruntime-gpu==")} <= tested


def test_the_environment_of_the_frameworks_has_what_a_server_needs() -> None:
    """Its packages are installed without what they need themselves, so that their versions stay."""
    lines = REQUIREMENTS.read_text().splitlines()
    listed = {Requirement(line).name for line in lines if line and not line.startswith("#")}
    missing = needed_by("gateway", "worker", "cli", "embedded", "embeddings", "cpu") - {
        canonicalize_name(name) for name in listed
    }
    assert missing == set()


def test_protobuf_has_the_bound_that_tritonclient_has() -> None:
    """Without it pip takes the newest gRPC packages first, which need a newer one, and tries versions for minutes."""
    lines = distribution("tritonclient").requires or ()
    theirs = next(needed for line in lines if (needed := Requirement(line)).name == "protobuf")
    gateway = map(Requirement, PROJECT["optional-dependencies"]["gateway"])
    ours = next(needed for needed in gateway if needed.name == "protobuf")
    for major in range(5, 20):
        if not theirs.specifier.contains(f"{major}.99.0"):
            assert not ours.specifier.contains(f"{major}.99.0")


def pins(lock: str) -> set[str]:
    lines = (ROOT / f"deploy/locks/{lock}.txt").read_text().splitlines()
    return {line.rstrip("\\ ") for line in lines if line and not line.startswith((" ", "#"))}


def expanded(optional: Mapping[str, list[str]], extra: str) -> list[str]:
    """Return the requirements of an extra, those of the extras that it names in turn included."""
    lines: list[str] = []
    for line in optional[extra]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            lines += (inner for other in requirement.extras for inner in expanded(optional, other))
        else:
            lines.append(line)
    return lines


def test_modules_of_an_extra_are_those_of_pyproject() -> None:
    """What `require` looks for is what the extra installs, package by package."""
    optional = PROJECT["optional-dependencies"]
    distributions = packages_distributions()
    for extra in INSTALLED:
        modules = extras()[extra]
        wanted = {canonicalize_name(Requirement(line).name) for line in expanded(optional, extra)}
        found = {canonicalize_name(name) for module in modules for name in names_of(module, distributions)}
        assert found == wanted, extra
    assert set(optional) == {*extras(), "gpu", "all"}
    every = ",".join(LOCKS["serving"])
    assert optional["all"] == [f"millstream[{every}]"]


@pytest.mark.parametrize(
    ("role", "packages", "lock"),
    [
        # The check of an upload is a program of its own that the gateway starts.
        ("gateway", ("millstream.gateway", "millstream.services.ingest"), "gateway"),
        ("worker", ("millstream.workers",), "worker-cpu"),
    ],
)
def test_a_role_imports_nothing_outside_of_its_lock(role: str, packages: tuple[str, ...], lock: str) -> None:
    """Follows imports inside functions, too, which importing a module does not run."""
    graph = grimp.build_graph("millstream", include_external_packages=True)
    waiting = [module for module in graph.modules if module.startswith(packages)]
    visited: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module not in visited:
            visited.add(module)
            waiting += graph.find_modules_directly_imported_by(module) if module.startswith("millstream.") else ()
    external = {module for module in visited if not module.startswith("millstream")} - sys.stdlib_module_names
    external -= OPTIONAL[role]
    distributions = packages_distributions()
    imported = {canonicalize_name(name) for module in external for name in names_of(module, distributions)}
    assert "numpy" in imported
    assert imported <= locked(lock)


def names_of(module: str, distributions: Mapping[str, list[str]]) -> list[str]:
    """Distributions that bring a module; several share the first part of some modules."""
    return [SHARED[module]] if module in SHARED else list(set(distributions[module]))
