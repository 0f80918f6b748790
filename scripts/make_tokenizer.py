"""Train the small byte-level BPE tokenizer that the package ships for tests and local runs.

Run it as ``python scripts/make_tokenizer.py [FOLDER]``. The result depends only on this file,
on ``scripts/tokenizer_corpus/`` (all of it written for this purpose) and on the release of the
``tokenizers`` library, so a second run changes nothing.

What the tokenizer shares with that of Qwen3, because renderers depend on it: the way text is
cut before merging, one token per digit, ``<|im_start|>``-like tokens that are special, and
``<think>``, ``<tool_call>`` and ``<tool_response>`` tokens that are added but *not* special, so
that text encoded with ``split_special_tokens=True`` still yields them. What it does not
share: no Unicode normalisation, so that every text comes back as it went in.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
DESTINATION = HERE.parent / "src" / "inspect_tinker_plugin" / "testing_data" / "tokenizer"

VOCABULARY = 2048
"""Number of tokens, including the added ones."""

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NOT_SPECIAL = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word, with the space or sign before it
    r"|\p{N}"  # one digit at a time
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # punctuation, with the line ends after it
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # white space
)
"""How text is split before merges are learned, as in Qwen3."""

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hiro", "Ines", "John")
THINGS = ("apples", "books", "coins", "eggs", "flowers", "marbles", "pencils", "stamps", "tickets")
TOOLS = {
    "bash": ("cmd", ("ls -la", "cat notes.txt", "pwd", "grep -rn main .", "python3 main.py")),
    "python": ("code", ("print(1 + 1)", "import os\nprint(os.listdir())", "x = 3\nprint(x)")),
    "submit": ("answer", ("42", "yes", "B", "the file is empty", "3.14")),
    "add": ("x", ("1", "2", "17")),
    "web_search": ("query", ("capital of France", "largest prime number")),
    "text_editor": ("path", ("/workspace/main.py", "/tmp/result.txt")),
}


def sums(rng: random.Random, count: int) -> Iterator[str]:
    """Return arithmetic, as bare equations and as one-sentence problems with their solutions."""
    for _ in range(count):
        a, b = rng.randrange(2, 1000), rng.randrange(2, 100)
        name, other = rng.sample(NAMES, 2)
        thing = rng.choice(THINGS)
        yield f"{a} + {b} = {a + b}\n{a} - {b} = {a - b}\n{a} * {b} = {a * b}\n"
        yield f"What is {a} + {b}? ANSWER: {a + b}\nCompute {a} times {b}.\n\\boxed{{{a * b}}}\n"
        yield (
            f"{name} has {a} {thing} and gives {b} of them to {other}. How many {thing} does "
            f"{name} have left? {a} - {b} = {a - b}, so {name} has {a - b} {thing} left. "
            f"The answer is {a - b}.\n"
        )
        yield (
            f"{other} buys {b} {thing} for ${a}.00 each. How much does {other} pay in total? "
            f"Let x be the total. x = {b} * {a} = {a * b}. The total is ${a * b}.\n"
        )


def calls(rng: random.Random, count: int) -> Iterator[str]:
    """Return tool declarations, calls and results in JSON, as chat templates write them."""
    for _ in range(count):
        name = rng.choice(sorted(TOOLS))
        parameter, values = TOOLS[name]
        value = rng.choice(values)
        call = {"name": name, "arguments": {parameter: value}}
        schema = {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Use the {name} tool.",
                "parameters": {
                    "type": "object",
                    "properties": {parameter: {"type": "string", "description": parameter}},
                    "required": [parameter],
                    "additionalProperties": False,
                },
            },
        }
        yield json.dumps(call) + "\n" + json.dumps(call, separators=(",", ":")) + "\n"
        yield json.dumps(schema) + "\n"
        yield json.dumps({"result": value, "error": None, "success": True, "items": [1, 2.5]})
        yield f"system\nuser\nassistant\ntool\n\nUser: {value}\n\nAssistant: {value}\n\nUser:"
        yield f'{{"id": "call_{name}", "timeout": 30, "ok": false}}\n'


def corpus() -> Iterator[str]:
    """Return all training text, in a fixed order."""
    rng = random.Random(0)
    for name in ("prose.txt", "code.txt"):
        # Twice: otherwise there would be more generated text than text written by people.
        text = (HERE / "tokenizer_corpus" / name).read_text(encoding="utf-8")
        yield text
        yield text
    yield from sums(rng, 60)
    yield from calls(rng, 60)


def train() -> Tokenizer:
    """Return the trained tokenizer, added tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(NOT_SPECIAL),
        min_frequency=2,
        # Every byte has a token, even if the corpus does not use it: no text is unknown.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    # Added after training, so their ids follow the vocabulary, as in Qwen3.
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in NOT_SPECIAL])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the corpus yields {tokenizer.get_vocab_size()} tokens: add text")
    return tokenizer


def write(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    train().save(str(folder / "tokenizer.json"))
    config = {
        # The generic class: the Qwen class would add Unicode normalisation again.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": 32768,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DESTINATION)
