"""The ceiling G: a bare grpc.aio server that reads the same message and echoes its tensor bytes.

python -m tests.bench.grpc_echo          # prints `ready http://…`
"""

from __future__ import annotations

from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc


class Echo(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Returns the bytes of the first input as the only output."""

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        tensor = request.inputs[0]
        response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        response.outputs.add(name="output", datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(request.raw_input_contents[0])
        return response


async def main() -> None:
    """Serve on a free port until SIGTERM."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready http://127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
