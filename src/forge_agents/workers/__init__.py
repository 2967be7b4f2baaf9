"""Programs that run in the Python of a collection of environments, and import nothing of forge."""
