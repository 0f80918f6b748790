"""Uploads a finished export to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from inspect_tinker_plugin.errors import ExportError


def push_to_hub(folder: Path, repository: str) -> None:
    """Upload an export through ``datasets``, all of its splits.

    Args:
        folder: The export; it stays as it is.
        repository: Name of the dataset, as ``user/name``. A new one is private.

    Raises:
        ExportError: The Hub cannot be reached, or does not take it.
    """
    from datasets import load_dataset

    try:
        load_dataset(str(folder)).push_to_hub(repository, private=True)
    except Exception as error:  # of the network, of the Hub, of its client
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ExportError(
            f"{folder} is complete, but was not uploaded to {repository!r} ({reason:.300}). Log in "
            "with `hf auth login`, or set HF_TOKEN, and upload it with "
            f'datasets.load_dataset("{folder}").push_to_hub("{repository}").'
        ) from error
