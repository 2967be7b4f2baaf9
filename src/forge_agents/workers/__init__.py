"""Programs that run in another Python, that of a collection of environments, and import nothing of forge."""
