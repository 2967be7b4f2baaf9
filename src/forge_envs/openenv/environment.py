"""OpenEnv servers as environments of this library, and as verifiers of single answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from forge.rewards import Scores
from forge.rewards.verifier import collect_scores
from forge.types import Sample
from forge_envs.environment import CUT, Action, Environment, InfrastructureError, Message, Step, user_message
from forge_envs.schemas import parameters_of

from ..content import Json, text_of
from .client import OpenEnvClient, OpenEnvError, Session
from .wire import FORGE_ACTION, Reply, step_from_reply

Task = Any  # a `Sample`, a mapping of the reset's parameters, or the value of its `task`
ToAction = Callable[[Action], Mapping[str, Json]]
ToMessages = Callable[[Reply], list[Message]]
ToReset = Callable[[Task, int], Mapping[str, Json]]


class OpenEnvEnvironment(Environment):
    """Episodes on an OpenEnv server, each in a session.

    A turn that the server rejects as an action, or for which `to_action` raises ValueError, is answered with the error.
    A reply without a reward counts 0; an episode without any reward is unscored. An episode is truncated if its
    metadata has `truncated` when it is done, else terminated.

    With `mcp` the environment's tools are offered to the policy, and its calls become sequential steps. A turn without
    a call ends the episode, unless `to_action` is given.

    Args:
        server: a client, whose sessions are shared with other environments, or a url, for a separate client.
        to_action: JSON of an action. By default the turn's text is the only required (or only) field of the server's
            schema, converted to a number if the schema says so; with several fields the turn must be a JSON object.
            Thoughts are not part of it, and a turn that was cut at its limit of tokens is not an action.
        to_messages: messages for the policy. By default a single text of the observation, else its JSON.
        to_reset: the reset's parameters from task and seed. By default the seed, and `question` and `answer` of a
            sample, the items of a mapping, or `task`.
        mcp: offer tools.
        max_chars: of a message; the rest is cut.
    """

    def __init__(
        self,
        server: OpenEnvClient | str,
        *,
        to_action: ToAction | None = None,
        to_messages: ToMessages | None = None,
        to_reset: ToReset | None = None,
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
        self._schema: dict[str, Json] = {}
        self._session: Session | None = None
        self._rewarded = False
        self._is_default = to_action is None and to_messages is None and not mcp

    async def reset(self, task: Task, *, seed: int) -> Step:
        """Start an episode. InfrastructureError: no session, or it was lost."""
        await self._end_session()
        self._rewarded = False
        self._schema = dict((await self._client.schema()).get("action") or {})
        self._session = await self._client.acquire()
        reply = await self._session.reset(**self._to_reset(task, seed))
        if self._is_forge:
            return step_from_reply(reply)
        tools = await self._session.list_tools() if self._mcp else ()
        messages = tuple(self._to_messages(reply))
        return Step(messages, tools=tools, terminated=reply.done, info={"metadata": reply.metadata})

    async def step(self, action: Action) -> Step:
        """Take a turn.

        Raises:
            InfrastructureError: the session was lost, or the reply breaks the protocol.
            OpenEnvError: the environment raised.
        """
        assert self._session is not None, "step before reset"
        # With tools, a turn is its calls; a turn without any ends the episode, unless it can be an action.
        if self._mcp and (action.calls or action.errors):
            return await self._call_tools(self._session, action)
        if self._mcp and self._to_action is None:
            return self._make_step((), None, {}, over=True)

        # A text that was cut at its limit says something else than the policy meant.
        if action.truncated and self._to_action is None and not self._is_forge:
            return Step((user_message(CUT),))
        try:
            sent = (self._to_action or self._default_action)(action)
        except ValueError as error:
            return Step((user_message(f"error: {error}"),))

        reply = await self._send_action(self._session, sent)
        if isinstance(reply, str):
            return Step((user_message(reply),))
        if self._is_forge:
            return step_from_reply(reply)

        return self._make_step(tuple(self._to_messages(reply)), reply.reward, reply.metadata, over=reply.done)

    async def close(self) -> None:
        """End the session, and close the client if it is this environment's own."""
        await self._end_session()
        if self._owns_client:
            await self._client.close()

    @property
    def _is_forge(self) -> bool:
        """Return whether the server is one of this library: actions and steps are sent as they are."""
        return self._is_default and self._schema.get("title") == FORGE_ACTION

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _send_action(self, session: Session, action: Mapping[str, Json]) -> Reply | str:
        """Return the server's reply to an action, or an error for the policy."""
        try:
            return await session.step(action)
        # A rejected action is the policy's fault, and it may try again; other errors are the server's.
        except OpenEnvError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return self._shorten_text(f"error: {error.message}")

    async def _call_tools(self, session: Session, action: Action) -> Step:
        messages: list[Message] = []
        rewards: list[float] = []
        metadata: dict[str, Json] = {}
        over = False

        for call in action.calls:
            # Every call needs an answer: chat templates expect one message for each.
            content = "error: not run: the episode is over"
            if not over:
                sent = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
                reply = await self._send_action(session, sent)
                if isinstance(reply, str):
                    content = reply
                else:
                    content = self._shorten_text(_result_text(reply))
                    rewards += [] if reply.reward is None else [reply.reward]
                    metadata |= reply.metadata
                    over = reply.done

            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content})

        messages += [{"role": "tool", "name": "error", "content": f"error: {error}"} for error in action.errors]
        return self._make_step(tuple(messages), sum(rewards) if rewards else None, metadata, over=over)

    def _make_step(
        self, messages: tuple[Message, ...], reward: float | None, metadata: Mapping[str, Json], *, over: bool
    ) -> Step:
        self._rewarded |= reward is not None
        # OpenEnv has no other word for an episode that a limit ended.
        truncated = over and bool(metadata.get("truncated"))
        return Step(
            messages,
            reward=None if over and not self._rewarded else reward or 0.0,
            terminated=over and not truncated,
            truncated=truncated,
            info={"metadata": metadata},
        )

    def _default_messages(self, reply: Reply) -> list[Message]:
        """Return the default messages. Most observations are one text: it is shown as it is, others as JSON."""
        shown = {name: value for name, value in reply.observation.items() if name != "metadata" and value is not None}
        only = next(iter(shown.values())) if len(shown) == 1 else None
        return [user_message(self._shorten_text(only if isinstance(only, str) else json.dumps(shown)))]

    def _default_action(self, action: Action) -> Mapping[str, Json]:
        """Make the default action of a turn. ValueError: the turn does not match the schema."""
        if self._schema.get("title") == FORGE_ACTION:
            return asdict(action)
        fields = [name for name in parameters_of({"parameters": self._schema}).properties if name != "metadata"]

        # Without required fields, all are.
        required = [name for name in fields if name in (self._schema.get("required") or ())] or fields
        if len(required) == 1:
            parameters = parameters_of({"parameters": {**self._schema, "required": required}})
            # "+1" and ".5" are numbers and no JSON.
            arguments = {required[0]: parameters.value(required[0], action.answer, python=True)}
            if wrong := parameters.mismatch(arguments):
                raise ValueError(wrong)
            return arguments

        try:
            value = json.loads(action.answer or "{}")
        except ValueError:
            value = None

        if not isinstance(value, dict):
            names = f" with {', '.join(required)}" if required else ", such as {}: its schema names no fields"
            raise ValueError(f"an action must be a JSON object{names}")
        return value

    def _shorten_text(self, text: str) -> str:
        surplus = len(text) - self._max_chars
        return text if surplus <= 0 else f"{text[: self._max_chars]}... ({surplus} more characters)"


def _reset_parameters(task: Task, seed: int) -> Mapping[str, Json]:
    if task is None:
        return {"seed": seed}
    if isinstance(task, Sample):
        task = {"question": task.prompt.text, "answer": task.target}
    return {"seed": seed, **(task if isinstance(task, Mapping) else {"task": task})}


def _result_text(reply: Reply) -> str:
    """Return the text of a tool's result or error."""
    error = reply.observation.get("error")
    if error:
        return f"error: {error.get('message', error) if isinstance(error, dict) else error}"
    result = reply.observation.get("result", reply.observation)
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        text = text_of(result)
        return f"error: {text}" if result.get("is_error") or result.get("isError") else text
    return result if isinstance(result, str) else json.dumps(result)


class OpenEnvVerifier:
    """Scores responses by an OpenEnv server: each is the one action of an episode, whose reward is its score.

    The reset has the prompt as `question` and the target as `answer`. A server that is lost, rejects the response as an
    action, gives no reward or asks for another action leaves the response unscored, with the reason.

    Args:
        url: of the server.
        name: of the score in metrics.
        sessions: episodes at once.
        timeout: seconds for the answer to one message.
        patience: seconds to retry a server that is down or full.

    Raises:
        ValueError: the url is of another scheme.
    """

    def __init__(
        self, url: str, *, name: str = "openenv", sessions: int = 16, timeout: float = 60.0, patience: float = 30.0
    ) -> None:
        self.names = (name,)
        self._client = OpenEnvClient(url, sessions=sessions, timeout=timeout, patience=patience)

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, 1] scores of the responses to one prompt; NaN with a reason where one cannot be scored."""
        task = {"question": prompt} if target is None else {"question": prompt, "answer": target}
        return await collect_scores([self._score_response(task, response) for response in responses], len(self.names))

    async def close(self) -> None:
        """Close the connections."""
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
                f"{self._client.url} did not end the episode: a verifier decides after one answer"
            )
        return step.reward
