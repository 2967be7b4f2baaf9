"""Prompts, conversations, preferences, tasks, a character tokenizer and rule rewards: plain Python, no torch."""
