"""The gateway's address for agents on other machines: HTTPS with a certificate of the user's."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

from forge.config import ConfigError
from forge.config.sections import Section


class AddressConfig(Section):
    """Where agents on other machines reach the gateway, by HTTPS. Those on this machine use 127.0.0.1 as before."""

    listen: str
    """The host and port to listen at, as 0.0.0.0:8443."""
    certificate: str
    """A PEM file with the certificate, and those that it is signed with."""
    private_key: str
    """A PEM file with its key."""
    url: str | None = None
    """By which agents reach it, where that is another name; null: https:// and `listen`."""

    def _check(self) -> None:
        path = "episode.agent.address"
        _, port = self.endpoint()
        if port is None:
            raise ConfigError(f"{path}.listen must be a host and a port, as 0.0.0.0:8443, got {self.listen!r}")
        parts = urlsplit(self.reached_at)
        if parts.scheme != "https" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ConfigError(f"{path}.url must be like https://gateway.example.org:8443, got {self.url!r}")
        self.context()

    def endpoint(self) -> tuple[str, int | None]:
        """The host and the port to listen at; None for a port that is none."""
        parts = urlsplit(f"//{self.listen}")
        try:
            return parts.hostname or "", parts.port
        except ValueError:
            return parts.hostname or "", None

    @property
    def reached_at(self) -> str:
        """The URL without `/v1`."""
        return (self.url or f"https://{self.listen}").rstrip("/")

    @property
    def name(self) -> str:
        """The host by which requests must name the gateway."""
        return urlsplit(self.reached_at).hostname or ""

    def context(self) -> ssl.SSLContext:
        """TLS 1.2 or newer with the certificate. ConfigError: the files are absent, or no pair."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # An empty password: OpenSSL would ask for one at the terminal, and a job has none.
        try:
            context.load_cert_chain(self.certificate, self.private_key, password="")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"episode.agent.address: {self.certificate} and {self.private_key} are no certificate with its key, in "
                f"PEM and without a password: {error}"
            ) from None
        return context
