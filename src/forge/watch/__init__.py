"""`forge watch`: a page over the folders that runs leave."""

from .server import Watch

__all__ = ["Watch"]
