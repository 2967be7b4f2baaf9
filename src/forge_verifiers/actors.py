"""A panel of verifiers as a service."""

from collections.abc import Sequence
from dataclasses import dataclass

from forge.rewards.verifier import Scores
from forge.runtime.controller import ForgeActor, Service, endpoint

from .config import VerifiersConfig


class VerifierActor(ForgeActor):
    """Component that runs a panel of verifiers in a separate process; several replicas share the calls.

    Args:
        verifiers: the configuration of the panel.
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
        """Return scores [responses, columns] of the responses to one prompt, see `forge_verifiers.Panel`."""
        return await self.panel.score(prompt, responses, target)

    @endpoint
    async def names(self) -> tuple[str, ...]:
        """Return the names of the panel's columns."""
        return self.panel.names


@dataclass(eq=False)
class RemotePanel:
    """A verifier in this process that asks the panel of a service.

    Args:
        service: a service of `VerifierActor`.
        names: the names of the panel's columns.
    """

    service: Service
    names: tuple[str, ...]

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return scores [responses, names] of the responses to one prompt, all by the same replica."""
        return await self.service.score.route(prompt, list(responses), target)
