"""Which samples of a task: chosen in the words of ``inspect eval``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inspect_tinker_plugin.contracts.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selects samples, with the words and the meaning of ``inspect eval``.

    Raises:
        ConfigError: Two of the choices exclude each other, or one of them chooses nothing.
    """

    limit: int | tuple[int, int] | None = None
    """The first samples, or those from a position (from 0, included) to another (excluded)."""

    sample_id: str | int | Sequence[str | int] | None = None
    """Ids or patterns (``easy-*``), as ``inspect eval --sample-id``; keeps the dataset's order."""

    sample_ids: Sequence[str | int] | None = None
    """Exact ids, in the desired order."""

    sample_shuffle: bool | int | None = None
    """Shuffle before the limit is applied: ``True``, or a seed that makes the order repeatable."""

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        _check_ids(self.sample_ids)
        if self.sample_id is not None and not self.patterns:
            raise ConfigError("sample_id is empty, so there is no sample; None takes all of them")
        if self.sample_ids is not None and self.sample_id is not None:
            raise ConfigError("sample_id and sample_ids exclude each other; give one of them")
        if self.sample_id is None and self.sample_ids is None:
            return
        for name in ("limit", "sample_shuffle"):
            if getattr(self, name) not in (None, False):
                by_id = "sample_id" if self.sample_ids is None else "sample_ids"
                raise ConfigError(
                    f"{name} and {by_id} exclude each other: sample ids go neither with a limit "
                    "nor with shuffling"
                )

    @property
    def patterns(self) -> list[str | int]:
        """The patterns of ``sample_id`` as a list."""
        wanted = self.sample_id
        return [wanted] if isinstance(wanted, str | int) else list(wanted or ())


def _check_limit(limit: object) -> None:
    if limit is None:
        return
    whole = [limit] if not isinstance(limit, tuple) else [limit[0] + 1, limit[1]]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in whole):
        raise ConfigError(f"limit must be a whole number of at least 1, or a range, got {limit!r}")
    if isinstance(limit, tuple) and (len(limit) != 2 or limit[0] >= limit[1]):
        raise ConfigError(f"limit {limit!r} leaves no sample; a range is (from, to), from 0")


def _check_ids(ids: object) -> None:
    if ids is None:
        return
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise ConfigError(f"sample_ids is a list of ids, such as [{ids!r}], not {ids!r:.80}")
    if not ids:
        raise ConfigError("sample_ids is empty, so there is no sample; None takes all of them")
