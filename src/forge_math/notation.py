"""The tokens of an answer: one notation for Unicode, LaTeX and plain text, which keeps everything that has a meaning.

Spaces, delimiters of mathematics, sizes of brackets, fonts and invisible characters are removed. Case, exponents,
indices, primes, "!", bases, signs and arrows are kept.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

DEEPEST = 40  # nested brackets


def word_set(text: str) -> frozenset[str]:
    """Return the set of the space-separated words in a text."""
    return frozenset(text.split())


LONGEST = 4000  # characters of a final answer; longer ones are compared as texts
RAISED = frozenset("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ")  # exponents
_RAISED = re.compile(f"[{''.join(sorted(RAISED))}]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+")  # indices
_MINUS = dict.fromkeys(map(ord, "−–‐‑"), "-") | {ord("∶"): ":"}
CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "₩": "won", "₽": "rouble"}

# Unicode symbols by their LaTeX commands.
_GREEK = """alpha beta gamma delta epsilon zeta eta theta iota kappa lamda mu nu xi omicron pi rho sigma tau upsilon phi
chi psi omega"""
_COMMANDS = {
    unicodedata.lookup(f"GREEK SMALL LETTER {name}"): name.replace("lamda", "lambda") for name in word_set(_GREEK)
}
_COMMANDS |= {letter.upper(): name.title() for letter, name in _COMMANDS.items()}
GREEK = frozenset(f"\\{name}" for name in _COMMANDS.values())
_OPERATORS = """ϕ phi ϑ theta ϵ epsilon ∞ infty ≤ leq ≥ geq ⩽ leq ⩾ geq ≠ neq ≈ approx × cdot · cdot ⋅ cdot ∙ cdot
∗ cdot ÷ div ± pm ∓ mp ∪ cup ∩ cap ∈ in ∉ notin ∅ emptyset ⊂ subset ⊆ subseteq ⊃ supset ⊇ supseteq ∠ angle △ triangle
⊥ perp ∥ parallel √ sqrt ∑ sum ∏ prod ∫ int → to ⇒ Rightarrow ∣ mid ′ prime ℝ mathbb{R} ℤ mathbb{Z} ℕ mathbb{N} ℚ
mathbb{Q} ℂ mathbb{C} ⌊ lfloor ⌋ rfloor ⌈ lceil ⌉ rceil ∧ wedge ∨ vee ¬ neg ∀ forall ∃ exists … ldots ≡ equiv ∼ sim
⟨ langle ⟩ rangle"""
_COMMANDS |= dict(zip(_OPERATORS.split()[::2], _OPERATORS.split()[1::2], strict=True))
# Commands with the same meaning, by the form that replaces them: "" for those without a meaning.
_SAME = {
    r"\frac": "dfrac tfrac cfrac",
    r"\binom": "dbinom tbinom",
    r"\leq": "le leqslant",
    r"\geq": "ge geqslant",
    r"\neq": "ne",
    r"\to": "rightarrow longrightarrow",
    r"\ldots": "dots cdots",
    r"\vec": "overrightarrow",
    r"\bar": "overline",
    r"\hat": "widehat",
    r"\phi": "varphi",
    r"\theta": "vartheta",
    r"\epsilon": "varepsilon",
    r"\emptyset": "varnothing",
    r"\setminus": "backslash",
    r"\wedge": "land",
    r"\vee": "lor",
    r"\neg": "lnot",
    r"\Rightarrow": "implies",
    r"\{": "lbrace",
    r"\}": "rbrace",
    "*": "times cdot ast bullet",
    "|": "mid vert lvert rvert",
    "'": "prime",
    "<": "lt",
    ">": "gt",
    "[": "lbrack",
    "]": "rbrack",
    "%": "%",
    "": "left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle limits nolimits bf rm it large Large"
    " therefore checkmark",
    "(": "langle",
    ")": "rangle",
    r"\|": "lVert rVert Vert",
    ":": "colon",
    " ": "quad qquad",
}
_CANONICAL = {f"\\{command}": canonical for canonical, commands in _SAME.items() for command in commands.split()}

_WRAPPER = re.compile(
    r"\\(?:(?P<text>text|textrm|textit|textbf|texttt|textsf|textnormal|mbox|hbox)|(?P<colour>textcolor|color)"
    r"|(?P<font>mathbb|mathbf|boldsymbol|bm|mathit|mathsf|mathcal|underline|emph|boxed|fbox)"
    r"|(?P<upright>mathrm|operatorname\*?))(?![A-Za-z])\s*"
)
FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt min max gcd lcm det"
)
_ENVIRONMENT = re.compile(
    r"\\(begin|end)\s*\{\s*(?:([vV]matrix|cases)|[pbB]?matrix|smallmatrix|array)\*?\s*\}(?:\s*\{[lcr|\s]*\})?"
)
_SPACES = re.compile(r"(?P<row>\\\\)|\\!|\\[()\[\]]|\\[,;: ]|~")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\\!\s*|\\[,;: ]|[\u00a0\u2009\u202f])\d{3})+(?!\d)")
_ENDLESS = re.compile(r"(\d*\.\d*?)(\d{1,6}?)\2+(?:\.{3}|\\[lc]?dots(?![A-Za-z]))")  # 0.8333...
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d|,\d)(?:\.\d*)?")
_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<repeating>\d*\.\d*\\(?:bar|overline|dot)\s*(?:\{\d+\}|\d))"
    r"|(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+(?![\w.]))?)"
    r"|(?P<command>\\(?:[A-Za-z]+|.))"
    r"|(?P<word>\x00[^\x00]*\x00)"
    r"|(?P<letters>[^\W\d_]+)"
    r"|(?P<symbol>.)",
    re.DOTALL,
)
# Units with a metric prefix.
PREFIXED = frozenset(f"{prefix}{unit}" for prefix in "nmckMG" for unit in [*"mgsLlNJWVA", "Pa", "Hz", "eV"]) - {"Gs"}
# Short words that are units after a number and a space; those of GLUED also directly after a number.
UNITS = PREFIXED | word_set("lb oz ft mi yd hr am pm Hz Pa eV dB Wb in")
GLUED = word_set(
    "and or cm mm km kg ml mL lb lbs oz ft in mph kmh min hrs am pm kHz MHz GHz degrees meters miles hours"
)
SHORT_WORDS = word_set("or no is of in on to if so it as be we he an")
_CLOSED_BY = {"{": "}", "(": ")", "[": "]", r"\{": r"\}"}


class Token(NamedTuple):
    """A token. `kind` is "number", "command" (such as `\\sin`), "letter", "word" or "symbol"; `spaced`: a space is
    before it; `upright`: it is a word in a command such as \\text."""

    text: str
    kind: str
    spaced: bool = False
    upright: bool = False


@lru_cache(maxsize=4096)
def tokenize_answer(text: str) -> tuple[Token, ...]:
    """Return the tokens of a final answer; one word, the whole text, if it has more than LONGEST characters or
    brackets that nest more than DEEPEST times."""
    brackets = (1 if match[0] in "([{" else -1 for match in re.finditer(r"[(\[{}\])]", text))
    if len(text) > LONGEST or max(accumulate(brackets), default=0) > DEEPEST:
        return (Token(text.strip(), "word"),)
    return tuple(_trim_tokens(_remove_braces(list(_split_tokens(_to_plain(text))))))


def join_spelling(parts: Sequence[Token]) -> tuple[str, ...]:
    """Return the texts of tokens in a form to compare: without a leading article, and words in lower case."""
    words = [token.text for token in parts if token.kind == "word"]
    is_shouted = len(words) > 1 and max(map(len, words)) > 4 and all(map(str.isupper, words))  # no names in capitals
    texts = tuple(
        token.text.casefold() if is_shouted and token.kind == "word" else fold_token(token) for token in parts
    )
    return texts[1:] if len(texts) > 1 and parts[0].kind == "word" and texts[0] in ("the", "an") else texts


def fold_token(token: Token) -> str:
    """Return the text of a token, a word in lower case unless it may be a name in capitals, such as ABD or MHz."""
    text = token.text
    is_name = len(text) < 5 and not text.islower() and (not text.istitle() or text in PREFIXED or len(text) == 1)
    return text if token.kind != "word" or is_name else text.casefold()


def find_closing(parts: Sequence[Token], start: int) -> int:
    """Return the index of the bracket, of any kind, that closes the one at `start`; the number of tokens for none."""
    depth = 0
    for index in range(start, len(parts)):
        depth += (parts[index].text in _CLOSED_BY) - (parts[index].text in _CLOSED_BY.values())
        if not depth:
            return index
    return len(parts)


def _is_grouped(digits: re.Match[str]) -> str:
    return re.sub(r"\D", "", digits[0])


def _brace_mark(mark: str) -> Callable[[re.Match[str]], str]:
    return lambda run: f"{mark}{{{unicodedata.normalize('NFKC', run[0])}}}"


def _expand_fraction(character: re.Match[str]) -> str:
    """Return a fraction that is one character, such as ½, as LaTeX."""
    top, bottom = unicodedata.normalize("NFKC", character[0]).split("⁄")
    return rf" \frac{{{top}}}{{{bottom}}}"


Rewrite = tuple[str | re.Pattern[str], str | Callable[[re.Match[str]], str]]
# Digits, fractions, exponents, indices and words of Unicode as LaTeX, in this order.
_UNICODE: list[Rewrite] = [
    (_RAISED, _brace_mark("^")),
    (_LOWERED, _brace_mark("_")),
    ("[¼-¾⅐-⅞]", _expand_fraction),
    ("[①-⑳]", lambda circled: rf"\textcircled{{{unicodedata.numeric(circled[0]):.0f}}}"),
    (r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
    ("或", r" \\text{or} "),
    ("、", ", "),
    ("[º°]", r"^\\circ "),
    ("℃", r"^\\circ C"),
    ("℉", r"^\\circ F"),
    (_THOUSANDS, _is_grouped),
]
# Spaces, environments, and older forms of LaTeX as the ones that the parser reads, in this order.
_REWRITES: list[Rewrite] = [
    (_THOUSANDS, _is_grouped),
    (_ENVIRONMENT, lambda name: f"\\{name[1]}\x00{name[2] or 'matrix'}\x00"),
    (_SPACES, lambda space: space["row"] or (" " if space[0] != r"\!" else "")),
    (r"\\([dtc]?frac)\s*(\d)\s*(\d)", r"\\\1{\2}{\3}"),
    (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\tag\s*\{[^{}]*\}|\\>", " "),
    (r"\\not\s*=", r"\\neq "),
    (_ENDLESS, r"\1\\bar{\2}"),
    (r"\\degree(?![A-Za-z])", r"^\\circ "),
]


def _to_plain(text: str) -> str:
    """Return a text with Unicode as LaTeX, without delimiters, and with the words of text commands between NULs."""
    text = _to_latex(text.replace("\x00", " "))
    # Marks of Markdown and of mathematics around the answer.
    text = _remove_dollars(text.strip().strip("*_`").strip())
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    return _unwrap_commands(text).replace("**", "^")


def _to_latex(text: str) -> str:
    """Return a text without invisible characters, and with all Unicode of mathematics as LaTeX."""
    if text.isascii():
        return text
    # Invisible characters go first: they split numbers and commands.
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    for pattern, replacement in _UNICODE:
        text = re.sub(pattern, replacement, text)
    text = "".join(f"\\{_COMMANDS[character]} " if character in _COMMANDS else character for character in text)
    return unicodedata.normalize("NFKC", text.translate(_MINUS)).translate(_MINUS).replace("⁄", "/")


def _remove_dollars(text: str) -> str:
    """Return a text without the dollars around mathematics, and with currency signs as words between NULs."""
    if len(re.findall(r"(?<!\\)\$", text)) % 2:
        text = re.sub(r"(?<!\\)\$(?=\s*[-+]?[\d.])", r"\\$", text, count=1)
    text = re.sub(r"(?<!\\)\$", " ", text)
    for sign, name in CURRENCIES.items():
        text = text.replace(f"\\{sign}", f" \x00{name}\x00 ").replace(sign, f" \x00{name}\x00 ")
    return text


def _unwrap_commands(text: str) -> str:
    """Return a text in which the content of font, colour and box commands replaces them.
    The content of text commands, such as `\\text{...}`, is enclosed in NUL characters."""
    pieces: list[str] = []
    end = 0
    for command in _WRAPPER.finditer(text):
        if command.start() < end:  # inside the last one
            continue
        pieces.append(text[end : command.start()])
        start = command.end()
        if command["colour"]:
            start = _group_end(text, start)
            if text[start : start + 1] != "{":
                end = start
                continue
        end = _group_end(text, start)
        content = text[start + 1 : end - 1]
        if end == start:  # without braces
            content = ""
        elif command["text"]:
            content = _mark_words(_unwrap_commands(content))
        elif command["upright"]:
            content = _read_upright(content.strip(), "".join(pieces).rstrip()[-1:])
        else:
            content = f"{{{_unwrap_commands(content)}}}"
        pieces.append(content)

    return "".join([*pieces, text[end:]])


def _mark_words(content: str) -> str:
    """Return the content of a text command with its words between NULs."""

    def mark_run(run: re.Match[str]) -> str:
        is_text = len(run[0]) == 1 or is_word(run[0]) or run[0] in UNITS or re.search("[a-z]", run[0]) is not None
        return f"\x00{run[0]}\x00" if is_text else run[0]

    return " " + re.sub(r"(?<![\\\x00A-Za-z])[A-Za-z]+(?![\x00A-Za-z])", mark_run, content) + " "


def _read_upright(content: str, before: str) -> str:
    """Return the content of `\\mathrm` as a function, a word, a unit of one letter after a number, or letters."""
    if content in FUNCTIONS:
        return f"\\{content} "
    is_unit = len(content) == 1 and content.isalpha() and content not in "eid" and (before.isdigit() or before in ")}")
    if (before and is_unit) or re.fullmatch(r"[A-Za-z]*[a-z]{2}[A-Za-z]*|[kmcM][A-Z]|[kM]?Hz", content):
        return f" \x00{content}\x00 "
    return f" {_unwrap_commands(content)} "


def _group_end(text: str, start: int) -> int:
    """Return the index after the group in braces that starts at `start`; `start` if there is none, or it is not
    closed."""
    if text[start : start + 1] != "{":
        return start
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return start + brace.end()
    return start


def _split_tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of a text that `_to_plain` returned. A comma may group digits outside of brackets only."""
    spaced = False
    depth = position = 0
    last: Token | None = None

    while position < len(text):
        match = (not depth and _GROUPED.match(text, position)) or _TOKEN.match(text, position)
        assert match
        piece, position = match[0], match.end()
        kind = match.lastgroup or "number"
        piece = _CANONICAL.get(piece, piece)
        if kind == "space" or not piece.strip():
            spaced = spaced or bool(piece)
            continue
        if kind == "letters":
            following = text[position : position + 1]
            parts = list(_split_letters(piece, spaced, last, following in ("^", "_", "(") or following.isdigit()))
        elif kind == "word":
            parts = [Token(piece.strip("\x00"), "word", spaced, True)]
        elif kind == "repeating":
            digits, period = re.split(r"\\(?:bar|overline|dot)\s*", piece)
            parts = [Token(f"{digits}({period.strip('{}')})", "number", spaced)]
        elif kind == "number":
            parts = [Token(piece.replace(",", "").rstrip("."), "number", spaced)]
        else:
            parts = [Token(piece, "command" if re.match(r"\\[A-Za-z]", piece) else "symbol", spaced)]
        yield from parts
        last = parts[-1]
        depth += (piece in "([") + (piece == r"\{") - (piece in ")]") - (piece == r"\}")
        spaced = False


def _split_letters(run: str, spaced: bool, before: Token | None, glued_after: bool) -> Iterator[Token]:
    """Yield the tokens of a run of letters: a function, a word, or a variable for each letter. `before` is the token
    before it, and `glued_after` says whether mathematics follows without a space, which makes it variables."""
    after_figure = before is not None and before.kind == "number"
    glued = glued_after or (
        before is not None and not spaced and before.text not in ("(", "-", "'", ",", "/", "|", '"')
    )
    if run in FUNCTIONS or run == "pi":
        yield Token(f"\\{run}", "command", spaced)
    elif (after_figure and (run in GLUED or (spaced and run in UNITS))) or (not glued and is_word(run)):
        yield Token(run, "word", spaced)
    else:
        for letter in run:
            yield Token(letter, "letter", spaced)
            spaced = False


def is_word(run: str) -> bool:
    """Return whether a run of letters is a word rather than a product of variables: it has a vowel, three different
    letters and no capital inside, and its letters are not neighbours in the alphabet with single gaps, as in CBA."""
    if len(run) < 3:
        return run in SHORT_WORDS or (run.istitle() and run.lower() in SHORT_WORDS)
    if not (run.islower() or run.isupper() or run.istitle()) or not re.search("[aeiouyAEIOUY]|[^\x00-\x7f]", run):
        return False
    codes = sorted(map(ord, run.lower()))
    steps = {later - code for code, later in pairwise(codes)}
    return len(set(codes)) > 2 and not (len(run) < 7 and steps <= {1, 2})


def _remove_braces(parts: list[Token]) -> list[Token]:
    """Return tokens without braces around a single one: x^{2} is x^2."""
    unbraced: list[Token] = []
    for token in parts:
        if token.text == "}" and len(unbraced) > 1 and unbraced[-2].text == "{" and unbraced[-1].text not in "{}":
            inner = unbraced.pop()
            unbraced[-1] = inner._replace(spaced=unbraced[-1].spaced)
        else:
            unbraced.append(token)
    return unbraced


def _trim_tokens(parts: list[Token]) -> list[Token]:
    """Return tokens without a leading "=", punctuation at the end, and braces around all of them."""
    while parts and parts[0].text in ("=", r"\approx"):
        parts = parts[1:]
    while parts:
        is_exclamation = parts[-1].text == "!" and len(parts) > 1 and parts[-2].kind == "word"
        if is_exclamation or parts[-1].text in (*".,;:。।॥۔։።។။\\", r"\\"):
            parts = parts[:-1]
        elif len(parts) > 1 and parts[0].text == "{" and find_closing(parts, 0) == len(parts) - 1:
            parts = parts[1:-1]
        else:
            break
    return parts
