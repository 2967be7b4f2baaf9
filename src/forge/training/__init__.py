"""Training: a policy, its optimiser, its parallelism and its checkpoints. Imports torch and transformers."""
