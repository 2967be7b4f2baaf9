"""Chat with the model of a run, or with the model that it started from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_inspect.runs import settings

if TYPE_CHECKING:
    from forge.engines.interface import Engine
    from forge.types import Sampling

TIMEOUT = 120.0  # seconds for an answer: a model on the CPU is slow
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
FIELDS = {"run", "which", "messages", "prompt", *SAMPLING}
Body = dict[str, Any]


class NoModel(ValueError):
    """There is no model to chat with; gives the reason."""


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
        self._loaded: dict[str, tuple[str, Engine, Any]] = {}
        self._lock = asyncio.Lock()

    async def answer(self, run: Path, body: Body) -> Body:
        """Return the text that the model `which` ("run" or "base") generates after the messages, or after a prompt.

        Raises:
            NoModel: the run has not been exported, or started from a model outside of `root`.
            ValueError: an invalid request.
        """
        which, messages, sampling = read_question(body)
        # One request at a time: the page is for a person, and two would share the same cores.
        async with self._lock:
            model = await asyncio.to_thread(self._find_model, run, which)
            engine, tokenizer = await asyncio.to_thread(self._load, which, model)
            return await asyncio.to_thread(generate_answer, engine, tokenizer, messages, sampling)

    def close(self) -> None:
        """Close the engines of all loaded models."""
        for _, engine, _ in self._loaded.values():
            engine.close()
        self._loaded.clear()

    def _find_model(self, run: Path, which: str) -> str:
        if which == "base" and self.base is not None:
            return self.base
        path = run / "model"
        if which == "base":
            start = settings(run).get("model")
            path = Path(start).absolute() if start else run.parent / f"{run.name}-initial"
        folder = path.resolve()
        if not (folder / "config.json").is_file():
            remedy = "it is exported at the end of a run" if which == "run" else "name it with --base"
            raise NoModel(f"there is no model in {path}: {remedy}")
        # A page of this user must not be made to load a model, or a link to one, from elsewhere on the machine.
        if not all(part.resolve().is_relative_to(self.root) for part in (folder, *folder.iterdir())):
            raise NoModel(f"{path} is not below {self.root}: name it with --base")
        return str(folder)

    def _load(self, which: str, model: str) -> tuple[Engine, Any]:
        from forge.engines import load_engine
        from forge.models.find import resolve_model
        from forge.models.tokenizer import open_tokenizer

        if which not in self._loaded or self._loaded[which][0] != model:
            if which in self._loaded:
                self._loaded.pop(which)[1].close()
            path = resolve_model(model)
            self._loaded[which] = model, load_engine("embedded", path), open_tokenizer(path)
        return self._loaded[which][1:]


def read_question(body: Body) -> tuple[str, list[Body], Sampling]:
    """Return the model that a request asks ("run" or "base"), its messages, and how to sample.

    Raises:
        ValueError: a field is unknown or invalid; names it.
    """
    from forge.types import Sampling

    if unknown := body.keys() - FIELDS:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}; a question has {', '.join(sorted(FIELDS))}")
    which = body.get("which", "run")
    if which not in ("run", "base"):
        raise ValueError("which must be run or base")
    messages = [{"role": "user", "content": body.get("prompt")}]
    messages = body["messages"] if body.get("messages") is not None else messages
    well_formed = isinstance(messages, list) and messages
    if not well_formed or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        raise ValueError("ask with messages, each an object with a text as content, or with a text as prompt")

    try:
        settings = {name: body[name] for name in SAMPLING if body.get(name) is not None}
        return which, messages, Sampling(**{"max_tokens": 256} | settings)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def generate_answer(engine: Engine, tokenizer: Any, messages: list[Body], sampling: Sampling) -> Body:
    """Return what a model generates after the messages; a model without a chat template continues the last text."""
    from forge.data.chat import ChatFormat

    text = messages[-1]["content"]
    if tokenizer.chat_template:
        form = ChatFormat(tokenizer)
        text = form.render(messages, add_generation_prompt=True)
        sampling = replace(sampling, stop_token_ids=tuple(form.stop_ids))
    prompt_ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    request = engine.submit(prompt_ids, sampling)
    try:
        (completion,) = request.result(TIMEOUT)
    finally:  # also after a timeout: the engine would continue without a reader
        request.cancel()
    answer = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    return {"text": answer, "finish": completion.finish, "tokens": len(completion.token_ids)}
