"""Pairs of answers that say the same, and pairs that do not; one a line, the two apart by " | ".

Some are of public reports on other graders: huggingface/Math-Verify 2, 14, 37, 41, 60, 64, 69 and 82, NVIDIA-NeMo/Gym
1844.
"""

SAME_LINES = r"""
\frac{\sqrt{3}}{2} | \frac{1}{2}\sqrt{3}
\frac{\sqrt3}2 | \frac{\sqrt{3}}{2}
\frac{1}{\sqrt 2} | \frac{\sqrt{2}}{2}
2^{10} | 1024
10! | 3628800
\binom{10}{3} | 120
{10 \choose 3} | 120
\text{even} | even
x \in [-2, 7] | [-2,7]
-2 \le x \le 7 | [-2,7]
[-2,7] | \text{[-2,7]}
(x-5)(x+5) | x^2-25
(x+5)(x-5) | (x - 5)(x + 5)
y^2 - 4xy + 4x^2 | (2x-y)^2
p - q | -q+p
\$ 36 | 36
36\text{ dollars} | \$36
3:45\text{ PM} | \text{3:45 PM}
11\sqrt2 | 11\sqrt{2}
\sqrt{51} | √51
\frac{9 \pi}{4} - 6 | -6+\frac{9\pi}{4}
\left(\frac{3}{5},\frac{8}{3}\right] | (3/5, 8/3]
\left( 3, \frac{\pi}{2} \right) | (3,π/2)
6 - 5i | -5i+6
i | \sqrt{-1}
1 \pm \sqrt{19} | 1+\sqrt{19},1-\sqrt{19}
1 - \sqrt{19}, 1 + \sqrt{19} | 1\pm\sqrt{19}
\pm 2 | 2,-2
\{2,-2\} | \pm2
x = 2 \text{ or } x = -2 | -2, 2
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} | \begin{pmatrix} \frac{1}{5} \\ -\frac{18}{5} \end{pmatrix}
\begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix} | \begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}
\begin{bmatrix}1 & 0\\0 & 1\end{bmatrix} | \begin{pmatrix} 1 & 0 \\ 0 & 1 \\ \end{pmatrix}
\left(\begin{array}{c} 1 \\ 2 \end{array}\right) | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
4.5\times10^{33} | 4.5e33
6.02 \times 10^{23} | 6.02\cdot 10^{23}
1/3 | 0.\overline{3}
.\overline{3} | \frac13
137.5 | 137 \frac{1}{2}
\frac{275}{2} | 137 \frac{1}{2}
2k | 2 \cdot k
\frac{2k}{1} | 2k
5r^5 | 5 r^{5}
\cot(x) | \cot x
\frac{\cos x}{\sin x} | \cot x
\log_2 8 | 3
8n^2+4n+1 | 1 + 4n + 8n^{2}
\text{(C)} | C
C | \text{(C)}
\mathrm{C} | C
\textbf{(C) } 12 | C
(-\infty, 2) \cup (3, \infty) | (3,\infty)\cup(-\infty,2)
x < 2 \text{ or } x > 3 | (-\infty, 2) \cup (3, \infty)
\mathbb{R} | \mathbb{R}
(-\infty,\infty) | (-\infty, +\infty)
y = \frac{1}{2}x + 3 | y=0.5x+3
y = \frac{x}{2}+3 | y=\frac{1}{2}x+3
2y = x + 6 | y=\frac{1}{2}x+3
x - 2y + 6 = 0 | y=\frac{1}{2}x+3
5x-7y+11z+4=0 | 5x - 7y + 11z + 4 = 0
-5x+7y-11z-4=0 | 5x - 7y + 11z + 4 = 0
10x - 14y + 22z + 8 = 0 | 5x - 7y + 11z + 4 = 0
(x-1)^2+(y-2)^2=9 | (x - 1)^2 + (y - 2)^2 = 3^2
1,000,000 | 10^6
1\,000\,000 | 1000000
1 million | 10^6
54 \text{ square units} | 54
54\text{ units}^2 | 54
72^\circ | 72
72 | 72^\circ
72\degree | 72^{\circ}
30\% | 30
0.3 | 30\%
3\frac{1}{2} | 3.5
-\frac{3}{8} | \frac{-3}{8}
\frac{3}{-8} | -\frac38
-0.375 | -\frac{3}{8}
e^{2} | \mathrm{e}^2
\sqrt[3]{4} | 4^{1/3}
2^{\frac{2}{3}} | \sqrt[3]{4}
|x-1| | \left|x-1\right|
\lvert x-1\rvert | |1-x|
\lfloor x \rfloor | \left\lfloor x \right\rfloor
f(x)=x^2+1 | x^2+1
f^{-1}(x) = \frac{x-1}{2} | \frac{x-1}{2}
a_n = 2n - 5 | a_{n}=2 n-5
n(n+1)/2 | \frac{n(n+1)}{2}
\frac{n^2+n}{2} | \frac{n(n+1)}{2}
\frac{1}{2}n(n+1) | \frac{n(n+1)}{2}
\text{6,000 dollars} | 6000
9,\!450 | 9450
3\text{ hours} | 3
1:2 | 1:2
2 : 3 | 2:3
\text{Tuesday} | tuesday
\text{II only} | II only
Paris. | Paris
the ellipse | \text{ellipse}
An ellipse | ellipse
5\text{ cm} | 5 \mathrm{~cm}
5 \,\text{cm}^{2} | 5\text{ cm}^2
2\pi r^2 | 2 \pi r^{2}
\pi r^2 \cdot 2 | 2 \pi r^{2}
\vec{AB} | \overrightarrow{AB}
\angle{ABC} | \angle ABC
\emptyset | \varnothing
\{\} | \emptyset
(1,2), (3,4) | (3,4), (1,2)
\{(1,2),(3,4)\} | (1,2),(3,4)
x=2, y=3 | x=2, y=3
(x,y)=(2,3) | (2,3)
(a, b) = (2, 3) | (2,3)
\left(x, y\right) = \left(2, 3\right) | (2,3)
A=\{1,2\} | \{1,2\}
120\text{ km/h} | 120 \text{ km per hour}
16\text{ ft}^2 | 16 \text{ square feet}
0.5 | .5
+5 | 5
5.000 | 5
007 | 7
1+2i | 2i+1
\frac{1+i}{2} | \frac{1}{2}+\frac{i}{2}
\tan^{-1}(2) | \arctan 2
\sin^{-1} x | \arcsin x
\csc x | \frac{1}{\sin x}
8\sqrt{3} \text{ units} | 8\sqrt{3}
\approx 3.14 | 3.14
x \approx 3.14 | 3.14
\frac{22}{7} \approx 3.142857 | \frac{22}{7}
S = 12 | 12
0.0833333333333333 | \frac{1}{12}
(1,4.5) | (1,\frac{9}{2})
\frac{x}{7}+\frac{2}{7} | \frac{x+2}{7}
\sec^2(y) | \tan^2(y)+1
\begin{pmatrix}-\frac{7}{4}&-2\\4&2\end{pmatrix} | (\begin{pmatrix}-\frac{7}{4}&-2\\4&2\\\end{pmatrix})
\begin{pmatrix}\frac{1}{3x^{2/3}}&0\\0&1\end{pmatrix} | (\begin{pmatrix}\frac{1}{3\sqrt[3]{x}^2}&0\\0&1\\\end{pmatrix})
-\frac{8x^2}{9(x^2-2)^{5/3}}+\frac{2}{3(x^2-2)^{2/3}} | -\frac{2(x^2+6)}{9(x^2-2)\sqrt[3]{x^2-2}^2}
-34x-45y+20z-100=0 | 34x+45y-20z+100=0
a=1 \text{ or } a=-2 | a=-2 \text{ or } a=1
\text{13} | 13
-1 + exp(16) | e^{16} - 1
pi/2 | \dfrac{\pi}{2}
-2*pi | -2\pi
E: A polygenic risk score | E
\text{E} | E
f(x) = 0 | f(x)=0
14.0 + -1.0i | 14 - i
\sqrt{1/n} | \frac{1}{\sqrt{n}}
3\frac{1}{2} | \frac{7}{2}
12:00 | 12:00
x\in\{1,2\} | \{1,2\}
x \in \mathbb{R} | x\in R
"""
DIFFERENT_LINES = r"""
\frac{1}{2}\sqrt{3} | \frac{1}{\sqrt{3}}
[-2,7) | [-2,7]
x > -2 | x \geq -2
(x-5)(x+5) | x^2+25
6+5i | 6-5i
-i | i
1+\sqrt{19} | 1\pm\sqrt{19}
2 | \pm 2
1, 2 | 1, 2, 3
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 & 2 \end{pmatrix}
0.33 | \frac13
137 | 137 \frac{1}{2}
5r^4 | 5r^5
\tan x | \cot x
D | \text{(C)}
(-\infty,2]\cup(3,\infty) | (-\infty,2)\cup(3,\infty)
(-\infty,2)\cap(3,\infty) | (-\infty,2)\cup(3,\infty)
y = \frac{1}{2}x - 3 | y=\frac{1}{2}x+3
5x-7y+11z=4 | 5x - 7y + 11z + 4 = 0
10x - 14y + 22z + 4 = 0 | 5x - 7y + 11z + 4 = 0
3\% | 30\%
300\% | 30\%
54 \text{ cubic units} | 54\text{ square units}
3:4 | 4:3
1:2 | 0.5:2
(3,2) | (2,3)
x=3,y=2 | x=2,y=3
1 \text{ or } 2 | 1
not 5 | 5
5 or 6 | 5
less than 5 | 5
5^2 | 25.1
\sqrt{25.1} | 5
e^3 | e^2
\ln 2 | \log 2
a_{n+1} | a_n
2n-5 | 2n+5
x^{n+1} | x^n+1
\frac{a}{b+c} | \frac{a}{b}+c
a/(b+c) | a/b+c
2^{x+1} | 2^x+1
(2^x)+1 | 2^{x+1}
\sqrt{x+1} | \sqrt{x}+1
\sin(2x) | 2\sin x
\sin x^2 | \sin^2 x
f(x+1) | f(x)+1
|x| | x
AB | CD
A | a
\Gamma | \gamma
\theta | \Theta
\pi | \Pi
10 \text{ m} | 10 \text{ M}
10^{-15} | 10^{-16}
1.0000001\times10^{-20} | 1.1\times10^{-20}
123456789012345678 | 123456789012345679
3.14159 | \pi
1.41421 | \sqrt 2
\{1,2\} | \{1,3\}
[1,2] | \{1,2\}
\text{Monday} | Tuesday
II | III only
I and II | I and III
\text{yes} | no
12:00 | 12:30
3\text{ hours} | 3\text{ minutes}
x^2=4 | 2
\{x \mid x>0\} | \{x \mid x \ge 0\}
x \neq 3 | x=3
2<x<5 | 2<x\le5
\lfloor x\rfloor | \lceil x\rceil
\binom{n}{k} | \binom{k}{n}
\frac{dy}{dx} | \frac{dx}{dy}
5! | 5
\overline{z} | z
\bar{x} | x
\hat p | p
A^T | A
A^{-1} | A
P(A|B) | P(B|A)
P(A) | P(B)
A \cup B | A \cap B
A \subset B | B \subset A
\sim p | p
\neg p | p
p \wedge q | p \vee q
\forall x | \exists x
\sum_{k=1}^n k | \sum_{k=0}^n k^2
\int_0^1 x dx | \int_0^2 x dx
\lim_{x \to 0} x | \lim_{x \to 1} x
4\sqrt(2) | 4
\frac{1}{2004!} | \frac{1}{2006!}
\frac{1}{2^{99}} | \frac{1}{2^{98}}
n=2, 3, 4 | n=1, 2, 3
D = (0, 1) | D = (0, 1.5)
F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1} | F_n = \sum_{k=0}^{n-2} F_k F_{n-k-2}
19, 46, \text{ and } 82 | 21, 36, and 82
\frac{2^{2005}+1}{3 \cdot 2^{2006}} | \frac{1}{3 \cdot 2^{2006}}
1 - \frac{1}{\mathrm{e}} | 1 + \frac{1}{\mathrm{e}}
\pm 2021 | 2021
12:00 | 1:00
1, 2, \ldots, n | 1, 3, 5, \ldots, 2n-1
1:2:3:\ldots | 1:4:9:\ldots
3*x-1*y+13=0 | 3x + 4y + 14=0
f(x) = 0 | \forall x>0, f(x) = 0
1728 | 1331 and 1728
33.3 | \frac{100}{3}
\langle H\rangle \ll \Delta E | E
0 | x^2 - x^2+1
"""


def pairs(lines: str) -> list[tuple[str, str]]:
    """The two of each line."""
    return [(line.rpartition(" | ")[0], line.rpartition(" | ")[2]) for line in lines.strip().split("\n")]


SAME, DIFFERENT = pairs(SAME_LINES), pairs(DIFFERENT_LINES)
