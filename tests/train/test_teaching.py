"""The examples teach a tiny model what a policy did."""

from __future__ import annotations

from pathlib import Path

import tinker
from example_tasks.teaching import imitate
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Trajectory, Transition

PROMPT, REPLY = [5, 6, 7], [100, 200, 300, 400]


def conversation() -> Trajectory:
    prompt = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=PROMPT)])
    said = TokensWithLogprobs(tokens=REPLY, maybe_logprobs=[0.0] * len(REPLY))
    transition = Transition(ob=prompt, ac=said, reward=0.0, episode_done=True)
    return Trajectory(transitions=[transition], final_ob=tinker.ModelInput.empty())


def continued(model: Path) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(model))
    tokens = loaded.generate(torch.tensor([PROMPT]), max_new_tokens=len(REPLY), do_sample=False)
    return [int(token) for token in tokens[0, len(PROMPT) :]]


def test_a_taught_model_says_what_the_policy_said(tmp_path: Path, tiny_model: Path) -> None:
    before = continued(tiny_model)
    taught = tmp_path / "taught"
    imitate(tiny_model, taught, [conversation()], steps=60)
    assert before != REPLY
    assert continued(taught) == REPLY
    assert continued(tiny_model) == before, "the model it came from is as it was"
