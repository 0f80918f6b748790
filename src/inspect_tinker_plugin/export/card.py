"""The ``README.md`` of an export: tells ``load_dataset`` (and the Hugging Face Hub) its schema.

JSON lines need it: their reader guesses types from the first lines, and a key that
is null there would have no type for the lines that follow.
"""

from __future__ import annotations

from typing import Any

CARD = "README.md"


def card(task: str, *, rich: bool, pattern: str) -> str:
    """Write the card.

    Args:
        task: Name of the task.
        rich: The schema of the files.
        pattern: Matches the files.
    """
    import yaml

    from inspect_tinker_plugin.export.columns import features

    head: dict[str, Any] = {
        "configs": [
            {"config_name": "default", "data_files": [{"split": "train", "path": pattern}]}
        ],
        "dataset_info": {"features": _fields(features(rich=rich))},
    }
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {task}\n\n"
        "Prompts and answers of an Inspect task, written by `inspect rl export`. `prompt` is what\n"
        "the task's solver sends to the model first; `info` and `tools` hold JSON. `export.json`\n"
        "says how it was made.\n"
    )


def _fields(struct: Any) -> list[dict[str, Any]]:
    return [{"name": name, **_type(of)} for name, of in struct.items()]


def _type(of: Any) -> dict[str, Any]:
    from datasets import List

    if isinstance(of, List):
        inner = of.feature
        return {"list": _fields(inner)} if isinstance(inner, dict) else {"list": inner.dtype}
    return {"struct": _fields(of)} if isinstance(of, dict) else {"dtype": of.dtype}
