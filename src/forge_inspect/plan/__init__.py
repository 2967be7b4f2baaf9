"""Plans of configurations before they start: memory of each process, seconds of each step."""
