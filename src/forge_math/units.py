"""Units around a value: read, compared, never converted."""

import re
from collections.abc import Sequence

from .notation import CURRENCIES, FUNCTIONS, PREFIXED, Token, word_set

Unit = tuple[tuple[str, int], ...]  # names with their powers, sorted

# Other spellings of each unit, by its name. Plurals in -s are read as well.
_SPELLINGS = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "dm": "decimeter decimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "inch": "in inches",
    "foot": "ft feet",
    "yard": "yd",
    "mile": "mi",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram kilo",
    "ton": "tonne t",
    "pound": "lb quid",
    "ounce": "oz",
    "ms": "millisecond",
    "second": "s sec",
    "minute": "min",
    "hour": "h hr",
    "day": "",
    "week": "wk",
    "month": "",
    "year": "yr",
    "mL": "ml milliliter millilitre",
    "liter": "l L litre",
    "gallon": "gal",
    "newton": "N",
    "joule": "J",
    "watt": "W",
    "volt": "V",
    "ampere": "A amp",
    "ohm": "\\Omega",
    "kohm": "k\\Omega",
    "micrometer": "micron",
    "angstrom": "\u00c5",
    "tesla": "T",
    "weber": "Wb",
    "farad": "",
    "decibel": "dB",
    "electronvolt": "eV",
    "pascal": "Pa",
    "hertz": "Hz",
    "mole": "mol",
    "kelvin": "K",
    "degree": "deg",
    "radian": "rad",
    "celsius": "C",
    "fahrenheit": "F",
    "dollar": "USD usd buck",
    "cent": "¢",
    "euro": "EUR",
    "yuan": "\u5143 CNY RMB",
    "percent": "",
    "unit": "",
}
_NAMES = {name: name for name in PREFIXED}
_NAMES |= {spelling: name for name, spellings in _SPELLINGS.items() for spelling in [name, *spellings.split()]}
_NAMES |= {
    f"{spelling}s": name for spelling, name in _NAMES.items() if len(spelling) > 2 and not spelling.endswith("s")
}
_NAMES |= {"lbs": "pound", "hrs": "hour", "yrs": "year", "secs": "second", "mins": "minute", "feets": "foot"}
_COMPOUND = {"mph": (("hour", -1), ("mile", 1)), "kmh": (("hour", -1), ("km", 1)), "kph": (("hour", -1), ("km", 1))}
# Units of one letter that need no text command after a figure and a space. The others, such as C, name points.
_LONE = frozenset("m s g h L N J W V K A T")
_MONEY = frozenset([*CURRENCIES.values(), "cent"])
# Words that never name a unit: they change the number, deny it, or are another number.
_NUMERALS = (
    r"zero|one|two|three|(?:four|six|seven|eight|nine)(?:teen|ty)?|five|ten|eleven|twelve|thirteen|fifteen|eighteen"
    r"|eighty|twenty|thirty|forty|fifty|half|halves|quarter|dozen|score|gross|hundred|thousand|[mb]illion|trillion"
    r"|quadrillion|lakh|crore|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|ten)"
)
_NOT_UNITS = re.compile(
    rf"(?:{_NUMERALS})s?|infinity|infinite|alpha|beta|gamma|theta|lambda|omega|factorial|negative|positive|inverse"
    r"|reciprocal|prime|repeating|recurring|and|n?or|but|to|pi|sqrt|sin|cos|tan|log|ln|exp|mod|frac|plus|minus|divided"
    r"|multiplied|squared|cubed|root|twice|double|triple|not?|never|wrong|incorrect|false|untrue|impossible|invalid"
    r"|excluded|rejected|extraneous|fails?|maybe|perhaps|possibly|probably|guess|unless|except|than|base|if"
)
_MOST_TOKENS = 12
_MOST_WORDS = 6
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_AFTER_POWERS = {"squared": 2, "cubed": 3}
_FILLERS = word_set("of in the a an per long old total altogether only are")


def with_unit(parts: Sequence[Token]) -> tuple[list[Token], Unit]:
    """Return the tokens of a value without the unit after it or the currency before it, and that unit, () for none."""
    # A currency before the number counts as a unit after it.
    core = list(parts)
    money: Unit = ()
    sign = int(core[0].text in ("-", "+")) if core else 0
    if len(core) > sign + 1 and core[sign].upright and core[sign].text in _MONEY:
        money = ((core.pop(sign).text, 1),)
    # The first token that starts a unit of all that follows.
    for start in range(max(1, len(core) - _MOST_TOKENS), len(core)):
        unit = _read_unit(core[start:]) if _begins_unit(core, start) else None
        if unit is not None:
            return core[:start], tuple(sorted({*money, *unit}))
    return core, money


def same_kind(unit: Unit, target: Unit) -> bool:
    """Return whether two units may be the same: one is missing, they are equal, or differ in what was left out.

    All words of one must be among those of the other: 4 apples are 4 red apples, but 5 steps left are not 5 steps
    right.

    >>> same_kind((("km", 1),), (("mile", 1),))
    False
    """
    if not unit or not target or unit == target:
        return True
    if {name for name, _ in (*unit, *target)} <= _NAMES.keys() | set(_NAMES.values()):
        # Known units differ if their names do, but "degrees" may be degrees of a temperature scale.
        degrees = {(("degree", 1),), (("celsius", 1), ("degree", 1)), (("degree", 1), ("fahrenheit", 1))}
        return {unit, target} <= degrees and (("degree", 1),) in (unit, target)
    return set(unit) <= set(target) or set(target) <= set(unit)


def _begins_unit(parts: Sequence[Token], start: int) -> bool:
    """Return whether a unit can start at this token."""
    token, before = parts[start], parts[start - 1]
    following = [part.text for part in parts[start + 1 : start + 3]]
    if token.text == "^":
        # After a function, degrees are a part of its argument: sin 30 degrees.
        return following[:1] == [r"\circ"] and not any(part.text[1:] in FUNCTIONS for part in parts[:start])
    after_value = before.kind == "number" or before.text in (")", "}")

    if token.kind == "letter":
        per = following[:1] == ["/"] and following[1:2] and following[1] in _LONE  # 10m/s
        foreign = not token.text.isascii() and token.text in _NAMES
        prefixed = token.text == "k" and following == [r"\Omega"]
        return foreign or (after_value and ((token.spaced and token.text in _LONE) or bool(per) or prefixed))

    # A short word of no unit may be variables: 6 pi eta rva.
    short = token.kind == "word" and not token.upright and len(token.text) < 4 and token.text not in _NAMES
    if short and before.kind != "number":
        return False
    return token.kind == "word" or token.text == "%" or (after_value and token.text in (r"\Omega", r"\mu"))


def _read_unit(parts: Sequence[Token]) -> Unit | None:
    """Return the unit that tokens spell, or None if they spell none."""
    powers: dict[str, int] = {}
    # The sign of the powers (-1 after "per"), the power of the next unit ("square"), the last unit, the next prefix.
    sign, coming, last, prefix = 1, 1, "", ""
    spelled, index = 0, 0

    # Each token is a prefix, a name with its power, a filler word, or a sign that raises or divides.
    while index < len(parts):
        token = parts[index]
        text, lower = token.text, token.text.lower()
        following = parts[index + 1].text if index + 1 < len(parts) else ""
        is_letter = token.kind == "letter" and not (index and parts[index - 1].kind == "letter" and not prefix)

        if text == r"\mu" or (text == "k" and following == r"\Omega"):
            prefix = {"k": "k", r"\mu": "micro"}[text]
        elif text == r"\Omega" or (token.kind == "word" and token.text.isalpha()) or (is_letter and text in _NAMES):
            spelled += 1
            if _NOT_UNITS.fullmatch(lower) or (len(text) == 1 and text.isascii() and text not in _NAMES):
                return None
            if text in _COMPOUND:
                powers |= dict(_COMPOUND[text])
            elif lower in _POWERS and following:
                coming = _POWERS[lower]
            elif lower in _AFTER_POWERS and last:
                powers[last] *= _AFTER_POWERS[lower]
            elif lower == "per" and last:
                sign = -1
            elif text not in _FILLERS or (text == "in" and not following.isalpha()):
                last = prefix + (_NAMES.get(text) or _NAMES.get(lower if len(text) > 2 else text) or _to_singular(text))
                powers[last] = powers.get(last, 0) + sign * coming
                coming, prefix = 1, ""
        # A single letter that is a word, such as "a".
        elif text in _FILLERS and token.kind == "letter":
            spelled += 1
        elif text == "^" and following == r"\circ":
            last = "degree"
            powers[last] = 1
            index += 1
        elif text == "^" and last:
            exponent, width = _read_exponent(parts, index + 1)
            if not width:
                return None
            powers[last] *= exponent
            index += width
        elif text == "/" and last:
            sign = -1
        elif text == "%" and not last:
            last = "percent"
            powers[last] = 1
        elif text == "(" and following == "s":  # apple(s)
            index += 2
        elif text not in ("-", "*", "(", ")", "{", "}") or not last:
            return None

        index += 1

    # A power or a prefix needs a unit, and a long text is not a unit.
    if spelled > _MOST_WORDS or coming != 1 or prefix or (not powers and not spelled):
        return None
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def _read_exponent(parts: Sequence[Token], start: int) -> tuple[int, int]:
    """Return the exponent that starts at a token, as 2 of m^2 or -1 of s^{-1}, and the number of its tokens, 0 if there
    is none."""
    texts = [part.text for part in parts[start : start + 4]]
    if texts and re.fullmatch(r"\d", texts[0]):
        return int(texts[0]), 1
    if texts in (["{", "-", "1", "}"], ["{", "-", "2", "}"]):
        return -int(texts[2]), 4
    return 0, 0


def _to_singular(word: str) -> str:
    """Return the singular of a word in lower case; short words with capitals stay, as these distinguish prefixes."""
    if len(word) < 5 and not word.islower():
        return word
    return word.lower().removesuffix("s") if len(word) > 3 and not word.endswith("ss") else word.lower()
