"""The agent programs that tests run: which, where they are, and how they get there.

``make agent-programs`` runs this file. It fetches them from npm and PyPI into a folder of the
user's cache, once, and makes an image of it where there is an engine. Tests fetch nothing.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

VERSIONS = {"codex": "0.169.0", "claude": "2.1.330", "mini": "2.4.6"}
"""Releases that the tests were written for."""

NPM = {"codex": "@openai/codex", "claude": "@anthropic-ai/claude-code"}
PYPI = {"mini": "mini-swe-agent"}
UNDECLARED = "mcp>=2,<3"
"""What the client library of mini-swe-agent imports and does not ask for."""

KEY = "-".join(VERSIONS.values())
FOLDER = Path(platformdirs.user_cache_dir("inspect-tinker-plugin")) / "agent-programs" / KEY
BIN = FOLDER / "bin"
BASE = "inspect-rl-test/python:1"
IMAGE = f"inspect-rl-test/agents:{KEY}"
IMAGE_FOLDER = Path(__file__).parent / "image"

MACHINES = {
    "x86_64": ("x64", "manylinux_2_28_x86_64"),
    "aarch64": ("arm64", "manylinux_2_28_aarch64"),
}

# A Python program with the packages beside it, for whatever Python is there.
LAUNCHER = """#!/bin/sh
root=$(dirname "$(dirname "$(readlink -f "$0")")")
version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
export PYTHONPATH="$root/python-$version${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m minisweagent.run.mini "$@"
"""


def missing(name: str) -> str | None:
    """Say why a program cannot be run on this machine, or nothing."""
    if not (BIN / name).exists():
        return f"{name} {VERSIONS[name]} is not there: make agent-programs"
    return None


@functools.cache
def missing_image() -> str | None:
    """Say why there is no image with the programs, or nothing."""
    try:
        run("docker", "image", "inspect", IMAGE)
    except (OSError, subprocess.SubprocessError):
        return f"no engine with the image {IMAGE}: make agent-programs"
    return None


def run(*command: str) -> str:
    """Run a command and return what it printed.

    Raises:
        CalledProcessError: It failed.
    """
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    return done.stdout


def fetch(folder: Path) -> None:
    """Fill a folder with the programs."""
    node, wheels = MACHINES[platform.machine()]
    packages = [f"{package}@{VERSIONS[name]}" for name, package in NPM.items()]
    run("npm", "install", "--ignore-scripts", "--prefix", str(folder / "npm"), *packages)
    (folder / "bin").mkdir()
    for name, pattern in {
        "codex": f"@openai/codex-linux-{node}/**/codex",
        "claude": f"@anthropic-ai/claude-code-linux-{node}/claude",
    }.items():
        found = [path for path in (folder / "npm/node_modules").glob(pattern) if path.is_file()]
        (binary,) = found
        (folder / "bin" / name).symlink_to(Path("..") / binary.relative_to(folder))
    for version in {"3.11", f"{sys.version_info.major}.{sys.version_info.minor}"}:
        kind = ["--python-version", version, "--only-binary", ":all:", "--platform", wheels]
        older = ["--platform", wheels.replace("_2_28", "2014")]
        target = ["--target", str(folder / f"python-{version}")]
        packages = [f"{package}=={VERSIONS[name]}" for name, package in PYPI.items()]
        pip = (sys.executable, "-m", "pip", "install", "-q")
        run(*pip, *kind, *older, *target, *packages, UNDECLARED)
    launcher = folder / "bin" / "mini"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)


def main() -> None:
    """Fetch what is not there yet."""
    if not FOLDER.is_dir():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as made:
            fetch(Path(made) / "new")
            (Path(made) / "new").rename(FOLDER)
    print(f"programs: {', '.join(f'{name} {version}' for name, version in VERSIONS.items())}")
    print(f"folder: {FOLDER}")
    if shutil.which("docker") is None or missing_image() is None:
        print(f"image: {missing_image() or IMAGE}")
        return
    run("docker", "image", "inspect", BASE)
    build = ("docker", "build", "--quiet", "--network", "host", "--tag", IMAGE)
    run(*build, "--file", str(IMAGE_FOLDER / "Dockerfile"), str(FOLDER))
    print(f"image: {IMAGE}")


if __name__ == "__main__":
    main()
