"""Verifiers as a service."""

from __future__ import annotations

from collections.abc import Sequence

from forge.rewards.verifier import Scores
from forge.runtime.controller import ForgeActor, Service, endpoint

from .config import VerifiersConfig


class VerifierActor(ForgeActor):
    """A panel in a separate process; several replicas share the calls.

    Args:
        verifiers: which ones.
    """

    def __init__(self, verifiers: VerifiersConfig) -> None:
        self.verifiers = verifiers

    def setup(self) -> None:
        """Load the models of the panel."""
        self.panel = self.verifiers.panel()

    async def teardown(self) -> None:
        """Close the panel."""
        if hasattr(self, "panel"):  # its setup may have failed
            await self.panel.close()

    @endpoint
    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, verifiers], see `forge_verifiers.Panel`."""
        return await self.panel.score(prompt, responses, target)

    @endpoint
    async def names(self) -> tuple[str, ...]:
        """Return the verifiers' columns."""
        return self.panel.names


class RemotePanel:
    """The verifiers of a service, as a verifier here."""

    def __init__(self, service: Service, names: tuple[str, ...]) -> None:
        self.service = service
        self.names = names

    @classmethod
    async def from_service(cls, service: Service) -> RemotePanel:
        """Return the panel of a service of `VerifierActor`."""
        return cls(service, await service.names.route())

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, names], scored by one replica."""
        return await self.service.score.route(prompt, list(responses), target)
