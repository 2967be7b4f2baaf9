"""Main program of the processes that Monarch starts: applies forge's settings, then runs Monarch's own main program."""

from . import _monarch  # noqa: F401  (loads Monarch's library)

if __name__ == "__main__":
    from ..monarch_names import invoke_main

    invoke_main()
