"""What Monarch starts as a new process: its own main program, with its log in a private place."""

from . import _monarch  # noqa: F401  (loads Monarch's library)

if __name__ == "__main__":
    from monarch._src.actor.bootstrap_main import invoke_main

    invoke_main()
