"""Sandboxes: files, set-up scripts, per-sample specifications; `local` and Docker."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Score, Target, accuracy, includes
from inspect_ai.solver import Generate, TaskState, generate, use_tools
from inspect_ai.tool import bash, python, text_editor
from inspect_ai.util import (
    ComposeConfig,
    ComposeService,
    SandboxEnvironmentSpec,
    sandbox,
    store,
)
from tests.folders import made_folder
from tests.functions import make_scorer, make_solver
from tests.parity.cases import Expect, case

from inspect_tinker_plugin.testing.replies import ScriptTurn, call, say, submit

IMAGE = "inspect-rl-test/python:1"
COMPOSE = f"""
services:
  default:
    image: {IMAGE}
    x-local: true
    init: true
    command: tail -f /dev/null
    network_mode: none
    environment:
      GREETING: hello
"""
TWO_SERVICES = (
    COMPOSE
    + f"""
  helper:
    image: {IMAGE}
    x-local: true
    init: true
    command: tail -f /dev/null
    network_mode: none
"""
)


def compose_file(text: str = COMPOSE) -> str:
    path = made_folder("parity") / "compose.yaml"
    path.write_text(text)
    return str(path)


def docker(text: str = COMPOSE) -> tuple[str, str]:
    return ("docker", compose_file(text))


@make_scorer(accuracy())
async def file_holds(state: TaskState, target: Target, path: str) -> Score:
    """Looks for the target in a file of the sandbox."""
    try:
        text = await sandbox().read_file(path)
    except FileNotFoundError:
        return Score(value=0, explanation="no file")
    return Score(value=1 if target.text in text else 0, answer=text)


def shell_task(environment: object, **sample: object) -> Task:
    return Task(
        dataset=[Sample(input="Work.", target="done", **sample)],  # type: ignore[arg-type]
        solver=[use_tools(bash(timeout=20), python(timeout=20)), generate()],
        scorer=[includes(), file_holds("result.txt")],
        sandbox=environment,  # type: ignore[arg-type]
    )


def in_each_provider(name: str, make: Callable[[object], Task], **fields: Any) -> None:
    case(id=f"local-{name}", **fields)(lambda: make("local"))
    case(id=f"docker-{name}", docker=True, **fields)(lambda: make(docker()))


SHELL: list[ScriptTurn] = [
    say("", call("bash", command="echo $((6 * 7)) && echo oops >&2 && exit 3")),
    say("", call("python", code="print(sum(range(10)))")),
    say("", call("bash", command="echo done > result.txt")),
    "done",
]
SHELL_EXPECT = Expect(
    turns=4,
    scores={"includes": "C", "file_holds": 1},
    tools=["bash", "python"],
    says=["42", "oops", "45"],
)


in_each_provider("shell-and-python", shell_task, script=SHELL, expect=SHELL_EXPECT)


def files() -> dict[str, str]:
    binary = base64.b64encode(bytes(range(256))).decode()
    on_disk = made_folder("parity") / "notes.txt"
    on_disk.write_text("from disk\n")
    return {
        "inline.txt": "in line\n",
        "deep/er/file.txt": "deep\n",
        "blob.bin": f"data:application/octet-stream;base64,{binary}",
        "notes.txt": str(on_disk),
    }


FILES: list[ScriptTurn] = [
    say("", call("bash", command="cat inline.txt deep/er/file.txt notes.txt made; wc -c blob.bin")),
    "done",
]
FILES_EXPECT = Expect(
    turns=2,
    scores={"includes": "C", "file_holds": 0},
    says=["in line", "deep", "from disk", "256", "by setup"],
)
SETUP = "#!/usr/bin/env bash\necho by setup > made\n"


in_each_provider(
    "files-and-setup-script",
    lambda environment: shell_task(environment, files=files(), setup=SETUP),
    script=FILES,
    expect=FILES_EXPECT,
)


@case(script=FILES, expect=FILES_EXPECT)
def setup_script_from_a_file() -> Task:
    path = made_folder("parity") / "setup.sh"
    path.write_text(SETUP)
    return shell_task("local", files=files(), setup=str(path))


@case(script=[], expect=Expect(turns=0, error="RuntimeError"))
def setup_script_that_fails() -> Task:
    return shell_task("local", setup='#!/usr/bin/env bash\nrm -- "$0"; echo no >&2; exit 1\n')


@case(
    script=[say("", call("bash", command="echo done > result.txt")), "done"],
    expect=Expect(turns=2, scores={"includes": "C", "file_holds": 1}),
)
def sandbox_of_the_sample() -> Task:
    return shell_task(None, sandbox="local")


GREET: list[ScriptTurn] = [
    say("", call("bash", command="echo $GREETING; echo done > result.txt")),
    "done",
]


@case(
    script=GREET,
    expect=Expect(turns=2, scores={"includes": "C", "file_holds": 1}, says=["of the sample"]),
    docker=True,
)
def config_of_the_sample_over_the_tasks() -> Task:
    own = COMPOSE.replace("GREETING: hello", "GREETING: of the sample")
    return shell_task(docker(), sandbox=docker(own))


@case(
    script=GREET,
    expect=Expect(
        turns=2,
        scores={"includes": "C", "file_holds": 1},
        holds=lambda trace: trace.messages[2]["content"] == "\n",
    ),
)
def type_of_the_task_over_the_samples() -> Task:
    return shell_task("local", sandbox=docker())


@case(
    script=[say("", call("bash", command="echo $COLOUR; echo done > result.txt")), "done"],
    expect=Expect(turns=2, scores={"includes": "C", "file_holds": 1}, says=["green"]),
    docker=True,
)
def compose_given_as_an_object() -> Task:
    service = ComposeService(
        image=IMAGE,
        init=True,
        command="tail -f /dev/null",
        network_mode="none",
        environment={"COLOUR": "green"},
        **{"x-local": True},  # type: ignore[arg-type]  # extensions are fields of any name
    )
    config = ComposeConfig(services={"default": service})
    return shell_task(SandboxEnvironmentSpec(type="docker", config=config))


@case(
    script=[say("", call("bash", command="echo done > result.txt")), "done"],
    expect=Expect(
        turns=2, scores={"includes": "C", "file_holds": 1}, store={"helper": "from helper"}
    ),
    docker=True,
)
def several_services() -> Task:
    @make_solver
    async def uses_helper(state: TaskState, generate: Generate) -> TaskState:
        helper = sandbox("helper")
        await helper.write_file("note.txt", "from helper")
        store().set("helper", await helper.read_file("note.txt"))
        return state

    task = shell_task(docker(TWO_SERVICES))
    task.setup = uses_helper()
    return task


def waiting(environment: Any) -> Task:
    return Task(
        dataset=[Sample(input="Wait.", target="done")],
        solver=[use_tools(bash(timeout=1)), generate()],
        scorer=includes(),
        sandbox=environment,
    )


in_each_provider(
    "tool-timeout",
    waiting,
    script=[say("", call("bash", command="sleep 30")), "done"],
    expect=Expect(turns=2, scores={"includes": "C"}, says=["timed out"]),
)


@case(
    script=[say("", call("bash", command="echo no sandbox"))],
    expect=Expect(turns=1, error="ProcessLookupError"),
)
def tool_that_needs_a_missing_sandbox() -> Task:
    return shell_task(None)


def edit(command: str, **arguments: str) -> ModelOutput:
    return say("", call("text_editor", command=command, path="/tmp/parity-file.txt", **arguments))


EDITING = [
    edit("create", file_text="one\ntwo\n"),
    edit("str_replace", old_str="two", new_str="done"),
    edit("view"),
    submit("done"),
]


@case(
    script=EDITING,
    expect=Expect(turns=4, scores={"includes": "C"}, tools=["submit", "text_editor"]),
    docker=True,
)
def text_editor_in_docker() -> Task:
    return Task(
        dataset=[Sample(input="Edit.", target="done")],
        solver=react(tools=[text_editor()]),
        scorer=includes(),
        sandbox=docker(),
    )


@case(
    script=[say("", call("bash", command="cat given.txt; echo done > result.txt")), submit("done")],
    expect=Expect(turns=2, scores={"file_holds": 1}, says=["given"]),
    docker=True,
)
def react_agent_in_docker() -> Task:
    return Task(
        dataset=[Sample(input="Work.", target="done", files={"given.txt": "given"})],
        solver=react(tools=[bash(timeout=20)]),
        scorer=file_holds("result.txt"),
        sandbox=docker(),
    )
