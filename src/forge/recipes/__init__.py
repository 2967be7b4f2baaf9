"""Recipes: their configuration, and what they share."""
