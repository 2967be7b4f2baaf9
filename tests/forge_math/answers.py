"""Responses by target: those that give it, and those that do not. Each line is one; `\\n` in it is a newline."""

import re

RIGHT_LINES = {
    "4": r"""
4
\boxed{4}
\boxed{4.0}
\boxed{ 4 }
\boxed{{4}}
\fbox{x} and \boxed{4}
\boxed{3}, no: \boxed{4}
$\boxed{4}$.
\[\boxed{4}\]
#### 4
####4
#### $4
#### 4.
#### 4.00
<answer>4</answer>
<answer>\boxed{4}</answer>
<answer> 4 </answer> done
The answer is 4
The answer is 4.
the answer is: 4
Answer: 4
**Answer:** 4
**Answer**: **4**
Final answer is $4$.
The answer is \(4\).
The answer is 4 because 2 + 2 = 4
The answer is 4, since there are four.
The answer is 4, which is even.
The answer is 4 (see above).
The answer is 4 (an even number).
The answer is 4. That is all.
The answer is 4 apples
The answer is 4 apples.
The answer is 4 red apples left over.
The answer is about 4
The answer is exactly 4
Q: 2 + 2?\nA: 4
So she has 4
So she has 4 apples.
4 apples
4%
+4
４
𝟒
¥4
€4
£4.00
₹4
$4
\$4
4\text{ cm}
4\text{ cm}^2
4 cm²
4 km/h
4 miles per hour
4 apple(s)
4\,\text{kg}
4^\circ
4°
\color{red}{4}
\boxed{\color{red}{4}}
\boxed{\color{red}4}
\boxed{\textcolor{blue}{4}}
\boxed{\mathbf{4}}
\boxed{\boldsymbol{4}}
\boxed{\underline{4}}
\boxed{\text{4}}
\boxed{x = 4}
\boxed{x=4}
\boxed{f(2) = 4}
\boxed{P(A) = 4}
\boxed{x_1 = 4}
\boxed{\angle ABC = 4}
\boxed{2 + 2 = 4}
\boxed{2 \times 2 = 4}
\boxed{2 \cdot 2 = 4}
\boxed{x = 2 + 2 = 4}
\boxed{8/2}
\boxed{\frac{8}{2}}
\boxed{\dfrac82}
\boxed{\sqrt{16}}
\boxed{2^2}
\boxed{2²}
\boxed{x = \sqrt{16}}
\boxed{4\ }
\boxed{\left(4\right)}
\boxed{4.}
\boxed{4}\n\nThe answer is 4.
\boxed{4}\n#### 4
The answer is 5. Wait, the answer is 4.
\boxed{5}\nLet me check.\n\boxed{4}
<think>\boxed{5}</think>\boxed{4}
<think>the answer is 5</think>The answer is 4
\boxed{\approx 4}
4!/6 is \boxed{4}
""",
    "0.5": r"""
½
\boxed{½}
1/2
\frac12
\frac{1}{2}
\tfrac{1}{2}
.5
0.50
50%
50\%
\boxed{50\%}
\boxed{\frac{1}{2} = 0.5}
5e-1
5 \times 10^{-1}
#### 0.5
The answer is one half, \boxed{0.5}
""",
    "3/2": r"""
1½
\boxed{1½}
1 1/2
\boxed{1\frac{1}{2}}
\boxed{1\frac12}
1.5
\frac{3}{2}
\boxed{\frac{3}{2} = 1.5}
""",
    "1/3": r"""
⅓
\boxed{0.\overline{3}}
\boxed{0.\bar{3}}
\boxed{.\overline{3}}
\boxed{0.\overline{33}}
\boxed{0.3\overline{3}}
\frac{1}{3}
0.3333333
""",
    "16": r"""
#### 4²
\boxed{4²}
\boxed{4^2}
\boxed{2^{4}}
\boxed{2⁴}
16
""",
    "-4": r"""
-4
−4
–4
\boxed{-4}
\boxed{−4}
-\$4
-4.0
\boxed{-\frac{8}{2}}
The answer is -4 degrees
The answer is $-4$.
\boxed{x = -4}
""",
    "1234": r"""
1,234
1{,}234
1\,234
\boxed{1,234}
\boxed{1{,}234}
\boxed{1\,234}
\boxed{1\,234.0}
#### 1,234
#### $1,234.00
1.234e3
1.234 \times 10^3
The answer is 1,234 dollars.
12​34
12⁠34
""",
    "5000000": r"""
5 million
5 million dollars
\boxed{5\text{ million}}
5,000,000
5000 thousand
5e6
\boxed{5 \times 10^6}
\boxed{5\cdot10^{6}}
0.005 billion
""",
    "24": r"""
2 dozen
24 eggs
\boxed{4!}
""",
    "400": r"""
4 hundred
400
\boxed{400\text{ miles}}
""",
    "B": r"""
B
(B)
\boxed{B}
\boxed{\text{B}}
\boxed{\text{(B)}}
\boxed{\textbf{(B)}}
The answer is B.
The answer is (B).
The answer is B) 12
The answer is (B) 12
\boxed{B) 12}
\boxed{(B)\ 12}
\boxed{\text{(B) } 12}
Answer: B
**Answer: B**
""",
    "x+2": r"""
x+2
\boxed{x+2}
\boxed{2+x}
\boxed{y = x + 2}
\boxed{f(x) = x+2}
""",
    r"\sqrt{8}": r"""
\boxed{2\sqrt{2}}
\boxed{\sqrt{8}}
\boxed{\sqrt 8}
\boxed{8^{1/2}}
\boxed{2\sqrt{2}\text{ inches}}
\boxed{2\sqrt{2}\text{ square inches}}
""",
    "2abc": r"""
\boxed{2bca}
\boxed{2abc}
""",
    r"\{1,2\}": r"""
\boxed{\{2,1\}}
\boxed{\{1, 2\}}
""",
    "(1, 2)": r"""
\boxed{(1,2)}
\boxed{\left(1,2\right)}
""",
    "Paris": r"""
\boxed{\text{Paris}}
The answer is Paris.
paris
PARIS
""",
}
WRONG_LINES = {
    "4": r"""
I do not know
\boxed{}
\boxed{5}
The answer is 4 (or 5)
The answer is 4, or 5
The answer is 4, 5
The answer is 4 or 5
The answer is 4; or maybe 5
The answer is 4. Or 5.
The answer is 4, maybe 5
The answer is 4 (perhaps 5)
The answer is 4, not 5? Or 5
The answer is 4 and 5
The answer is 4, and 5
The answer is 5 or 4
The answer is not 4
The answer is not 4 but 5
The answer is 4 minus one
The answer is 4 times ten
The answer is 4 dozen
The answer is 4 hundred
The answer is 4 thousand
The answer is 4 million
The answer is 4 trillion
The answer is 4 wrong
The answer is 4 squared
The answer is 4 plus one
The answer is 4 and a half
The answer is 4 and one half
The answer is 4 divided by two
The answer is less than 4
The answer is at most 4
The answer is between 3 and 4
The answer is four
\boxed{4 or 5}
\boxed{4 \text{ or } 5}
\boxed{4, 5}
\boxed{4 5}
\boxed{5 = 4 + 1}
\boxed{4=5}
\boxed{5=4}
\boxed{3=4}
\boxed{2+3=4}
\boxed{3 = 5 = 4}
\boxed{2x = 4}
\boxed{-x = 4}
\boxed{\frac{x}{2} = 4}
\boxed{x - y = 4}
\boxed{x + y = 4}
\boxed{x^2 = 4}
\boxed{x<4}
\boxed{x \le 4}
\boxed{x=4 \text{ or } x=5}
\boxed{x=5 \text{ or } x=4}
\boxed{x=5, x=4}
\boxed{x \neq 4}
\boxed{4x}
\boxed{4a}
\boxed{4k}
\boxed{2+2}
\boxed{2 \times 2}
\boxed{2 \cdot 2}
\boxed{2*2}
\boxed{2(2)}
\boxed{(2)(2)}
\boxed{5-1}
\boxed{8 \div 2}
\boxed{6 - 2}
\boxed{4 \pm 1}
\boxed{4_5}
\boxed{4_{10}}
\boxed{4-}
\boxed{-4}
\boxed{--4}
\boxed{+-4}
\boxed{4/}
\boxed{/4}
\boxed{4^}
\boxed{4\frac{1}{2}}
\boxed{4!}
#### 4!
\boxed{0x4}
\boxed{04x}
\boxed{4\%4}
\boxed{[4]5}
\boxed{(4,4)}
\boxed{\{4, 5\}}
\boxed{4} or \boxed{5}
\boxed{4} or 5
\boxed{5} or \boxed{4}
$\boxed{4}$, or maybe $5$
\boxed{4}\nThe answer is 5
\boxed{4}\n#### 5
\boxed{4}. So the answer is 5.
\boxed{5}\nThe answer is 4
<think>\boxed{4}</think>
<think>\boxed{4}</think> I am done
<answer>4 5</answer>
<answer>4 or 5</answer>
<answer>4, 5</answer>
<answer></answer> 5
#### 4 5
#### 4 or 5
#### 4, 5
#### 4 - 5
#### 4/5
#### 4,5
#### 4.5
#### 44
#### 4 wrong
#### -4
#### 4.00001
The answer is 4.1
The answer is 4e1
The answer is 4%4
The answer is 4⁄5
4²
4½
½
4 x 10^2
4 \times 10^{2}
4·5
4 and then 7
IV
nan
inf
\boxed{nan}
\boxed{\infty}
\boxed{4/0}
\boxed{0/0}
\boxed{\text{not } 4}
\boxed{\text{about } 4 \text{ or } 5}
\boxed{\text{4 or 5}}
\boxed{\frac{4}{5}}
\boxed{\sqrt{4}}
\boxed{4i}
\boxed{4e}
\boxed{4\pi}
\boxed{|x| = 4 + x}
\boxed{\sin(4)}
\boxed{\log 4}
\boxed{\begin{pmatrix}4\\5\end{pmatrix}}
""",
    "45": r"""
4 5
4\,5
4\;5
4~5
\boxed{4\,5}
\boxed{4 5}
\boxed{4\quad 5}
#### 4 5
\boxed{4, 5}
\boxed{4{,}5}
<answer>4 5</answer>
""",
    "5": r"""
x=4 \text{ or } x=5
\boxed{x=4 \text{ or } x=5}
\boxed{4=5}
\boxed{x \in \{4, 5\}}
\boxed{x \ge 5}
\boxed{5x}
\boxed{5é}
\boxed{5 é}
The answer is 4 (or 5)
""",
    "10": r"""
1010_2
\boxed{1010_2}
\boxed{1010_{2}}
\boxed{10_2}
\boxed{0xA}
\boxed{0xa}
\boxed{9 + 1}
ten
\boxed{1 0}
""",
    "1010": r"""
\boxed{1010_2}
\boxed{1010_{2}}
\boxed{10 10}
""",
    "4000": r"""
\boxed{4k}
4k
\boxed{4K}
""",
    "B": r"""
A
\boxed{A}
\boxed{A or B}
\boxed{A) or B)}
\boxed{A, B}
The answer is A) B
The answer is (A) or (B)
The answer is not B
b is bad, so \boxed{C}
12
\boxed{12}
\boxed{BB}
\boxed{B2}
""",
    "-1": r"""
\boxed{e^{i\pi}}
\boxed{i^2}
\boxed{--1}
\boxed{1}
\boxed{1 - 2}
""",
    "42": r"""
\boxed{6 \times 7}
\boxed{6*7}
\boxed{6(7)}
\boxed{40+2}
\boxed{42 or 43}
\boxed{42, 43}
\boxed{42_8}
\boxed{4 2}
""",
    "x+2": r"""
\boxed{x+3}
\boxed{x-2}
\boxed{x}
\boxed{2}
\boxed{x+2 \text{ or } x+3}
\boxed{y + 1 = x + 2}
""",
    "1/3": r"""
0.33
0.333
\boxed{0.3}
\boxed{0.3\overline{4}}
\boxed{1 / 4}
""",
    r"\sqrt{8}": r"""
\boxed{2\sqrt{2}\text{ or } 3}
\boxed{2\sqrt{2}\text{ wrong}}
\boxed{2\sqrt{2}\text{ plus one}}
\boxed{\text{not } 2\sqrt{2}}
""",
    "(1, 2)": r"""
\boxed{(2,1)}
\boxed{1}
\boxed{(1,2,3)}
""",
}


def lines(blocks: dict[str, str]) -> list[tuple[str, str]]:
    """(response, target) of each line."""
    return [
        (re.sub(r"\\n(?=[^a-z]|The|$)", "\n", line), target)  # not the \\n of \\neq
        for target, block in blocks.items()
        for line in block.strip("\n").split("\n")
    ]


RIGHT, WRONG = lines(RIGHT_LINES), lines(WRONG_LINES)
