"""What outlives a process: versioned weights between the processes of one host, and journals of what was done."""

from .journal import Journal
from .versions import VersionStore

__all__ = ["Journal", "VersionStore"]
