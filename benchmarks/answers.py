"""What the reward for mathematics takes for right: targets of MATH and AGIEval, changed and written in other ways.

    python benchmarks/answers.py [--targets FILE] [--gsm8k FILE] [--show N]

Every target is compared with mutations, which have another value by construction, and with spellings, which have the
same. It prints the share of wrong verdicts, those that are doubtful (listed below, with the reason), pairs of targets
that are taken for equal, the agreement with human labels on GSM8K, and the time an answer.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from forge.rewards.rules import MathReward

SHARED = Path(__file__).parents[2] / "shared" / "data"
reward = MathReward()

SWAPPED = [
    *[(rf"\{a}", rf"\{b}") for a, b in [("sin", "cos"), ("cos", "sin"), ("tan", "cot"), ("cot", "tan"), ("ln", "log")]],
    *[
        (r"\cup", r"\cap"),
        (r"\cap", r"\cup"),
        (r"\in", r"\notin"),
        (r"\pi", "e"),
        (r"\pi", r"\Pi"),
        (r"\omega", r"\Omega"),
    ],
    *[
        (r"\geq", ">"),
        (r"\leq", "<"),
        (r"\geq", r"\leq"),
        (r"\leq", r"\geq"),
        ("<", ">"),
        (">", "<"),
        ("<", r"\leq"),
        (">", r"\geq"),
    ],
    *[
        ("=", r"\neq"),
        ("=", "<"),
        ("=", ">"),
        ("+", "-"),
        (r"\infty", "0"),
        (r"+\infty", r"-\infty"),
        (r"-\infty", r"+\infty"),
    ],
    *[
        ("(", "["),
        (")", "]"),
        ("[", "("),
        ("]", ")"),
        (r"\{", "("),
        (r"\circ", "\\text{ radians}"),
        ("cm", "m"),
        ("cents", "dollars"),
    ],
    *[(r"\$", "€"), (r"\pm", "+"), (r"\pm", "-"), ("_8", "_9"), ("_9", "_8"), ("cup", "liter")],
    *[
        ("only", "and III only"),
        ("First", "Second"),
        ("First", "Third"),
        ("east", "west"),
        ("ellipse", "circle"),
        ("origin", "vertex"),
    ],
    *[
        ("right", "left"),
        ("initial", "final"),
        ("phones", "tablets"),
        ("week", "day"),
        ("height", "speed"),
        ("no such", "one such"),
    ],
    *[
        ("feet", "meters"),
        ("object", "ground"),
        ("starts", "ends"),
        ("Kathy", "Karen"),
        ("value", "values"),
        ("fix", "sell"),
    ],
]
WORDS = ["not", "no", "maybe", "half of", "twice", "the square of", "the negative of", "neither", "double", "minus"]
WORDS_AFTER = [
    "or 7",
    "and 7",
    "minus one",
    "squared",
    "is wrong",
    "divided by two",
    "plus one",
    "or else",
    "times two",
    "cubed",
]


def bare(target: str) -> str:
    """A target without its dollars of mathematics."""
    return re.sub(r"(?<!\\)\$", "", target).strip()


def is_prose(target: str) -> bool:
    """Whether it is words rather than mathematics."""
    words = re.sub(r"\\text\{([^}]*)\}", r"\1", bare(target))
    return bool(re.search(r"[A-Za-z]{4}", re.sub(r"\\[A-Za-z]+", "", words))) or bool(re.match(r"\([A-Z]", words))


def is_scalar(target: str) -> bool:
    """Whether it is one expression, without relations, lists, brackets of structure, or words."""
    text = bare(target)
    structure = re.search(
        r"[=<>,\[\]_|]|\\(?:leq|geq|in|cup|cap|text|mbox|operatorname|pm|begin|\{|circ|infty|textcircled|\$)", text
    )
    return (
        not structure
        and not re.fullmatch(r"\(.*\)|\\left.*|[A-Z]", text)
        and not re.search(r"[a-z]{3} | and | or ", text)
    )


def value(target: str) -> float | None:
    """The value of a target that is one plain number."""
    text = bare(target)
    return float(text) if re.fullmatch(r"-?\d*\.?\d+", text) else None


def mutations(target: str) -> Iterator[str]:
    """Answers of another value than the target."""
    text = bare(target)
    for match in re.finditer(r"\d", text):  # each digit another
        for step in (1, 5):
            yield text[: match.start()] + str((int(match[0]) + step) % 10) + text[match.end() :]
    for match in re.finditer(
        r"(?<![\\A-Za-z{])[A-Za-z](?![A-Za-z])", re.sub(r"\\text\{[^}]*\}", lambda m: " " * len(m[0]), text)
    ):
        yield text[: match.start()] + match[0].swapcase() + text[match.end() :]  # a symbol in the other case
        if match[0] not in "ei":
            yield text[: match.start()] + match[0] + "^2" + text[match.end() :]
            yield text[: match.start()] + match[0] + "'" + text[match.end() :]
            yield text[: match.start()] + match[0] + "_7" + text[match.end() :]
            yield text[: match.start()] + match[0] + "!" + text[match.end() :]
    for old, new in SWAPPED:
        for match in re.finditer(re.escape(old) + (r"(?![A-Za-z])" if old[-1].isalpha() else ""), text):
            if (old in "+-" and match.start() == 0) or (
                old.isalpha() and text[match.start() - 1 : match.start()] == "\\"
            ):
                continue
            yield text[: match.start()] + new + text[match.end() :]
    for match in re.finditer(r"-", text):
        yield text[: match.start()] + text[match.end() :]
    for match in re.finditer(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", text):  # turned fractions
        yield f"{text[: match.start()]}\\frac{{{match[2]}}}{{{match[1]}}}{text[match.end() :]}"
    for match in re.finditer(r"\^\{?[\w]\}?|\\sqrt(?=\{)|_\{?\w\}?", text):  # an exponent, a root or an index less
        yield text[: match.start()] + text[match.end() :]
    for match in re.finditer(r"(?<=[\w}])(?=[-+])", text):
        yield f"{text[: match.start()]}+1{text[match.start() :]}"
    yield from swapped_parts(text)
    if is_prose(target):
        plain = re.sub(r"\\text\{([^}]*)\}", r"\1", text)
        yield from (f"{word} {plain}" for word in WORDS)
        yield from (f"{plain} {word}" for word in WORDS_AFTER)
        for index in range(0, len(plain.split()), 2):
            words = plain.split()
            yield " ".join([*words[:index], "seven", *words[index + 1 :]])
        return
    yield from (
        f"{text} or 7731",
        f"{text}, 7731",
        f"({text}, 7731)",
        f"\\{{{text}, 7731\\}}",
        f"\\text{{not }} {text}",
    )
    yield from (
        f"[{text}, 7731)",
        f"\\text{{{text} or less}}",
        f"\\sqrt{{{text}}} + 7731",
        f"{text} \\text{{ or }} 7731",
        f"7731, {text}",
        f"({text}, {text})",
        f"{text} 7731",
    )
    yield from (
        f"{text} \\text{{ and }} {text}",
        f"\\begin{{pmatrix}} {text} \\\\ 7731 \\end{{pmatrix}}",
        f"x \\neq {text}",
    )
    if is_scalar(target):
        number = value(target)
        if number is None or number not in (0, 1, -1):
            yield from (
                f"({text})^2",
                f"({text})^{{3}}",
                f"\\sqrt{{{text}}}",
                f"({text})^{{-2}}",
                f"\\left({text}\\right)²",
            )
        if number is None or number not in (1, 2):
            yield f"({text})!"
        if number is None or abs(number) != 1:
            yield from (f"\\frac{{1}}{{{text}}}", f"({text})^{{-1}}", f"1/({text})")
        if number != 0:
            yield from (f"-({text})", f"2\\cdot({text})", f"({text})i", f"({text})\\pi", f"({text})x", f"({text})e")
            yield from (f"\\frac{{{text}}}{{2}}", f"({text}) \\times 10^{{-18}}", f"\\frac{{({text})x}}{{y}}")
        yield from (f"({text})+1", f"({text})-10^{{-3}}", f"1-({text})" if number != 0.5 else "0.51", f"|{text}|+1")
        yield from (f"(-\\infty, {text})", f"x<{text}", f"x \\geq {text}", f"\\pm ({text})" if number else "1")
        if number is not None and number == int(number) and number > 0:
            yield from (
                f"{text}_7",
                f"{text}_{{12}}",
                f"{text}!!",
                f"1{text}",
                f"{text}.01" if "." not in text else "7",
                f"0{text}x",
            )
            yield from (f"{text}\\text{{ million}}", f"{text} dozen", f"{text}\\frac{{1}}{{3}}", f"{text}^{{\\prime}}x")
    elif not re.search(r"[<>=]|\\leq|\\geq|\\in|\\text|or|and", text):
        yield from (f"2({text})", f"3({text})", f"{text}_7", f"{text}'", f"{text}+7", f"7+{text}")
    else:
        yield from (
            f"{text}, 7",
            f"7 = {text}",
            f"{text} = 7",
            f"{text} + 7731",
            f"7731 < {text}",
            f"{text} \\text{{ or }} x=7731",
        )


def swapped_parts(text: str) -> Iterator[str]:
    """Tuples, intervals and matrices with two of their members exchanged, left out or doubled."""
    match = re.fullmatch(r"(\\left)?([(\[])(.*?)(\\right)?([)\]])", text)
    if match and "\\cup" not in text:
        members = match[3].split(",")
        for i, j in combinations(range(len(members)), 2):
            if members[i].strip() != members[j].strip():
                order = [*members]
                order[i], order[j] = order[j], order[i]
                yield f"{match[2]}{','.join(order)}{match[5]}"
        for i in range(len(members)):
            yield f"{match[2]}{','.join(members[:i] + members[i + 1 :])}{match[5]}"
            yield f"{match[2]}{','.join([*members[:i], members[i], *members[i:]])}{match[5]}"
    if "pmatrix" in text:
        yield text.replace("pmatrix", "vmatrix")
    match = re.fullmatch(r"(\\begin\{pmatrix\})(.*)(\\end\{pmatrix\})", text)
    if match:
        rows = match[2].split(r"\\")
        for i, j in combinations(range(len(rows)), 2):
            if rows[i].strip() != rows[j].strip():
                order = [*rows]
                order[i], order[j] = order[j], order[i]
                yield match[1] + r" \\ ".join(order) + match[3]
        for i in range(len(rows)):
            yield match[1] + r" \\ ".join(rows[:i] + rows[i + 1 :]) + match[3]
            yield match[1] + r" \\ ".join([*rows, rows[i]]) + match[3]


UNICODE = [
    *[(r"\infty", "∞"), (r"\pi", "π"), (r"\cup", "∪"), (r"\cap", "∩"), (r"\leq", "≤"), (r"\geq", "≥"), (r"\in ", "∈ ")],
    *[
        (r"\omega", "ω"),
        (r"\alpha", "α"),
        (r"\beta", "β"),
        ("^2", "²"),
        ("^{2}", "²"),
        (r"^\circ", "°"),
        (r"^{\circ}", "°"),
    ],
    *[(r"\pm", "±"), ("-", "−"), (r"\mid", "∣"), ("^5", "⁵"), ("^3", "³")],
]


def spellings(target: str) -> Iterator[str]:
    """Responses that give the target, written in another way."""
    text = bare(target)
    prose = is_prose(target)
    for form in (
        "\\boxed{{{}}}",
        "So \\boxed{{{}}}.",
        "\\boxed{{ {} }}",
        "<answer>{}</answer>",
        "#### {}",
        "The answer is \\boxed{{{}}}.",
    ):
        yield form.format(text)
    yield f"<think>\nIt may be \\boxed{{7731}}.\n</think>\n\n\\boxed{{{text}}}"
    yield f"First I get \\boxed{{7731}}, which is wrong.\n\nThen\n\\boxed{{{text}}}"
    if prose:
        plain = re.sub(r"\\text\{([^}]*)\}", r"\1", text)
        yield from (f"\\boxed{{\\text{{{plain}}}}}", f"\\boxed{{\\textbf{{{plain}}}}}", f"\\boxed{{\\mbox{{{plain}}}}}")
        yield from (
            f"#### {plain}.",
            f"<answer> {plain}. </answer>",
            f"**Answer:** {plain}",
            f"<answer>**{plain}**</answer>",
        )
        yield from (
            f"<answer>{plain.replace(' ', '  ')}</answer>",
            f"<answer>\n{plain}\n</answer>",
            f"{plain}\n",
            f" {plain} ",
        )
        yield from (f"\\boxed{{\\text{{{plain}}}.}}", f"#### {plain} ", f"\\boxed{{\\mathbf{{\\text{{{plain}}}}}}}")
        if len(plain) > 5 and "\\" not in plain and "II" not in plain and "$" not in target:
            yield from (
                f"<answer>{plain.upper()}</answer>",
                f"<answer>{plain.lower()}</answer>",
                f"#### {plain.title()}",
            )
        return
    inside = [
        f"${text}$",
        f"\\({text}\\)",
        f"\\[{text}\\]",
        f"{{{text}}}",
        f"\\displaystyle {text}",
        f"{text}.",
        f"= {text}",
    ]
    inside += [
        f"\\mathbf{{{text}}}",
        f"\\color{{red}}{{{text}}}",
        f"\\textcolor{{blue}}{{{text}}}",
        f"{text}\\,",
        f"\\, {text}",
    ]
    inside += [
        re.sub(r"(?<![A-Za-z]) | (?![A-Za-z])", "", text),
        re.sub(r",(?!\\!|\d{3})", ", ", text),
        text.replace(r"\frac", r"\dfrac"),
        text.replace(r"\frac", r"\tfrac"),
    ]
    inside += [
        text.replace("{\\frac", "{\\displaystyle\\frac"),
        f"\\boldsymbol{{{text}}}",
        text.replace("(", r"\left(").replace(")", r"\right)"),
    ]
    inside += [f" {text} ", f"{text}\\!", f"\\underline{{{text}}}", text.replace("\\left", "").replace("\\right", "")]
    for latex, symbol in UNICODE:
        if latex in text:
            inside.append(text.replace(latex + " ", symbol).replace(latex, symbol))
    if re.search(r"\\sqrt\{\d+\}", text):
        inside += [re.sub(r"\\sqrt\{(\d+)\}", r"√\1", text), re.sub(r"\\sqrt\{(\d+)\}", r"\\sqrt{\1 }", text)]
        inside += [re.sub(r"\\sqrt\{(\d+)\}", r"(\1)^{1/2}", text), re.sub(r"(?<=\d)\s*\\sqrt", r"\\cdot\\sqrt", text)]
    if re.search(r"\\frac\{\d+\}\{\d+\}", text) and not re.search(r"\d\s*\\frac", text):
        inside += [
            re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"(\1/\2)", text),
            re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"{\1}/{\2}", text),
        ]
    if re.search(r"\\leq|\\geq", text):
        inside.append(text.replace(r"\leq", r"\le ").replace(r"\geq", r"\ge "))
    if "pmatrix" in text:
        inside += [
            text.replace("pmatrix", "bmatrix"),
            re.sub(r"\s+", " ", text.replace(r"\\", r" \\ ")),
            text.replace("&", " & "),
        ]
        inside.append(
            "\\left(" + text.replace("\\begin{pmatrix}", "\\begin{array}{cc}").replace("pmatrix", "array") + "\\right)"
        )
    number = value(target)
    if number is not None:
        inside += [
            f"{text}\\text{{ cm}}",
            f"{text} \\text{{ m}}",
            f"x = {text}",
            f"{text}\\%" if abs(number) > 1 else text,
            f"\\${text}",
        ]
        inside += [
            f"{number:.6f}",
            f"\\frac{{{text}}}{{1}}",
            f"{text}^1",
            f"{text} \\text{{ units}}",
            f"\\approx {text}",
            f"({text})",
        ]
        inside += ["".join(chr(ord(c) + 0xFEE0) if c.isdigit() else c for c in text), f"\u200b{text}", f"{number:e}"]
        if number == int(number):
            inside += [
                f"{int(number):,}",
                f"{2 * int(number)}/2",
                f"{int(number):,}".replace(",", "{,}"),
                f"\\frac{{{3 * int(number)}}}{{3}}",
            ]
            inside += [f"\\sqrt{{{int(number) ** 2}}}"] if number >= 0 else []
    elif is_scalar(target):
        inside += [
            f"x = {text}",
            f"y={text}",
            f"({text})",
            f"\\frac{{{text}}}{{1}}",
            f"({text})^1",
            f"{text} \\text{{ units}}",
        ]
        inside.append(f"\\left({text}\\right)")
        if re.search(r"[a-z]|sqrt|pi", re.sub(r"\\frac", "", text)):
            inside += [f"\\frac{{2({text})}}{{2}}", f"2({text})/2", f"({text})\\cdot 1^7"]
        if not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)) and not re.search(
            r"[-+]|\d\s*\\frac", text[1:]
        ):
            inside.append(f"{text} \\text{{ m}}")
    elif r"\circ" in text:
        inside += [
            re.sub(r"\^\{?\\circ\}?", new, text)
            for new in (r"\\text{ degrees}", " degrees", "", r"^{\\circ}", r"^\\circ")
        ]
    yield from (f"\\boxed{{{form}}}" for form in inside)


# Verdicts that a person could give either way: not counted.
DOUBTFUL = {
    ("\\log (y-x+1)>0", "$\\ln (y-x+1)>0$"): "it is the same condition",
    ("\\boxed{5,720-\\frac{15(3+n)}{2^{n-4}}}", "5, $720-\\frac{15(3+n)}{2^{n-4}}$"): "5,720 may be one number",
}


def changed(target: str) -> set[str]:
    """The mutations of a target."""
    texts = {text for text in mutations(target) if re.sub(r"[\s{}]", "", text) != re.sub(r"[\s{}]", "", bare(target))}
    return {text for text in texts if (text, target) not in DOUBTFUL}


def written(target: str) -> set[str]:
    """The spellings of a target."""
    return {text for text in spellings(target) if text != target and (text, target) not in DOUBTFUL}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--targets", type=Path, default=SHARED / "math_targets.json")
    parser.add_argument("--gsm8k", type=Path, default=SHARED / "gsm8k" / "model_solutions_dev.jsonl")
    parser.add_argument("--show", type=int, default=20, help="wrong verdicts that are printed, of each kind")
    options = parser.parse_args()
    targets = [row["answer"] for row in json.loads(options.targets.read_text())]
    seconds: list[float] = []

    def verdict(response: str, target: str) -> bool:
        start = time.perf_counter()
        right = reward("", response, target) == 1.0
        seconds.append(time.perf_counter() - start)
        return right

    verdict(r"\boxed{1+x}", "x+1")  # starts the helper
    accepted, rejected = [], []
    counts: dict[str, list[int]] = {"mutations": [], "spellings": []}
    for target in targets:
        counts["mutations"].append(len(changed(target)))
        counts["spellings"].append(len(written(target)))
        accepted += [(text, target) for text in sorted(changed(target)) if verdict(f"\\boxed{{{text}}}", target)]
        rejected += [(text, target) for text in sorted(written(target)) if not verdict(text, target)]
    for what, wrong in (("mutations", accepted), ("spellings", rejected)):
        total = sum(counts[what])
        print(f"{what}: {total}, at least {min(counts[what])} a target; wrong {len(wrong)} ({len(wrong) / total:.3%})")
        for text, target in wrong[: options.show]:
            print(f"    {text!r} for {target!r}")
    for (text, target), reason in DOUBTFUL.items():
        print(f"doubtful, not counted: {text!r} for {target!r}: {reason}")
    different = sorted({bare(target) for target in targets})
    equal = [(one, other) for one, other in combinations(different, 2) if verdict(f"\\boxed{{{one}}}", other)]
    print(f"pairs of targets: {len(different) * (len(different) - 1) // 2}; taken for equal: {len(equal)}")
    for one, other in equal:
        print(f"    {one!r} and {other!r}")
    if options.gsm8k.exists():
        problems = [json.loads(line) for line in options.gsm8k.read_text().splitlines()]
        solved = [
            (p["ground_truth"].rpartition("A: ")[2], s) for p in problems for s in p.values() if isinstance(s, dict)
        ]
        right = sum(verdict(solution["solution"], target) == solution["is_correct"] for target, solution in solved)
        print(f"GSM8K, agreement with human labels: {right} of {len(solved)}")
    milliseconds = statistics.quantiles([1000 * second for second in seconds], n=100)
    print(f"ms an answer: p50 {milliseconds[49]:.2f}, p99 {milliseconds[98]:.2f}, of {len(seconds)}")


if __name__ == "__main__":
    main()
