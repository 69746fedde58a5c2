"""Which requests give files, and what is said where no library decodes them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream.gateway.connection.budgets import ReceiveBudget
from millstream.gateway.parts import PreparerParts
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.prepared import PreparedPlans, gives_media, prepared_for, read_prepared
from millstream.plugins.prepare.gateway import media
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.model.usage import encoded_names, usage_of

IMAGE = TensorSpec(name="pixels", datatype="FP32", shape=(-1, 3, 8, 8))
OTHER = TensorSpec(name="threshold", datatype="FP32", shape=(-1, 1))


def manifest(*inputs: TensorSpec, prepare: dict[str, Any] | None = None) -> Manifest:
    return Manifest(
        model="m",
        version=1,
        created=1.0,
        digest="0" * 64,
        served="model.onnx",
        files=(),
        signature=Signature(inputs=inputs, outputs=(), batching=True),
        config=ModelConfig.model_validate({"prepare": {"pixels": {"image": {}}} if prepare is None else prepare}),
        opset=17,
        ir_version=8,
    )


def plans(of: Manifest, bytes_max: int = 1 << 20) -> tuple[InputPlans, PreparedPlans]:
    settings = cast("Any", SimpleNamespace(request_bytes_max=bytes_max))
    preparer = media.build(PreparerParts(settings, cast("Any", None), ReceiveBudget(1 << 30)))
    own = InputPlans(of.model, of.signature, 64)
    own.prepared = preparer.plans(of, own)
    assert own.prepared is not None
    return own, own.prepared


def test_names_of_files_in_requests() -> None:
    assert encoded_names(manifest(IMAGE)) == {"pixels": "image"}
    own = IMAGE.model_copy(update={"name": "image"})
    assert encoded_names(manifest(own, prepare={"image": {"image": {}}})) == {"image": "image"}
    two = manifest(IMAGE, own, prepare={"pixels": {"image": {}}, "image": {"image": {}}})
    assert encoded_names(two) == {"pixels": "pixels", "image": "image"}
    assert usage_of(two).kind == "image"
    assert usage_of(two).input is None


def test_what_is_read_again_with_the_plans_of_files() -> None:
    own, prepared = plans(manifest(IMAGE))
    for name, datatype in (("pixels", "BYTES"), ("image", "BYTES")):
        with pytest.raises(Failure) as refused:
            own.named(name).fit(datatype, (1,))
        assert prepared_for(own, refused.value) is prepared
    for name, datatype, shape in (("pixels", "FP16", (1,)), ("pixels", "FP32", (1, 3, 9, 9)), ("other", "BYTES", (1,))):
        with pytest.raises(Failure) as refused:
            own.named(name).fit(datatype, shape)
        assert prepared_for(own, refused.value) is None
    png = b"\x89PNG\r\n\x1a\n" + bytes(20)
    assert prepared_for(own, Failure(Code.INVALID, ""), png) is prepared
    assert prepared_for(own, Failure(Code.INVALID, ""), bytes(30)) is None
    assert gives_media(own, "image/png")
    assert not gives_media(own, "audio/wav")
    assert prepared.named("pixels") is prepared.named("image")


def test_one_file_beside_other_inputs_is_no_body_alone() -> None:
    _, prepared = plans(manifest(IMAGE, OTHER))
    assert not prepared.recognises(b"\x89PNG\r\n\x1a\n" + bytes(20))
    assert [(plan.name, plan.datatype) for plan in prepared] == [("image", "BYTES"), ("threshold", "FP32")]


def test_a_tensor_larger_than_a_request_is_not_made() -> None:
    _, prepared = plans(manifest(IMAGE), bytes_max=1000)
    png = b"\x89PNG\r\n\x1a\n" + bytes(20)
    given = prepared.one(png).tensors
    with pytest.raises(Failure, match="1 files are a tensor of 768 bytes") as refused:
        _, small = plans(manifest(IMAGE), bytes_max=700)
        asyncio.run(small.prepare(given))
    assert refused.value.code is Code.TOO_LARGE


def test_without_a_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "find_spec", lambda _: None)
    _, prepared = plans(manifest(IMAGE))
    with pytest.raises(Failure, match=r"decodes no images: pip install 'millstream\[media\]'") as refused:
        asyncio.run(prepared.prepare(prepared.one(b"x").tensors))
    assert refused.value.code is Code.UNSUPPORTED


def test_a_second_reading_keeps_no_body() -> None:
    """The failure of the first reading leads to its frames, and these to the body: nothing may lead back to it."""

    class Body(bytearray):
        """Can be referred to weakly."""

    own, prepared = plans(manifest(IMAGE))

    def read(with_plans: InputPlans, body: Body) -> int:
        try:
            with_plans.named("pixels").fit("BYTES", (1,))
        except Failure as failure:
            kept = failure  # as frames of readers do that name the input in the message
            raise kept from None
        return len(body)

    gc.collect()
    gc.disable()
    try:
        body = Body(b"file")
        kept = weakref.ref(body)
        assert read_prepared(own, partial(read, body=body)) == (4, prepared)
        del body
        assert kept() is None
    finally:
        gc.enable()
