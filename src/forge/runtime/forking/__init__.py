"""Processes that are forked from one that has imported its libraries: they start in milliseconds.

Monarch starts a launcher (`forklauncher`), which asks the server (`forkserver`) for a fork and mirrors its signals and
its end. Without a fork the launcher becomes the process itself.
"""
