"""Chat with the model of a run, with the model that it started from, or with the policy in training."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import TYPE_CHECKING

from ...observability.runs import settings
from ..text import Tokenizer
from .live import Body, NoModel, as_text, ask

if TYPE_CHECKING:
    from ...engines.interface import Engine

TIMEOUT = 120.0  # seconds for an answer: a model on the CPU is slow
MAX_TOKENS = 2048
# Fields that the page may set; others, such as n, would need more time and memory.
FIELDS = {"messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed"}


class Chat:
    """Chat with one engine at a time for each of the two models.

    Args:
        root: the folder that contains the models.
        base: a folder or hub id to use in place of the model that a run started from, wherever it is.
    """

    def __init__(self, root: Path, base: str | None) -> None:
        self.root = root
        self.base = base
        # By choice of the model: its path, engine and tokenizer.
        self._loaded: dict[str, tuple[str, Engine, Tokenizer]] = {}
        self._lock = asyncio.Lock()

    async def answer(self, run: Path, body: Body) -> Body:
        """Return the text that the model `which` ("run", "base" or "live") generates after the messages.

        Args:
            body: that of `/v1/chat/completions` or `/v1/completions`: messages or prompt, max_tokens,
                temperature, seed; and `which`.

        Raises:
            NoModel: the run has not been exported, is not served, or started from a model outside of `root`.
            ValueError: an invalid request.
        """
        which = body.pop("which", "run")
        if which not in ("run", "base", "live"):
            raise ValueError("which must be run, base or live")
        body = check_body(body)
        if which == "live":
            return await ask(run, body, TIMEOUT)
        # One request at a time: the page is for a person, and two would share the same cores.
        async with self._lock:
            model = await asyncio.to_thread(self._model, run, which)
            _, engine, tokenizer = await asyncio.to_thread(self._load, which, model)
            return await asyncio.to_thread(self._generate, engine, tokenizer, body)

    def close(self) -> None:
        """Close the engines of all loaded models."""
        for _, engine, _ in self._loaded.values():
            engine.close()
        self._loaded.clear()

    def _model(self, run: Path, which: str) -> str:
        if which == "base" and self.base is not None:
            return self.base
        if which == "base":
            config = settings(run)
            initial = run.parent / f"{run.name}-initial"
            path = Path(config["model"]).absolute() if config.get("model") else initial
        else:
            path = run / "model"
        folder = path.resolve()
        if not (folder / "config.json").is_file():
            remedy = "it is exported at the end of a run" if which == "run" else "name it with --base"
            raise NoModel(f"there is no model in {path}: {remedy}")
        # A page of this user must not be made to load a model, or a link to one, from elsewhere on the machine.
        for part in (folder, *folder.iterdir()):
            if not part.resolve().is_relative_to(self.root):
                raise NoModel(f"{path} is not below {self.root}: name it with --base")
        return str(folder)

    def _load(self, which: str, model: str) -> tuple[str, Engine, Tokenizer]:
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

    def _generate(self, engine: Engine, tokenizer: Tokenizer, body: Body) -> Body:
        from ..requests import BadRequest, parse

        # A base model has no chat template: it continues the text.
        if "messages" in body and not tokenizer.chat_template:
            body = as_text(body)
        try:
            job = parse({**body, "model": "m"}, tokenizer, "m", chat="messages" in body)
        except BadRequest as error:
            raise ValueError(str(error)) from None
        request = engine.submit(job.prompts[0], job.sampling)
        try:
            (completion,) = request.result(TIMEOUT)
        # Also after a timeout: the engine would continue without a reader.
        finally:
            request.cancel()
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return {"text": text, "finish": completion.finish, "tokens": len(completion.token_ids)}


def check_body(body: Body) -> Body:
    """Check the body of a request, and limit its tokens to what a page should ask for.

    Raises:
        ValueError: names the field at fault.
    """
    unknown = sorted(body.keys() - FIELDS)
    if unknown:
        raise ValueError(f"unknown field {unknown[0][:60]!r}")
    # A page that is left open should not occupy the machine for long.
    tokens = 256 if body.get("max_tokens") is None else body["max_tokens"]
    if type(tokens) is not int or tokens < 1:
        raise ValueError("max_tokens must be a whole number of at least 1")
    messages = body.get("messages")
    if messages is None and not isinstance(body.get("prompt"), str):
        raise ValueError("ask with messages, or with a text as prompt")
    # Contents of other kinds, such as images, are no texts that the models here read.
    if messages is not None and not (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages)
    ):
        raise ValueError("messages must be a list of at least one message, each an object with a text as content")
    return body | {"max_tokens": min(tokens, MAX_TOKENS)}
