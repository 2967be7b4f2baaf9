"""A reward for the format `<think>reasoning</think> answer`, blind to whether the answer is right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingReward:
    """Scores the shape of a response.

    - `full_reward`: one opening tag, one closing tag after it, text between them, and text after them.
    - `partial_reward`: at least one of the two tags, but not that shape (unclosed, repeated, empty, no answer).
    - 0: no tag at all.

    Some chat templates open the block themselves, at the end of the prompt; that tag counts as the response's own.

    Args:
        partial_reward: at most `full_reward`; ValueError otherwise.
        full_reward: the reward of the whole shape.
        tag: the name inside the angle brackets; ValueError if it is empty.
    """

    partial_reward: float = 0.2
    full_reward: float = 1.0
    tag: str = "think"

    def __post_init__(self) -> None:
        if not self.tag.strip():
            raise ValueError("tag is empty: name the tag without its brackets, such as 'think'")
        if self.partial_reward > self.full_reward:
            raise ValueError(f"partial_reward {self.partial_reward} is above full_reward {self.full_reward}")

    def __call__(self, prompt: str, response: str, target: str = "") -> float:
        opening, closing = f"<{self.tag}>", f"</{self.tag}>"
        if prompt.rstrip().endswith(opening):
            # The policy did not write this tag: by itself it earns nothing.
            if closing not in response and opening not in response:
                return 0.0
            response = opening + response
        if opening not in response and closing not in response:
            return 0.0
        head, _, rest = response.partition(opening)
        thought, _, answer = rest.partition(closing)
        whole = (
            response.count(opening) == 1
            and response.count(closing) == 1
            and not head.strip()
            and bool(thought.strip())
            and bool(answer.strip())
        )
        return self.full_reward if whole else self.partial_reward
