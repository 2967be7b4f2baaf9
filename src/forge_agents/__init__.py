"""Agents that people ship, trained as they are: a gateway that records every token that they make the policy sample."""
