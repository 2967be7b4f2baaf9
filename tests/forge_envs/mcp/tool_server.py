"""An MCP server over standard input and output, written by hand: python tool_server.py [how it misbehaves]"""

import json
import os
import sys
import threading
import time

HOW = sys.argv[1] if len(sys.argv) > 1 else ""
NAMES = ["add", "fail", "slow", "crash", "big", "hang", "blocks", "pid", "ask"]
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"name": name, "description": f"{name} it", "inputSchema": NUMBERS} for name in NAMES]
LOCK = threading.Lock()
ANSWER = '{"jsonrpc": "2.0", "id": %s, "result": {"content": [{"type": "text", "text": "a\\ud800b"}]}}\n'
ERROR = '{"jsonrpc": "2.0", "id": %s, "error": {"code": CODE, "message": "no such city"}}\n'
# What is written in the place of an answer, to the number of a call.
LINES = {
    "a surrogate": ANSWER,
    "a code in words": ERROR.replace("CODE", '"E"'),
    "no object": '{"id": %s, "result": 3}\n',
    "a log in JSON": '{"id": %s, "level": "info"}\n[1]\n3\n',
    "an unfinished line": "{",
}


def send(message):
    with LOCK:
        print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def text(said, **more):
    return {"content": [{"type": "text", "text": said}], **more}


def call(name, arguments):
    if name == "add":
        return text(str(arguments["a"] + arguments["b"]))
    if name == "fail":
        return text("a must not be 0", isError=True)
    if name == "slow":
        time.sleep(arguments["a"] / 10)
        return text(f"slept {arguments['a']}")
    if name == "crash":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(7)
    if name == "big":
        return text("x" * arguments["a"])
    if name == "pid":
        return text(str(os.getpid()))
    blocks = [
        {"type": "text", "text": "seen"},
        {"type": "image", "data": "aGk=", "mimeType": "image/png"},
        {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}},
        {"type": "resource_link", "uri": "file:///b", "name": "b"},
    ]
    return {"content": blocks}


def answer(number, name, arguments):
    if name not in NAMES:
        send({"id": number, "error": {"code": -32602, "message": f"Unknown tool: {name}"}})
    else:
        send({"id": number, "result": call(name, arguments)})


asking = None
if HOW == "ends":
    sys.exit("no licence")
for line in sys.stdin:
    message = json.loads(line)
    number, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    if HOW == "mute" or (HOW == "no list" and method == "tools/list"):
        continue
    if method == "initialize":
        print("this line is not JSON", flush=True)
        version = "1999-01-01" if HOW == "old" else params["protocolVersion"]
        send(
            {
                "id": number,
                "result": {
                    "protocolVersion": version,
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "s", "version": "1"},
                },
            }
        )
    elif method == "ping" and HOW == "no ping":
        send({"id": number, "error": {"code": -32601, "message": "Method not found"}})
    elif method == "ping":
        send({"id": number, "result": {}})
    elif method == "tools/list":
        first = "cursor" not in params
        page = {"tools": TOOLS[:4], "nextCursor": "more"} if first else {"tools": TOOLS[4:]}
        send({"id": number, "result": page})
    elif method == "tools/call" and HOW == "closes":
        os.close(1)
    elif method == "tools/call" and HOW in LINES:
        sys.stdout.write(LINES[HOW].replace("%s", str(number)))
        sys.stdout.flush()
    elif method == "tools/call" and params["name"] == "hang":
        time.sleep(60)
    elif method == "tools/call" and params["name"] == "ask":
        asking = number
        send({"id": "p", "method": "ping"})
        send({"id": "s", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}})
    elif method == "tools/call":
        threading.Thread(target=answer, args=(number, params["name"], params["arguments"]), daemon=True).start()
    elif number == "s":
        send({"id": asking, "result": text(message["error"]["message"])})
