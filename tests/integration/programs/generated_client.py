"""Uploads a model and sends it a request with a client that openapi-python-client made of docs/openapi.json; prints
what came back.

python generated_client.py URL model.onnx < request.json
"""

import json
import sys
from pathlib import Path

from millstream_api import Client
from millstream_api.api.admin_models import list_models, upload_version
from millstream_api.api.v2_inference import infer, infer_version, model_metadata
from millstream_api.models import Error, InferReply, InferRequest, ModelMetadata, Models, Version
from millstream_api.types import File


def main() -> None:
    url, path = sys.argv[1:]
    request = InferRequest.from_dict(json.load(sys.stdin))
    with Client(url, timeout=240) as client, Path(path).open("rb") as file:
        version = upload_version.sync("made", 1, client=client, body=File(file), wait=60)
        assert isinstance(version, Version), version
        reply = infer.sync("made", client=client, body=request)
        assert isinstance(reply, InferReply), reply
        same = infer_version.sync("made", "1", client=client, body=request)
        missing = infer.sync("absent", client=client, body=request)
        assert isinstance(missing, Error), missing
        listed = list_models.sync(client=client)
        assert isinstance(listed, Models), listed
        metadata = model_metadata.sync("made", client=client)
        assert isinstance(metadata, ModelMetadata), metadata
    print(
        json.dumps(
            {
                "state": version.state,
                "outputs": [output.to_dict() for output in reply.outputs],
                "same": same == reply,
                "error": missing.error,
                "models": [model.name for model in listed.models],
                "inputs": [tensor.name for tensor in metadata.inputs],
            }
        )
    )


if __name__ == "__main__":
    main()
