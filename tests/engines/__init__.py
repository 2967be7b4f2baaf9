"""Tests of the generation engines."""
