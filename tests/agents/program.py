"""A program that runs in a sandbox and speaks a model API over plain sockets.

It needs Python with its pure modules only, which a sandbox of the tests has. It is given what to
do as JSON: ``dialect``, ``turns`` of each of ``talks`` conversations at once, ``port``. It sends
all of a conversation with every call and appends what comes back, and prints the seconds of
each call.
"""

# mypy: ignore-errors
# Python where it runs has no typing module.

import json
import socket
import sys
import threading
import time

PARAMETERS = {
    "type": "object",
    "properties": {"cmd": {"type": "string", "description": "The command."}},
    "required": ["cmd"],
}
FUNCTION = {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}


def connect(port):
    """Inspect's own proxy is not up yet when its bridge says so."""
    for _ in range(600):
        try:
            return socket.create_connection(("localhost", port))
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise TimeoutError("nobody listens")


def post(port, path, body):
    text = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    with connect(port) as connection:
        connection.sendall(head.encode() + text)
        reply = b""
        while piece := connection.recv(65536):
            reply += piece
    head, _, said = reply.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise RuntimeError(f"refused: {head.decode()} {said.decode()}")
    return json.loads(said)


def chat(port, items):
    body = {"messages": items, "tools": [{"type": "function", "function": FUNCTION}]}
    reply = post(port, "/v1/chat/completions", {"model": "inspect", **body})
    message = {k: v for k, v in reply["choices"][0]["message"].items() if v is not None}
    return [message], [
        {"role": "tool", "tool_call_id": call["id"], "content": None}
        for call in message.get("tool_calls", [])
    ]


def responses(port, items):
    body = {"input": items, "tools": [{"type": "function", **FUNCTION, "strict": False}]}
    reply = post(port, "/v1/responses", {"model": "inspect", **body})
    items = [{k: v for k, v in item.items() if v is not None} for item in reply["output"]]
    return items, [
        {"type": "function_call_output", "call_id": item["call_id"], "output": None}
        for item in items
        if item["type"] == "function_call"
    ]


def anthropic(port, items):
    tool = {"name": "bash", "description": "Run a command.", "input_schema": PARAMETERS}
    body = {"messages": items, "max_tokens": 1000, "tools": [tool]}
    reply = post(port, "/v1/messages", {"model": "inspect", **body})
    blocks = [{k: v for k, v in block.items() if v is not None} for block in reply["content"]]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": None}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    answer = [{"role": "user", "content": results}] if results else []
    return [{"role": "assistant", "content": blocks}], answer


def google(port, items):
    contents = [item if "parts" in item else google_turn(item) for item in items]
    body = {"contents": contents, "tools": [{"functionDeclarations": [FUNCTION]}]}
    reply = post(port, "/v1beta/models/inspect:generateContent", body)
    said = reply["candidates"][0]["content"]
    calls = [part["functionCall"] for part in said["parts"] if "functionCall" in part]
    return [said], [{"name": call["name"], "output": None} for call in calls]


def google_turn(item):
    if "output" not in item:
        return {"role": "user", "parts": [{"text": item["content"]}]}
    given = {"name": item["name"], "response": {"output": item["output"]}}
    return {"role": "user", "parts": [{"functionResponse": given}]}


def fill(answers, turn):
    """Say what each call gave, in whatever place a dialect has for it."""
    number = 0
    for answer in answers:
        for place in answer["content"] if isinstance(answer.get("content"), list) else [answer]:
            place["output" if "output" in place else "content"] = f"Result {number} of turn {turn}."
            number += 1
    return answers


def converse(ask, port, name, turns, seconds):
    items = [{"role": "user", "content": f"Do it, {name}."}]
    for turn in range(turns):
        begun = time.monotonic()
        said, answers = ask(port, items)
        seconds.append(time.monotonic() - begun)
        items += said
        items += fill(answers, turn) or [{"role": "user", "content": f"And {turn}?"}]


def main():
    asked = json.loads(sys.argv[1])
    dialects = {"chat": chat, "responses": responses, "anthropic": anthropic, "google": google}
    ask = dialects[asked["dialect"]]
    seconds = []
    failures = []
    threading.excepthook = lambda failed: failures.append(repr(failed.exc_value))
    talks = [
        threading.Thread(
            target=converse, args=(ask, asked["port"], f"agent {n}", asked["turns"], seconds)
        )
        for n in range(asked["talks"])
    ]
    for talk in talks:
        talk.start()
    for talk in talks:
        talk.join()
    if failures:
        sys.exit("\n".join(failures))
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
