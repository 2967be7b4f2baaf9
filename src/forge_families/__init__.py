"""Train and run any causal language model of transformers, by its modules; a probe asks what they compute."""
