"""Episodes beside evals, whatever the start-up files of the user's shell print."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quiet_shells(no_start_up_files: None) -> None:
    """Use it in each test."""
