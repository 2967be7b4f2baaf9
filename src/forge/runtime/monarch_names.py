"""All private names of Monarch that forge uses: another version of Monarch can break this file and no other.

`forge.runtime.controller._monarch` calls `check_monarch` before it uses any of them. A name is imported when it is
first read from this module: importing the module itself must start no thread, as the fork server imports it before it
forks.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env as reload_config_from_env
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError as SupervisionError
    from monarch._src.actor import config as config
    from monarch._src.actor.bootstrap_main import invoke_main as invoke_main
    from monarch._src.actor.endpoint import EndpointProperty as EndpointProperty
    from monarch._src.actor.host_mesh import BootstrapCommand as BootstrapCommand
    from monarch.actor import HostMesh

VERSION = "0.7"  # pinned in pyproject.toml, tests compare the two
LIBRARY = "monarch._rust_bindings"
MAIN = "monarch._src.actor.bootstrap_main"


class PrivateName(NamedTuple):
    """The module of a private name, and what forge uses the name for, as the end of "to ..."."""

    module: str
    purpose: str


NAMES = {
    "reload_config_from_env": PrivateName(
        f"{LIBRARY}.monarch_hyperactor.config", "have Monarch read its TLS certificates from the environment"
    ),
    "SupervisionError": PrivateName(
        f"{LIBRARY}.monarch_hyperactor.supervision", "tell a lost process from an error of its component"
    ),
    "EndpointProperty": PrivateName(
        "monarch._src.actor.endpoint", "accept Monarch's own decorators in a ForgeActor (_method, _name)"
    ),
    "BootstrapCommand": PrivateName(
        "monarch._src.actor.host_mesh", "start processes by forge's launcher, with the allocator's settings"
    ),
    "config": PrivateName("monarch._src.actor", "keep Monarch's prefix of an actor out of log messages"),
    "invoke_main": PrivateName(MAIN, "run the main program of a process that was started ahead of Monarch"),
}
_CONCURRENT = "_monarch_concurrent_endpoint_wrapper"  # marks what `concurrent_endpoint` made of a method


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(NAMES[name].module), name)


def check_monarch() -> None:
    """Check that the installed version of Monarch has all of these private names.

    Raises:
        ImportError: some are missing; names them and the version to install, in one line.
    """
    missing = [
        f"{private.module}.{name} ({private.purpose})"
        for name, private in NAMES.items()
        if not _name_exists(name, private)
    ]
    if not missing:
        # Whether instances have the attributes that `method_of` reads is tried with an endpoint.
        from monarch.actor import concurrent_endpoint

        async def probe_endpoint(actor: object, number: int) -> int:
            return number

        try:
            if method_of(concurrent_endpoint(probe_endpoint)) != (probe_endpoint, False):
                missing.append(f"monarch.actor.concurrent_endpoint: {_CONCURRENT} (accept it in a ForgeActor)")
        except AttributeError as error:
            missing.append(f"monarch._src.actor.endpoint.EndpointProperty: {error}")

    if missing:
        try:
            installed = version("torchmonarch")
        except PackageNotFoundError:
            installed = "of an unknown version"
        raise ImportError(
            f"torchmonarch {installed} lacks what forge uses of {VERSION}: {'; '.join(missing)}. Install the pinned "
            f"version: pip install 'torchmonarch=={VERSION}.*'"
        )


def _name_exists(name: str, private: PrivateName) -> bool:
    try:
        return hasattr(import_module(private.module), name)
    except ImportError:
        return False


def method_of(marked: "EndpointProperty[Any, Any]") -> tuple[Callable[..., Any], bool]:
    """Return (method, has_port): the method that a decorator of Monarch's marked, and whether it answers by a port.

    Such a method (`explicit_response_port=True`) gets a port as its first argument, and sends its answer there.
    """
    method: Callable[..., Any] = marked._method
    if not getattr(method, _CONCURRENT, False):
        return method, marked._explicit_response_port
    # `concurrent_endpoint` wraps the method, and the wrapper always has a port: if the signatures are equal, the method
    # has a separate port.
    original: Callable[..., Any] = inspect.unwrap(method)
    return original, inspect.signature(method) == inspect.signature(original)


def meshes_of(state: object) -> "Mapping[str, HostMesh]":
    """Return the host meshes of a Monarch job's state (`JobState`) by name; empty for any other object."""
    kind = type(state)
    if kind.__name__ != "JobState" or not kind.__module__.startswith("monarch."):
        return {}
    return vars(state)["_hosts"]
