"""Versioned weights between processes of one host."""

from .versions import VersionStore

__all__ = ["VersionStore"]
