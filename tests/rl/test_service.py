"""A server that cannot be reached is found out at once; a key may come from three places."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.rl.models import make_renderer, no_key, require_server


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server that answers every request with an error."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "127.0.0.1:80", "ftp://127.0.0.1"])
def test_an_address_without_a_server_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="no Tinker API server can be reached"):
        require_server(address)


def test_whatever_answers_is_left_to_the_sdk(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    require_server(f"http://127.0.0.1:{port}")
    require_server(f"https://127.0.0.1:{port}")  # a fault of certificates or protocol
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{port}/")
    require_server(None)


def test_a_key_comes_from_a_variable_a_command_or_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("inspect_tinker_plugin.rl.models._is_logged_in", lambda: False)
    assert no_key("train on", "add --local") == (
        "there is no TINKER_API_KEY in the environment: set it to train on the Tinker service, or "
        "add --local"
    )
    monkeypatch.setattr("inspect_tinker_plugin.rl.models._is_logged_in", lambda: True)
    assert no_key("train on", "add --local") is None
    monkeypatch.undo()
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo key")
    assert no_key("train on", "add --local") is None


def test_a_hub_that_cannot_be_reached_is_found_out_before_its_client_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(name: str) -> None:
        raise AssertionError("the client of the hub tries for a minute")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("inspect_tinker_plugin.rl.models.get_tokenizer", never)
    with pytest.raises(ConfigError, match=r"tokenizer of nobody/nothing .* hub cannot be reached"):
        make_renderer("qwen3", model="nobody/nothing")
