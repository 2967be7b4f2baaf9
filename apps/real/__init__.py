"""Reinforcement learning of a real pretrained model on a CPU: three tasks that a rule can check."""
