"""Requests and answers of the two servers: protobuf as the JSON that SkyRL speaks.

Can be removed together with `protocol`, which says when.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

_NUMPY: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
}


class WireError(ValueError):
    """The client asked for something that the local server cannot carry."""


def decompress(body: bytes, encoding: str) -> bytes:
    """Undo the request's content encoding (none or zstd)."""
    if encoding in ("", "identity"):
        return body
    if encoding == "zstd":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    raise WireError(f"the local server does not know the content encoding {encoding!r}")


def decode_forward_backward(body: bytes) -> tuple[dict[str, Any], bool]:
    """Return SkyRL's JSON of a forward-backward request, and whether it is forward only.

    The input goes under `forward_backward_input`, or `forward_input` when it is forward only.
    """
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(body)
    config = {name: value for name, value in message.loss_fn_config.items()}
    for name, tagged in message.loss_fn_config_v2.items():
        if tagged.WhichOneof("value") != "number":
            raise WireError(f"the local server knows only numbers in loss_fn_config, not {name}")
        config[name] = tagged.number
    inputs = {
        "data": [_decode_datum(datum) for datum in message.data],
        "loss_fn": message.loss_fn,
        "loss_fn_config": config or None,
    }
    key = "forward_input" if message.forward_only else "forward_backward_input"
    return {"model_id": message.model_id, key: inputs}, message.forward_only


def _decode_datum(datum: pb.Datum) -> dict[str, Any]:
    return {
        "model_input": {"chunks": [_decode_chunk(chunk) for chunk in datum.model_input]},
        "loss_fn_inputs": {
            name: {"data": _decode_tensor(name, tensor)}
            for name, tensor in datum.loss_fn_inputs.items()
        },
    }


def _decode_chunk(chunk: pb.Chunk) -> dict[str, Any]:
    if chunk.WhichOneof("chunk") != "encoded_text":
        raise WireError("the local server's model reads text only: no images, no audio")
    tokens = np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32)
    return {"type": "encoded_text", "tokens": tokens.tolist()}


def _decode_tensor(name: str, tensor: pb.Tensor) -> list[Any]:
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None or tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise WireError(f"the local server takes dense one-dimensional {name} only")
    values: list[Any] = np.frombuffer(tensor.dense, dtype=dtype).tolist()
    return values


def encode_result(result: dict[str, Any]) -> bytes | None:
    """Encode a finished result for the SDK; None for the kinds that it reads as JSON."""
    if "sequences" in result:
        return _encode_samples(result)
    if "loss_fn_outputs" in result:
        return _encode_forward_backward(result)
    return None


def _encode_samples(result: dict[str, Any]) -> bytes:
    message = pb.SampleResponse()
    for sequence in result["sequences"]:
        item = message.sequences.add()
        stopped = sequence["stop_reason"] == "stop"
        item.stop_reason = pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH
        item.tokens = np.asarray(sequence["tokens"], dtype=np.int32).tobytes()
        item.logprobs = np.asarray(sequence["logprobs"], dtype=np.float32).tobytes()
    prompt: list[float] | None = result.get("prompt_logprobs")
    if prompt is not None:
        # SkyRL 0.2 leaves out the first token, which nothing precedes: undefined, hence NaN.
        message.prompt_logprobs = np.asarray([math.nan, *prompt], dtype=np.float32).tobytes()
    return bytes(message.SerializeToString())


def _encode_forward_backward(result: dict[str, Any]) -> bytes:
    message = pb.ForwardBackwardOutput()
    message.loss_fn_output_type = result["loss_fn_output_type"]
    for name, value in (result.get("metrics") or {}).items():
        message.metrics[name] = value
    outputs: list[dict[str, Any]] = result["loss_fn_outputs"]
    if outputs:
        record = message.loss_fn_outputs.add()
        record.num_datums = len(outputs)
        for name in outputs[0]:
            arrays = [np.asarray(o[name]["data"], dtype=np.float32).reshape(-1) for o in outputs]
            ends = np.cumsum([0, *(array.nbytes for array in arrays)])
            field = record.fields[name]
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets = ends.astype(np.int64).tobytes()
            field.dtype = pb.DTYPE_FLOAT32
    return bytes(message.SerializeToString())
