"""Applies LoRA adapters sequence by sequence, which a CPU does several times faster.

The published layers sort all tokens by their adapter and multiply them with `ragged_dot`, which
has no fast form on a CPU: each token is multiplied with every slot. A sequence has one adapter,
so its matrices can be looked up and used as they are. Written for SkyRL 0.2.0, like `engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def repair_adapters() -> None:
    """Patch the engine classes of this process. Call once."""
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
