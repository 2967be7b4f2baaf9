"""A gateway whose model is a function: it serves every dialect, for tests of them and of the programs that speak them.

    python benchmarks/scripted_gateway.py --port 8111

As a program it lets any agent run one shell command, which writes hello into out.txt, and then says that it is done.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

from aiohttp import web

from forge_agents.dialects import Dialect
from forge_agents.dialects.anthropic import AnthropicDialect
from forge_agents.dialects.chat import ChatDialect
from forge_agents.dialects.responses import ResponsesDialect
from forge_agents.messages import BadRequest, Call, Delta, Finish, Message, ModelRequest, ModelTurn
from forge_http.web import bind_socket, serve_application

Answer = Callable[[ModelRequest], Sequence[ModelTurn]]

DIALECTS: dict[str, Dialect] = {
    "/chat/completions": ChatDialect(),
    "/responses": ResponsesDialect(),
    "/messages": AnthropicDialect(),
    "/messages/count_tokens": AnthropicDialect(),
}
COMMAND = "echo hello > out.txt"
END = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # what a command prints at the end of a task of mini-swe-agent
# A text that says the same to programs which read files from the text, as aider does.
DONE = "Done:\n\nout.txt\n```\nhello\n```\n"
# Names of tools that run a command, in the programs that were seen.
SHELLS = ("exec_command", "shell", "shell_command", "bash", "Bash", "run_shell_command", "execute_bash", "run_command")
PIECE = 7  # characters of a delta


class ScriptedGateway:
    """Answers requests by a function.

    Attributes:
        answer: the turns of a request, one a sample. Their ids, and those of their calls, are set here.
        failure: what a stream ends with after its first piece, if anything.
        requests: those that were answered, each with the dialect's name.
        bodies: the bodies of all requests, as they came.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.failure: BadRequest | None = None
        self.requests: list[tuple[str, ModelRequest]] = []
        self.bodies: list[dict] = []

    def application(self) -> web.Application:
        """The routes, with and without /v1."""
        app = web.Application(client_max_size=1 << 26)
        for prefix in ("/v1", ""):
            for path in DIALECTS:
                app.router.add_post(prefix + path, self._handle)
            app.router.add_get(f"{prefix}/models", self._models)
        return app

    @contextmanager
    def serve(self, port: int = 0) -> Iterator[str]:
        """Serve in a thread; yields the URL."""
        started: Future[str] = Future()
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()

        async def run() -> None:
            try:
                async with serve_application(self.application(), bind_socket("127.0.0.1", port)) as url:
                    started.set_result(url)
                    await stop.wait()
            except Exception as error:
                started.set_exception(error)

        thread = Thread(target=loop.run_until_complete, args=(run(),))
        thread.start()
        try:
            yield started.result(60)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(60)
            loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "forge-policy", "object": "model", "created": 1, "owned_by": "forge"}
        return web.json_response({"object": "list", "data": [model]})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/v1")
        dialect = DIALECTS[path]
        body = await request.json()
        self.bodies.append(body)
        try:
            parsed = dialect.read(body)
            if path.endswith("/count_tokens"):
                count = len(json.dumps(parsed.messages, default=str)) // 4
                return web.json_response({"input_tokens": count})
            turns = [self._named(turn, dialect, number) for number, turn in enumerate(self.answer(parsed))]
        except BadRequest as error:
            return web.json_response(dialect.error(error), status=error.status)
        self.requests.append((type(dialect).__name__, parsed))
        if not parsed.stream:
            return web.json_response(dialect.complete(parsed, turns))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for data in self._events(dialect, parsed, turns):
            await response.write(data)
        return response

    async def _events(
        self, dialect: Dialect, request: ModelRequest, turns: Sequence[ModelTurn]
    ) -> AsyncIterator[bytes]:
        writer = dialect.writer(request, [turn.id for turn in turns])
        yield writer.ping() if not isinstance(dialect, AnthropicDialect) else b""
        yield writer.begin(turns[0].prompt_tokens)
        for sample, turn in enumerate(turns):
            for delta in pieces(sample, turn):
                yield writer.delta(delta)
                yield writer.ping()
                if self.failure is not None:
                    yield writer.failure(self.failure)
                    return
        yield writer.end(turns)

    def _named(self, turn: ModelTurn, dialect: Dialect, sample: int) -> ModelTurn:
        identity = f"{len(self.requests)}x{sample}"
        calls = [replace(call, id=f"{dialect.call_prefix}{identity}x{index}") for index, call in enumerate(turn.calls)]
        return replace(turn, id=f"{dialect.id_prefix}{identity}", calls=tuple(calls))


def pieces(sample: int, turn: ModelTurn) -> Iterator[Delta]:
    """A turn as a stream sends it."""
    for begin in range(0, len(turn.thought), PIECE):
        yield Delta(sample, thought=turn.thought[begin : begin + PIECE])
    for begin in range(0, len(turn.content), PIECE):
        yield Delta(sample, content=turn.content[begin : begin + PIECE])
    for call in turn.calls:
        yield Delta(sample, call=call)


def write_hello(request: ModelRequest) -> list[ModelTurn]:
    """One call of a tool that runs commands, if there is one and no result yet; else a text."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.tools}
    shell = next((name for name in SHELLS if name in schemas), None)
    has_result = any(map(is_result, request.messages))
    ends_by_command = any(END in message["content"] for message in request.messages)
    content = ""
    calls: tuple[Call, ...] = ()
    if request.schema is not None:
        content = '{"title": "Write hello"}'
    elif has_result and "final_answer" in schemas:
        calls = (Call("", "final_answer", '{"answer": "Done."}'),)
    elif shell is not None and has_result and ends_by_command:
        calls = (Call("", shell, json.dumps(command_arguments(schemas[shell], f"echo {END}"))),)
    elif shell is not None and not has_result:
        calls = (Call("", shell, json.dumps(command_arguments(schemas[shell], COMMAND))),)
    else:
        content = DONE
    thought = "One command is enough." if calls else ""
    finish: Finish = "tool_calls" if calls else "stop"
    prompt = sum(len(str(message)) for message in request.messages) // 4 + 1
    return [ModelTurn("", content, thought, calls, finish, prompt_tokens=prompt, completion_tokens=32)]


def is_result(message: Message) -> bool:
    """Whether a message is the result of a call, of which smolagents makes a text of the user."""
    return message["role"] == "tool" or message["content"].startswith("Observation:")


def command_arguments(schema: dict, command: str) -> dict:
    """Arguments that run a command, for the schema of a shell's arguments."""
    blanks = {"string": "write a file", "boolean": False, "integer": 1000, "number": 1000, "array": [], "object": {}}
    arguments = {}
    for name, field in schema.get("properties", {}).items():
        if name in ("cmd", "command"):
            arguments[name] = ["bash", "-lc", command] if field.get("type") == "array" else command
        elif name in schema.get("required", ()):
            arguments[name] = blanks[field.get("type", "string")]
    return arguments


def main() -> None:
    """Serve until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    gateway = ScriptedGateway(write_hello)
    with gateway.serve(parser.parse_args().port) as url, contextlib.suppress(KeyboardInterrupt):
        print(url, flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
