"""Imitation teaches a tiny model what a policy did, once, and only from text."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Trajectory, Transition

from tinker_local import Imitation, LocalConfigError, imitate

PROMPT, REPLY = [5, 6, 7], [100, 200, 300, 400]
SHORT = Imitation(steps=60, batch_size=4)


def conversation(*chunks: tinker.ModelInputChunk) -> Trajectory:
    prompt = tinker.ModelInput(chunks=[*chunks, tinker.EncodedTextChunk(tokens=PROMPT)])
    said = TokensWithLogprobs(tokens=REPLY, maybe_logprobs=[0.0] * len(REPLY))
    transition = Transition(ob=prompt, ac=said, reward=0.0, episode_done=True)
    return Trajectory(transitions=[transition], final_ob=tinker.ModelInput.empty())


def continued(model: Path) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(model))
    tokens = loaded.generate(torch.tensor([PROMPT]), max_new_tokens=len(REPLY), do_sample=False)
    return [int(token) for token in tokens[0, len(PROMPT) :]]


@pytest.mark.nightly
def test_a_taught_model_says_what_the_policy_said(tmp_path: Path, tiny_model: Path) -> None:
    before = continued(tiny_model)
    lines: list[str] = []
    taught = imitate(tiny_model, tmp_path / "taught", [conversation()], how=SHORT, say=lines.append)
    assert before != REPLY
    assert continued(taught) == REPLY
    assert continued(tiny_model) == before, "the model it came from is as it was"
    assert lines[-1].startswith("imitation step   60/60  loss 0.")
    written = (taught / "model.safetensors").stat().st_mtime_ns
    assert imitate(tiny_model, taught, [conversation()], how=SHORT) == taught
    assert (taught / "model.safetensors").stat().st_mtime_ns == written, "made once"


def test_what_cannot_be_imitated_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(LocalConfigError, match="no trajectories"):
        imitate(tiny_model, tmp_path / "taught", [])
    picture = tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=3)
    with pytest.raises(LocalConfigError, match="only text"):
        imitate(tiny_model, tmp_path / "taught", [conversation(picture)])
    assert not (tmp_path / "taught").exists()
    how = Imitation(steps=1, batch_size=1)
    imitate(tiny_model, tmp_path / "taught", [conversation()], how=how)
    with pytest.raises(LocalConfigError, match="a taught model of another kind"):
        imitate(tiny_model, tmp_path / "taught", [conversation()] * 2, how=how)
    with pytest.raises(LocalConfigError, match="is not a taught model"):
        imitate(tiny_model, tiny_model, [conversation()], how=how)
