"""A small MCP server on stdio, started as a separate process by the corpus."""

from __future__ import annotations

import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("corpus")


@server.tool()
def shout(text: str, times: int = 1) -> str:
    """Say something loudly.

    Args:
        text: What to say.
        times: How often.
    """
    return " ".join([text.upper()] * times)


@server.tool()
def fail(reason: str) -> str:
    """Always fail."""
    if reason == "death":
        os._exit(1)
    raise ValueError(reason)


if __name__ == "__main__":
    server.run("stdio")
