"""Ask the model of a run, the one that it started from, or the policy that is in training."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from ..observability.runs import SERVED, settings, state
from ..web import API_KEY, LOOPBACK

if TYPE_CHECKING:
    from ..engines.interface import Engine

PATIENCE = 120.0  # seconds for an answer
MOST_TOKENS = 2048


class NoModel(ValueError):
    """There is nothing to ask; says why."""


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
        asked["max_tokens"] = min(int(asked.get("max_tokens") or 256), MOST_TOKENS)
        if which == "live":
            return await self._live(run, asked)
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
        elif which == "run":
            path = run / "model"
        else:
            raise ValueError(f"which must be run, base or live, got {which!r}")
        found = path.resolve()
        if not (found / "config.json").is_file():
            why = "it is exported at the end of a run" if which == "run" else "name it with --base"
            raise NoModel(f"there is no model in {path}: {why}")
        for part in (found, *found.iterdir()):
            if not part.resolve().is_relative_to(self.root):
                raise NoModel(f"{path} is not below {self.root}: name it with --base")
        return str(found)

    def _load(self, which: str, model: str) -> tuple[str, Engine, Any]:
        from ..engines import load_engine
        from ..models import open_tokenizer, resolve_model

        if which not in self._loaded or self._loaded[which][0] != model:
            if which in self._loaded:
                self._loaded.pop(which)[1].close()
                gc.collect()
            path = resolve_model(model)
            self._loaded[which] = model, load_engine("embedded", path), open_tokenizer(path)
        return self._loaded[which]

    def _generate(self, engine: Engine, tokenizer: Any, asked: dict[str, Any]) -> dict[str, Any]:
        from ..serve.requests import BadRequest, parse

        if "messages" in asked and not tokenizer.chat_template:
            asked = as_text(asked)
        try:
            job = parse({**asked, "model": "m"}, tokenizer, "m", chat="messages" in asked)
        except BadRequest as error:
            raise ValueError(str(error)) from None
        (completion,) = engine.submit(job.prompts[0], job.sampling).result(PATIENCE)
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return {"text": text, "finish": completion.finish, "tokens": len(completion.token_ids)}

    async def _live(self, run: Path, asked: dict[str, Any]) -> dict[str, Any]:
        path = run / SERVED
        if state(run) != "running" or not path.is_file():
            raise NoModel("the policy is not served: the run is not running, or serve.port is not set")
        url = str(json.loads(path.read_text())["url"])
        host = urlsplit(url).hostname
        if host not in LOOPBACK:  # a folder of others could name any address
            raise NoModel(f"the policy is served at {host}, which is not this machine")
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limit = aiohttp.ClientTimeout(PATIENCE)
        async with aiohttp.ClientSession(timeout=limit, headers=headers) as session:
            for ask in (asked, as_text(asked)) if "messages" in asked else (asked,):
                what = "chat/completions" if "messages" in ask else "completions"
                async with session.post(f"{url}/{what}", json=ask, allow_redirects=False) as response:
                    body = await response.json()
                if "no chat template" not in str(body.get("error")):
                    break
        if "choices" not in body:
            raise ValueError(str(body.get("error", {}).get("message", body)))
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return {"text": text, "finish": choice["finish_reason"], "tokens": body["usage"]["completion_tokens"]}


def as_text(asked: dict[str, Any]) -> dict[str, Any]:
    """For a model without a template, which continues text: the last message is what it continues."""
    rest = {name: given for name, given in asked.items() if name != "messages"}
    return rest | {"prompt": str(asked["messages"][-1]["content"])}
