"""Journals lose nothing that was written, and believe nothing that was not."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inspect_tinker_plugin.contracts.errors import ConfigError, InspectRLError
from inspect_tinker_plugin.processes import Journal, alone_in, local_path, read_rows, write_whole

ROWS: list[dict[str, Any]] = [{"n": 1, "text": "é\u2028\ud800"}, {"n": 2, "crc": "mine"}, {"n": 3}]


def test_what_was_written_is_read_by_a_journal_and_as_plain_json_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.load() == []
    assert 0 < journal.hold(ROWS[0]) < journal.hold(ROWS[1])
    assert not journal.path.exists()
    journal.write(ROWS[2])
    assert [row["n"] for row in Journal(journal.path).load()] == [1, 2, 3]
    assert [row["n"] for row in read_rows(journal.path)] == [1, 2, 3]
    journal.replace(ROWS[1:])
    assert [row["n"] for row in journal.load()] == [2, 3]


def flip(held: bytes) -> bytes:
    middle = held.index(b'"n": 2') + 5
    return held[:middle] + b"7" + held[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda held: held[:-1], [1, 2]),
        (lambda held: held[:-9], [1, 2]),
        (lambda held: held + b'{"n": 4', [1, 2, 3]),
        (lambda held: held + b'\xff{"n": 4}\n', [1, 2, 3]),
        (flip, [1]),
        (lambda held: b"", []),
    ],
    ids=["no end", "cut", "begun", "no line", "another number", "nothing"],
)
def test_a_damaged_line_ends_it_and_the_next_follows_the_last_whole_one(
    tmp_path: Path, damage: Callable[[bytes], bytes], left: list[int]
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write(*ROWS)
    journal.path.write_bytes(damage(journal.path.read_bytes()))
    assert [row["n"] for row in journal.load()] == left
    journal.write({"n": 9})
    assert [row["n"] for row in journal.load()] == [*left, 9]


def test_what_cannot_be_replaced_leaves_no_half_written_file(tmp_path: Path) -> None:
    (taken := tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_whole(taken, "text")
    with pytest.raises(OSError):
        Journal(taken).replace(ROWS)
    assert list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize("known", [None, "/elsewhere/metrics.jsonl"])
def test_a_disk_that_is_full_is_named(tmp_path: Path, known: str | None) -> None:
    with pytest.raises(OSError) as caught, alone_in(tmp_path, "a.lock", taken="is taken"):
        raise OSError(errno.ENOSPC, "No space left on device", *([known] if known else []))
    assert caught.value.filename == (known or str(tmp_path))


@pytest.mark.parametrize("error", [None, FileNotFoundError("a file of it"), RuntimeError("then")])
def test_a_folder_that_was_removed_meanwhile_is_not_reported_as_written(
    tmp_path: Path, error: Exception | None
) -> None:
    folder = tmp_path / "written"

    def write() -> None:
        folder.rename(tmp_path / "moved")
        folder.mkdir()  # by what writes next
        (folder / "a.lock").touch()  # of another process, which begins there
        if error is not None:
            raise error

    with (
        pytest.raises(InspectRLError, match=f"{folder} was moved or removed") as caught,
        alone_in(folder, "a.lock", taken="is taken", keep=False),
    ):
        write()
    assert caught.value.__cause__ is error
    assert (folder / "a.lock").exists()


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("runs/a b", "runs/a b"),
        ("~/runs", str(Path.home() / "runs")),
        ("file:///runs/ü x", "/runs/ü x"),
        (Path("file:///runs"), "/runs"),
        ("out:2/x", "out:2/x"),
    ],
)
def test_what_is_a_path_of_this_machine(given: str | Path, path: str) -> None:
    assert local_path(given) == Path(path)


@pytest.mark.parametrize("given", ["s3://bucket/x", Path("s3://bucket/x"), "memory://bucket/x"])
def test_the_address_of_another_store_is_none(given: str | Path) -> None:
    with pytest.raises(ConfigError, match=r"(s3|memory)://bucket/x is remote"):
        local_path(given)
