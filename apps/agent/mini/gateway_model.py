"""The text-based model of mini-swe-agent that asks by `requests`, with the address of OPENAI_BASE_URL."""

import os
from typing import Any

from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel


class GatewayModel(OpenRouterTextbasedModel):  # type: ignore[misc]  # mini-swe-agent is in another environment
    """The model of a gateway."""

    def __init__(self, **kwargs: Any) -> None:
        # `usage` asks OpenRouter for prices.
        super().__init__(**{"model_kwargs": {"usage": None}, **kwargs})
        self._api_url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
