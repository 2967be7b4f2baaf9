from forge.recipes.rl_config import AgentConfig

__all__ = ["AgentConfig"]
