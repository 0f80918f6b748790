"""The names of the model under training, and the models that may answer beside it.

It is ``rl/policy`` for Inspect, and ``rl/NAME`` in logs. A program that asks for another model by
name, for titles, say, gets what the option ``side_models`` says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from inspect_tinker_plugin.contracts.errors import ConfigError

POLICY_PROVIDER = "rl"
POLICY_NAME = "policy"
POLICY_MODEL = f"{POLICY_PROVIDER}/{POLICY_NAME}"

Answerer = Literal["policy", "train", "role", "reply", "refuse"]

requested_model: ContextVar[str | None] = ContextVar("inspect_rl_requested_model", default=None)
"""The model that the program of this context asked for by name; ``None`` outside of programs."""


class SideModelRefusedError(Exception):
    """A program asked for a model that ``side_models`` refuses; it is shown as a 404."""

    status_code = 404


@dataclass(frozen=True)
class SideModel:
    """How calls for other models are answered."""

    how: Answerer
    what: str = ""
    """The role's name, or the reply's text."""


def read_side_models(rules: Mapping[str, str]) -> dict[str, SideModel]:
    """Read the option: by name or pattern, what answers.

    Raises:
        ConfigError: a value is none of those that there are.
    """
    return {pattern: _read_side_model(pattern, value) for pattern, value in rules.items()}


def _read_side_model(pattern: str, value: str) -> SideModel:
    how, _, what = value.partition(":")
    if how in ("policy", "train", "refuse") and not what:
        return SideModel(how)  # type: ignore[arg-type]  # one of the three
    if how == "role" and what:
        return SideModel("role", what)
    if how == "reply":
        return SideModel("reply", what)
    raise ConfigError(
        f"side_models: {value!r} for {pattern!r} is not one of policy, train, role:NAME, "
        "reply:TEXT, refuse"
    )


def check_side_roles(rules: Mapping[str, SideModel], roles: Collection[str]) -> None:
    """Check that the roles that rules name are set.

    Raises:
        ConfigError: One is not.
    """
    for pattern, rule in rules.items():
        if rule.how == "role" and rule.what not in roles:
            raise ConfigError(
                f"side_models: {pattern!r} is to be answered by the role {rule.what!r}, which is "
                f"not set: model_roles={{{rule.what!r}: 'provider/model'}}"
            )


def find_side_model(rules: Mapping[str, SideModel], name: str | None) -> SideModel | None:
    """Return what answers a program's call for a model; ``None`` for the one under training.

    The first pattern that fits counts; without any, the policy answers, untrained.
    """
    if name is None or name == "inspect" or name.startswith("inspect/"):
        return None
    if name in (POLICY_MODEL, POLICY_NAME):  # Inspect, too, takes them for the eval's own
        return None
    fitting = (rule for pattern, rule in rules.items() if fnmatchcase(name, pattern))
    return next(fitting, SideModel("policy"))


TOKENIZER_FOLDER = Path(__file__).resolve().parents[1] / "testing_data" / "tokenizer"
"""The shipped byte-level tokenizer, with Qwen3's special tokens, for scripts and tiny models."""
