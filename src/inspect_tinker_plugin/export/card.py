"""The ``README.md`` of an export: tells ``load_dataset`` (and the Hugging Face Hub) its schema.

JSON lines need it: their reader guesses types from the first lines, and a key that
is null there would have no type for the lines that follow.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Features

CARD = "README.md"


def card(title: str, about: str, *, features: Features, files: Mapping[str, str]) -> str:
    """Write the card.

    Args:
        title: Its heading.
        about: What the rows are.
        features: Types of the columns.
        files: A pattern of file names for each split.
    """
    import yaml

    splits = [{"split": split, "path": pattern} for split, pattern in files.items()]
    head: dict[str, Any] = {
        "configs": [
            {
                "config_name": "default",
                "data_files": splits,
                # `load_dataset` keeps what it read of a folder under the folder's last name and a
                # hash of this card, and would take another export of that name for the same.
                "description": f"export {uuid.uuid4().hex}",
            }
        ],
        "dataset_info": {"features": _fields(features)},
    }
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {title}\n\n{about}\n"
        "`export.json` says how it was made.\n"
    )


def _fields(struct: Any) -> list[dict[str, Any]]:
    return [{"name": name, **_type(of)} for name, of in struct.items()]


def _type(of: Any) -> dict[str, Any]:
    from datasets import List

    if isinstance(of, List):
        inner = of.feature
        return {"list": _fields(inner)} if isinstance(inner, dict) else {"list": inner.dtype}
    if isinstance(of, dict):
        return {"struct": _fields(of)}
    return {"dtype": getattr(of, "dtype", None) or type(of).__name__.lower()}  # Json has none
