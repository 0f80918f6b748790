"""The translated messages agree with the SDK's own converters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tinker
import zstandard
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response
from tinker.types import ForwardBackwardInput, ForwardBackwardOutput, SampleResponse
from tinker.types.forward_backward_request import ForwardBackwardRequest

from tinker_local.wire import (
    WireError,
    decode_forward_backward,
    decompress,
    encode_result,
)


def datum(**inputs: tinker.TensorData) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=dict(inputs)
    )


def request_bytes(data: list[tinker.Datum], *, forward_only: bool = False) -> bytes:
    body = ForwardBackwardInput(
        data=data, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5}
    )
    message = forward_backward_request_to_proto(
        ForwardBackwardRequest(model_id="m", seq_id=1, forward_backward_input=body)
    )
    message.forward_only = forward_only
    return bytes(message.SerializeToString())


TARGETS = tinker.TensorData(data=[6, 7, 8], dtype="int64")
ADVANTAGES = tinker.TensorData(data=[0.0, 0.5, -1.5], dtype="float32")


def test_a_forward_backward_request_becomes_json() -> None:
    content = request_bytes([datum(target_tokens=TARGETS, advantages=ADVANTAGES)])
    body, forward_only = decode_forward_backward(content)
    assert forward_only is False
    assert body["model_id"] == "m"
    inputs = body["forward_backward_input"]
    assert inputs["loss_fn"] == "ppo"
    assert inputs["loss_fn_config"] == {"clip_low_threshold": 0.5}
    (found,) = inputs["data"]
    assert found["model_input"] == {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    assert found["loss_fn_inputs"]["target_tokens"] == {"data": [6, 7, 8]}
    assert found["loss_fn_inputs"]["advantages"] == {"data": [0.0, 0.5, -1.5]}


def test_a_forward_only_request_uses_the_other_field() -> None:
    body, forward_only = decode_forward_backward(request_bytes([], forward_only=True))
    assert forward_only is True
    assert body["forward_input"]["data"] == []


def test_two_dimensional_targets_are_refused() -> None:
    wide = tinker.TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2])
    with pytest.raises(WireError, match="one-dimensional target_tokens"):
        decode_forward_backward(request_bytes([datum(target_tokens=wide)]))


def test_images_are_refused() -> None:
    image = tinker.types.ImageChunk(data=b"...", format="png")
    item = tinker.Datum(model_input=tinker.ModelInput(chunks=[image]), loss_fn_inputs={})
    with pytest.raises(WireError, match="text only"):
        decode_forward_backward(request_bytes([item]))


def test_compressed_bodies_are_read() -> None:
    assert decompress(zstandard.ZstdCompressor().compress(b"body"), "zstd") == b"body"
    assert decompress(b"body", "") == b"body"
    with pytest.raises(WireError, match="brotli"):
        decompress(b"body", "brotli")


def test_samples_reach_the_sdk() -> None:
    encoded = encode_result(
        {
            "sequences": [
                {"stop_reason": "stop", "tokens": [1, 2], "logprobs": [-0.5, -1.0]},
                {"stop_reason": "length", "tokens": [3], "logprobs": [-2.0]},
            ],
            "prompt_logprobs": [-3.0],
        }
    )
    assert encoded is not None
    response = deserialize_proto_response(encoded, SampleResponse)
    assert isinstance(response, SampleResponse)
    assert [s.stop_reason for s in response.sequences] == ["stop", "length"]
    assert [s.tokens for s in response.sequences] == [[1, 2], [3]]
    assert response.sequences[0].logprobs == [-0.5, -1.0]
    assert response.prompt_logprobs_np is not None
    assert math.isnan(response.prompt_logprobs_np[0])
    assert response.prompt_logprobs_np[1] == -3.0


def test_ragged_training_outputs_reach_the_sdk() -> None:
    outputs = [{"logprobs": {"data": [-1.0, -2.0]}}, {"logprobs": {"data": [-3.0]}}]
    encoded = encode_result(
        {"loss_fn_output_type": "scalar", "loss_fn_outputs": outputs, "metrics": {"a:sum": 2.0}}
    )
    assert encoded is not None
    response = deserialize_proto_response(encoded, ForwardBackwardOutput)
    assert isinstance(response, ForwardBackwardOutput)
    found = [o["logprobs"].to_numpy() for o in response.loss_fn_outputs]
    np.testing.assert_array_equal(found[0], [-1.0, -2.0])
    np.testing.assert_array_equal(found[1], [-3.0])
    assert response.metrics == {"a:sum": 2.0}
