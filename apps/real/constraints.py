"""Instructions that a rule can check, in the manner of IFEval (Zhou et al. 2023): length, letter case, a word to use,
an end. A question has several; a person reads them as one request."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from random import Random

from apps.toys.tasks import ProceduralTask, Row

TOPICS = ["the sea", "winter", "a small village", "music", "a long journey", "breakfast", "an old friend", "the moon"]
TOPICS += ["a garden", "rain", "a train", "the market", "a dog", "mountains", "a library", "the harbour", "bread"]
WORDS = ["light", "quiet", "stone", "river", "morning", "never", "green", "window", "always", "paper", "cold", "home"]
ENDS = ["!", "?", "...", "The end."]


class Constraints(ProceduralTask):
    """`difficulty` is the number of constraints, at most four."""

    name = "constraints"

    def draw(self, rng: Random, low: int, high: int) -> Row:
        count = rng.randint(low, high)
        rules: dict[str, object] = {
            "most_words": rng.randint(6, 14),
            "lower": True,
            "word": rng.choice(WORDS),
            "end": rng.choice(ENDS),
        }
        texts = {
            "most_words": f"Use at most {rules['most_words']} words.",
            "lower": "Use no capital letters.",
            "word": f'Use the word "{rules["word"]}".',
            "end": f'End with "{rules["end"]}"',
        }
        if rules["end"] == "The end.":  # it has a capital letter
            del rules["lower"]
        chosen = rng.sample(list(rules), min(len(rules), count))
        question = f"Write one sentence about {rng.choice(TOPICS)}. {' '.join(texts[name] for name in chosen)}"
        return Row(question, json.dumps({name: rules[name] for name in chosen}))

    def size(self, low: int, high: int) -> int:
        return len(TOPICS) * 9 * len(WORDS) * len(ENDS) * 64


@dataclass(frozen=True, slots=True)
class FollowsConstraints:
    """The share of a target's constraints that a response meets; 1 means all. A response of fewer than three words, or
    in which one word is half of all, meets none: it is not a sentence."""

    def __call__(self, prompt: str, response: str, target: str) -> float:
        rules, text = json.loads(target), response.strip()
        words = re.findall(r"[\w']+", text.lower())
        if len(words) < 3 or 2 * max(Counter(words).values()) >= len(words):
            return 0.0
        met = {
            "most_words": lambda most: len(words) <= most,
            "lower": lambda _: text == text.lower(),
            "word": lambda word: word in words,
            "end": text.endswith,
        }
        return sum(met[name](value) for name, value in rules.items()) / len(rules)
