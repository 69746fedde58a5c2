"""Triton's model configuration: its conversion to our documents and back, and every error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream.plugins.compat.triton.config.config import (
    CONFIG_BYTES_MAX,
    ParsedConfig,
    empty_config,
    from_json,
    from_text,
)
from millstream.plugins.compat.triton.config.effective_config import effective_config
from millstream.plugins.compat.triton.config.model_folder import served_versions
from millstream.plugins.compat.triton.config.to_model_config import TranslatedConfig, to_model_config
from millstream.plugins.compat.triton.config.to_signature import client_signature, requested_batching
from millstream.plugins.compat.triton.config.unsupported_fields import REASONS_MAX, refuse, unsupported
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest, ModelConfig, QueuePolicy
from millstream.services.model.signature import Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),
        TensorSpec(name="n", datatype="INT64", shape=(-1, -1)),
    ),
    outputs=(
        TensorSpec(name="y", datatype="FP32", shape=(-1, 2, 2)),
        TensorSpec(name="t", datatype="BYTES", shape=(-1, 1)),
    ),
    batching=True,
)
ALONE = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(3, 4)),),
    outputs=(TensorSpec(name="y", datatype="BF16", shape=(4, 3)),),
    batching=False,
)
X = 'input { name: "x" data_type: TYPE_FP32 dims: [4] }'
N = 'input { name: "n" data_type: TYPE_INT64 dims: [-1] }'
WARM_UP = """
    model_warmup { name: "w" batch_size: 1
      inputs { key: "x" value { data_type: TYPE_FP32 dims: [4] zero_data: true } }
      inputs { key: "n" value { data_type: TYPE_INT64 dims: [1] zero_data: true } } }
"""


def serve(text: str, found: Signature = SIGNATURE) -> TranslatedConfig:
    given = from_text(text)
    refuse(unsupported(given.message))
    return to_model_config(given, client_signature(given, found, ("Requests run one at a time: it said so.",)))


def fit(text: str, found: Signature = SIGNATURE) -> Signature:
    return client_signature(from_text(text), found, ("Requests run one at a time: it said so.",))


def manifest(given: ParsedConfig, found: Signature = SIGNATURE, **fields: Any) -> Manifest:
    signature = client_signature(given, found, ())
    return Manifest(
        model="m",
        version=3,
        created=1.0,
        digest="ab" * 32,
        served="3/model.onnx",
        files=(),
        signature=signature,
        config=to_model_config(given, signature).config,
        opset=17,
        ir_version=8,
        triton=given.document(),
        **fields,
    )


def refused(text: str, found: Signature = SIGNATURE) -> str:
    with pytest.raises(Failure) as caught:
        serve(text, found)
    assert caught.value.code is Code.INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


def test_scheduling():
    config = serve(
        """
        max_batch_size: 16
        dynamic_batching {
          preferred_batch_size: [ 8, 4 ]
          max_queue_delay_microseconds: 1500
          preserve_ordering: true
          priority_levels: 3
          default_priority_level: 2
          default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 250 allow_timeout_override: true max_queue_size: 7 }
          priority_queue_policy { key: 1 value { max_queue_size: 9 } }
        }
        """
    )
    assert config.config == ModelConfig(
        batching=True,
        rows_max=16,
        rows_preferred=(4, 8),
        queue_delay_ms_max=1.5,
        priority_levels=3,
        priority_default=2,
        queue=QueuePolicy(timeout_ms_default=0.25, timeout_action="delay", timeout_override=True, requests_max=7),
        queue_by_priority={1: QueuePolicy(requests_max=9)},
    )
    assert ["preserve_ordering" in note for note in config.notes] == [True]


@pytest.mark.parametrize(
    ("groups", "pools", "instances"),
    [
        ("", (), 0),
        ("instance_group { kind: KIND_CPU count: 2 }", ("cpu",), 2),
        ("instance_group { kind: KIND_GPU }", ("gpu",), 1),
        ("instance_group { kind: KIND_AUTO count: 3 }", (), 3),
        ("instance_group [ { count: 1 kind: KIND_CPU }, { count: 2 kind: KIND_CPU } ]", ("cpu",), 3),
        ("instance_group [ { count: 3 kind: KIND_CPU }, { kind: KIND_GPU } ]", ("gpu", "cpu"), 3),
    ],
)
def test_instances(groups, pools, instances):
    config = serve(groups).config
    assert (config.pools, config.instances_max) == (pools, instances)


def test_ignored_fields_become_notes():
    notes = serve(
        """
        max_batch_size: 0
        dynamic_batching { }
        instance_group { kind: KIND_MODEL count: 2 gpus: [ 0 ] profile: "p" rate_limiter { priority: 2 } }
        parameters { key: "intra_op_thread_count" value { string_value: "4" } }
        parameters { key: "session.use_env_allocators" value { string_value: "1" } }
        parameters { key: "mine" value { string_value: "my own" } }
        optimization { graph { level: 1 } execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }
        response_cache { enable: true }
        model_metrics { }
        """
    ).notes
    for word in (
        "dynamic_batching",
        "at most 2 workers",
        "gpus",
        "KIND_MODEL",
        "rate_limiter",
        "profile",
        "threads",
    ):
        assert any(word in note for note in notes), word
    for word in ("session.use", "response_cache", "tensorrt", "optimization.graph", "model_metrics"):
        assert any(word in note for note in notes), word
    assert not any("mine" in note for note in notes)
    assert all(note.endswith(".") for note in notes)


def test_listed_tensors_are_narrowed_reordered_and_optional():
    x, n = SIGNATURE.inputs
    found = SIGNATURE.model_copy(update={"inputs": (x, n.model_copy(update={"optional": True}))})
    with pytest.raises(Failure, match="input 'x': optional is true, but the model needs it"):
        fit(f"max_batch_size: 4 {X[:-1]} optional: true }}", found)
    seen = fit(
        f"""
        max_batch_size: 4
        input {{ name: "n" data_type: TYPE_INT64 dims: [ 5 ] optional: true }}
        {X}
        output {{ name: "t" data_type: TYPE_STRING dims: [ 1 ] label_filename: "labels.txt" }}
        """,
        found,
    )
    assert [(spec.name, spec.shape, spec.optional) for spec in seen.inputs] == [
        ("n", (-1, 5), True),
        ("x", (-1, 4), False),
    ]
    assert [spec.name for spec in seen.outputs] == ["t"]
    assert serve('output { name: "t" data_type: TYPE_STRING dims: [ 1 ] label_filename: "l.txt" }').config.labels == {
        "t": "l.txt"
    }


def test_reshape():
    seen = fit(
        """
        max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }
        input { name: "n" data_type: TYPE_INT64 dims: [ 1, -1 ] reshape { shape: [ -1 ] } }
        """
    )
    assert [(spec.shape, spec.model_shape) for spec in seen.inputs] == [((-1, 2, 2), (4,)), ((-1, 1, -1), (-1,))]
    row = Signature(
        inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1,)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1,)),),
        batching=True,
    )
    (spec,) = fit(
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }', row
    ).inputs
    assert (spec.shape, spec.model_shape) == ((-1, 1), ())


@pytest.mark.parametrize(
    ("text", "batching", "shape"),
    [
        ("", True, (-1, 4)),
        ("max_batch_size: 8", True, (-1, 4)),
        ("max_batch_size: 0", False, (-1, 4)),
        (f"{X} {N}", True, (-1, 4)),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: [-1, 4] } input { name: "n" data_type: TYPE_INT64 dims: [6, -1] }',
            False,
            (-1, 4),
        ),
        ('name: "max_batch_size: 0" # max_batch_size: 0', True, (-1, 4)),
    ],
)
def test_batching_follows_max_batch_size_and_dims(text, batching, shape):
    seen = fit(text)
    assert (seen.batching, seen.inputs[0].shape) == (batching, shape)


def test_max_batch_size_zero_and_absent_differ():
    assert requested_batching(from_text("max_batch_size: 0")) is False
    assert requested_batching(from_text("")) is None
    assert requested_batching(from_json('{"maxBatchSize": "4"}')) is True
    assert requested_batching(from_json('{"max_batch_size": 0}')) is False


def test_warmup():
    text = """
        max_batch_size: 4
        model_warmup {
          name: "first" batch_size: 4 count: 2
          inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] random_data: true } }
          inputs { key: "n" value { data_type: TYPE_INT64 dims: [ 7 ] input_data_file: "raw" } }
        }
        model_warmup {
          name: "second" batch_size: 1
          inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }
          inputs { key: "n" value { data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } }
        }
        """
    first, second = serve(text).config.warmup
    assert (first.name, first.rows, first.count, second.rows, second.count) == ("first", 4, 2, 1, 1)
    assert (first.inputs["x"].fill, first.inputs["x"].shape, first.inputs["x"].datatype) == ("random", (4,), "FP32")
    assert (first.inputs["n"].fill, first.inputs["n"].file) == ("file", "warmup/raw")
    assert second.inputs["x"].fill == "zero"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sequence_batching { }", "sequence_batching is not supported"),
        ('platform: "tensorrt_plan"', "platform 'tensorrt_plan' is not supported"),
        ('backend: "dali"', "backend 'dali' is not supported"),
        ("model_transaction_policy { decoupled: true }", "decoupled is not supported"),
        ('input { name: "x" data_type: TYPE_FP32 dims: [4] allow_ragged_batch: true }', "allow_ragged_batch"),
        ("batch_input { kind: BATCH_ELEMENT_COUNT }", "batch_input is not supported"),
        ("batch_output { }", "batch_output is not supported"),
        ('model_operations { op_library_filename: "a.so" }', "model_operations is not supported"),
        ('model_repository_agents { agents { name: "checksum" } }', "model_repository_agents"),
        ("max_batch_size: -1", "max_batch_size -1 is negative"),
        ("max_batch_size: 100000", "more than 65536"),
        ("\n  max_batch: 3", "2:3"),
        ("max_batch_size: many", "1:17"),
        ('input { name: "q" data_type: TYPE_FP32 dims: [4] }', "unexpected input 'q': the model's inputs are x, n"),
        (f"{X} {X}", "input 'x' is listed twice"),
        (X, "the model has the input 'n', which the configuration does not list"),
        ('output { name: "q" data_type: TYPE_FP32 dims: [4] }', "unexpected output 'q'"),
        ('input { name: "x" data_type: TYPE_INT8 dims: [4] }', "data_type is TYPE_INT8, but the model has TYPE_FP32"),
        ('input { name: "x" dims: [4] }', "no data_type"),
        (
            'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [5] }',
            "says [5], but the model has [4] without the batch",
        ),
        ('max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [-1] }', "says [-1]"),
        ('max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [4, 1] }', "says [4, 1]"),
        ('input { name: "x" data_type: TYPE_FP32 }', "dims is empty"),
        ('input { name: "x" data_type: TYPE_FP32 dims: [-2] }', "a dimension is"),
        ('input { name: "x" data_type: TYPE_FP32 dims: [0] }', "at least 1"),
        (f'max_batch_size: 4 {X} input {{ name: "n" data_type: TYPE_INT64 dims: [0] }}', "at least 1"),
        ('input { name: "x" data_type: TYPE_FP32 dims: [4] reshape { shape: [0] } }', "at least 1"),
        (WARM_UP * 65, "more than 64 entries"),
        (
            f"max_batch_size: 100 dynamic_batching {{ preferred_batch_size: {list(range(1, 66))} }}",
            "more than 64 sizes",
        ),
        (
            'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [3] reshape { shape: [4] } }',
            "different numbers of elements",
        ),
        ("instance_group { passive: true }", "passive"),
        ("instance_group { count: -1 }", "negative"),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: [5] }", "preferred_batch_size 5 is not from 1"),
        ("dynamic_batching { max_queue_delay_microseconds: 99000000 }", "more than 10000000"),
        ("dynamic_batching { priority_levels: 2 }", "default_priority_level 0 is not from 1"),
        ("dynamic_batching { priority_levels: 2000 default_priority_level: 1 }", "more than 1024"),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { } } }",
            "level 3",
        ),
        ('output { name: "t" data_type: TYPE_STRING dims: [1] label_filename: "../x" }', "not a path below"),
        ('model_warmup { name: "w" }', "batch_size 0 is not from 1"),
        ('model_warmup { name: "w" batch_size: 1 }', "input 'x' is missing"),
        ('model_warmup { name: "w" batch_size: 1 count: 5000 }', "count 5000"),
        ('model_warmup { name: "w" batch_size: 1 inputs { key: "q" value { } } }', "no input 'q'"),
        (
            'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: [3] zero_data: true } } inputs { key: "n" value { data_type: TYPE_INT64 dims: [1] zero_data: true } } }',
            "dims [3], which do not fit [4]",
        ),
        (
            'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: [4] } } inputs { key: "n" value { data_type: TYPE_INT64 dims: [1] zero_data: true } } }',
            "has no data",
        ),
        (
            'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: [4] input_data_file: "/etc/x" } } inputs { key: "n" value { data_type: TYPE_INT64 dims: [1] zero_data: true } } }',
            "not a path below",
        ),
    ],
)
def test_invalid_configurations_are_rejected(text, words):
    assert words in refused(text)


def test_requested_batching_of_an_unbatchable_model_is_rejected_with_the_reason():
    assert "requests batching, but the model cannot batch: Requests run one at a time: it said so." in refused(
        "max_batch_size: 4", ALONE
    )
    assert fit('input { name: "x" data_type: TYPE_FP32 dims: [3, 4] }', ALONE).batching is False
    assert "batch_size 2, but the model does not batch" in refused('model_warmup { name: "w" batch_size: 2 }', ALONE)


def test_a_configuration_in_json():
    numbers = from_json('{"max_batch_size": 16, "dynamic_batching": {"max_queue_delay_microseconds": 5}}')
    strings = from_json('{"maxBatchSize": "16", "dynamicBatching": {"maxQueueDelayMicroseconds": "5"}}')
    assert numbers == strings
    for bad in (
        "[1]",
        "{",
        '{"no_field": 1}',
        '{"input": 1}',
        '{"max_batch_size": "x"}',
        "[" * 100_000,
        '{"input": [[1]]}',
    ):
        with pytest.raises(Failure) as caught:
            from_json(bad)
        assert caught.value.code is Code.INVALID
    for read in (from_json, from_text):
        with pytest.raises(Failure, match="longer than"):
            read(" " * (CONFIG_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", (7,)),
        ("version_policy { latest { num_versions: 2 } }", (3, 7)),
        ("version_policy { latest { } }", (7,)),
        ("version_policy { all { } }", (1, 3, 7)),
        ("version_policy { specific { versions: [3, 1] } }", (1, 3)),
        ("version_policy { specific { versions: [9, 3, 2] } }", (3,)),
    ],
)
def test_version_policy(text, wanted):
    assert served_versions(from_text(text).message, [1, 7, 3]) == wanted


@pytest.mark.parametrize("text", ["version_policy { specific { versions: [2] } }", "version_policy { specific { } }"])
def test_a_version_policy_that_selects_no_version_is_rejected(text):
    with pytest.raises(Failure, match="version_policy"):
        served_versions(from_text(text).message, [1])
    with pytest.raises(Failure, match="no version"):
        served_versions(empty_config().message, [])


def test_effective_config_of_a_version_without_a_configuration():
    document = effective_config(manifest(empty_config()))
    assert json.loads(json.dumps(document)) == document
    assert list(document) == [
        "name", "platform", "backend", "runtime", "version_policy", "max_batch_size", "input", "output", "batch_input",
        "batch_output", "optimization", "dynamic_batching", "instance_group", "default_model_filename",
        "cc_model_filenames", "metric_tags", "parameters", "model_warmup",
    ]  # fmt: skip
    assert (document["name"], document["platform"], document["backend"]) == ("m", "onnxruntime_onnx", "onnxruntime")
    assert document["version_policy"] == {"all": {}}
    assert document["max_batch_size"] == 64
    assert document["input"][1] == {
        "name": "n", "data_type": "TYPE_INT64", "format": "FORMAT_NONE", "dims": [-1], "is_shape_tensor": False,
        "allow_ragged_batch": False, "optional": False, "is_non_linear_format_io": False,
    }  # fmt: skip
    assert document["output"][1] == {
        "name": "t", "data_type": "TYPE_STRING", "dims": [1], "label_filename": "", "is_shape_tensor": False,
        "is_non_linear_format_io": False,
    }  # fmt: skip
    assert document["dynamic_batching"] == {
        "preferred_batch_size": [], "max_queue_delay_microseconds": 0, "preserve_ordering": False, "priority_levels": 0,
        "default_priority_level": 0, "priority_queue_policy": {},
    }  # fmt: skip
    assert document["instance_group"] == [
        {
            "name": "m_0", "kind": "KIND_CPU", "count": 1, "gpus": [], "secondary_devices": [], "profile": [],
            "passive": False, "host_policy": "",
        }
    ]  # fmt: skip
    assert document["optimization"] == {
        "priority": "PRIORITY_DEFAULT", "input_pinned_memory": {"enable": True}, "output_pinned_memory": {"enable": True},
        "gather_kernel_buffer_threshold": 0, "eager_batching": False,
    }  # fmt: skip
    assert document["default_model_filename"] == "model.onnx"


def test_effective_config_of_a_version_that_does_not_batch():
    document = effective_config(manifest(empty_config(), ALONE, origin="/models/m"))
    assert document["max_batch_size"] == 0
    assert "dynamic_batching" not in document
    assert document["input"][0]["dims"] == [3, 4]
    assert document["output"][0]["data_type"] == "TYPE_BF16"
    assert document["version_policy"] == {"latest": {"num_versions": 1}}


def test_effective_config_returns_uploaded_values_as_numbers():
    given = from_text(
        f"""
        name: "m" max_batch_size: 8 {X} {N}
        output {{ name: "y" data_type: TYPE_FP32 dims: [4] reshape {{ shape: [2, 2] }} }}
        dynamic_batching {{
          max_queue_delay_microseconds: 5000000
          priority_levels: 2 default_priority_level: 1
          priority_queue_policy {{ key: 2 value {{ default_timeout_microseconds: 9 }} }}
        }}
        instance_group {{ count: 2 kind: KIND_CPU }}
        parameters {{ key: "mine" value {{ string_value: "own" }} }}
        metric_tags {{ key: "team" value: "a" }}
        version_policy {{ specific {{ versions: [3] }} }}
        model_warmup {{ name: "w" batch_size: 1
          inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: [4] zero_data: true }} }}
          inputs {{ key: "n" value {{ data_type: TYPE_INT64 dims: [2] random_data: true }} }} }}
        """
    )
    document = effective_config(manifest(given))
    assert document["max_batch_size"] == 8
    assert document["version_policy"] == {"specific": {"versions": [3]}}
    assert document["dynamic_batching"]["max_queue_delay_microseconds"] == 5_000_000
    assert document["dynamic_batching"]["priority_queue_policy"] == {
        "2": {
            "timeout_action": "REJECT", "default_timeout_microseconds": 9, "allow_timeout_override": False,
            "max_queue_size": 0,
        }
    }  # fmt: skip
    assert [one["name"] for one in document["output"]] == ["y"]
    assert document["output"][0]["reshape"] == {"shape": [2, 2]}
    assert document["parameters"] == {"mine": {"string_value": "own"}}
    assert document["metric_tags"] == {"team": "a"}
    assert document["instance_group"][0]["count"] == 2
    assert document["model_warmup"][0]["inputs"]["x"] == {"data_type": "TYPE_FP32", "dims": [4], "zero_data": True}
    assert from_json(json.dumps(document)).message.max_batch_size == 8


EVERYTHING = """
    backend: "dali"
    platform: "tensorrt_plan"
    max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: [4] allow_ragged_batch: true }
    sequence_batching { }
    model_transaction_policy { decoupled: true }
    instance_group { passive: true }
    batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" }
    batch_output { target_name: "y" }
    model_operations { op_library_filename: "ops.so" }
    model_repository_agents { agents { name: "checksum" } }
"""


NAMED = [
    "platform",
    "backend 'dali'",
    "sequence_batching",
    "model_transaction_policy.decoupled",
    "instance_group",
    "input 'x': allow_ragged_batch",
    "batch_input",
    "batch_output",
    "model_operations",
    "model_repository_agents",
]


def test_every_field_that_cannot_be_served_is_named_at_once() -> None:
    message = refused(EVERYTHING)
    assert message.startswith(
        "the configuration asks for 10 things that cannot be served: (1) platform 'tensorrt_plan'"
    )
    for number, what in enumerate(NAMED, 1):
        assert f"({number}) {what}" in message


def test_reasons_beyond_a_limit_are_counted() -> None:
    inputs = "".join(f'input {{ name: "x{at}" allow_ragged_batch: true }} ' for at in range(REASONS_MAX + 5))
    message = refused(inputs)
    assert message.endswith(f"({REASONS_MAX + 1}) and 5 more")
