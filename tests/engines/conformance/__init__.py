"""What every engine does, held to plain transformers."""
