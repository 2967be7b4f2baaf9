"""Train and generate with any causal language model of transformers: its own modules, asked by a probe what they can."""
