"""Inspection of runs: what one would need, what it did, and where two computations of it part."""
