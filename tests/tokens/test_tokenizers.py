"""One tokenizer, used by episodes, rewards, scorers and trainer at once, and what it remembers."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
import threading
from collections.abc import Callable

import pytest
from inspect_ai import Task
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate
from tests.rl.policies import Words
from tests.rl.tasks import sums
from tests.tokens.formats import tokenizer
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.tokens import tokenizers
from inspect_tinker_plugin.tokens.dataset_renderer import DatasetRenderer
from inspect_tinker_plugin.tokens.tokenizers import RememberedEncodings

TEXT = "A line of text. <|im_end|> <think> " * 200


def busy(work: Callable[[], object], threads: int = 3) -> list[BaseException]:
    """Run work in several threads; return the errors."""
    wrong: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(25):
                work()
        except BaseException as error:
            wrong.append(error)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return wrong


def test_threads_with_other_settings_get_their_own_tokens() -> None:
    shared = tokenizer("<|thread-test|>")
    DatasetRenderer(get_renderer("qwen3_instruct", shared))
    expected = {split: shared.encode(TEXT, split_special_tokens=split) for split in (True, False)}
    assert expected[True] != expected[False]
    turn = iter(range(10**6))

    def work() -> None:
        split = next(turn) % 2 == 0
        assert shared.encode(TEXT, split_special_tokens=split) == expected[split]
        shared.decode(expected[split])

    assert not busy(work, threads=4)


async def test_reward_functions_and_scorers_may_use_the_tokenizer_in_threads() -> None:
    shared = tokenizer()

    def length(result: object) -> float:
        for split in (True, False) * 3:
            shared.encode(TEXT, split_special_tokens=split)
        return 1.0

    @scorer(metrics=[accuracy()])
    def counted() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            await asyncio.to_thread(lambda: [shared.encode(TEXT) for _ in range(10)])
            return Score(value=1.0)

        return score

    task = Task(dataset=sums(3), solver=generate(), scorer=counted())
    renderer = get_renderer("qwen3_instruct", shared)
    dataset = as_rl_dataset(task, renderer, batch_size=3, group_size=4, reward=length)
    groups = await asyncio.gather(
        *[do_group_rollout(group, Words(["2"])) for group in dataset.get_batch(0)],
        *[asyncio.to_thread(shared.encode, TEXT) for _ in range(8)],
    )
    assert all(group.get_total_rewards() == [1.0] * 4 for group in groups[:3])


def test_remembered_encodings_follow_settings_and_added_tokens() -> None:
    shared = tokenizer()
    DatasetRenderer(get_renderer("qwen3_instruct", shared))
    special, later = "<|im_end|>", "<|added-later|>"

    def all_tokens() -> list[list[int]]:
        return [
            shared.encode(text, add_special_tokens=False, **split)
            for text in (special, later, "x" * 1000, f"{TEXT} {special}é日本{later}\n\n" * 20)
            for split in ({}, {"split_special_tokens": True}, {"split_special_tokens": False})
        ]

    def remembered() -> list[list[int]]:
        with RememberedEncodings():
            return all_tokens()

    for _ in range(4):  # longer texts are remembered when they come for the second time
        before = remembered()
        assert before == all_tokens()
        before[0].append(-1)  # who was given tokens may change the list
    other = copy.copy(shared)  # which has the same tokens
    for owner, name in ((shared, later), (other, "added by the copy")):
        owner.add_special_tokens({"additional_special_tokens": [name]})
        assert remembered() == all_tokens()
        with RememberedEncodings():
            assert len(shared.encode(name, add_special_tokens=False)) == 1


def test_only_texts_that_return_are_remembered_and_only_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = tokenizer()
    DatasetRenderer(get_renderer("qwen3_instruct", shared))
    encoded: list[str] = []
    kept = tokenizers._Encodings.put

    def put(self: object, key: tuple[str, bool], tokens: list[int]) -> None:
        encoded.append(key[0])
        kept(self, key, tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizers._Encodings, "put", put)

    def encode(text: str) -> list[int]:
        before: list[int] = shared.encode(text, add_special_tokens=False)
        with RememberedEncodings():
            assert shared.encode(text, add_special_tokens=False) == before
        return before

    for text, times in (("a header", 1), ("a result " * 100, 2), ("a book " * 20_000, 4)):
        encoded.clear()
        for _ in range(4):
            encode(text)
        assert len(encoded) == times
    for number in range(400):  # each a hundredth of what is remembered
        for _ in range(2):
            encode(f"{number} " + "long " * 2000)
    known = tokenizers._encodings[shared]
    for part in (known._latest, known._before):
        assert sum(len(key[0]) for key in part) <= tokenizers._REMEMBERED
    encoded.clear()
    encode("399 " + "long " * 2000)
    assert not encoded
    encode("0 " + "long " * 2000)
    assert encoded


def test_remembered_encodings_follow_a_length_that_the_tokenizer_is_set_to() -> None:
    shared = tokenizer()
    DatasetRenderer(get_renderer("qwen3_instruct", shared))
    for text in ("x y " * 500, "<|im_end|>"):
        shared.backend_tokenizer.enable_truncation(3)
        with RememberedEncodings():
            short = shared.encode(text, add_special_tokens=False)
        assert short == shared.encode(text, add_special_tokens=False)


class Doubling(type(tokenizer())):  # type: ignore[misc]
    """A tokenizer whose class encodes in a way of its own."""

    def _encode_plus(self, *args: object, **kwargs: object) -> object:
        encoded = super()._encode_plus(*args, **kwargs)
        encoded["input_ids"] = encoded["input_ids"] * 2
        return encoded


def test_remembered_encodings_leave_a_class_its_own_way() -> None:
    shared = tokenizer()
    DatasetRenderer(get_renderer("qwen3_instruct", shared))
    own = copy.deepcopy(shared)
    own.__class__ = Doubling
    with RememberedEncodings():
        assert own.encode("x" * 1000) == shared.encode("x" * 1000) * 2


def test_a_guarded_tokenizer_copies_and_pickles_with_its_added_tokens() -> None:
    shared = tokenizer("<|copy-test|>")
    DatasetRenderer(get_renderer("qwen3_instruct", shared))
    for other in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        assert other.encode("<|copy-test|>") == shared.encode("<|copy-test|>")
        assert not busy(functools.partial(other.encode, TEXT, split_special_tokens=True))
