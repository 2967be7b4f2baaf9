"""The runtime: actors and services, machines and their processes, stored weights. It knows nothing of learning."""
