"""Teaches the tiny model a reply by imitation, before it is trained by reward.

A random model never hits on a whole tool call, so there would be nothing to reinforce:
``python warm_start.py MODEL STATE_DIR TASK REPLY SHARE`` prints the checkpoint to start from.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import tinker
import torch
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.local import LocalServer
from inspect_tinker_plugin.rl.dataset import as_rl_dataset

TRIES = 32


async def imitate(model: str, task: str, reply: str, share: float) -> str:
    """Imitate until a share of sampled replies is the one that is taught.

    Returns:
        Path of the checkpoint, for ``load_checkpoint_path``.
    """
    renderer = get_renderer("qwen3_instruct", get_tokenizer(model))
    dataset = as_rl_dataset(task, renderer, batch_size=8)
    prompts = []
    for builder in dataset.get_batch(0):
        (env,) = await builder.make_envs()
        observation = await env.initial_observation()
        assert isinstance(observation, tuple)
        prompts.append(observation[0])
        await builder.cleanup()
    tokens = renderer.tokenizer.encode(f"{reply}<|im_end|>", add_special_tokens=False)
    data = [_datum(prompt, tokens) for prompt in prompts]
    service = tinker.ServiceClient()
    client = await service.create_lora_training_client_async(model, rank=16)
    params = tinker.SamplingParams(max_tokens=len(tokens) + 4, stop=renderer.get_stop_sequences())
    for _ in range(150):
        trained = await client.forward_backward_async(data, "cross_entropy")
        stepped = await client.optim_step_async(tinker.AdamParams(learning_rate=1e-2))
        await trained.result_async()
        await stepped.result_async()
        sampler = await client.save_weights_and_get_sampling_client_async()
        result = await sampler.sample_async(prompts[0], TRIES, params)
        said = sum(list(each.tokens) == tokens for each in result.sequences)
        print(f"{said} of {TRIES}", file=sys.stderr)
        if said >= share * TRIES:
            break
    saved = await (await client.save_state_async("warm")).result_async()
    return saved.path


def _datum(prompt: tinker.ModelInput, tokens: list[int]) -> tinker.Datum:
    whole = tinker.ModelInput.from_ints([*prompt.to_ints(), *tokens])
    weights = torch.tensor([0.0] * prompt.length + [1.0] * len(tokens))
    return datum_from_model_input_weights(whole, weights)


def main() -> None:
    """Start the server of the run's folder, and stop it again."""
    model, state, task, reply, share = sys.argv[1:]
    with LocalServer(Path(model), state_dir=Path(state)) as server:
        os.environ.update(server.environ)
        print(asyncio.run(imitate(model, task, reply, float(share))))


if __name__ == "__main__":
    main()
