"""The verifiable reward for mathematics: is the final answer of a response the target?"""

import re
from dataclasses import dataclass

from ...data.thoughts import without_thoughts
from .comparison import load_comparison

_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_PHRASE = re.compile(
    r"(?:\b(?:answer|(?:correct|right|best)\s(?:option|choice))\b[\s*_]*(?:is|was|(?:would|should|must)\sbe|:|=)"
    r"|^[^\S\n]*A:|答案[是为：:]+|故选[：:]?)[\s*_:]*(?=[^\n])",
    re.IGNORECASE | re.MULTILINE,
)
_CHOSEN = re.compile(r"\b(?:[Oo]ption|[Cc]hoice)\s[*_(]{0,4}([A-J])[*_)]{0,4}\sis\s(?:the\s)?(?:correct|right|best)\b")
_PHRASE_END = re.compile(r"[.!](?:\s|$)|[,;](?=\s)|\s\(|\s(?:because|since|as|so|which|when|if)\s", re.IGNORECASE)
# After an answer: another one, or the first taken back.
_INSTEAD = re.compile(
    r"[^\w\n]{0,8}(?:or|maybe|perhaps|possibly|alternatively|not|(?:no,?\s)?wait|(?:is|was)\s(?:wrong|incorrect|false|not))\b",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(r"\b(?:not|isn't|cannot be|can't be)[\s$*:(\[\\]*\Z", re.IGNORECASE)  # before an answer
_ANOTHER = re.compile(
    rf"{_INSTEAD.pattern}|[^\w\n]{{0,8}}(?:and|but)\s[^\w\n]{{0,4}}(?:\d|[A-J]\b)|[,;]\s[-$\\(]{{0,3}}(?:\d|[A-J]\b)",
    re.IGNORECASE,
)
_FIGURE = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBERS = re.compile(
    rf"(?<![\w.])-?\$?(?:\d+ \d+/\d+(?!\d)|(?:{_FIGURE})(?:e[-+]?\d+|/\d+(?:\.\d+)?)?)"
    r"(?:\\?%|\s(?:thousand|million|billion)\b)?"
    r"|-?\\[dt]?frac\{-?\d+\}\{\d+\}"
    rf"|(?<=[\w.])(?<!\d)(?<!\d[.,])(?:{_FIGURE})",
    re.IGNORECASE,
)
# What makes a number a part of another answer: a root, a power, an index, the second of a ratio or of a pair, a bound.
_PART_BEFORE = re.compile(
    r"(?:[√^_]|\^\{|\d:|\\frac\{[^{}]{0,40}\}\{|\b(?:not|cannot be)\s|\s?[≠≥≤]\s?|\s[<>]\s|\\(?:neq?|geq?|leq?)\s?)\Z"
)
_PAIR_BEFORE = re.compile(r"[(\[][^()\[\]]{0,40},\s?\Z")
_PART_AFTER = re.compile(r"[π√^]|i(?!\w)|\s?\\(?:pi|sqrt|cdot|times)(?![A-Za-z])")
_LAST_FORMULA = re.compile(r"\$([^$\n]{1,200})\$[^\w$]{0,3}\Z")
_SIGN = re.compile(r"(?<![\w)\]])[−–](?=\.?\d)")  # a minus, not the dash of a range
_OPEN = re.compile(r"\\f?boxed\s*\{")
_BOX = re.compile(rf"{_OPEN.pattern}|(?<!\\)[{{}}]")
_LABELLED = re.compile(r"^[^\w\n]{0,4}[A-J][).:]", re.MULTILINE)  # the line of a choice
_LONGEST = 200_000
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"  # superscripts


def _find_boxes(text: str) -> list[tuple[int, int, int]]:
    """The closed `\\boxed{...}`, whose braces may nest, by their beginning: (its index, its content's indices)."""
    boxes: list[tuple[int, int, int]] = []
    if (first := _OPEN.search(text)) is None:
        return boxes
    opened: list[tuple[int, int] | None] = []  # the boxes among the open braces
    for brace in _BOX.finditer(text, first.start()):
        if brace[0] != "}":
            opened.append(None if brace[0] == "{" else brace.span())
        elif opened and (span := opened.pop()):
            boxes.append((*span, brace.start()))
    return sorted(boxes)


def find_boxed(text: str) -> str | None:
    """The content of the last closed `\\boxed{...}`; None if there is none. Where another answer stands next to it, as
    in "\\boxed{4} or \\boxed{5}", it is the text of both."""
    if not (boxes := _find_boxes(text)):
        return None
    begin, start, end = boxes[-1]
    if len(boxes) > 1 and boxes[-2][2] < begin:
        between = text[boxes[-2][2] + 1 : begin]
        if len(between) <= 20 and re.fullmatch(r"[^\w\n]*(?:(?:or|and)\b)?[^\w\n]*", between):
            return text[boxes[-2][0] : end + 1]
    if _TAKEN_BACK.search(text[max(0, begin - 30) : begin]):
        return f"not {text[start:end]}"
    after = text[end + 1 : end + 100].partition("\n")[0]
    return text[start:end].strip() if not _INSTEAD.match(after) else text[begin : end + 100].partition("\n")[0]


def final_answer(response: str) -> str | None:
    """The final answer of a response, or None if it has none.

    By preference: the last `\\boxed{...}`, `<answer>...</answer>`, `#### ...`, "answer is ..." or "answer: ...", a last
    line such as "B) 12" if no other is of that form, and otherwise the last number. Thoughts do not count.

    >>> final_answer("so the answer is 42.")
    '42'
    """
    response = _SIGN.sub("-", without_thoughts(response[-_LONGEST:]))
    in_box = find_boxed(response)
    if in_box is not None:
        return in_box

    # Searched from the end: a regular expression would take quadratic time over tags that are never closed.
    before, closing, _ = response.rpartition("</answer>")
    tagged = before.rpartition("<answer>")
    if closing and tagged[1]:
        return _find_stated(tagged[2]) or tagged[2].strip()
    if hashes := _HASHES.findall(response):
        return hashes[-1].strip()
    if (stated := _find_stated(response)) is not None:
        return stated
    if chosen_letters := _CHOSEN.findall(response):
        return chosen_letters[-1]

    before, _, last_line = response.rpartition("\n")
    parse_number = load_comparison().parse_number
    if load_comparison().split_choice(last_line)[0] and not _LABELLED.search(before):
        return last_line.strip()
    if formula := _LAST_FORMULA.search(response):
        return formula[1].strip()
    last = _last_number(response)
    full_number = parse_number(response)  # all of it may be one number, such as "2 dozen"

    return last if full_number is None or (last is not None and parse_number(last) == full_number) else response.strip()


def _find_stated(text: str, *, whole_line: bool = False) -> str | None:
    """Return the text after the last "answer is", up to the end of the phrase, or of the line if that has several
    answers."""
    last = None
    for last in _PHRASE.finditer(text):  # noqa: B007
        pass
    if last is None:
        return None
    phrase = text[last.end() :].partition("\n")[0]
    if whole_line:
        return phrase.strip()
    # Up to the end of the phrase, unless another answer follows it.
    end = _PHRASE_END.search(phrase)
    if end is None or _ANOTHER.match(phrase[end.start() : end.start() + 100]):
        return phrase.strip()
    return phrase[: end.start()].strip()


def _last_number(text: str) -> str | None:
    """Return the last number, unless it is one of two in "4 or 5", or a part of another."""
    before = last = None
    for figure in _NUMBERS.finditer(text):
        before, last = last, figure
    if last is None:
        return None
    context, following = text[max(0, last.start() - 60) : last.start()], text[last.end() : last.end() + 10]
    # A number within a larger answer is not that answer.
    is_pair = _PAIR_BEFORE.search(context) and following[:1] in (")", "]")
    if _PART_BEFORE.search(context) or _PART_AFTER.match(following) or is_pair or following[:1] in tuple(_RAISED):
        return None
    between = "" if before is None else text[before.end() : last.start()]
    several = re.fullmatch(r"\s?and\s", between) or (len(between) <= 30 and re.search(r"\bor\b", between))
    return None if several else last[0]


def _answers_after_box(response: str) -> list[str]:
    """Return the answers that a response states after its last box: they may contradict the box."""
    response = without_thoughts(response[-_LONGEST:])
    boxes = _find_boxes(response)
    after = response[boxes[-1][2] :] if boxes else ""
    hashes, stated = _HASHES.findall(after), _find_stated(after)
    return [*hashes[-1:], *([] if stated is None else [stated])]


@dataclass(frozen=True, slots=True)
class MathReward:
    """`correct` if the response's final answer equals the target, else `incorrect`; None, unscored, where the target
    itself takes too long to compare.

    The target may be a bare answer, LaTeX, or a worked solution that ends in `#### answer` or `\\boxed{answer}`;
    thoughts do not count. Answers compare by their tokens, as numbers and structures (see `comparison.are_equal`), then
    symbolically; an answer that is ambiguous, unreadable or takes too long to compare is incorrect, never an exception.

    Args:
        tolerance: how far two numbers may lie apart: relative to targets between -1 and 1, absolute beyond.
        correct: the reward of a right answer.
        incorrect: the reward of a wrong, missing or unreadable one.
    """

    tolerance: float = 1e-6
    correct: float = 1.0
    incorrect: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be 0 or positive and finite, got {self.tolerance}")

    def __call__(self, prompt: str, response: str, target: str) -> float | None:
        right = self.is_right(response, target, prompt)
        return None if right is None else self.correct if right else self.incorrect

    def is_right(self, response: str, target: str, prompt: object = "") -> bool | None:
        """Return whether it is right; None where the target takes too long to compare. `prompt` may have opened a
        thought."""
        compare = load_comparison()
        split_choice, are_equal, parse_number = compare.split_choice, compare.are_equal, compare.parse_number
        response = without_thoughts(response[-_LONGEST:], prompt)
        target = without_thoughts(target)
        expected = find_boxed(target)
        if expected is None:
            hashes = _HASHES.findall(target)
            expected = (hashes[-1] if hashes else target).strip()

        # A response that is the target needs no extraction, which would read "x + 2" as 2.
        response = _SIGN.sub("-", response)
        label, letter = split_choice(response)[0], split_choice(expected)[0]
        if label and letter:
            return label == letter
        stated = None if find_boxed(response) else _find_stated(response, whole_line=True)
        if compare.same_text(response, expected) or compare.same_text(stated or "", expected):
            return True
        answer = final_answer(response)

        later = _answers_after_box(response)
        if (
            later and split_choice(expected)[0] and not split_choice(answer or "")[0]
        ):  # the box is a step of the reasoning
            answer = later[-1]

        if answer is None:
            return False
        if letter and any(split_choice(text)[0] not in ("", letter) for text in later):
            return False  # it contradicts the box
        right = are_equal(answer, expected, self.tolerance)
        if right and (value := parse_number(expected)) is not None:
            # A number that is stated after the box contradicts it, unless it is the same.
            stated_numbers = [figure[0] for text in later if (figure := parse_number(text)) is not None]
            return all(are_equal(str(figure), str(value[0]), self.tolerance) for figure in stated_numbers)

        return right
