"""The tokenizer of our renderers: apart from other users of the one that was given."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

from tests.tokens.formats import tokenizer
from tinker_cookbook.renderers import get_renderer

from inspect_tinker_plugin.tokens.dataset_renderer import DatasetRenderer
from inspect_tinker_plugin.tokens.tokenizers import OwnTokenizer, own_tokenizer

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


def test_a_renderer_of_ours_is_not_disturbed_by_other_users_of_its_tokenizer() -> None:
    shared = tokenizer("<|thread-test|>")
    own = DatasetRenderer(get_renderer("qwen3_instruct", shared)).renderer.tokenizer
    expected = {split: shared.encode(TEXT, split_special_tokens=split) for split in (True, False)}
    assert expected[True] != expected[False]
    turn = iter(range(10**6))

    def work() -> None:
        split = next(turn) % 2 == 0
        assert own.encode(TEXT, split_special_tokens=split) == expected[split]
        shared.encode(TEXT)  # nobody else changes a setting meanwhile

    assert not busy(work, threads=4)


def test_a_given_renderer_and_its_tokenizer_stay_as_they_are() -> None:
    shared = tokenizer()
    given = get_renderer("qwen3_instruct", shared)
    methods = {name: getattr(type(shared), name) for name in ("encode", "decode", "_encode_plus")}
    context = DatasetRenderer(given)
    assert given.tokenizer is shared
    assert context.renderer.tokenizer is not shared
    assert isinstance(context.tokenizer, OwnTokenizer)
    assert methods == {name: getattr(type(shared), name) for name in methods}
    assert pickle.loads(pickle.dumps(context)).renderer.tokenizer.encode("a") == shared.encode("a")


def test_texts_have_the_tokens_of_the_tokenizer_remembered_or_not() -> None:
    shared = tokenizer("<|other|>")
    own = own_tokenizer(shared)
    for _ in range(3):
        for text in ("<|im_end|>", "<|other|>", "x" * 1000, f"{TEXT} é日本<|other|>\n\n" * 20):
            for split in ({}, {"split_special_tokens": True}, {"split_special_tokens": False}):
                tokens = own.encode(text, add_special_tokens=False, **split)
                assert tokens == shared.encode(text, add_special_tokens=False, **split)
                tokens.append(-1)  # who was given tokens may change the list
    assert own.decode(own.encode(TEXT)) == shared.decode(shared.encode(TEXT))
    assert own.encode("a", return_tensors=None) == shared.encode("a", return_tensors=None)
    assert (len(own), own.name_or_path) == (len(shared), shared.name_or_path)


class Doubling(type(tokenizer())):  # type: ignore[misc]
    """A tokenizer whose class encodes in a way of its own."""

    def _encode_plus(self, *args: object, **kwargs: object) -> object:
        encoded = super()._encode_plus(*args, **kwargs)
        encoded["input_ids"] = encoded["input_ids"] * 2
        return encoded


def test_a_class_with_its_own_way_is_left_alone() -> None:
    own = copy.deepcopy(tokenizer())
    own.__class__ = Doubling
    assert own_tokenizer(own) is own
