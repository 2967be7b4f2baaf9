"""The verifiable reward for mathematics: is the final answer of a response the target?"""

import re
from dataclasses import dataclass

from ...data.thoughts import without_thoughts
from .comparison import load_comparison

_HASHES = re.compile(r"####[ \t]*([^\n]+)")  # GSM8K's mark of an answer
# What precedes a stated answer.
_PHRASE = re.compile(
    # "the answer is", "the best option would be:"
    r"(?:\b(?:answer|(?:correct|right|best)\s(?:option|choice))\b[\s*_]*(?:is|was|(?:would|should|must)\sbe|:|=)"
    # a line that starts with "A:"; Chinese for "the answer is" and "so choose"
    r"|^[^\S\n]*A:|答案[是为：:]+|故选[：:]?)"
    # emphasis before the answer, which must be in the same line
    r"[\s*_:]*(?=[^\n])",
    re.IGNORECASE | re.MULTILINE,
)
# "Option (B) is correct"; the group is the letter.
_CHOSEN = re.compile(r"\b(?:[Oo]ption|[Cc]hoice)\s[*_(]{0,4}([A-J])[*_)]{0,4}\sis\s(?:the\s)?(?:correct|right|best)\b")
_CJK = r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"  # kana, ideographs, hangul, which need no space after a mark
# Where a stated answer ends: punctuation, a bracket, or a word that starts an explanation.
_PHRASE_END = re.compile(
    r"[.!](?:\s|$)|[,;](?=\s)|\s\(|\s(?:because|since|as|so|which|when|if)\s"
    # full stops of Chinese, Hindi, Urdu, Armenian, Ethiopic, Khmer and Burmese; others before the next word
    rf"|[。｡！।॥۔։።។။]|．(?!\d)|[.!,;，；]\s?(?={_CJK})|(?<=\S)[（(](?={_CJK})",
    re.IGNORECASE,
)
# After an answer: words that offer another one or take this one back.
_INSTEAD = re.compile(
    r"[^\w\n]{0,8}(?:(?:or|maybe|perhaps|possibly|alternatively|not|(?:no,?\s)?wait|(?:is|was)\s(?:wrong|incorrect|false|not))\b"
    # Chinese for "or", "also", "perhaps", "is not", "wrong"
    r"|或|还是|也|可能|不[是对]|错)",
    re.IGNORECASE,
)
# Before an answer.
_TAKEN_BACK = re.compile(r"(?:\b(?:not|isn't|cannot be|can't be)|不是|并非)[\s$*:(\[\\]*\Z", re.IGNORECASE)
# At the end of a stated answer: the words above, or a second number or letter after "and", "but" or a comma.
_ANOTHER = re.compile(
    rf"{_INSTEAD.pattern}|[^\w\n]{{0,8}}(?:(?:and|but)\s|[但而和])[^\w\n]{{0,4}}(?:\d|[A-J]\b)|[,;]\s[-$\\(]{{0,3}}(?:\d|[A-J]\b)",
    re.IGNORECASE,
)
_FIGURE = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"  # digits, perhaps with commas or decimals
_NUMBERS = re.compile(
    # not within a word: a mixed number (1 1/2), or a figure, perhaps with an exponent or a denominator
    rf"(?<![\w.])-?\$?(?:\d+ \d+/\d+(?!\d)|(?:{_FIGURE})(?:e[-+]?\d+|/\d+(?:\.\d+)?)?)"
    # and its unit: a percent sign or a power of thousand
    r"(?:\\?%|\s(?:thousand|million|billion)\b)?"
    # a fraction in LaTeX
    r"|-?\\[dt]?frac\{-?\d+\}\{\d+\}"
    # a figure directly after a letter or a dot, such as x=.5 or n5
    rf"|(?<=[\w.])(?<!\d)(?<!\d[.,])(?:{_FIGURE})",
    re.IGNORECASE,
)
# Text directly before or after a number that makes it only a part of the answer: a root, a power, an index, the second
# number of a ratio, a calculation or a pair, a bound, the sign of two values.
_PART_BEFORE = re.compile(
    r"(?:[√^_]|\^\{|\d:|\\frac\{[^{}]{0,40}\}\{|\b(?:not|cannot be|(?:less|more|greater) than)\s|不是\s?|\s?[≠≥≤]\s?"
    r"|<\s?|(?:\A|\s)[\w^()+*]{0,20}\s?>\s|(?:\A|\s)[\w^()+*]{1,20}>|\\(?:neq?|geq?|leq?|pm|mp|lt|gt)\s?|[±∓]\s?|\d\s?[+*×÷]\s?|\d\s-\s)\Z"
)
_PAIR_BEFORE = re.compile(r"[(\[][^()\[\]]{0,40},\s?\Z")
_PART_AFTER = re.compile(r"[π√^]|i(?!\w)|\s?\\(?:pi|sqrt|cdot|times)(?![A-Za-z])")
_LAST_FORMULA = re.compile(r"\$([^$\n]{1,200})\$[^\w$]{0,3}\Z")
_SIGN = re.compile(r"(?<![\w)\]])[−–](?=\.?\d)")  # a minus, not the dash of a range
_OPEN = re.compile(r"\\f?boxed\s*\{")
# The start of a box, or a brace.
_BOX = re.compile(rf"{_OPEN.pattern}|(?<!\\)[{{}}]")
_LABELLED = re.compile(r"^[^\w\n]{0,4}[A-J][).:]", re.MULTILINE)  # the line of a choice
_LONGEST = 200_000  # characters at the end of a response that are read
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"  # superscripts


def _find_boxes(text: str) -> list[tuple[int, int, int]]:
    """Return (start, start of the content, end of the content) of each closed `\\boxed{...}` in a text, in the order of
    their starts. Braces may nest.

    >>> _find_boxes(r"so \\boxed{42}.")
    [(3, 10, 12)]
    """
    boxes: list[tuple[int, int, int]] = []
    if (first := _OPEN.search(text)) is None:
        return boxes

    open_braces: list[tuple[int, int] | None] = []  # the open braces: the span of a box's start, None for another brace
    for brace in _BOX.finditer(text, first.start()):
        if brace[0] != "}":
            open_braces.append(None if brace[0] == "{" else brace.span())
        elif open_braces and (span := open_braces.pop()):
            boxes.append((*span, brace.start()))
    return sorted(boxes)


def find_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}`; None if there is none.

    If the text offers another answer next to it, as in `\boxed{4} or \boxed{5}`, or takes it back, the result is a text
    with both, which equals no answer.

    >>> find_boxed(r"So it is \boxed{42}.")
    '42'
    """
    if not (boxes := _find_boxes(text)):
        return None

    box_start, start, end = boxes[-1]

    # Directly after another box, with at most "or" or "and" between them.
    if len(boxes) > 1 and boxes[-2][2] < box_start:
        text_between = text[boxes[-2][2] + 1 : box_start]
        if len(text_between) <= 20 and re.fullmatch(r"[^\w\n]*(?:(?:or|and)\b|或者?|[和及、])?[^\w\n]*", text_between):
            return text[boxes[-2][0] : end + 1]

    if _TAKEN_BACK.search(text[max(0, box_start - 30) : box_start]):
        return f"not {text[start:end]}"
    if _INSTEAD.match(text[end + 1 : end + 100].partition("\n")[0]):
        return text[box_start : end + 100].partition("\n")[0]
    return text[start:end].strip()


def final_answer(response: str) -> str | None:
    """Return the final answer of a response, or None if it has none.

    It is the first of these that there is: the last `\\boxed{...}`, `<answer>...</answer>` or `#### ...`; what follows
    "answer is" or "answer:"; a last line such as "B) 12" if no other line has that form; the last number. Thoughts do
    not count.

    >>> final_answer("so the answer is 42.")
    '42'
    """
    response = _SIGN.sub("-", without_thoughts(response[-_LONGEST:]))
    if (in_box := find_boxed(response)) is not None:
        return in_box

    # Without a regular expression, which would take quadratic time over tags that are never closed.
    text_before, closing, _ = response.rpartition("</answer>")
    _, opening, tagged = text_before.rpartition("<answer>")
    if opening and closing:
        return _find_stated(tagged) or tagged.strip()

    if hashes := _HASHES.findall(response):
        return hashes[-1].strip()
    if (stated := _find_stated(response)) is not None:
        return stated
    if chosen_letters := _CHOSEN.findall(response):
        return chosen_letters[-1]

    text_before, _, last_line = response.rpartition("\n")
    parse_number = load_comparison().parse_number
    if load_comparison().split_choice(last_line)[0] and not _LABELLED.search(text_before):
        return last_line.strip()
    if formula := _LAST_FORMULA.search(response):
        return formula[1].strip()

    # The last number, unless the response as a whole is another number, such as "2 dozen".
    last = _last_number(response)
    whole = parse_number(response)
    if whole is None or (last is not None and parse_number(last) == whole):
        return last
    return response.strip()


def _find_stated(text: str, *, whole_line: bool = False) -> str | None:
    """Return what a text states after its last "answer is" or the like: up to the end of the phrase, or of the line if
    another answer follows there. None: nothing is stated.

    Args:
        whole_line: return the text up to the end of the line in any case.

    >>> _find_stated("The answer is 4, as shown above.")
    '4'
    """
    if not (openings := list(_PHRASE.finditer(text))):
        return None

    phrase = text[openings[-1].end() :].partition("\n")[0]
    if whole_line:
        return phrase.strip()

    # Not within a formula, after an odd number of dollars; if the whole phrase has an odd number, they are currency.
    is_currency = phrase.count("$") % 2 == 1
    ends = (end.start() for end in _PHRASE_END.finditer(phrase))
    phrase_end = next((end for end in ends if is_currency or phrase[:end].count("$") % 2 == 0), None)
    if phrase_end is None or _ANOTHER.match(phrase[phrase_end : phrase_end + 100]):
        return phrase.strip()
    return phrase[:phrase_end].strip()


def _last_number(text: str) -> str | None:
    """Return the last number of a text; None if there is none, or it is only one of the numbers or a part of the
    expression that answers, as in "4 or 5" and "2^10".

    >>> _last_number("There are 3 boxes of 14 apples")
    '14'
    >>> _last_number("It is 4 or 5")
    """
    numbers = list(_NUMBERS.finditer(text))

    # A number in a box that is not closed may be cut off, too.
    if not numbers or _OPEN.search(text):
        return None

    # A part of an expression, or of a pair such as (1, 2).
    last = numbers[-1]
    text_before, text_after = text[max(0, last.start() - 60) : last.start()], text[last.end() : last.end() + 10]
    is_part = _PART_BEFORE.search(text_before) or _PART_AFTER.match(text_after) or text_after[:1] in tuple(_RAISED)
    if is_part or (_PAIR_BEFORE.search(text_before) and text_after[:1] in (")", "]")):
        return None

    # One of several numbers, such as "4 or 5".
    between = text[numbers[-2].end() : last.start()] if len(numbers) > 1 else ""
    has_several = re.fullmatch(r"\s?and\s", between) or (len(between) <= 30 and re.search(r"\bor\b", between))
    return None if has_several else last[0]


def _answers_after_box(response: str) -> list[str]:
    """Return the answers that a response states after its last box, which may contradict it: at most one after `####`
    and one after "answer is". Without a box there are none."""
    response = without_thoughts(response[-_LONGEST:])
    boxes = _find_boxes(response)
    after = response[boxes[-1][2] :] if boxes else ""
    hashes, stated = _HASHES.findall(after), _find_stated(after)
    return [*hashes[-1:], *([] if stated is None else [stated])]


@dataclass(frozen=True, slots=True)
class MathReward:
    """The reward `correct` if the response's final answer equals the target, else `incorrect`.

    The target may be a bare answer, LaTeX, or a worked solution that ends in `#### answer` or `\\boxed{answer}`;
    thoughts do not count. Answers are compared as text, as numbers and then symbolically (see `comparison.are_equal`).
    An answer that is ambiguous, unreadable or takes too long to compare is incorrect, never an exception. A response is
    unscored, None, if the target itself takes too long to compare.

    Args:
        tolerance: how far two numbers may lie apart: relative to targets between -1 and 1, absolute beyond.
        correct: the reward of a right answer.
        incorrect: the reward of a wrong, missing or unreadable answer.
    """

    tolerance: float = 1e-6
    correct: float = 1.0
    incorrect: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be 0 or positive and finite, got {self.tolerance}")

    def __call__(self, prompt: str, response: str, target: str) -> float | None:
        if (right := self.is_right(response, target, prompt)) is None:
            return None
        return self.correct if right else self.incorrect

    def is_right(self, response: str, target: str, prompt: object = "") -> bool | None:
        """Return whether a response has the right answer; None if the target takes too long to compare.

        Args:
            prompt: of the response, at whose end the chat template may have opened a thought.
        """
        compare = load_comparison()
        split_choice, are_equal, parse_number = compare.split_choice, compare.are_equal, compare.parse_number
        response = without_thoughts(response[-_LONGEST:], prompt)

        # The answer that the target holds.
        target = without_thoughts(target)
        if (expected := find_boxed(target)) is None:
            hashes = _HASHES.findall(target)
            expected = (hashes[-1] if hashes else target).strip()

        # Compare the response as a whole first: reading an answer from "x + 2" would give 2.
        response = _SIGN.sub("-", response)
        label, letter = split_choice(response)[0], split_choice(expected)[0]
        if label and letter:
            return label == letter

        stated = None if find_boxed(response) else _find_stated(response, whole_line=True)
        if compare.same_text(response, expected) or compare.same_text(stated or "", expected):
            return True

        # If the target is a letter and the box holds none, the box is a step of the reasoning.
        answer = final_answer(response)
        later_answers = _answers_after_box(response)
        if later_answers and letter and not split_choice(answer or "")[0]:
            answer = later_answers[-1]

        # An answer after the box that is another letter or number contradicts it.
        if answer is None or (letter and any(split_choice(later)[0] not in ("", letter) for later in later_answers)):
            return False

        is_equal = are_equal(answer, expected, self.tolerance)
        expected_number = parse_number(expected)
        if is_equal and expected_number is not None:
            later_numbers = [number[0] for later in later_answers if (number := parse_number(later)) is not None]
            return all(are_equal(str(number), str(expected_number[0]), self.tolerance) for number in later_numbers)

        return is_equal
