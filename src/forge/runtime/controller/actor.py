"""Components: plain classes whose `@endpoint` methods are callable from the controller.

class Counter(ForgeActor):
    @endpoint
    def add(self, n: int) -> int: ...

counter = await Counter.options(num_replicas=2).as_service(start=10)
await counter.add.route(1)
"""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..monarch_names import method_of
from ._monarch import EndpointProperty
from .handle import Local, foreign_component, foreign_hint
from .options import Options, snake_case
from .runtime import add_local, runtime
from .service import Service
from .types import ActorContext, Kwargs, Pending

F = TypeVar("F")

# Called by the process that hosts a component, never by its callers.
OWN_CALLS = ("setup", "on_respawn", "teardown")


@overload
def endpoint(method: F) -> F: ...


@overload
def endpoint(*, catch_up: bool = False) -> Callable[[F], F]: ...


def endpoint(method: F | None = None, *, catch_up: bool = False) -> F | Callable[[F], F]:
    """Make a method callable through a service; written as `@endpoint` or `@endpoint(catch_up=True)`.

    `async def` endpoints interleave with one another; plain `def` endpoints run in the component's own thread, one at
    a time, in the order of their calls.

    Args:
        catch_up: for calls that bring every replica up to date, such as new weights. A `fanout` then does not wait
            for replicas that are being replaced: they get its latest call before they serve. By default it waits.
    """

    def mark(method: F) -> F:
        method.__forge_endpoint__ = True  # type: ignore[attr-defined]
        method.__forge_catch_up__ = catch_up  # type: ignore[attr-defined]
        return method

    return mark if method is None else mark(method)


class Launcher:
    """A component class with its placement, ready to start. Created by `Component.options(...)`."""

    def __init__(self, cls: "type[ForgeActor]", options: Options) -> None:
        self._cls, self._options = cls, options

    def as_service(self, *args: object, **kwargs: object) -> Pending[Service]:
        """Return a coroutine that starts the replicas, each built with these arguments, and waits until all serve.

        The arguments are checked by the call itself, before the coroutine is awaited and anything starts.

        Raises:
            TypeError: an argument is missing or unknown.
            ValueError: the arguments do not fit the placement.
            Exception: what the constructor raises, of a component with `constructor_checks`; when the coroutine is
                awaited, what a replica's `__init__` or `setup` raised.
        """
        # Checked here and not in the replica: a mistake in the arguments should not cost the start of a process.
        component, kwargs = foreign_component(self._cls, kwargs)
        try:
            inspect.signature(component).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{component.__name__}.as_service: {error}{''.join(map(foreign_hint, kwargs))}") from None

        # Only the class that defines the constructor can promise that it is cheap: a user's subclass that overrides it
        # may load a model there, which belongs in the replica's process.
        constructor_class = next(cls for cls in component.__mro__ if "__init__" in vars(cls))
        if vars(constructor_class).get("constructor_checks"):
            component(*args, **kwargs)
        options = self._options.on_mesh_of(snake_case(component.__name__))
        options, kwargs = component.place(options, kwargs)

        # The checks above run when the call is written, the start when the coroutine is awaited.
        async def start_service() -> Service:
            service = await runtime().start(component, options, args, kwargs)
            component.started(service, kwargs)
            return service

        return start_service()

    def as_actor(self, *args: object, **kwargs: object) -> Pending[Service]:
        """Return a coroutine that starts one replica, an actor mesh of `procs` ranks; see `as_service`."""
        if self._options.num_replicas != 1:
            raise ValueError(f"as_actor needs num_replicas = 1, got {self._options.num_replicas}: use as_service")
        return self.as_service(*args, **kwargs)


class ForgeActor:
    """Base class of every component.

    Subclasses take their settings in `__init__`, which must be cheap and whose arguments must be picklable. Heavy work
    belongs in `setup`, which runs in the component's process before it serves. Methods marked by Monarch's own
    decorators, `endpoint` and `concurrent_endpoint` of `monarch.actor`, are endpoints as well.
    """

    context: ActorContext = ActorContext("local")
    constructor_checks = False  # whether this class's constructor runs in the controller as well, to check arguments
    vital = True  # whether the run ends when no replica of it is left

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A class written for Monarch keeps its decorators: each of its endpoints becomes one of ours.
        for name, value in [*vars(cls).items()]:
            if isinstance(value, EndpointProperty):
                method, has_port = method_of(value)
                if has_port:
                    raise TypeError(
                        f"{cls.__name__}.{name} has explicit_response_port, which is not supported: return the value "
                        "instead"
                    )
                setattr(cls, name, endpoint(method))

    if not TYPE_CHECKING:  # a type checker would take every attribute for one that exists

        def __getattr__(self, name: str) -> Any:
            cls = type(self)
            # A property that raised AttributeError leads here: raise its error again, not a misleading one.
            if hasattr(cls, name):
                return object.__getattribute__(self, name)
            # An attribute that only `setup` assigns is missing because nothing called `setup` yet: the error says so.
            code = getattr(cls.setup, "__code__", None)  # none of a callable object
            hint = ": call setup() first, or start it with as_actor" if code and name in code.co_names else ""
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    @classmethod
    def options(cls, config: Options | None = None, **options: object) -> Launcher:
        """Return a launcher of this component with a placement: `config`, keywords (fields of `Options`), or both.

        A keyword replaces the value that `config` has.
        """
        return Launcher(cls, Options(**{**(config or {}), **options}))

    @classmethod
    def place(cls, options: Options, kwargs: Kwargs) -> tuple[Options, Kwargs]:
        """Return the placement and the constructor arguments to use; called in the controller before anything starts.

        A component overrides it to adjust the two to each other, or to raise ValueError if they do not fit.
        """
        return options, kwargs

    @classmethod
    def started(cls, service: Service, kwargs: Mapping[str, object]) -> None:
        """Prepare the controller for a new service; called there once all replicas of the service are ready.

        Args:
            kwargs: the keyword arguments of the component's constructor.
        """

    @classmethod
    def as_service(cls, *args: object, **kwargs: object) -> Pending[Service]:
        """Return a coroutine that starts one replica with default options, see `Launcher.as_service`."""
        return cls.options().as_service(*args, **kwargs)

    @classmethod
    def as_actor(cls, *args: object, **kwargs: object) -> Pending[Service]:
        """Return a coroutine that starts an actor with default options, see `Launcher.as_actor`."""
        return cls.options().as_actor(*args, **kwargs)

    @classmethod
    async def shutdown(cls, actor: Service) -> None:
        """Stop a service or actor of this component, as `await actor.shutdown()` does."""
        await actor.stop()

    @classmethod
    async def as_local(cls, *args: object, **kwargs: object) -> Local:
        """Start an instance in this process, called by the same verbs: for state that belongs to the controller.

        `forge.runtime.controller.shutdown` runs the instance's `teardown`.
        """
        component = cls(*args, **kwargs)
        add_local(component)
        if (prepared := component.setup()) is not None:
            await prepared
        return Local(snake_case(cls.__name__), component, cls.endpoints())

    @classmethod
    def endpoints(cls) -> dict[str, bool]:
        """Return the names of the `@endpoint` methods, each with its `catch_up`, e.g. {"update_weights": True}.

        Raises:
            TypeError: an endpoint has the name of an attribute that every service has, such as `stop`.
        """
        catch_up = {
            name: method.__forge_catch_up__
            for name, method in inspect.getmembers(cls)
            if getattr(method, "__forge_endpoint__", False) and name not in OWN_CALLS
        }
        for name in catch_up:
            if hasattr(Service, name):
                raise TypeError(
                    f"{cls.__name__}.{name} cannot be an endpoint, because services have an attribute of that name: "
                    "rename it"
                )
        return catch_up

    def setup(self) -> Pending[None] | None:
        """Prepare to serve; called once in the component's process, before it serves. May be async."""

    def on_respawn(self) -> Pending[None] | None:
        """Restore the state of the lost process; called in its replacement after `setup`, before it serves.

        May be async. It should raise `Unrecoverable` if the state is lost: the run then ends with that error.
        """

    def teardown(self) -> Pending[None] | None:
        """Release the resources that `setup` acquired; called once at shutdown. May be async."""
