"""Processes that are forked from one that has imported its libraries: they start in milliseconds."""
