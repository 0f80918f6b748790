"""TRL's GRPO trains a tiny model on the episodes of a task, and its reward rises.

TRL is not a dependency of the tests: ``make clients`` installs it and runs them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, mean
from inspect_ai.solver import TaskState, generate
from tests.functions import make_scorer
from tests.rl.policies import renderer, tokenizer

from inspect_tinker_plugin.serve import Prompt, RolloutService, Sampled, Sampler

trl = pytest.importorskip("trl", reason="TRL is not installed: make clients")

REPLY = 8


@make_scorer(mean())
async def share_of_letter(state: TaskState, target: Target, letter: str) -> Score:
    text = state.output.completion
    return Score(value=text.count(letter) / max(1, len(text)))


def task() -> Task:
    samples = [Sample(id=f"s{number}", input=f"{number}: speak.") for number in range(8)]
    return Task(dataset=samples, solver=generate(), scorer=share_of_letter("e"))


def tiny_model() -> Any:
    """Make a Qwen2 with random weights, which says anything."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer()), **shape, **heads)).eval()


def sampler_of(model: Any) -> Sampler:
    """Lend the model that is trained, as it is now."""

    async def sample(prompt: Prompt) -> Sampled:
        tokens = torch.tensor([list(prompt.tokens)])
        with torch.no_grad():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=REPLY,
                do_sample=True,
                top_k=0,
                eos_token_id=list(prompt.stop),
                pad_token_id=tokenizer().pad_token_id,
                return_dict_in_generate=True,
                output_logits=True,
            )
        new = out.sequences[0, tokens.shape[1] :].tolist()
        logprobs = [
            float(torch.log_softmax(logits[0].double(), -1)[token])
            for logits, token in zip(out.logits, new, strict=True)
        ]
        ended = new[-1] in prompt.stop
        return Sampled(tokens=new, logprobs=logprobs, stop_reason="stop" if ended else "length")

    return sample


@pytest.mark.filterwarnings("ignore::UserWarning")  # rollout_func is experimental there
def test_grpo_improves_on_the_episodes_of_a_task(tmp_path: Path) -> None:
    service = RolloutService(task(), renderer(), log_dir=None)

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Run an episode per prompt, which is the id of a sample."""

        async def run() -> Any:
            lent = sampler_of(trainer.model)
            return await asyncio.gather(*(service.run_episode(each, lent) for each in prompts))

        rows: dict[str, Any] = {}
        for result in asyncio.run(run()):
            if result.failure is not None:
                raise RuntimeError(result.failure.message)
            branch = result.branches[-1]
            start = len(branch.prompt_tokens)
            for name, value in (
                ("prompt_ids", branch.tokens[:start]),
                ("completion_ids", branch.tokens[start:]),
                ("logprobs", branch.logprobs[start:]),
                ("env_mask", branch.mask[start:]),
                ("reward", result.reward),
            ):
                rows.setdefault(name, []).append(value)
        return rows

    def paid(reward: list[float], **_: Any) -> list[float]:
        return reward

    torch.set_num_threads(1)  # the matrices are tiny
    torch.manual_seed(0)
    settings = {"per_device_train_batch_size": 64, "num_generations": 32, "max_steps": 20}
    trainer = trl.GRPOTrainer(
        model=tiny_model(),
        processing_class=tokenizer(),
        reward_funcs=paid,
        rollout_func=roll_out,
        train_dataset=Dataset.from_dict({"prompt": [f"s{number}" for number in range(8)]}),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            learning_rate=3e-2,
            max_completion_length=REPLY,
            beta=0.0,
            seed=0,
            use_cpu=True,
            gradient_checkpointing=False,
            bf16=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            **settings,
        ),
    )
    trainer.train()
    rewards = [each["reward"] for each in trainer.state.log_history if "reward" in each]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
