"""Ask the model of a run, the one that it started from, or the policy that is in training."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...observability.runs import settings
from .live import NoModel, as_text, ask

if TYPE_CHECKING:
    from ...engines.interface import Engine

PATIENCE = 120.0  # seconds for an answer
MOST_TOKENS = 2048
FIELDS = {"messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed"}


class Chat:
    """Answers with one engine at a time for each of the two models.

    Args:
        root: models are below this folder.
        base: a folder or hub id that takes the place of what a run started from, wherever it is.
    """

    def __init__(self, root: Path, base: str | None) -> None:
        self.root, self.base = root, base
        self._loaded: dict[str, tuple[str, Engine, Any]] = {}  # which: its model
        self._lock = asyncio.Lock()

    async def answer(self, run: Path, asked: dict[str, Any]) -> dict[str, Any]:
        """The text of `which` ("run", "base" or "live") after the messages.

        Args:
            asked: as the body of `/v1/chat/completions` or `/v1/completions`: messages or prompt, max_tokens,
                temperature, seed; and `which`.

        Raises:
            NoModel: the run has not been exported, is not served, or started from a model that is elsewhere.
            ValueError: an invalid request.
        """
        which = asked.pop("which", "run")
        if which not in ("run", "base", "live"):
            raise ValueError("which must be run, base or live")
        asked = checked(asked)
        if which == "live":
            return await ask(run, asked, PATIENCE)
        async with self._lock:
            model = await asyncio.to_thread(self._model, run, which)
            _, engine, tokenizer = await asyncio.to_thread(self._load, which, model)
            return await asyncio.to_thread(self._generate, engine, tokenizer, asked)

    def close(self) -> None:
        """Close the engines of all loaded models."""
        for _, engine, _ in self._loaded.values():
            engine.close()
        self._loaded.clear()

    def _model(self, run: Path, which: str) -> str:
        if which == "base" and self.base is not None:
            return self.base
        if which == "base":
            known = settings(run)
            initial = run.parent / f"{run.name}-initial"
            path = Path(known["model"]).absolute() if known.get("model") else initial
        else:
            path = run / "model"
        found = path.resolve()
        if not (found / "config.json").is_file():
            why = "it is exported at the end of a run" if which == "run" else "name it with --base"
            raise NoModel(f"there is no model in {path}: {why}")
        for part in (found, *found.iterdir()):
            if not part.resolve().is_relative_to(self.root):
                raise NoModel(f"{path} is not below {self.root}: name it with --base")
        return str(found)

    def _load(self, which: str, model: str) -> tuple[str, Engine, Any]:
        from ...engines import load_engine
        from ...models.find import resolve_model
        from ...models.tokenizer import open_tokenizer

        if which not in self._loaded or self._loaded[which][0] != model:
            if which in self._loaded:
                self._loaded.pop(which)[1].close()
                gc.collect()
            path = resolve_model(model)
            self._loaded[which] = model, load_engine("embedded", path), open_tokenizer(path)
        return self._loaded[which]

    def _generate(self, engine: Engine, tokenizer: Any, asked: dict[str, Any]) -> dict[str, Any]:
        from ..requests import BadRequest, parse

        if "messages" in asked and not tokenizer.chat_template:
            asked = as_text(asked)
        try:
            job = parse({**asked, "model": "m"}, tokenizer, "m", chat="messages" in asked)
        except BadRequest as error:
            raise ValueError(str(error)) from None
        answer = engine.submit(job.prompts[0], job.sampling)
        try:
            (completion,) = answer.result(PATIENCE)
        finally:
            answer.cancel()
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return {"text": text, "finish": completion.finish, "tokens": len(completion.token_ids)}


def checked(asked: dict[str, Any]) -> dict[str, Any]:
    """The body of a request, with no more tokens than a page should ask for.

    Raises:
        ValueError: names the field at fault.
    """
    if unknown := sorted(asked.keys() - FIELDS):
        raise ValueError(f"unknown field {unknown[0][:60]!r}")
    tokens = 256 if asked.get("max_tokens") is None else asked["max_tokens"]
    if type(tokens) is not int or tokens < 1:
        raise ValueError("max_tokens must be a whole number of at least 1")
    messages = asked.get("messages")
    if messages is None and not isinstance(asked.get("prompt"), str):
        raise ValueError("ask with messages, or with a text as prompt")
    if messages is not None and not (
        isinstance(messages, list)
        and messages
        and all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in messages)
    ):
        raise ValueError("messages must be a list of at least one message, each an object with a text as content")
    return asked | {"max_tokens": min(tokens, MOST_TOKENS)}
