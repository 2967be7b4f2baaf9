"""Whether the services of a run have room: on the hosts that are given, or on this machine. Before anything starts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

from ..runtime.cluster.credentials import SECRET, Credentials, NoSecret, read_secret
from ..runtime.cluster.doctor import host_sees
from ..runtime.cluster.inventory import VISIBLE, visible_gpus
from ..runtime.cluster.pool import parse_addresses, survey
from ..runtime.cluster.rooms import NoHostRoom, check_fit
from ..runtime.cluster.wire import split
from ..runtime.controller import Options
from ..runtime.controller.placement import demand_of
from ..system.addresses import join_address


def check_hosts(cfg: Any) -> None:
    """Reject services that do not fit on the hosts of the run, or on this machine.

    Raises:
        ValueError: lists the room of each host.
    """
    if cfg.cluster.configured_hosts is None:
        return check_gpus(cfg)
    if (secret := read_secret()) is None:
        raise NoSecret(f"cluster.hosts is set and {SECRET} is not: set it to the secret of their workers")
    demands, shares = [], set()
    for name in type(cfg.services).model_fields:
        if cfg.services[name] is None:
            continue
        options = Options(**cfg.placement(name))
        if options.host is not None and join_address(*split(options.host)) not in parse_addresses(
            cfg.cluster.configured_hosts
        ):
            known = ", ".join(parse_addresses(cfg.cluster.configured_hosts))
            raise ValueError(f"services.{name}.host is {options.host}, which is none of the hosts: {known}")
        if options.share in shares or (options.hosts is None and not options.with_gpus):
            continue
        shares |= {options.share} - {None}
        count = 1 if options.share else -(-options.num_replicas // options.per_process)
        demands += [demand_of(f"services.{name}, replica {index}", options) for index in range(count)]
    with TemporaryDirectory() as folder:
        credentials = Credentials.make(secret, Path(folder))
        failures: list[str] = []
        try:
            found, failures = asyncio.run(survey(cfg.cluster.configured_hosts, credentials))
            check_fit(found, demands)
        except NoHostRoom as error:
            raise ValueError("; ".join([str(error), *failures])) from None


def check_shared(cfg: Any, model: str) -> None:
    """Reject hosts that do not see the model, or the folder of all runs where trainers on them write checkpoints.

    Raises:
        ValueError: names the host and the folder.
    """
    placed = {name: cfg.placement(name) for name in type(cfg.services).model_fields if cfg.services[name] is not None}
    there = {name for name, one in placed.items() if one["host"] or one["hosts"] is not None or one["with_gpus"]}
    if cfg.cluster.configured_hosts is None or not there:
        return
    root, secret = Path(cfg.run.root).absolute(), read_secret()
    assert secret is not None  # see check_hosts
    root.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=root, prefix=".forge-", suffix=".tmp") as mark, TemporaryDirectory() as folder:
        mark.write(token := token_hex(8))
        mark.flush()
        files = {Path(model) / "config.json": (Path(model) / "config.json").read_text()}
        if there & {"trainer", "critic"}:
            files[Path(mark.name)] = token
        credentials = Credentials.make(secret, Path(folder))
        for host in parse_addresses(cfg.cluster.configured_hosts):
            for path, content in files.items():
                seen = asyncio.run(host_sees(host, credentials, path.absolute(), content))
                if not seen:
                    raise ValueError(
                        f"host {host} does not see {path.parent}: share it between the hosts, at the same path"
                    )


def gpus_needed(cfg: Any) -> dict[str, int]:
    """How many GPUs each service of a configuration takes. Services that share processes share their GPUs, which count
    for the first of them. Hosts are simulated on this machine and add none."""
    needed: dict[str, int] = {}
    shares: set[str] = set()
    for name in type(cfg.services).model_fields:
        if cfg.services[name] is None or not (placed := cfg.placement(name))["with_gpus"]:
            continue
        if (share := placed["share"]) is None:
            needed[name] = placed["procs"] * placed["num_replicas"] * placed["gpus_per_proc"]
        elif share not in shares:
            shares.add(share)
            needed[name] = placed["share_procs"] * placed["gpus_per_proc"]
    return needed


def check_gpus(cfg: Any) -> None:
    """Reject services that take more GPUs than this machine has.

    Raises:
        ValueError: names the services and the settings to change.
    """
    needed = gpus_needed(cfg)
    if not needed or (total := sum(needed.values())) <= (there := len(visible_gpus())):
        return
    each = ", ".join(f"services.{name} {count}" for name, count in needed.items())
    limit = next((f" ({name}={os.environ[name]})" for name in VISIBLE if os.environ.get(name)), "")
    colocated = "set colocated to true, " if len(needed) > 1 and "colocated" in type(cfg).model_fields else ""
    raise ValueError(
        f"{total} GPUs are needed ({each}) and this machine has {there}{limit}: lower procs or num_replicas, "
        f"{colocated}or set with_gpus to false ({' '.join(f'--services.{name}.with_gpus false' for name in needed)})"
    )
