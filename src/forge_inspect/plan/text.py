"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from .components import ComponentPlan, Plan

GB = 1e9


def plan_lines(plan: Plan, dollars_per_hour: float | None = None) -> Iterator[str]:
    """The lines of a plan, with the cost of 1,000 steps where the price of a GPU's hour is given."""
    device = plan.machines.device
    machines = "CPU" if device.type == "cpu" else f"{plan.machines.count} x {device.name} ({device.memory / GB:.0f} GB)"
    yield f"{plan.model}: {plan.elements:,} parameters, on {machines}"
    yield ""
    width = max(10, *(len(component.name) for component in plan.components))
    for component in plan.components:
        yield from _component(component, width)
    if plan.seconds:
        yield ""
        phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in plan.seconds.items())
        yield f"a step: {plan.step_seconds:.3g} s ({phases}), by a roofline of stated shares; docs/plan.md says which"
        if dollars_per_hour is not None:
            cost = 1000 * plan.step_seconds / 3600 * plan.devices * dollars_per_hour
            yield f"1,000 steps: {1000 * plan.step_seconds / 3600:.3g} h on {plan.devices} GPUs, {cost:,.0f} dollars"
    yield from (f"note: {note}" for note in plan.notes)


def _component(component: ComponentPlan, width: int) -> Iterator[str]:
    # Host memory is what the machine has: only devices have a verdict.
    verdict = ""
    if component.with_gpus:
        verdict = "fits" if component.fits else f"DOES NOT FIT {readable(component.bound)}"
    processes = f"{component.processes} process{'es' if component.processes > 1 else ''}"
    yield f"{component.name:<{width}} {readable(component.total):>8} in each of {processes}  {verdict}".rstrip()
    parts = ", ".join(f"{name} {readable(size)}" for name, size in component.parts.items())
    yield f"{'':<{width}} {parts}"
    if component.moment:
        yield f"{'':<{width}} the most at: {component.moment}"
    if component.limits:
        yield f"{'':<{width}} {component.limits}"


def readable(size: float) -> str:
    """Return a number of bytes in GB, or in MB below a tenth of one."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
