"""Environments of other libraries, each in a module of its own that needs that library: `gymnasium`, `reasoning_gym`,
`textarena`."""
