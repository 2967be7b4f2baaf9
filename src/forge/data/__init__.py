"""Datasets, procedural tasks, prompt formats, a character tokenizer and rule rewards: plain Python, no torch."""
