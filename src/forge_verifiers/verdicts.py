"""The verdict in a judge's answer."""

from __future__ import annotations

import re

from forge.data.thoughts import without_thoughts

_LEADS = r"(?:(?:my|the|so|final|overall|therefore|thus|hence)[^\w\n]+)*"
_MARKERS = r"(?:verdict|answer|judge?ment|decision|conclusion|result|grade|rating|label|correct)"


def read_verdict(answer: str, yes: str, no: str) -> bool | None:
    """Whether a judge says `yes`, in any case; None if it says neither, or one cannot tell.

    After its thoughts, the last verdict counts that is alone on a line or has a marker: "Verdict: yes" at the beginning
    of a line, `[[yes]]`, `\\boxed{yes}`, `<verdict>yes</verdict>`, a value in JSON. Without one, a word that begins the
    first or the last line, followed by a sign of punctuation ("No, it is wrong"). A word anywhere else does not count,
    as in "there is no error".
    """
    answer = without_thoughts(answer)
    # The word by itself, not as a part of another or of a number.
    word = rf"(?<![\w.-])({re.escape(yes)}|{re.escape(no)})(?![\w-]|\.\d)"
    marked = re.compile(
        rf"^[^\w?\n]*(?:{_LEADS}{_MARKERS}[^\w\n]*?(?:is\b|[:=–—-])[^\w?\n]*)?{word}[^\w?\n]*$"
        rf"|^[^\w\n]*{_LEADS}{_MARKERS}[^\w\n]*?(?:is\b|[:=–—-])[^\w?\n]*{word}[.,;:!](?!.*(?<!\w)(?:{re.escape(yes)}|{re.escape(no)})(?!\w))"
        rf"|\"[\w ]{{1,40}}\"[^\S\n]*:[^\S\n]*\"?{word}\"?[^\S\n]*(?:[,}}]|$)"
        rf"|\[\[\s*{word}\s*\]\]|\\boxed\{{(?:\\text\w*\{{)?\s*{word}\s*\}}|<\w+>\s*{word}\s*</\w+>",
        re.IGNORECASE | re.MULTILINE,
    )
    # Each alternative has its group; the last verdict of a text counts.
    verdicts = [next(filter(None, match.groups())) for match in marked.finditer(answer)]
    # Without a marker only the first and the last line count, and only if they agree.
    if not verdicts:
        lines = answer.strip().splitlines()
        # A verdict as the first word, and not as in "No of the cases".
        leading = re.compile(rf"[^\w?]*{word}(?:[.,;:!—](?=\s|$)(?!\sof\b)|\s[–—-]\s)", re.IGNORECASE)
        begins = (leading.match(line) for line in lines[:1] + lines[-1:])
        verdicts = [match[1] for match in begins if match]
        if len({verdict.lower() for verdict in verdicts}) > 1:
            return None
    return verdicts[-1].lower() == yes.lower() if verdicts else None
