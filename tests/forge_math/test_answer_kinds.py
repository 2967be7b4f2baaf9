"""Kinds of answers whose difference is easily lost: symbols, units, structures, choices; each with its neighbours."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from forge.data.thoughts import without_thoughts
from forge.rewards.rules import ExactMatch, JsonMatch, MathReward, final_answer
from forge_math.compare import are_equal, same_text
from forge_math.notation import tokenize_answer
from forge_verifiers import AnswerFrequency, MathVerifier

from . import answer_pairs

TARGETS = Path(__file__).parents[2].parent / "shared" / "data" / "math_targets.json"

# Each pair differs in its value, by what the name says.
DIFFERENT = {
    "ratio": [("4:3", "3:4"), ("3:2:1", "1:2:3"), ("1:2", "1:2:3"), ("1:2", "2"), ("(1/2,1/3)", "1:2:3")],
    "real line": [(r"\mathbb{R}", r"(0,\infty)"), (r"\mathbb{Z}", r"(-\infty,\infty)"), ("x<3", r"\mathbb{R}")],
    "exponent": [
        (r"3\sigma^3", r"3\sigma"),
        ("AB^2", "AB"),
        ("mn^3", "mn"),
        (r"\tan^2\theta", r"\tan\theta"),
        ("xy²", "xy"),
    ],
    "factorial": [("k!", "k"), ("(n+1)!", "n+1"), (r"\binom{n}{k}!", r"\binom{n}{k}"), ("2m!", "(2m)!"), ("n!!", "n!")],
    "case": [
        ("R", "r"),
        ("ABC", "abc"),
        (r"\Omega", r"\omega"),
        ("2K", "2k"),
        (r"v_A", r"v_a"),
        ("10 mW", r"10\text{ MW}"),
    ],
    "tiny": [
        ("10^{-18}", "0"),
        ("3e-20", "4e-20"),
        (r"-10^{-25}", r"10^{-25}"),
        (r"\frac{1}{10^{17}}", r"\frac{1}{10^{16}}"),
    ],
    "tiny roots": [(r"\sqrt{2}\cdot10^{-20}", r"\sqrt{3}\cdot10^{-20}"), (r"\pi\cdot10^{-30}", r"2\pi\cdot10^{-30}")],
    "base": [
        ("77_8", "77_9"),
        ("101_2", "101"),
        ("101", "101_2"),
        ("1A_{16}", "1A_{12}"),
        ("12_5", "13_5"),
        ("7_{10}", "111_2"),
    ],
    "arrow": [
        (r"A \to B", r"A \leftarrow B"),
        (r"p \Rightarrow q", r"q \Rightarrow p"),
        (r"\vec{v}", "v"),
        ("A→B", "B→A"),
    ],
    "prime": [("f'(2)", "f(2)"), ("y''", "y'"), ("x'+1", "x+1"), (r"g^{\prime}(x)", "g(x)"), ("A'", "A")],
    "index": [("a_1", "a_2"), ("x_{12}", "x_{1}2"), ("t_n", "t"), (r"\lambda_1", r"\lambda"), ("S_{n+1}", "S_n")],
    "ends": [("[2,5)", "[2,5]"), ("(2,5)", "[2,5]"), (r"(0,1]\cup[2,3]", r"(0,1]\cup[2,3)"), (r"x \geq 2", "x > 2")],
    "order": [
        ("(3,1,2)", "(1,2,3)"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    ],
    "structure": [
        (r"\{4,5\}", "(4,5)"),
        ("4,5,5", "4,5"),
        ("(4,5)", "4,5"),
        ("7", "(7,7)"),
        (r"\begin{vmatrix}1&0\\0&1\end{vmatrix}", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}"),
    ],
    "unit": [
        ("15 m^2", r"15\text{ m}^3"),
        (r"4\text{ kg}", r"4\text{ lb}"),
        (r"6\text{ hours}", r"6\text{ days}"),
        (r"\$5", "€5"),
        ("80 cents", r"\$80"),
        ("3 km/h", "3 km"),
    ],
    "function": [
        ("f(3)=0", "f(-3)=0"),
        ("f(2x)", "2f(x)"),
        (r"\omega(2n)=\omega(2n)", r"\omega(2n)=\omega(n)"),
        (r"\cos x", r"\sec x"),
        (r"\log_2 x", r"\log_3 x"),
    ],
    "relation": [
        ("x<4", "x>4"),
        ("a<b<c", "a<c<b"),
        ("y=3x+1", "y=3x-1"),
        ("x+y=2", "x+y=3"),
        (r"x \neq 2", "x=2"),
        ("2 \\in A", "2 \\notin A"),
    ],
    "root": [
        (r"\sqrt[3]{5}", r"\sqrt{5}"),
        (r"\sqrt{x^2}", "x"),
        (r"\sqrt{x^2y^2}", "xy"),
        (r"\sqrt{5}", "5"),
        ("-√7", "√7"),
    ],
    "words": [
        ("north", "south"),
        ("not prime", "prime"),
        ("the object squared", "the object"),
        ("cat", "act"),
        ("on", "no"),
    ],
    "label": [
        ("(C) or (D)", "C"),
        ("(C) is wrong", "C"),
        ("(C) minus one", "C"),
        ("A) C)", "C"),
        ("c", "C"),
        ("(D)", "C"),
    ],
    "sum": [(r"\sum_{k=1}^{n} k", r"\frac{n(n-1)}{2}"), (r"\int_0^1 x^3 dx\cdot\pi", r"\frac{\pi}{3}")],
}
# Each pair says the same.
SAME = {
    "environment": [
        (r"\begin{bmatrix}5\\6\end{bmatrix}", r"\begin{pmatrix}5\\6\end{pmatrix}"),
        (r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    ],
    "list": [
        (r"3 \text{ and } 8", "3, 8"),
        ("8 or 3", "3,8"),
        ("x=3 or x=8", "3, 8"),
        (r"x = 3, 8", "8,3"),
        (r"\pm 5", "5, -5"),
        (r"2 \pm \sqrt{3}", r"2-\sqrt{3}, 2+\sqrt{3}"),
    ],
    "unit": [
        (r"8\text{ s}", "8"),
        ("8 N", "8"),
        (r"8\,\mathrm{g}", "8"),
        ("8 L", "8"),
        ("8", r"8\text{ m}"),
        ("9.8 m/s^2", "9.8"),
        ("12 square meters", r"12\text{ m}^2"),
        ("5 dollars", r"\$5"),
    ],
    "Unicode": [
        ("3√5", r"3\sqrt{5}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("2π", r"2\pi"),
        ("x ≥ −1", r"x \geq -1"),
        ("(−∞, 3]", r"(-\infty, 3]"),
        ("θ", r"\theta"),
        ("A ∪ B", r"A \cup B"),
        ("6×10³", "6000"),
        ("45°", r"45^\circ"),
        ("x₁+x₂", "x_1+x_2"),
    ],
    "choice": [
        ("(D)", "D"),
        ("D) 14", "D"),
        ("D. north", "D"),
        ("D: 3", "(D)"),
        (r"\text{(D)}", "D"),
        ("option D", "D"),
    ],
    "interval": [
        ("x>7", r"(7,\infty)"),
        (r"-1 \le x < 2", "[-1,2)"),
        (r"x \in [-1,2)", "[-1,2)"),
        ("]1,4[", "(1,4)"),
        (r"\{x \mid x<0\}", r"(-\infty,0)"),
        (r"x<0 \text{ or } x>1", r"(-\infty,0)\cup(1,\infty)"),
        (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)"),
    ],
    "equation": [
        ("y-2x=0", "y=2x"),
        ("2x+2y=4", "x+y=2"),
        ("f(x)=x^2", "y=x^2"),
        ("6=x", "x=6"),
        ("4<x", "x>4"),
        ("c>b>a", "a<b<c"),
    ],
    "base": [
        ("77_{8}", "77_8"),
        (r"1a_{16}", "1A_{16}"),
        ("(101)_2", "101_2"),
        (r"40_{\text{nine}}", "40_9"),
        ("052_8", "52_8"),
    ],
    "number": [
        ("6.0", "6"),
        (r"2\frac{1}{4}", "2.25"),
        ("1e3", "1000"),
        (r"\frac{18}{4}", "4.5"),
        (r"0.1\overline{6}", r"\frac{1}{6}"),
        ("2.828427", r"2\sqrt{2}"),
    ],
    "words": [
        ("North", "north"),
        ("the centre", "centre"),
        ("Yes", "yes"),
        ("FIRST QUADRANT", "First quadrant"),
        (r"\text{Even}", "even"),
    ],
    "case of form": [
        (r"\mathbf{20,000}", "20000"),
        (r"15\text{ cm}^2.", r"15\text{ cm}^2"),
        (r"\dfrac{1}{2}x", r"x/2"),
        (r"\left\{1,2\right\}", r"\{2,1\}"),
        ("①③", r"\textcircled{1}\textcircled{3}"),
    ],
    "ratio": [("3:4", r"\frac{3}{4}"), ("6:8", "3:4"), (r"1:\sqrt2", r"\frac{1}{\sqrt{2}}"), ("1∶2∶3", "2:4:6")],
    "real line": [
        (r"(-\infty,\infty)", r"\mathbb{R}"),
        (r"\mathbb{R}", r"(-\infty,+\infty)"),
        (r"x \in \mathbb{R}", r"\mathbb{R}"),
        (r"\text{all real numbers}", r"x\in(-\infty,\infty)"),
        (r"-\infty<x<\infty", "ℝ"),
    ],
    "sum": [(r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"), (r"\int_0^1 x^3 dx\cdot\pi", r"\frac{\pi}{4}")],
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", DIFFERENT)
def test_math_answers_of_different_value_are_unequal(kind):
    pairs = [pair for one, other in DIFFERENT[kind] for pair in ((one, other), (other, one))]
    assert [pair for pair in pairs if MathReward()("", rf"\boxed{{{pair[0]}}}", pair[1]) != 0.0] == []


@pytest.mark.processes
@pytest.mark.parametrize("kind", SAME)
def test_math_answers_of_equal_value_are_equal(kind):
    assert [pair for pair in SAME[kind] if MathReward()("", rf"\boxed{{{pair[0]}}}", pair[1]) != 1.0] == []


@pytest.mark.processes
@pytest.mark.costly
def test_math_reward_gives_expected_verdict_on_collected_answer_pairs():
    reward = MathReward()
    assert [pair for pair in answer_pairs.SAME if reward("", rf"\boxed{{{pair[0]}}}", pair[1]) != 1.0] == []
    both_ways = [order for one, other in answer_pairs.DIFFERENT for order in ((one, other), (other, one))]
    assert [pair for pair in both_ways if reward("", rf"\boxed{{{pair[0]}}}", pair[1]) != 0.0] == []


@pytest.mark.processes
def test_math_reward_verifier_and_answer_frequency_agree():
    """The reward, the verifier and the frequency of answers give one verdict."""
    for (one, other), same in [
        *((pair, False) for pair in DIFFERENT["exponent"]),
        *((pair, True) for pair in SAME["unit"]),
    ]:
        responses = [rf"\boxed{{{one}}}", rf"\boxed{{{other}}}"]
        verdicts = asyncio.run(MathVerifier().score("", responses[:1], other)).values[0, 0]
        frequency = asyncio.run(AnswerFrequency().score("", responses)).values[0, 0]
        assert bool(verdicts) is bool(frequency) is same, (one, other)


SIDES = st.text(alphabet="abxyXY0123456789(),+-*/ ", max_size=8)


@given(SIDES, st.sampled_from(["!", "'", "^", "_", "!!", "^2", "_2"]), SIDES)
def test_text_answer_comparison_keeps_mathematical_symbols(before, mark, after):
    assert not same_text(f"a{before}{mark}{after}b", f"a{before}{after}b")


@given(SIDES.filter(lambda text: not any(token.kind == "word" for token in tokenize_answer(text))))
def test_text_answer_comparison_is_case_sensitive(text):
    assert text.swapcase() == text or not same_text(text, text.swapcase())


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("B) 12", "B) 12"),
        ("The two sides are 3 and 4.\n\nC", "C"),
        ("Let me see.\n(D) 5 apples", "(D) 5 apples"),
        ("A) 1\nB) 2\nC) 3", "3"),  # the options again
        ("I count 3.\nSo the number is 7", "7"),
        ("**E**", "**E**"),
        ("The correct option is **(B)**.", "(B)**"),
        ("So the answer would be C.", "C"),
        ("Since 3 > 2, option (B) is correct.", "B"),
        ("Option A is wrong, so choice **D** is the right one of 4.", "D"),
    ],
)
def test_multiple_choice_letter_is_read_without_answer_marker(response, answer):
    assert final_answer(response) == answer


THOUGHTS = [
    ("<think>\n7\n</think>\n\n2", "2"),
    ("7</think>2", "2"),  # the template opened it
    ("<think>7", ""),
    ("[THINK]7[/THINK]2", "2"),
    ("<seed:think>7</seed:think>2", "2"),
    ("<reasoning>7</reasoning>\n2", "2"),
    ("◁think▷7◁/think▷2", "2"),
    ("<think>a</think>1<think>b</think>2", "2"),
    ("<|channel|>analysis<|message|>7<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>", "2"),
    ("2", "2"),
]


@pytest.mark.parametrize(("text", "answer"), THOUGHTS)
def test_math_reward_reads_only_text_after_thoughts(text, answer):
    assert without_thoughts(text) == answer
    assert ExactMatch()("", text, "2") == float(answer == "2")
    assert MathReward()("", text, "2") == float(answer == "2")
    braced = text.replace("2", '{"a": 2}').replace("7", '{"a": 7}')
    assert JsonMatch()("", braced, '{"a": 2}') == float(answer == "2")


def test_unclosed_thought_is_not_read_as_answer():
    assert MathReward()("<|im_start|>assistant\n<think>\n", r"It may be \boxed{2}", "2") == 0.0
    assert MathReward()("<|im_start|>assistant\n<think>\n", r"It may be 3</think>\boxed{2}", "2") == 1.0
    assert ExactMatch()("<think>", "2", "2") == 1.0  # the target as it is needs no reading


def test_digits_grouped_by_commas_are_one_number():
    assert are_equal("1,234", "1234", 0.0)
    assert not are_equal("(1,234)", "1234", 0.0)
    assert are_equal("(1,234)", "(1, 234)", 0.0)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.skipif(not TARGETS.exists(), reason="no targets of MATH in ../shared/data")
def test_math_targets_equal_themselves_and_not_nearby_values():
    """A part of benchmarks/answers.py."""
    from benchmarks import answers

    targets = [row["answer"] for row in json.loads(TARGETS.read_text())][::9]
    reward = MathReward()
    accepted, rejected = [], []
    for target in targets:
        changed = sorted(answers.changed(target))[::3]
        accepted += [(text, target) for text in changed if reward("", rf"\boxed{{{text}}}", target) != 0.0]
        rejected += [(text, target) for text in sorted(answers.written(target))[::3] if reward("", text, target) != 1.0]
    assert (accepted, rejected) == ([], [])


@pytest.mark.parametrize(
    ("response", "target", "right"),
    [
        ("The value is −5", "-5", True),
        ("The value is −5", "5", False),
        ("It is –5.", "-5", True),
        ("between 3–5", "5", True),  # a range
        ("The answer is A, B", "A", False),
        ("Answer: (A), (B)", "A", False),
        ("The answer is A. Or B.", "A", False),
        (r"\boxed{D}. So the answer is (A).", "D", False),
        (r"The answer is not \boxed{4}", "4", False),
        (r"\boxed{4} is wrong.", "4", False),
        (r"\boxed{4}. Wait, it should be 5.", "4", False),
        (r"\boxed{4}. No other solutions exist.", "4", True),
        ("The answer is 4... no wait, 5", "4", False),
        ("The answer cannot be 4", "4", False),
        ("It is 3√2", "2", False),
        ("It is 4π", "4", False),
        ("It is x^2", "2", False),
        (r"It is $\frac{x}{2}$", "2", False),
        ("The pair is (3, 4)", "4", False),
        ("At 3:45", "45", False),
        ("So x ≥ 5", "5", False),
        ("3 and 4", "4", False),
        ("She has 5 apples and he has 4", "4", True),
        (r"The value is $2\sqrt{3}$.", r"2\sqrt3", True),
        ("It costs $5.", "5", True),
        ("The answer is 4<|im_end|>", "4", True),
        ("The answer is 4</s>", "4", True),
        ("The answer is therefore 12", "12", True),
        ("<answer> The answer is 12. </answer>", "12", True),
        ("答案：B", "B", True),
        # Marks of other scripts end an answer, and other answers after them count.
        ("答案是42。", "42", True),
        ("所以答案为 $\\frac{1}{2}$。", "1/2", True),
        ("答案是3.5！", "3.5", True),
        ("答案是３．５．", "3.5", True),
        ("The answer is 42।", "42", True),
        ("The answer is 42۔", "42", True),
        ("#### 42。", "42", True),
        ("答案是42，因为6*7=42。", "42", True),
        ("答案是42（两个数的和）", "42", True),
        ("答案是（1，2）。", "(1,2)", True),
        ("The answer is $x \\in (1, 2)$.", "(1,2)", True),
        ("答案是42。或43。", "42", False),
        ("答案是42，但43也对", "42", False),
        ("答案是3，4。", "3", False),
        (r"\boxed{4}或\boxed{5}", "5", False),
        ("答案不是42。", "42", False),
        # Of a bound, a calculation, two signs or a box that is not closed the last number is only a part.
        ("x is less than 4", "4", False),
        ("so x<4", "4", False),
        ("±4", "4", False),
        ("3+4", "4", False),
        ("10 - 4", "4", False),
        (r"so \boxed{12", "12", False),
        ("It is 4!", "4", True),
        ("<b>4</b>", "4", True),
        # Several letters are in any order, with or without commas.
        (r"\boxed{A, C}", "AC", True),
        (r"\boxed{\text{C and A}}", "AC", True),
        (r"\boxed{A, C}", "ACD", False),
        (r"\boxed{A}", "AC", False),
        (r"\boxed{1.234,56}", "1234.56", False),
        (r"\boxed{2\ln x}", r"\ln x^2", False),
        (r"\boxed{}", "", False),
        (r"\boxed{" + "(x>0)" * 700 + "}", "4", False),
    ],
)
@pytest.mark.processes
def test_retracted_or_partial_math_answers_score_0(response, target, right):
    assert MathReward()("", response, target) == float(right)
