"""Writes the report of a run."""

from __future__ import annotations

from pathlib import Path


def write_report(log_dir: Path) -> Path:
    path = log_dir / "report.html"
    path.write_text("", encoding="utf-8")
    return path
