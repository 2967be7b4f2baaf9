"""OpenEnv servers as environments of this library, and as verifiers of answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from forge.rewards.verifier import Scores, collect_scores
from forge.types import Conversation, Sample
from forge.types.conversation import as_text
from forge_envs.environment import CUT, Action, Environment, InfrastructureError, Message, Step, user_message
from forge_envs.schemas import parameters_of

from ..content import Json, shorten_text, text_of
from .client import OpenEnvClient, OpenEnvError, Session
from .wire import FORGE_ACTION, Reply, step_from_reply

Task = Any  # a `Sample`, a mapping of parameters of the reset, or the value of its parameter `task`


class OpenEnvEnvironment(Environment):
    """An environment of an OpenEnv server, which plays each episode in a session.

    If the server rejects a turn as an action, or `to_action` raises ValueError for it, the policy gets the error as the
    observation. A reply without a reward counts as 0; an episode without any reward is unscored. When a reply is done,
    the episode is truncated if the reply's metadata has `truncated`, and terminated otherwise.

    With `mcp` the environment's tools are offered to the policy, and the calls of a turn become steps, one after the
    other. A turn without a call ends the episode, unless `to_action` is given.

    Args:
        server: a client, whose sessions may be shared with other environments, or a url, for a separate client.
        to_action: converts a turn to the JSON of an action. By default the turn's text is the value of the only
            required (or only) field of the server's schema, as a number if the schema says so; with several fields the
            turn must be a JSON object. Thoughts are not part of the text, and a turn that was cut at its limit of
            tokens is answered with an error.
        to_messages: converts a reply to messages for the policy. By default one message: the observation's text, if
            that is its only field, or its JSON.
        to_reset: returns the parameters of the reset for a task and a seed. By default the seed and, for a sample, its
            "question" and "answer"; for a mapping, its items; for anything else, "task".
        mcp: offer the environment's tools to the policy.
        max_chars: the most characters of a message, after which it is cut.
    """

    def __init__(
        self,
        server: OpenEnvClient | str,
        *,
        to_action: Callable[[Action], Mapping[str, Json]] | None = None,
        to_messages: Callable[[Reply], list[Message]] | None = None,
        to_reset: Callable[[Task, int], Mapping[str, Json]] | None = None,
        mcp: bool = False,
        max_chars: int = 8192,
    ) -> None:
        self._client = OpenEnvClient(server, sessions=1) if isinstance(server, str) else server
        self._owns_client = isinstance(server, str)
        self._to_action = to_action
        self._to_messages = to_messages or self._default_messages
        self._to_reset = to_reset or _reset_parameters
        self._mcp = mcp
        self._max_chars = max_chars
        self._session: Session | None = None
        self._is_default = to_action is None and to_messages is None

    async def reset(self, task: Task, *, seed: int) -> Step:
        """Start an episode in a new session; InfrastructureError if there is none, or it is lost."""
        await self._end_session()
        self._rewarded = False  # whether a reply of the episode had a reward
        self._schema: dict[str, Json] = dict((await self._client.schema()).get("action") or {})
        self._session = await self._client.acquire()
        reply = await self._session.reset(**self._to_reset(task, seed))
        if self._is_forge:
            return step_from_reply(reply)
        tools = await self._session.list_tools() if self._mcp else ()
        return Step(
            tuple(self._to_messages(reply)), tools=tools, terminated=reply.done, info={"metadata": reply.metadata}
        )

    async def step(self, action: Action) -> Step:
        """Send a turn to the server as an action or as tool calls, and return its answer.

        Raises:
            InfrastructureError: the session is lost, or the reply violates the protocol.
            OpenEnvError: the environment raised an exception.
        """
        assert self._session is not None, "step before reset"
        # A server of this library gets the calls as they are, and offers its tools by itself.
        offers_tools = self._mcp and not self._is_forge
        if offers_tools and (action.calls or action.errors):
            return await self._call_tools(self._session, action)
        if offers_tools and self._to_action is None:
            return self._make_step((), None, {}, over=True)

        # A text that was cut may mean something else than the whole one. `to_action` and this library's servers get
        # `truncated`, and decide themselves.
        if action.truncated and self._to_action is None and not self._is_forge:
            return Step((user_message(CUT),))
        try:
            action_json = (self._to_action or self._default_action)(action)
        except ValueError as error:
            return Step((user_message(f"error: {error}"),))

        reply = await self._send_action(self._session, action_json)
        if isinstance(reply, str):
            return Step((user_message(reply),))
        if self._is_forge:
            return step_from_reply(reply)

        return self._make_step(tuple(self._to_messages(reply)), reply.reward, reply.metadata, over=reply.done)

    async def close(self) -> None:
        """End the session, and close the client if this environment has created it."""
        await self._end_session()
        if self._owns_client:
            await self._client.close()

    @property
    def _is_forge(self) -> bool:
        """Return whether the server serves an environment of this library: actions and steps are sent unconverted."""
        return self._is_default and self._schema.get("title") == FORGE_ACTION

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _send_action(self, session: Session, action: Mapping[str, Json]) -> Reply | str:
        """Return the server's reply to an action, or a text for the policy if the server rejects the action."""
        try:
            return await session.step(action)
        except OpenEnvError as error:
            # Only a rejected action is the policy's fault, which may try another one.
            if error.code != "VALIDATION_ERROR":
                raise
            return shorten_text(f"error: {error.message}", self._max_chars)

    async def _call_tools(self, session: Session, action: Action) -> Step:
        # Run the calls of a turn one after the other until the episode is over, and return all results in one step.
        messages: list[Message] = []
        rewards: list[float] = []
        metadata: dict[str, Json] = {}
        over = False

        for call in action.calls:
            # Every call gets a message, also one that is not run: chat templates expect it.
            content = "error: not run: the episode is over"
            if not over:
                reply = await self._send_action(
                    session, {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
                )
                if isinstance(reply, str):
                    content = reply
                else:
                    content = shorten_text(_result_text(reply), self._max_chars)
                    rewards += [] if reply.reward is None else [reply.reward]
                    metadata |= reply.metadata
                    over = reply.done

            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content})

        messages += [{"role": "tool", "name": "error", "content": f"error: {error}"} for error in action.errors]
        return self._make_step(tuple(messages), sum(rewards) if rewards else None, metadata, over=over)

    def _make_step(
        self, messages: tuple[Message, ...], reward: float | None, metadata: Mapping[str, Json], *, over: bool
    ) -> Step:
        # Return a step; at the end of an episode without any reward, one that leaves it unscored.
        self._rewarded |= reward is not None
        is_unscored = over and not self._rewarded
        # OpenEnv has no separate field for an episode that a limit has ended.
        truncated = over and bool(metadata.get("truncated"))
        return Step(
            messages,
            reward=None if is_unscored else reward or 0.0,
            terminated=over and not truncated,
            truncated=truncated,
            info={"metadata": metadata},
        )

    def _default_messages(self, reply: Reply) -> list[Message]:
        """Return an observation as one message: its text if that is its only field but metadata, otherwise its JSON."""
        fields = {name: value for name, value in reply.observation.items() if name != "metadata" and value is not None}
        only_value = next(iter(fields.values())) if len(fields) == 1 else None
        text = only_value if isinstance(only_value, str) else as_text(fields)
        return [user_message(shorten_text(text, self._max_chars))]

    def _default_action(self, action: Action) -> Mapping[str, Json]:
        """Return the JSON of the action in a turn's text; ValueError if it does not match the server's schema."""
        if self._schema.get("title") == FORGE_ACTION:
            return asdict(action)
        fields = [name for name in parameters_of({"parameters": self._schema}).properties if name != "metadata"]

        # A schema without required fields requires all of them.
        required = [name for name in fields if name in (self._schema.get("required") or ())] or fields
        if len(required) == 1:
            parameters = parameters_of({"parameters": {**self._schema, "required": required}})
            # By Python's rules, in which "+1" and ".5" are numbers; in JSON they are not.
            arguments = {required[0]: parameters.value(required[0], action.answer, python=True)}
            if problem := parameters.mismatch(arguments):
                raise ValueError(problem)
            return arguments

        try:
            value = json.loads(action.answer or "{}")
        except ValueError:
            value = None

        if not isinstance(value, dict):
            names = f" with {', '.join(required)}" if required else ", such as {}: its schema names no fields"
            raise ValueError(f"an action must be a JSON object{names}")
        return value


def _reset_parameters(task: Task, seed: int) -> Mapping[str, Json]:
    if task is None:
        return {"seed": seed}
    if isinstance(task, Sample):
        task = {"question": task.prompt.text, "answer": task.target}
    return {"seed": seed, **(task if isinstance(task, Mapping) else {"task": task})}


def _result_text(reply: Reply) -> str:
    """Return the text of a tool's result; it starts with "error: " if the call failed."""
    if error := reply.observation.get("error"):
        return f"error: {error.get('message', error) if isinstance(error, dict) else error}"
    result = reply.observation.get("result", reply.observation)
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        text = text_of(result)
        return f"error: {text}" if result.get("is_error") or result.get("isError") else text
    return as_text(result)


class OpenEnvVerifier:
    """A verifier that scores responses by an OpenEnv server.

    Each response is the only action of an episode, whose reward is the score. The reset gets the prompt as `question`
    and the target as `answer`. A response is unscored, with the reason, if the connection is lost, or the server
    rejects the response as an action, gives no reward or does not end the episode.

    Args:
        url: the server's address.
        name: the score's name in metrics.
        sessions: how many responses are scored at once.
        timeout: seconds for the answer to one message.
        patience: seconds for which a server that is down or full is retried.

    Raises:
        ValueError: the url does not start with http, https, ws or wss.
    """

    def __init__(
        self, url: str, *, name: str = "openenv", sessions: int = 16, timeout: float = 60.0, patience: float = 30.0
    ) -> None:
        self.names = (name,)
        self._client = OpenEnvClient(url, sessions=sessions, timeout=timeout, patience=patience)

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return [responses, 1] scores of the responses to one prompt; NaN with a reason where one is unscored."""
        task = {"question": Conversation(prompt).plain} | ({} if target is None else {"answer": target})
        return await collect_scores([self._score_response(task, response) for response in responses], len(self.names))

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._client.close()

    async def _score_response(self, task: dict[str, str], response: str) -> float | None:
        environment = OpenEnvEnvironment(self._client)
        try:
            await environment.reset(task, seed=0)
            step = await environment.step(Action(response, response))
        finally:
            await environment.close()
        if not step.done:
            raise InfrastructureError(
                f"{self._client.url} did not end the episode after one action, as a verifier needs"
            )
        return step.reward
