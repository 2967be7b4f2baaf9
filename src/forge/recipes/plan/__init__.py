"""What a configuration needs before it starts: memory of each process, seconds of each step."""
