"""Judges of the quickstart's task that look at one thing each; none of them knows the answer.

The prompt is a word with ">" behind it, and the response should be that word spelt backwards.
"""


def right_length(prompt: str, response: str, target: str | None = None) -> float:
    """1 if the response is as long as the word."""
    return float(len(response) == len(prompt) - 1)


def first_letter(prompt: str, response: str, target: str | None = None) -> float:
    """Does it start with the letter that the word ends with?"""
    return float(response[:1] == prompt[-2:-1])


def last_letter(prompt: str, response: str, target: str | None = None) -> float:
    """Does it end with the letter that the word starts with?"""
    return float(response[-1:] == prompt[:1])


def same_letters(prompt: str, response: str, target: str | None = None) -> float:
    """1 if it has the letters of the word, each as often, in any order."""
    return float(sorted(response) == sorted(prompt[:-1]))


def known_letters(prompt: str, response: str, target: str | None = None) -> float:
    """The share of its letters that the word has."""
    return sum(letter in prompt[:-1] for letter in response) / max(1, len(response))


def whole(response: str) -> str | None:
    """The answer of a response for answer frequency: all of it."""
    return response or None
