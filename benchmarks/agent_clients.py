"""Which programs that people ship as agents work against the gateway: installs and runs each, and prints a table.

    python benchmarks/agent_clients.py --folder build/agents                    # the gateway over a scripted policy
    python benchmarks/agent_clients.py --folder build/agents --url URL --key K  # against a gateway
    python benchmarks/agent_clients.py --folder build/agents --only codex qwen-code

Each program has one folder, where npm or pip installs it once; --update asks for the newest versions. Programs of node
need npm. The task is to write hello into out.txt. A relay in front of the gateway counts the requests and keeps them in
PROGRAM/requests.jsonl; what the program printed is in PROGRAM/output.txt.

Without --url, the session of each run is closed and must become an episode whose account of tokens adds up. Then the
table has its turns, the conversations that it began and why (`roots`), its tokens, and the retries that were answered
without sampling. PROGRAM/DIALECT.txt is the conversation, and where a new one left an earlier one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from aiohttp import ClientSession, ClientTimeout, web
from forced_gateway import ForcedGateway

from forge_agents.certificate import EXCLUSIONS
from forge_agents.record import SessionRecord
from forge_http.web import bind, listen

PROGRAMS = Path(__file__).with_name("agent_programs")
TASK = "Write hello into out.txt"
MODEL = "forge-policy"


@dataclass(frozen=True)
class Program:
    """A program, how it is installed and called.

    dialects: those that it speaks; with several, it runs once for each.
    packages: of npm if `node`, else of PyPI; the first gives the version.
    command: {program} is the folder of the program's executables, {task}, {model}, {dialect}, {url} and {key} are set.
    files: in the home folder, with the same fields as <task> and so on, since JSON has braces.
    """

    name: str
    dialects: tuple[str, ...]
    packages: tuple[str, ...]
    command: tuple[str, ...]
    node: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


CODEX = """model = "<model>"
model_provider = "forge"
[model_providers.forge]
name = "forge"
base_url = "<url>/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
OPENCODE = json.dumps(
    {
        "provider": {
            "forge": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": "<url>/v1", "apiKey": "<key>"},
                "models": {"<model>": {"reasoning": True}},
            }
        },
        "model": "forge/<model>",
        "small_model": "forge/<model>",
        "permission": {"bash": "allow", "edit": "allow"},
    }
)
CLAUDE_ENV = {"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
LITELLM_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
MINI_ENV = {**LITELLM_ENV, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
UNCONFINED = "--dangerously-bypass-approvals-and-sandbox"  # of codex: it runs in a folder of this benchmark
AIDER_OPTIONS = ("--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")
# fmt: off
ALL = (
    Program("codex", ("responses",), ("@openai/codex",),
            ("{program}/codex", "exec", "--skip-git-repo-check", UNCONFINED, "{task}"), True,
            files={".codex/config.toml": CODEX}),
    Program("claude-code", ("anthropic",), ("@anthropic-ai/claude-code",),
            ("{program}/claude", "-p", "{task}", "--model", "{model}", "--dangerously-skip-permissions"),
            True, CLAUDE_ENV),
    Program("opencode", ("chat",), ("opencode-ai",),
            ("{program}/opencode", "run", "--model", "forge/{model}", "{task}"), True,
            files={".config/opencode/opencode.json": OPENCODE}),
    Program("qwen-code", ("chat",), ("@qwen-code/qwen-code",),
            ("{program}/qwen", "--auth-type", "openai", "-y", "-p", "{task}"), True),
    Program("mini-swe-agent", ("chat",), ("mini-swe-agent",),
            ("{program}/mini", "-y", "--exit-immediately", "-m", "openai/{model}", "-t", "{task}", "-o", "run.json"),
            env=MINI_ENV),
    Program("aider", ("chat",), ("aider-chat",),
            ("{program}/aider", "--model", "openai/{model}", *AIDER_OPTIONS, "--no-gitignore", "--edit-format", "whole",
             "--message", "{task}"), env=LITELLM_ENV),
    Program("openai-agents", ("responses", "chat"), ("openai-agents",),
            ("{program}/python", f"{PROGRAMS}/use_openai_agents.py", "{dialect}", "{task}"),
            env={"OPENAI_AGENTS_DISABLE_TRACING": "1"}),
    Program("smolagents", ("chat",), ("smolagents[openai]",),
            ("{program}/python", f"{PROGRAMS}/use_smolagents.py", "{task}")),
    Program("pydantic-ai", ("chat", "responses", "anthropic"), ("pydantic-ai-slim[openai,anthropic]",),
            ("{program}/python", f"{PROGRAMS}/use_pydantic_ai.py", "{dialect}", "{task}")),
    Program("langchain", ("chat", "responses", "anthropic"), ("langchain", "langchain-openai", "langchain-anthropic"),
            ("{program}/python", f"{PROGRAMS}/use_langchain.py", "{dialect}", "{task}")),
)
# fmt: on


def install(program: Program, folder: Path, update: bool) -> str:
    """Install a program unless it is there; the version."""
    folder.mkdir(parents=True, exist_ok=True)
    if program.node:
        if update or not (folder / "node_modules").exists():
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
            names = [f"{name}@latest" for name in program.packages] if update else program.packages
            subprocess.run([*command, *names], check=True, stdout=subprocess.DEVNULL)
        manifest = folder / "node_modules" / program.packages[0] / "package.json"
        return json.loads(manifest.read_text())["version"]
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    package = program.packages[0].split("[")[0]
    question = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    installed = subprocess.run(question, capture_output=True, text=True)
    if update or installed.returncode:
        pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install", "--upgrade"]
        subprocess.run([*pip, *program.packages], check=True)
        installed = subprocess.run(question, capture_output=True, text=True, check=True)
    return installed.stdout.strip()


class Relay:
    """Forwards requests to a gateway, and keeps them."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.requests: list[dict] = []

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve in a thread; yields the URL."""
        started: Future[str] = Future()
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._forward)

        async def run() -> None:
            try:
                timeout = ClientTimeout(total=None)
                async with listen(app, bind("127.0.0.1", 0)) as url, ClientSession(timeout=timeout) as self._session:
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

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        record = {"method": request.method, "path": request.path_qs, "body": body.decode(errors="replace")}
        self.requests.append(record)
        unforwarded = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding")
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in unforwarded]
        url = self._target + request.path_qs
        async with self._session.request(request.method, url, headers=headers, data=body or None) as answer:
            record["status"] = answer.status
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for name in ("Content-Type", "Retry-After"):
                if name in answer.headers:
                    response.headers[name] = answer.headers[name]
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            return response


def run(program: Program, dialect: str, url: str, key: str, args: argparse.Namespace) -> str:
    """Run a program in a fresh home folder; one line of the table, without the bar at its end."""
    folder = Path(args.folder).resolve() / program.name
    try:
        version = install(program, folder, args.update)
    except (OSError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return f"| {program.name} | | {dialect} | no | not installed | | |"
    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    work = home / "work"
    work.mkdir(parents=True)
    relay = Relay(url)
    with relay.serve() as address:
        executables = folder / ("node_modules/.bin" if program.node else "bin")
        values = {"task": TASK, "model": args.model, "dialect": dialect, "url": address, "key": key}
        for name, text in program.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            for word, value in values.items():
                text = text.replace(f"<{word}>", value)
            file.write_text(text)
        command = [word.format(program=executables, **values) for word in program.command]
        began = time.monotonic()
        with (folder / "output.txt").open("w") as output:
            code = execute(
                command, work, {**environment(home, executables, values), **program.env}, output, args.timeout
            )
        seconds = time.monotonic() - began
    with (folder / "requests.jsonl").open("w") as log:
        log.writelines(json.dumps(request) + "\n" for request in relay.requests)
    written = work / "out.txt"
    done = written.exists() and "hello" in written.read_text()
    failed = sum(request.get("status", 500) >= 400 for request in relay.requests if request["method"] == "POST")
    posts = sum(request["method"] == "POST" for request in relay.requests)
    result = "yes" if done and code == 0 else "out.txt only" if done else "no"
    end = "timeout" if code is None else f"exit {code}"
    return f"| {program.name} | {version} | {dialect} | {result} | {end} | {posts} | {failed} | {seconds:.1f}"


def account(record: SessionRecord, model: str, file: Path) -> str:
    """The columns of a closed session. AssertionError: its tokens do not add up."""
    episode = record.episode(model, 1.0)
    certificate = record.unlearned(model) if episode is None else episode.info["certificate"]
    excluded = ", ".join(f"{name} {certificate[name]}" for name in EXCLUSIONS if certificate.get(name))
    retries = record.counts.get("retries", 0)
    if episode is None:
        return f" | {len(record.runs[model])} | | none ({excluded}) | {retries} |"
    file.write_text("\n".join([episode.text, *episode.info["differences"]]))
    roots = ", ".join(f"{count} {reason}" for reason, count in episode.info["roots"].items())
    tokens = f"{certificate['trained']} of {certificate['sampled']}" + (f" ({excluded})" if excluded else "")
    return f" | {episode.info['turns']} | {roots} | {tokens} | {retries} |"


def environment(home: Path, executables: Path, values: Mapping[str, str]) -> dict[str, str]:
    """All that a program sees of the environment: addresses, keys and models for every dialect, and no proxy."""
    url = values["url"]
    key = values["key"]
    model = values["model"]
    return {
        "PATH": f"{executables}:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "NO_PROXY": "127.0.0.1,localhost",
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{url}/v1"),
        "ANTHROPIC_BASE_URL": url,
        **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), key),
        **dict.fromkeys(("OPENAI_MODEL", "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), model),
    }


def execute(command: list[str], work: Path, env: Mapping[str, str], output, timeout: float) -> int | None:
    """Run a command in a process group; its exit code, or None if it was killed at the timeout."""
    process = subprocess.Popen(
        command,
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # What the program left in the background ends with it.
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            process.wait()
        process.wait()


def main() -> None:
    """Print the table, one line as soon as a program has ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="where programs are installed")
    parser.add_argument("--url", help="of a gateway, without /v1; by default one with a scripted policy is started")
    parser.add_argument("--key", default="none")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--only", nargs="*", choices=[program.name for program in ALL], help="some programs alone")
    parser.add_argument("--update", action="store_true", help="install the newest versions")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one run")
    args = parser.parse_args()
    columns = "| program | version | dialect | done | end | requests | of these errors | seconds |"
    columns += "" if args.url else " turns | roots | trained tokens | retries |"
    print(columns)
    print("|" + "---|" * columns.count(" | ") + "---|", flush=True)
    chosen = [program for program in ALL if not args.only or program.name in args.only]
    runs = [(program, dialect) for program in chosen for dialect in program.dialects]
    if args.url:
        for program, dialect in runs:
            print(run(program, dialect, args.url.rstrip("/"), args.key, args) + " |", flush=True)
        return
    with ForcedGateway(args.model).serve() as gateway:
        for program, dialect in runs:
            access = gateway.open()
            line = run(program, dialect, access.url, access.key, args)
            folder = Path(args.folder).resolve() / program.name
            print(line + account(gateway.close(access), args.model, folder / f"{dialect}.txt"), flush=True)


if __name__ == "__main__":
    main()
