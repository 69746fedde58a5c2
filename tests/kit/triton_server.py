"""Runs NVIDIA's Triton server with models in Python that hand their input on.

They hand it on as it came (DLPack): what this build of the backend makes of NumPy's arrays comes out empty, and texts
end the process of the model.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sysconfig
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.kit.triton_wheel import SERVER, libraries
from tests.kit.wait import wait_until

START_S_MAX = 400.0  # each model is a process that imports NumPy
_CONFIGURATION = """backend: "python"
max_batch_size: 0
input [ {{ name: "x" data_type: TYPE_{datatype} dims: [ -1, 2 ] }} ]
output [ {{ name: "y" data_type: TYPE_{datatype} dims: [ -1, 2 ] }} ]
"""
_MODEL = """import time
import triton_python_backend_utils as backend

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({run_s})
        return [self.answer(backend.get_input_tensor_by_name(request, "x")) for request in requests]

    def answer(self, tensor):
        return backend.InferenceResponse([backend.Tensor.from_dlpack("y", tensor.to_dlpack())])
"""


class TritonServer:
    """NVIDIA's server, and the folder of its models.

    Args:
        folder: where its models and its log are.
    """

    def __init__(self, folder: Path) -> None:
        self._models = folder / "models"
        self._log = folder / "tritonserver.log"
        self._reserved = _reserve_port()  # also between two starts
        self._port: int = self._reserved.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._shared = f"millstream-{uuid.uuid4().hex[:12]}"  # the names of its shared memory begin with it

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self._port}"

    def add(self, name: str, datatype: str = "FP32", run_s: float = 0) -> None:
        """Add a model with the input `x` and the output `y`, [rows, 2], before the start."""
        folder = self._models / name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(_CONFIGURATION.format(datatype=datatype))
        (folder / "1" / "model.py").write_text(_MODEL.format(run_s=run_s))

    def start(self) -> None:
        """Start the server, and wait until all models are ready."""
        command = [
            str(SERVER / "bin" / "tritonserver"),
            f"--model-repository={self._models}",
            f"--backend-directory={SERVER / 'backends'}",
            f"--backend-config=python,shm-region-prefix-name={self._shared}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self._port}",
            "--reuse-grpc-port=true",
            "--allow-http=false",
            "--allow-metrics=false",
        ]
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": libraries(),
            "PYTHONPATH": sysconfig.get_path("purelib"),  # the processes of its models import NumPy
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        with grpc.insecure_channel(self.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            wait_until(lambda: self._ready(stub), START_S_MAX, what=f"the server is ready (log: {self._log})")

    def _ready(self, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            return bool(stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=60).ready)
        except grpc.RpcError:
            return False

    def kill(self) -> None:
        """End the server and the processes of its models, and remove their shared memory."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for left in Path("/dev/shm").glob(f"{self._shared}*"):
            left.unlink(missing_ok=True)

    def close(self) -> None:
        """End the server, which is not started again."""
        self.kill()
        self._reserved.close()


@contextmanager
def triton_server(folder: Path) -> Iterator[TritonServer]:
    """Yield a server that is not started."""
    server = TritonServer(folder)
    try:
        yield server
    finally:
        server.close()


def _reserve_port() -> socket.socket:
    """Return a socket that has a port and does not listen: no other program gets that port."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
