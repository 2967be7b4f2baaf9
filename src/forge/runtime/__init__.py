"""What a run runs on: actors and services, machines and their processes, stored weights. Knows nothing of learning."""
