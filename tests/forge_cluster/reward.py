"""The reward of tiny.yaml."""


class SharedLetters:
    """The share of a response's characters that are letters of the answer: hardly a group is without a signal, so
    every step changes the weights."""

    def __call__(self, prompt: str, response: str, target: str) -> float:
        return sum(letter in target for letter in response) / max(len(response), 1)
