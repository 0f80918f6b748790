"""Limits the number of shapes that the engine compiles: each new one costs seconds on the CPU.

The published engine compiles again for each number of training sequences and for each
`max_tokens`. Both vary from step to step in real runs: groups without a spread of rewards are
dropped, a conversation that was rewritten is trained in pieces, token budgets shrink with each
turn. Written for SkyRL 0.2.0, like `engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

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
    TinkerEngine.find_batchable_sample = _once_all_have_arrived(TinkerEngine.find_batchable_sample)


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


def _once_all_have_arrived(find: Callable[..., Any]) -> Callable[..., Any]:
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
