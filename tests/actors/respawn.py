"""What the controller does to a component whose process was killed, done in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from forge.runtime.controller import ActorContext, ForgeActor
from forge.runtime.controller.types import _request

T = TypeVar("T", bound=ForgeActor)


@contextmanager
def request(name: str | None) -> Iterator[None]:
    """Within the block, endpoints serve this request."""
    token = _request.set(name)
    try:
        yield
    finally:
        _request.reset(token)


def started(component: T, incarnation: int = 0) -> T:
    """Set up, and taken up again if it is not the first of its place."""
    component.context = ActorContext(type(component).__name__, incarnation=incarnation)
    component.setup()
    if incarnation:
        component.on_respawn()
    return component
