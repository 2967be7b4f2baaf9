"""The cause of a difference between engine and trainer: one recorded batch, computed in several ways."""
