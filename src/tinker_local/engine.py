"""Repairs of SkyRL's published engine, applied inside the engine's process.

Written for SkyRL 0.2.0 (`settings.SUPPORTED_SKYRL`); each function says what it repairs, and
can be removed when a later release no longer needs it.

The published engine compiles again for each number of training sequences and for each
`max_tokens`, which costs seconds on the CPU. Both vary from step to step in real runs: groups
without a spread of rewards are dropped, a conversation that was rewritten is trained in pieces,
token budgets shrink with each turn. So the number of shapes is limited here.
"""

from __future__ import annotations

import json
import tarfile
import typing
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typing_extensions

from tinker_local.settings import is_training_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet


@contextmanager
def typed_dict_for_pydantic() -> Iterator[None]:
    """Import `skyrl.tinker.types` inside this block.

    It takes `TypedDict` from `typing`, which pydantic refuses before Python 3.12; the one from
    `typing_extensions` is accepted everywhere.
    """
    original = typing.TypedDict
    typing.TypedDict = typing_extensions.TypedDict
    try:
        yield
    finally:
        typing.TypedDict = original


def repair_engine() -> None:
    """Apply all repairs to the engine classes of this process. Call once, before they are used."""
    from skyrl.backends.jax import JaxBackendImpl
    from skyrl.tinker.engine import TinkerEngine

    JaxBackendImpl.load_sampler_weights = _load_sampler_weights
    JaxBackendImpl.load_checkpoint = _load_existing(JaxBackendImpl.load_checkpoint)
    JaxBackendImpl.create_model = _create_model_making_room(JaxBackendImpl.create_model)
    TinkerEngine._filter_valid_requests = _accept_saved_samplers(
        TinkerEngine._filter_valid_requests
    )
    TinkerEngine.process_single_request = _honour_optimizer_flag(
        TinkerEngine.process_single_request
    )


def _load_existing(load: Callable[..., None]) -> Callable[..., None]:
    """Refuse a checkpoint that is gone: the published engine goes on with untrained weights."""

    def load_checkpoint(self: Any, checkpoint_path: Any, model_id: str) -> None:
        if not is_training_checkpoint(Path(str(checkpoint_path))):
            raise FileNotFoundError(f"there is no training checkpoint in {checkpoint_path}")
        load(self, checkpoint_path, model_id)

    return load_checkpoint


# Separate slots for sampler weights
#
# The published engine loads saved sampler weights into the slot of the model that is being
# trained. Sampling from anything but the newest weights (the cookbook's asynchronous mode, an
# evaluation of an older checkpoint) thus silently sets the training back to them. Here
# each set of weights gets its own slot, the least recently used one when all are taken.
_SAMPLER = "sampler:"


def _sampler_id(model_id: str, checkpoint_id: str) -> str:
    return f"{_SAMPLER}{model_id}/{checkpoint_id}"


def _load_sampler_weights(self: Any, prepared_batch: Any) -> list[int]:
    """Return the slot of each request of the batch (0 for the base model), loading as needed."""
    keys = [
        _sampler_id(model_id, checkpoint_id) if model_id else ""
        for model_id, checkpoint_id in zip(
            prepared_batch.all_model_ids, prepared_batch.all_checkpoint_ids, strict=True
        )
    ]
    in_use = set(keys)
    for key, path in zip(keys, prepared_batch.all_checkpoint_paths, strict=True):
        if not key:
            continue
        if key in self.models:
            self.models[key] = self.models.pop(key)  # the most recently used is last
        else:
            _load_into_free_slot(self, key, path, in_use)
    return [self.models[key].adapter_index if key else 0 for key in keys]


def _load_into_free_slot(backend: Any, key: str, path: str, in_use: AbstractSet[str]) -> None:
    from skyrl.tinker import types
    from skyrl.tx.layers.lora import init_lora_adapter
    from skyrl.tx.utils.models import load_lora_checkpoint

    _make_room(backend, in_use)
    taken = {model.adapter_index for model in backend.models.values()}
    free = set(range(1, backend.config.max_lora_adapters)) - taken
    if not free:
        raise ValueError(
            f"no LoRA slot is left for sampler weights: {len(taken)} are in use; start the "
            "local server with more adapters"
        )
    lora = types.LoraConfig(**_saved_lora(path), seed=0)
    index = min(free)
    init_lora_adapter(backend.model, index, lora)
    load_lora_checkpoint(backend.model, lora, index, Path(path))
    backend.models[key] = types.ModelMetadata(adapter_index=index, lora_config=lora)


def _saved_lora(path: str) -> dict[str, Any]:
    """Rank and alpha from the adapter file itself: the model may be long unloaded."""
    with tarfile.open(path, mode="r:gz") as archive:
        for member in archive:
            if member.name.endswith("adapter_config.json"):
                file = archive.extractfile(member)
                assert file is not None
                config = json.load(file)
                return {"rank": int(config["r"]), "alpha": float(config["lora_alpha"])}
    raise ValueError(f"{path} holds no adapter_config.json")


def _make_room(backend: Any, in_use: AbstractSet[str] = frozenset()) -> None:
    """Free the slot of the least recently used sampler weights when every slot is taken."""
    if len(backend.models) < backend.config.max_lora_adapters - 1:
        return
    for key in list(backend.models):
        if key.startswith(_SAMPLER) and key not in in_use:
            # Cleared by the next user of the slot, which initialises all of it.
            del backend.models[key]
            return


def _create_model_making_room(create: Callable[..., None]) -> Callable[..., None]:
    def create_model(self: Any, model_id: str, lora_config: Any) -> None:
        _make_room(self)
        create(self, model_id, lora_config)

    return create_model


def _accept_saved_samplers(check: Callable[..., Any]) -> Callable[..., Any]:
    """Let saved sampler weights be sampled from although their model is not loaded.

    That is so after a restart of the server, or when the trainer that saved them has ended.
    """

    def filter_valid_requests(self: Any, requests: dict[str, tuple[str, Any]]) -> Any:
        saved = {
            key: request
            for key, request in requests.items()
            if getattr(request[1], "checkpoint_id", "")
        }
        others = {key: request for key, request in requests.items() if key not in saved}
        errors, valid = check(self, others)
        return errors, {key: r for key, r in requests.items() if key in saved or key in valid}

    return filter_valid_requests


def _honour_optimizer_flag(process: Callable[..., Any]) -> Callable[..., Any]:
    """Start a new optimizer when a state is loaded without its own; the engine always restores it.

    The flag is not part of SkyRL's request, so `protocol` adds it to the stored one.
    """

    def process_single_request(self: Any, kind: Any, model_id: str, data: dict[str, Any]) -> Any:
        result = process(self, kind, model_id, data)
        if kind.value == "load_weights" and not data.get("optimizer", True):
            _reset_optimizer(self.backend, model_id)
        return result

    return process_single_request


def _reset_optimizer(backend: Any, model_id: str) -> None:
    from skyrl.backends.jax import jax, nnx, optax

    if model_id not in backend.optimizers:
        return  # the load has failed, and its answer says so
    with jax.set_mesh(backend.mesh):
        backend.optimizers[model_id] = nnx.Optimizer(
            backend.model,
            optax.inject_hyperparams(optax.adamw)(learning_rate=0.0),
            wrt=backend.model.is_lora_param,
        )


# LoRA adapters sequence by sequence
#
# The published layers sort all tokens by their adapter and multiply them with `ragged_dot`, which
# has no fast form on a CPU: each token is multiplied with every slot. A sequence has one adapter,
# so its matrices can be looked up and used as they are, several times faster.
def repair_adapters() -> None:
    """Apply adapters by sequence in the engine classes of this process. Call once."""
    from skyrl.tx.layers.lora import LoRAMixin
    from skyrl.tx.utils.logits_processor import LogitsProcessorMixin

    LoRAMixin.apply_lora = _by_sequence(LoRAMixin.apply_lora)
    LogitsProcessorMixin._compute_chunked_logprobs = _logprobs_by_sequence


def _by_sequence(by_token: Callable[..., Any]) -> Callable[..., Any]:
    from skyrl.backends.jax import jnp

    def apply_lora(self: Any, x: Any, base_output: Any, adapter_indices: Any) -> Any:
        # (batch, length, features) is what linear layers and embeddings receive.
        if self.max_lora_adapters == 0 or adapter_indices is None or base_output.ndim != 3:
            return by_token(self, x, base_output, adapter_indices)
        if x.ndim == 2:  # token ids of an embedding
            inner = self.lora_A[...][adapter_indices[:, None], x]
        else:
            inner = jnp.einsum("bti,bir->btr", x, self.lora_A[...][adapter_indices])
        outer = jnp.einsum("btr,bro->bto", inner, self.lora_B[...][adapter_indices])
        scaling = self.lora_scaling[...][adapter_indices]
        return base_output + outer * scaling[:, None, None]

    return apply_lora


def _logprobs_by_sequence(
    self: Any, hidden_states: Any, target_ids: Any, chunk_size: int, adapter_indices: Any
) -> Any:
    """Split the output layer's work by sequences, each with one adapter, instead of by tokens."""
    from skyrl.backends.jax import jax, jnp

    head = self.get_lm_head()
    if adapter_indices is None:
        adapter_indices = jnp.zeros(hidden_states.shape[0], dtype=jnp.int32)

    def one(sequence: Any) -> Any:
        hidden, targets, adapter = sequence
        logits = head(hidden[None], adapter[None])
        return self.logits_to_logprobs(logits, targets[None])[0]

    if self.get_model_config().gradient_checkpointing:
        one = jax.checkpoint(one)
    return jax.lax.map(one, (hidden_states, target_ids, adapter_indices))


PADDING = "padding:"
"""Id of the sequences that pad a training batch. They belong to slot 0, the base model,
which is never trained, so they count in no gradient."""


def repair_shapes() -> None:
    """Patch the engine classes of this process. Call once."""
    from skyrl.backends.jax import JaxBackendImpl
    from skyrl.tinker.engine import TinkerEngine
    from skyrl.tx.utils.generator import GeneratorMixin

    JaxBackendImpl._model_pass = _in_full_batches(JaxBackendImpl._model_pass)
    GeneratorMixin._prefill_and_decode = staticmethod(
        _with_round_limits(GeneratorMixin._prefill_and_decode)
    )
    TinkerEngine.find_batchable_sample = _wait_for_more(TinkerEngine.find_batchable_sample)


def full_batch(count: int, limit: int) -> int:
    """Return the number of sequences that ``count`` is padded to, in passes of at most ``limit``.

    The last pass gets the next power of two, so that at most log2(limit) + 1 sizes occur, and
    less than half of a pass is wasted.
    """
    whole, rest = divmod(count, limit)
    return whole * limit + (min(limit, 1 << (rest - 1).bit_length()) if rest else 0)


def round_limit(max_tokens: int) -> int:
    """Round ``max_tokens`` up to a step of 16, 32 or 64, by at most about an eighth."""
    step = 16 if max_tokens <= 64 else 32 if max_tokens <= 256 else 64
    return -(-max_tokens // step) * step


def _in_full_batches(model_pass: Callable[..., Any]) -> Callable[..., Any]:
    def padded(self: Any, batch: Any, function: Any) -> Any:
        count = len(batch.all_model_inputs)
        missing = full_batch(count, self.config.train_micro_batch_size) - count
        if missing == 0:
            return model_pass(self, batch, function)
        # Copies of a real sequence with weight zero: attention over an empty one has no value.
        for name in ("all_model_inputs", "all_targets", "all_loss_fns", "all_loss_fn_configs"):
            values = getattr(batch, name)
            values.extend([values[0]] * missing)
        batch.all_token_weights.extend([[0.0] * len(batch.all_targets[0])] * missing)
        for name in ("all_sampling_logprobs", "all_advantages"):
            getattr(batch, name).extend([[]] * missing)
        batch.all_model_ids.extend([PADDING] * missing)
        self.models[PADDING] = _slot_of_the_base_model()
        try:
            return model_pass(self, batch, function)
        finally:
            del self.models[PADDING]

    return padded


def _slot_of_the_base_model() -> Any:
    from skyrl.tinker import types

    lora = types.LoraConfig(rank=1, alpha=1.0, seed=0)
    return types.ModelMetadata(adapter_index=0, lora_config=lora)


def _with_round_limits(generate: Callable[..., Any]) -> Callable[..., Any]:
    from skyrl.tx.utils.models import round_up_seq_len

    def rounded(
        model: Any, ids: Any, mask: Any, max_length: int, max_new_tokens: int, *rest: Any, **kw: Any
    ) -> Any:
        # Each sequence is cut at its own limit afterwards, so more tokens do no harm.
        new_tokens = round_limit(max_new_tokens)
        length = max(max_length, round_up_seq_len(ids.shape[1] + new_tokens))
        return generate(model, ids, mask, length, new_tokens, *rest, **kw)

    return rounded


def _wait_for_more(find: Callable[..., Any]) -> Callable[..., Any]:
    """Wait, a tenth of a second at a time, while more requests come in.

    A batch costs the same whether it is full or not, and the rollouts of a step ask together.
    """

    def find_batchable_sample(self: Any, session: Any) -> Any:
        found = find(self, session)
        seen = getattr(self, "_seen_samples", 0)
        self._seen_samples = len(found)
        if seen < len(found) < self.backend.config.sample_max_num_sequences:
            return {}
        self._seen_samples = 0
        return found

    return find_batchable_sample
