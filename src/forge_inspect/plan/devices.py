"""Devices that a plan is for: their memory and their rates."""

from __future__ import annotations

import re
from dataclasses import dataclass

GB = 1e9
GIB = 2**30
# Driver, kernels and the buffers of collectives, which no allocator of torch counts.
CONTEXT = 1.5 * GB


@dataclass(frozen=True)
class Device:
    """One kind of device.

    memory: bytes. tflops: dense bfloat16. bandwidth: of its memory, in GB/s. link: to the other devices of its host, in
    GB/s. network: of its host to others, in GB/s for each device.
    """

    name: str
    memory: float
    tflops: float
    bandwidth: float
    link: float
    network: float
    type: str = "cuda"


# What torch says that they have; rates from data sheets; a network of 400 Gbit/s for each GPU of a host,
# 200 for older ones.
DEVICES = {
    device.name: device
    for device in (
        Device("A100-40", 39.4 * GIB, 312, 1555, 300, 25),
        Device("A100", 79.2 * GIB, 312, 2039, 300, 25),
        Device("H100", 79.2 * GIB, 989, 3350, 450, 50),
        Device("H200", 139.8 * GIB, 989, 4800, 450, 50),
        Device("B200", 178.4 * GIB, 2250, 7700, 900, 50),
        Device("L4", 22.0 * GIB, 121, 300, 32, 12),
        Device("L40S", 44.5 * GIB, 362, 864, 32, 25),
        Device("A10", 22.0 * GIB, 125, 600, 32, 12),
        Device("RTX4090", 23.5 * GIB, 165, 1008, 32, 12),
    )
}


@dataclass(frozen=True)
class Machines:
    """Devices of one kind; on a CPU `count` is 1."""

    device: Device
    count: int


def parse_machines(text: str, cpu: Device) -> Machines:
    """The devices of `8xH100`, `H100` or `cpu`.

    Raises:
        ValueError: an unknown device; names those that are known.
    """
    if text.lower() == "cpu":
        return Machines(cpu, 1)
    match = re.fullmatch(r"(?:(\d+)\s*[xX])?\s*([\w-]+)", text.strip())
    names = {name.lower(): device for name, device in DEVICES.items()}
    device = match and names.get(match[2].lower())
    if not match or not device or match[1] == "0":
        raise ValueError(
            f"--gpus {text!r}: write a number and a device, as 8xH100; known are {', '.join(DEVICES)}, cpu"
        )
    return Machines(device, int(match[1] or 1))
