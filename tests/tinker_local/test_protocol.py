"""The real SDK against the real server: sampling, training, saving, resuming, refusing."""

from __future__ import annotations

import contextlib
import gc
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import ModelInput, SamplingParams
from tinker.lib.public_interfaces.training_client import TrainingClient

from tinker_local import LocalServer

pytestmark = [
    pytest.mark.local,
    # As in `service`, if the collector comes first.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROMPT = ModelInput.from_ints([101, 202, 303, 404])
ADAM = tinker.AdamParams(learning_rate=1e-3)
DATUM = tinker.Datum(
    model_input=PROMPT,
    loss_fn_inputs={
        "target_tokens": tinker.TensorData(data=[202, 303, 404, 505], dtype="int64"),
        "weights": tinker.TensorData(data=[1.0, 1.0, 1.0, 1.0], dtype="float32"),
    },
)


@pytest.fixture
def service(local_server: LocalServer) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient()
    yield client
    # The SDK waits for its heartbeat, which may lose the cancellation (0.38) and go on for ever.
    with contextlib.suppress(TimeoutError):
        client.close("success").result(timeout=30)
    with warnings.catch_warnings():
        # The SDK drops the connections of its first request without closing them.
        warnings.simplefilter("ignore", ResourceWarning)
        del client
        gc.collect()


@pytest.fixture
def trainer(service: tinker.ServiceClient, local_server: LocalServer) -> TrainingClient:
    return service.create_lora_training_client(str(local_server.model), rank=8, seed=1).result()


def train(client: TrainingClient, steps: int = 1) -> None:
    for _ in range(steps):
        client.forward_backward([DATUM], "cross_entropy").result()
        client.optim_step(ADAM).result()


def logprobs(client: TrainingClient) -> np.ndarray:
    output = client.forward([DATUM], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()


def prompt_logprobs(client: tinker.SamplingClient) -> np.ndarray:
    found = client.compute_logprobs(PROMPT).result()
    assert found[0] is None, "nothing precedes the first token"
    return np.array(found[1:], dtype=np.float32)


def test_training_raises_the_likelihood_and_a_forward_pass_leaves_no_gradient(
    trainer: TrainingClient,
) -> None:
    before = logprobs(trainer)
    trainer.optim_step(ADAM).result()
    np.testing.assert_array_equal(logprobs(trainer), before)
    train(trainer, steps=3)
    assert logprobs(trainer).sum() > before.sum() + 0.5


def test_filling_up_a_batch_changes_no_gradient(
    service: tinker.ServiceClient, local_server: LocalServer
) -> None:
    three, one = (
        service.create_lora_training_client(str(local_server.model), rank=8, seed=1).result()
        for _ in range(2)
    )
    # Three sequences are filled up to four; one by one, nothing is filled up.
    three.forward_backward([DATUM] * 3, "cross_entropy").result()
    for _ in range(3):
        one.forward_backward([DATUM], "cross_entropy").result()
    metrics = [client.optim_step(ADAM).result().metrics or {} for client in (three, one)]
    norms = [found["skyrl.ai/grad_norm"] for found in metrics]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    np.testing.assert_allclose(logprobs(three), logprobs(one), atol=1e-4)


@pytest.mark.nightly
def test_limits_differ_within_a_batch(trainer: TrainingClient) -> None:
    sampler = trainer.save_weights_and_get_sampling_client().result()
    limits = [1, 7, 16, 17]
    futures = [sampler.sample(PROMPT, 1, SamplingParams(max_tokens=n)) for n in limits]
    for limit, future in zip(limits, futures, strict=True):
        [sequence] = future.result().sequences
        assert len(sequence.tokens) == limit or ended_early(sequence, limit)


def ended_early(sequence: tinker.SampledSequence, limit: int) -> bool:
    """Whether a random model has sampled the end of its reply, as one in 2,048 tokens is."""
    return sequence.stop_reason == "stop" and 0 < len(sequence.tokens) <= limit


def test_every_sample_has_an_id_of_its_own(trainer: TrainingClient) -> None:
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = SamplingParams(max_tokens=5, stop="\n\nUser:")
    found = [sampler.sample(PROMPT, 3, params).result() for _ in range(2)]
    sequences = [sequence for response in found for sequence in response.sequences]
    assert len({sequence.sequence_id for sequence in sequences}) == 6
    for sequence in sequences:
        assert sequence.logprobs is not None
        assert len(sequence.tokens) == len(sequence.logprobs)
        whole = len(sequence.tokens) == 5 and sequence.stop_reason == "length"
        assert whole or ended_early(sequence, 5)


def test_the_same_seed_samples_the_same_tokens(service: tinker.ServiceClient) -> None:
    (model,) = [m.model_name for m in capabilities().supported_models]
    sampler = service.create_sampling_client(base_model=model).result()
    params = SamplingParams(max_tokens=8, seed=5)
    one, two = (sampler.sample(PROMPT, 1, params).result().sequences[0] for _ in range(2))
    assert one.tokens == two.tokens


def capabilities() -> tinker.types.GetServerCapabilitiesResponse:
    return tinker.RestClient().get_server_capabilities().result()


@pytest.mark.parametrize("path", ["tinker://{run}/sampler_weights/no", "tinker://{run}/weights/x"])
def test_weights_that_do_not_exist_are_refused_before_anything_is_sampled(
    service: tinker.ServiceClient, trainer: TrainingClient, path: str
) -> None:
    there = trainer.save_weights_for_sampler("there").result().path
    run = there.split("/")[2]
    trainer.save_state("x").result()
    with pytest.raises(tinker.NotFoundError, match="has no weights"):
        service.create_sampling_client(model_path=path.format(run=run)).result()
    service.create_sampling_client(model_path=there).result()
    service.create_sampling_client(model_path=there.replace("sampler_weights/", "")).result()
    (model,) = [m.model_name for m in capabilities().supported_models]
    service.create_sampling_client(model_path=there, base_model=model).result()


def test_old_sampler_weights_do_not_set_the_training_back(
    service: tinker.ServiceClient, trainer: TrainingClient
) -> None:
    path = trainer.save_weights_for_sampler("old").result().path
    train(trainer, steps=2)
    trained = logprobs(trainer)
    old = service.create_sampling_client(model_path=path).result()
    new = trainer.save_weights_and_get_sampling_client().result()
    for _ in range(2):
        from_new, from_old = prompt_logprobs(new), prompt_logprobs(old)
        assert not np.allclose(from_old, from_new, atol=1e-2)
        np.testing.assert_allclose(from_new, trained[:-1], atol=1e-4)
    np.testing.assert_array_equal(logprobs(trainer), trained)


@pytest.mark.nightly
def test_more_sampler_weights_than_slots_take_turns(
    local_server: LocalServer, service: tinker.ServiceClient, trainer: TrainingClient
) -> None:
    count = local_server.settings.adapters + 2
    samplers, expected = [], []
    for step in range(count):
        train(trainer)
        path = trainer.save_weights_for_sampler(f"step{step}").result().path
        samplers.append(service.create_sampling_client(model_path=path).result())
        expected.append(logprobs(trainer)[:-1])
    for sampler, wanted in zip(samplers, expected, strict=True):
        np.testing.assert_allclose(prompt_logprobs(sampler), wanted, atol=1e-4)


def test_a_state_with_its_optimizer_continues_as_if_never_interrupted(
    service: tinker.ServiceClient, trainer: TrainingClient
) -> None:
    train(trainer, steps=3)
    path = trainer.save_state("here").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path).result()
    for client in (resumed, fresh):
        np.testing.assert_allclose(logprobs(client), logprobs(trainer), atol=1e-6)
        train(client)
    train(trainer)
    np.testing.assert_allclose(logprobs(resumed), logprobs(trainer), atol=1e-5)
    assert not np.allclose(logprobs(fresh), logprobs(trainer), atol=1e-3), "no new optimizer"
    again = resumed.save_state("after").result().path
    sampler = resumed.save_weights_and_get_sampling_client().result()
    np.testing.assert_allclose(prompt_logprobs(sampler), logprobs(resumed)[:-1], atol=1e-4)
    assert service.create_training_client_from_state(again).result() is not None
    assert resumed.get_tokenizer().decode([1, 2]) == trainer.get_tokenizer().decode([1, 2])


def test_a_deleted_checkpoint_is_gone(
    service: tinker.ServiceClient, trainer: TrainingClient
) -> None:
    path = trainer.save_state("short-lived").result().path
    rest = tinker.RestClient()
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError, match="short-lived"):
        service.create_training_client_from_state(path).result()


@pytest.mark.nightly
def test_a_finished_session_gives_its_slots_back(local_server: LocalServer) -> None:
    for _ in range(3):
        with tinker.ServiceClient() as service:
            for _ in range(local_server.settings.adapters // 2):
                service.create_lora_training_client(str(local_server.model), rank=4).result()


def test_what_it_does_not_serve_is_refused(
    service: tinker.ServiceClient, local_server: LocalServer, trainer: TrainingClient
) -> None:
    with pytest.raises(tinker.BadRequestError, match=r"serves .*, not Qwen/Qwen3-8B"):
        service.create_lora_training_client("Qwen/Qwen3-8B").result()
    with pytest.raises(tinker.RequestFailedError, match="LoRA rank 64 must be between 1 and 32"):
        service.create_lora_training_client(str(local_server.model), rank=64).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.BadRequestError, match="does not support topk_prompt_logprobs"):
        sampler.sample(
            PROMPT,
            1,
            SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
        ).result()
    for params in (SamplingParams(seed=2**31), SamplingParams(stop=[1, 2**63])):
        with pytest.raises(tinker.BadRequestError, match=r"numbers of 32 bits, not (seed|stop)="):
            sampler.sample(PROMPT, 1, params).result()
    with pytest.raises(tinker.BadRequestError, match=r"takes 8,192 tokens, prompt and reply"):
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=8192)).result()
    with pytest.raises(tinker.BadRequestError, match="num_samples must be at least 1"):
        sampler.sample(PROMPT, 0, SamplingParams(max_tokens=1)).result()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{local_server.url}/api/v1/no_such_thing", timeout=60)


def test_what_is_no_number_is_a_failure_and_no_answer_to_wait_for(trainer: TrainingClient) -> None:
    trainer.forward_backward([DATUM], "cross_entropy").result()
    trainer.optim_step(tinker.AdamParams(learning_rate=1e30)).result()
    diverged = trainer.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.RequestFailedError, match="the weights have diverged"):
        diverged.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result()
    with pytest.raises(tinker.RequestFailedError, match="the weights have diverged"):
        trainer.forward_backward([DATUM], "cross_entropy").result()


def test_the_server_listens_on_this_machine_only(local_server: LocalServer) -> None:
    assert local_server.url.startswith("http://127.0.0.1:")
    port = int(local_server.url.rsplit(":", 1)[1])
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and int(address.split(":")[1], 16) == port:
            assert address.startswith("0100007F")
