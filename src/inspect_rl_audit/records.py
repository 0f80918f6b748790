"""The record that an audit keeps of an episode, and the journal for continuing an audit."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from inspect_tinker_plugin import ConfigError
from inspect_tinker_plugin.processes import Journal
from inspect_tinker_plugin.tasks import describe_part

JOURNAL = "journal.jsonl"
"""Episodes of an unfinished audit; the next run continues with it."""

FINISHED = "episodes.jsonl"
"""Episodes of a finished audit."""


ATTEMPTS = "attempts"
"""Folder of the attempts of a real model that the audit sampled, below the audit's."""


PolicyKind = Literal["unknowing", "right", "reworded", "other"]
"""What a policy does: it says that it has no answer, gives the right one, gives it in unusual words
or in another of its forms, or does anything else. What that earns is a reward for nothing."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """One episode of a scripted policy, as probes read it; plain data."""

    policy: str
    """Name of the policy."""

    kind: PolicyKind = "other"
    """Kind of the policy."""

    sample: int | str
    """Id of the sample."""

    repeat: int = 1
    """Number of this episode among identical ones, from 1."""

    reward: float | None = None
    """The reward; ``None`` when the episode failed or was not scored."""

    scores: Mapping[str, Any] = field(default_factory=dict)
    """Score values by scorer."""

    error: str | None = None
    """What failed."""

    cause: str | None = None
    """The cause of the error, as in ``Cause``."""

    limit: str | None = None
    """The task's limit that ended it."""

    turns: int = 0
    """Model calls that were answered."""

    tools: tuple[str, ...] = ()
    """Names of the tools offered at the first call."""

    input_tokens: int = 0
    """Prompt tokens of all calls together, estimated."""

    output_tokens: int = 0
    """Tokens that the policy said, estimated."""

    judge_tokens: int = 0
    """Tokens of all other models."""

    seconds: float = 0.0
    """Seconds from start to end."""

    scoring_seconds: float = 0.0
    """Of these, seconds in the scorers."""

    notes: Mapping[str, Any] = field(default_factory=dict)
    """Notes of the policy and its moves: the first prompt, what was found, …"""

    log: str | None = None
    """The ``.eval`` file that holds the episode, below the audit's folder."""

    epoch: int = 1
    """Its epoch in that file."""

    @property
    def key(self) -> str:
        """Key of this episode within its audit."""
        return episode_key(self.policy, self.sample, self.repeat)

    def evidence(self, **more: Any) -> dict[str, Any]:
        """Return the part of a finding that says where to look."""
        given = {
            "log": self.log,
            "sample": self.sample,
            "epoch": self.epoch,
            "policy": self.policy,
            "reward": self.reward,
            "error": self.error,
        }
        return {name: value for name, value in given.items() if value is not None} | more


def episode_key(policy: str, sample: int | str, repeat: int) -> str:
    """Return an episode's key within an audit; 7 and "7" are two samples."""
    return json.dumps([policy, sample, repeat])


class AuditJournal:
    """The finished episodes of an audit, one per line; the first line identifies the audit.

    Args:
        folder: Folder of the audit; it is created.
        identity: What is audited and how; another audit's journal is not continued.

    Raises:
        ConfigError: The folder holds another audit, or cannot be written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._journal = Journal(folder / JOURNAL)
        self.records: dict[str, EpisodeRecord] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._read_or_start(json.loads(json.dumps(identity, default=str)))
        except OSError as error:
            raise ConfigError(f"the audit's folder {folder} cannot be written: {error}") from error

    def finish(self) -> None:
        """Record that nothing is left to do: the next audit in this folder starts again."""
        os.replace(self._journal.path, self._journal.path.with_name(FINISHED))

    def _read_or_start(self, identity: object) -> None:
        lines = self._journal.load()
        if not lines:
            self._journal.replace([{"audit": identity}])
        elif lines[0].get("audit") != identity:
            raise ConfigError(
                f"{self._journal.path.parent} holds another audit (of another task, or with other "
                "options): give another folder with --out, or start again with --overwrite"
            )
        for fields in lines[1:]:
            record = EpisodeRecord(**{**fields, "tools": tuple(fields["tools"])})
            self.records[record.key] = record

    def add(self, records: list[EpisodeRecord]) -> None:
        """Record episodes whose log is on disk."""
        self._journal.write(*map(asdict, records))
        self.records.update({record.key: record for record in records})


def start_again(folder: Path) -> None:
    """Forget the audit in a folder and a model's attempts; logs of scripted episodes stay."""
    (folder / JOURNAL).unlink(missing_ok=True)
    shutil.rmtree(folder / ATTEMPTS, ignore_errors=True)


def named(value: object) -> str:
    """Return a text for an option's value that is the same in the next process."""
    text = str(describe_part(value) if callable(value) else value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)
