"""The tokenizer and the scripted policies of the tests of episodes."""

from tests.envs.conftest import bpe, scripted  # noqa: F401
