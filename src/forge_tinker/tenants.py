"""Tenants: who may call the server, by API key, and which rows of the journal are theirs."""

import hashlib
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from forge.config.sections import Section
from forge_http.web import web

from .journal import Journal

FILES = "/api/v1/files/"  # paths of links to files, which have a signature instead of a key


class Tenant(Section):
    """Who may call the server by one key, and how much they may have."""

    project: str
    """Tenants of one project share their models, checkpoints and sessions."""
    max_adapters: int | None = None
    """Models at once."""
    max_bytes: int | None = None
    """Of all checkpoints."""
    max_requests: int | None = None
    """Requests that are open at once."""


class TinkerSettings(Section):
    """The file of `forge tinker --config`."""

    tenants: dict[str, Tenant] = Field(default_factory=dict)
    """By API key, which begins with `tml-`; without any, every key is a separate tenant."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine that samples, as in the section `generator` of a run."""


class NotFound(ValueError):
    """The tenant has no such session, model, sampler, checkpoint or request."""


class Tenants:
    """The tenants of a server.

    Args:
        by_key: by API key; empty: each key is a separate tenant.
    """

    def __init__(self, by_key: Mapping[str, Tenant], journal: Journal) -> None:
        self.by_key, self._journal = by_key, journal

    def check_key(self, request: web.Request) -> str:
        """Return "known" for a request with a key of the configuration, or for a file."""
        return "known" if request.path.startswith(FILES) or request.headers.get("X-API-Key", "") in self.by_key else ""

    def tenant_of(self, request: web.Request) -> Tenant:
        """Return the tenant of a request's API key."""
        key = request.headers.get("X-API-Key", "")
        if self.by_key:
            return self.by_key[key]
        # Only a digest of the key is kept: clients may send one of the hosted service.
        return Tenant(project=hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:12])

    def owner_of(self, request: web.Request) -> str:
        """Return the project of a request's tenant, which owns what the request makes."""
        return self.tenant_of(request).project

    def own_row(self, table: str, name: Any, request: web.Request) -> Any:
        """Return the row with this id of a table, if it is the caller's.

        Raises:
            NotFound: it is not, or there is none.
        """
        if (row := self._journal.find(table, id=name, owner=self.owner_of(request))) is None:
            raise NotFound(f"there is no {table.removesuffix('s')} {name!r}")
        return row
