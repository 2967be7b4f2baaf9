"""Wrong answers that look right, for preference data that needs no download."""

from __future__ import annotations

import string
from random import Random


def mistake(answer: str, rng: Random) -> str:
    """An answer with one slip in it: two neighbours swapped, one character changed, dropped or doubled.

    Never the answer itself, and never the same number written in another way. ValueError for an empty answer.
    """
    if not answer:
        raise ValueError("there is no mistake to make in an empty answer")
    slips = [_swapped, _changed, _dropped, _doubled]
    rng.shuffle(slips)
    # One of them can always be made: a changed character changes the word, and the number too.
    return next(wrong for slip in slips if (wrong := slip(answer, rng)) and not _same(wrong, answer))


def _same(one: str, other: str) -> bool:
    return one == other or (one.isdecimal() and other.isdecimal() and int(one) == int(other))


def _swapped(answer: str, rng: Random) -> str:
    places = [i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]]
    if not places:
        return answer
    at = rng.choice(places)
    return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]


def _changed(answer: str, rng: Random) -> str:
    at = rng.randrange(len(answer))
    alphabets = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
    alphabet = next((letters for letters in alphabets if answer[at] in letters), string.ascii_lowercase)
    return answer[:at] + rng.choice(alphabet.replace(answer[at], "")) + answer[at + 1 :]


def _dropped(answer: str, rng: Random) -> str:
    if len(answer) == 1:
        return answer
    at = rng.randrange(len(answer))
    return answer[:at] + answer[at + 1 :]


def _doubled(answer: str, rng: Random) -> str:
    at = rng.randrange(len(answer))
    return answer[: at + 1] + answer[at:]
