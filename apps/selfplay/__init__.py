"""Several policies in one run: self-play, and games against one another."""
