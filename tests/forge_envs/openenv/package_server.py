"""Environments written for the `openenv` package; SESSIONS says how many at a time."""

import os
from uuid import uuid4

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = int(os.environ.get("SESSIONS", "1"))


class Move(Action):
    step: int


class Seen(Observation):
    at: int = 0
    seed: int = 0


class Walk(Environment):
    """Reach 3 with steps of any size."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed=None, episode_id=None, start=0, **more):
        self.at, self.seed = start, seed or 0
        self._state = State(episode_id=episode_id, step_count=0)
        return Seen(at=self.at, seed=self.seed)

    def step(self, action, timeout_s=None, **more):
        if action.step == 0:
            raise RuntimeError("stuck")
        self._state.step_count += 1
        self.at += action.step
        return Seen(at=self.at, seed=self.seed, reward=0.5, done=self.at == 3)

    @property
    def state(self):
        return self._state


class Tools(MCPEnvironment):
    """One tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def double(number: int) -> int:
            """Twice the number."""
            return 2 * number

        super().__init__(server)
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed=None, episode_id=None, **more):
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **more):
        return Observation()

    @property
    def state(self):
        return self._state


walk = create_app(Walk, Move, Seen, env_name="walk", max_concurrent_envs=SESSIONS)
tools = create_app(Tools, CallToolAction, CallToolObservation, env_name="tools", max_concurrent_envs=SESSIONS)
