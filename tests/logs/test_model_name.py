"""A log names the model that was rolled out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from inspect_ai.log import list_eval_logs, read_eval_log
from tests.rl.policies import Words
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.rl.builder import InspectRLDatasetBuilder
from inspect_tinker_plugin.rl.models import model_name
from inspect_tinker_plugin.testing import tokenizer_path


@pytest.mark.parametrize(
    ("made_for", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        (str(Path("/runs/one/tiny-model")), "tiny-model"),
        (str(tokenizer_path()), None),
        (None, None),
    ],
)
def test_the_model_is_the_one_that_the_renderer_was_made_for(
    made_for: str | None, name: str | None
) -> None:
    assert model_name(SimpleNamespace(_model_name=made_for)) == name


async def test_logs_of_training_and_test_have_a_tag_each(tmp_path: Path) -> None:
    builder = InspectRLDatasetBuilder(
        task="tests/rl/tasks.py@arithmetic",
        test_task="tests/rl/tasks.py@arithmetic",
        model_name=str(tokenizer_path()),
        renderer_name="qwen3_instruct",
        limit=1,
        log_dir=str(tmp_path),
    )
    for dataset in await builder():
        assert dataset is not None
        await do_group_rollout(dataset.get_batch(0)[0], Words(["1"]))
    for name in ("train", "test"):
        assemble_pending(tmp_path / name)
        [log] = list_eval_logs(str(tmp_path / name))
        assert read_eval_log(log, header_only=True).eval.tags == ["rollouts", name]
