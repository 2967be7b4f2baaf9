"""`python -m forge`, the same as `forge`."""

from .cli import main

main()
