"""The tokenizer and the scripted policies of the tests of episodes."""

from tests.forge_envs.core.conftest import bpe, scripted  # noqa: F401
