"""forge: reinforcement-learning post-training of language models in PyTorch.

Importing this package imports nothing heavy; each part is imported where it is used (`forge.losses`,
`forge.actors`, `forge.controller`, ...).
"""

__version__ = "0.1.0"
