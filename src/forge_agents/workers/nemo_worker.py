"""Plays environments of NeMo Gym 0.4: a resources server and its agent, unchanged, without ray and without the head
server. Both are served in this process; what the agent asks of its model goes to the episode's address."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from protocol import EpisodeError, SettingError, Values, serve

# So that nothing of this folder hides a package of the same name.
sys.path.pop(0)

try:
    import nemo_gym
    import uvicorn
    from nemo_gym import server_utils
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.global_config import (
        GlobalConfigDictParserConfig,
        get_first_server_config_dict,
        get_global_config_dict,
    )
    from nemo_gym.server_utils import ServerClient, SimpleServer
    from omegaconf import DictConfig, OmegaConf, open_dict
except ImportError as error:
    PROBLEM = f"nemo-gym 0.4 cannot be imported ({error}): {sys.executable} -m pip install 'nemo-gym==0.4.*'"
    ServerClient = object
else:
    PROBLEM = ""

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
KINDS = ("resources_servers", "responses_api_agents")
MODEL = "policy_model"  # the name of the policy in NeMo Gym's configurations


async def open_environment(environment: str, args: Values) -> Environment:
    """Open an environment: the name of a resources server that nemo-gym ships, or the path of a configuration.

    Args:
        args: keys of the configuration that differ, as on the command line of `gym env start`; `agent`, the name of the
            agent where the configuration has several; `datasets`, the names of those of the agent's that are read.
    """
    if PROBLEM:
        raise SettingError(PROBLEM)
    path = (
        environment
        if environment.endswith((".yaml", ".yml"))
        else f"{KINDS[0]}/{environment}/configs/{environment}.yaml"
    )
    agent = args.pop("agent", None)
    datasets = args.pop("datasets", None)
    model = {"responses_api_models": {"policy": {"entrypoint": "app.py", "host": "127.0.0.1", "port": 1}}}
    values = {"config_paths": [path], MODEL: model, "policy_model_name": "policy", **args}
    settings = GlobalConfigDictParserConfig(
        initial_global_config_dict=OmegaConf.create(values), skip_load_from_cli=True, skip_load_from_dotenv=True
    )
    try:
        opened = Environment(get_global_config_dict(settings), agent, datasets)
    except (Exception, SystemExit) as error:
        raise SettingError(f"environment {environment!r}: {' '.join(str(error).split())}") from error
    await opened.start()
    return opened


class Client(ServerClient):
    """How servers of one episode reach each other."""

    model: str = ""  # address of the episode's model
    agent: str = ""  # name of its agent
    agent_url: str = ""

    async def request(self, server_name: str, url_path: str, method: str, **options: Any) -> Any:
        """Send a request to the server of this name."""
        if hasattr(options.get("json"), "model_dump"):
            options["json"] = options["json"].model_dump(exclude_unset=True)
        if server_name == MODEL:
            if not self.model:
                raise RuntimeError(
                    "a resources server asks the policy, whose answer would be learned from: give it another model"
                )
            address = self.model
            options["json"] = {**options["json"], "model": "policy"}
        elif server_name == self.agent:
            address = self.agent_url
        else:
            address = self._build_server_base_url(get_first_server_config_dict(self.global_config_dict, server_name))
        return await server_utils.request(method=method, url=f"{address}{url_path}", **options)


class Environment:
    """The servers of a configuration."""

    def __init__(self, config: DictConfig, agent: str | None, datasets: list[str] | None) -> None:
        self.config, self.datasets = config, datasets
        servers = {
            name: kind
            for name, entry in config.items()
            for kind in KINDS
            if isinstance(entry, DictConfig) and kind in entry
        }
        agents = [name for name, kind in servers.items() if kind == KINDS[1]]
        if agent is None and len(agents) != 1:
            raise SettingError(f"it has the agents {', '.join(agents) or 'none'}: name one by args.agent")
        self.agent = agent or agents[0]
        if self.agent not in agents:
            raise SettingError(f"args.agent is {agent!r}, and it has the agents {', '.join(agents)}")
        self.agent_class = self._class(self.agent, KINDS[1])
        self.resources = {name: self._class(name, kind) for name, kind in servers.items() if kind == KINDS[0]}
        self.apps: dict[str, App] = {}  # agents of episodes, by the episode's number
        self.servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
        self.numbers = itertools.count()

    def _class(self, name: str, kind: str) -> type[SimpleServer]:
        """The class of a server: the one that its entry point's module runs."""
        (folder, settings), *_ = self.config[name][kind].items()
        module = importlib.import_module(f"{kind}.{folder}.{Path(settings.entrypoint).stem}")
        # A module may import the class of another server, which it extends.
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, SimpleServer) and value.__module__ == module.__name__
        ]
        if not classes:
            raise SettingError(f"{module.__name__} has no server")
        return classes[-1]

    def _app(self, name: str, cls: type[SimpleServer], **episode: str) -> App:
        settings = OmegaConf.to_container(get_first_server_config_dict(self.config, name), resolve=True)
        config = cls.model_fields["config"].annotation.model_validate(settings | {"name": name})
        head = BaseServerConfig(host="127.0.0.1", port=1)
        client = Client(head_server_config=head, global_config_dict=self.config, **episode)
        server = cls(config=config, server_client=client)
        app = server.setup_webserver()
        server.setup_exception_middleware(app)
        return app

    async def start(self) -> None:
        """Serve the resources servers on free ports of the loopback, and the agents of all episodes on one."""
        for name, cls in self.resources.items():
            port = self._serve(self._app(name, cls), lifespan="on")
            with open_dict(self.config):
                get_first_server_config_dict(self.config, name).update(host="127.0.0.1", port=port)
        self.base = f"http://127.0.0.1:{self._serve(self._dispatch, lifespan='off', interface='asgi3')}"
        while not all(server.started for server, _ in self.servers):
            for _, task in self.servers:
                if task.done():
                    await task
                    raise RuntimeError("a server ended while it started")
            await asyncio.sleep(0.01)

    def _serve(self, app: App, **settings: Any) -> int:
        """Serve an app; returns its port."""
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level=logging.WARNING, timeout_graceful_shutdown=1, **settings)
        server = uvicorn.Server(config)
        self.servers.append((server, asyncio.create_task(server.serve([listener]))))
        return listener.getsockname()[1]

    async def _dispatch(self, scope: Scope, receive: Any, send: Any) -> None:
        """Hand a request for /NUMBER/... to the agent of that episode."""
        _, number, *rest = scope["path"].split("/")
        path = "/" + "/".join(rest)
        await self.apps[number]({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    async def close(self) -> None:
        """End the servers."""
        for server, _ in self.servers:
            server.should_exit = True
        await asyncio.gather(*(task for _, task in self.servers))
        await server_utils.get_global_aiohttp_client().close()

    def rows(self) -> Iterator[tuple[str, Values]]:
        """The lines of the agent's datasets: those for validation are the held-out ones."""
        settings = get_first_server_config_dict(self.config, self.agent)
        datasets = {dataset.name: dataset for dataset in settings.get("datasets") or []}
        # Examples are a few lines for a look at an environment, and part of no training beside a real dataset.
        real = [name for name, dataset in datasets.items() if dataset.type != "example"]
        names = self.datasets or real or list(datasets)
        if not names or {*names} - {*datasets}:
            raise SettingError(f"args.datasets is {self.datasets}, and the agent has {', '.join(datasets) or 'none'}")
        for dataset in map(datasets.__getitem__, names):
            path = Path(dataset.jsonl_fpath)
            path = path if path.exists() else nemo_gym.PARENT_DIR / path
            if not path.exists():
                raise SettingError(
                    f"dataset {dataset.name} is not at {dataset.jsonl_fpath}: download it, or choose by args.datasets "
                    f"among {', '.join(datasets)}"
                )
            split = "eval" if dataset.type == "validation" else "train"
            for line in path.read_text().splitlines():
                task = json.loads(line)
                yield split, {"question": question_of(task), "answer": task}

    async def play(self, task: Values, url: str, model: str) -> Values:
        """One episode: the agent's run, which seeds the session, plays and verifies."""
        number = str(next(self.numbers))
        address = f"{self.base}/{number}"
        self.apps[number] = self._app(self.agent, self.agent_class, model=url, agent=self.agent, agent_url=address)
        try:
            response = await server_utils.request(method="POST", url=f"{address}/run", json=task)
            text = (await response.read()).decode(errors="replace")
        finally:
            del self.apps[number]
        if response.status != 200:
            raise EpisodeError(f"{self.agent} answered {response.status}: {' '.join(text.split())[-2000:]}")
        result = json.loads(text)
        ended = result.get("response", {}).get("incomplete_details") or {}
        metrics = {name: value for name, value in result.items() if isinstance(value, int | float)}
        return {"reward": result["reward"], "stop": ended.get("reason", "ended"), "metrics": metrics}


def question_of(task: Values) -> str:
    """The text that a task's first request has."""
    content = task["responses_create_params"]["input"]
    if isinstance(content, str):
        return content
    parts = [message.get("content", "") for message in content if message.get("role") == "user"]
    texts = [part if isinstance(part, str) else " ".join(item.get("text", "") for item in part) for part in parts]
    return "\n\n".join(filter(None, texts)) or json.dumps(content)


if __name__ == "__main__":
    serve(open_environment)
