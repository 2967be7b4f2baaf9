"""Modules of the sandbox's processes. They are sent as text and import nothing else of forge_sandbox."""
