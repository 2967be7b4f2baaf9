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
31and41 | 31 and 41
-2or2 | -2 or 2
x=-1and x=3 | $x=-1$ and $x=3$
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
nm^2 | m^2n
a^2x^2+by^2 | b y^2+a^2x^2
\frac12at^2 | \frac{at^2}2
mgh | m g h
GMm/r | \frac{GMm}r
\frac{nRT}V | nRT/V
qvB | qBv
abd | bad
mnp | pnm
\frac{kQq}{r^2} | \frac{kqQ}{r^2}
\frac32nRT | \frac{3nRT}2
\frac{mg}2 | \frac12mg
\frac12kA^2 | \frac12 k A^2
\sin30^\circ | \frac12
\tan60^\circ | \sqrt3
\cos60° | 0.5
\tan15^\circ | 2-\sqrt3
4\sin15^\circ | \sqrt6-\sqrt2
10\,\Omega | 10
4.7 k\Omega | 4.7
5 μm | 5
5\mu\text{m} | 5
300 K | 300
2 A | 2
5 T | 5
5 eV | 5
5\,\mathrm{eV} | 5
5 dB | 5
5\text{ Wb} | 5
5 kg·m/s | 5
5\mathrm{~m} \mathrm{~s}^{-1} | 5
5\text{ J/(mol K)} | 5
10m/s^2 | 10
5º | 5
12元 | 12
12\text{元} | 12
a^xa^y | a^{x+y}
(ab)^n | a^nb^n
x^{n+1} | x\cdot x^n
nx^{n-1} | \frac{nx^n}x
\frac{1-x^{n+1}}{1-x} | \frac{x^{n+1}-1}{x-1}
e^{n\ln n} | n^n
(-1)^{n+1} | (-1)^{n-1}
\frac{1-(-1)^n}2 | \frac{1+(-1)^{n+1}}2
6^n | 2^n3^n
\sqrt[3]{-8} | -2
\sqrt[5]{-32} | -2
\sqrt[3]{x^3} | x
\pi | 3.141592653589793
2\pi | 6.283185307
e | 2.718281828459045
0.\dot3 | \frac13
v_{\text{max}} | v_{max}
T_{eq} | T_{\mathrm{eq}}
x_{\min} | x_{\text{min}}
\langle1,2\rangle | (1,2)
|AB|=5 | 5
{\bf 5} | 5
5\tag{1} | 5
\therefore 5 | 5
3\colon2 | 3:2
1或2 | 1, 2
3、4 | 3,4
A\cap B | B\cap A
a\perp b | b\perp a
x=1,y=2 | 1,2
x=1,y=2 | (1,2)
AB=5 | 5
f(2)=5 | 5
\angle ABC=5 | 5
S_n=5 | 5
\text{area}=5 | 5
P(A)=5 | 5
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
X=-1 and x=3 | $x=-1$ and $x=3$
y_7=2x, y=-2x | $y=2x$, $y=-2x$
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
\frac32nRT | \frac32
\frac32nRT | 1.5
2mgh | 2
\frac12at^2 | \frac12
\frac12kA^2 | 0.5
2abd | 2
3axy | 3
5qvB | 5
\frac34GMm | \frac34
3mg | 3
2an | 2
\sqrt2mgR | \sqrt2
x^2abd | x^2
6\pi\eta rva | 6\pi\eta
ax^2+by^2 | ax^2+b^2y^2
at^2 | (at)^2
x+am^3 | x+a^3m^3
nm^2 | n^2m^2
Mgh | mgh
Rth | rth
Nkt | nkt
ABDEF | abdef
2mgR | 2mgr
Aabb | aabb
AaBbCc | AABBCC
Bbb | bbb
\cos15^\circ | \cos15
2\sin20^\circ | 2\sin20
\not= 3 | 3
x\not=3 | 3
5\text{ A} | 5\text{ V}
5\text{ A} | 5 kg
5\text{ A} | 3\text{ hours}
5 MeV | 5 meV
5 Mbps | 5 mbps
\$5 per hour | \$5 per day
\$5 profit | \$5 loss
5 left | 5 right
5 more | 5 less
5 steps left | 5 steps right
3 real roots | 3 imaginary roots
5 minimum value | 5 maximum value
4 millions | 4
4 thousands | 4
4 dozens | 4
4 quadrillion | 4
4 lakh | 4
4 crore | 4
4 tenths | 4
4 halves | 4
4 thirds | 4
4 hundredths | 4
4 tens | 4
4 infinity | 4
4 theta | 4
3\text{ i} | 3
3\text{e} | 3
5\text{ x} | 5
4 factorial | 4
4 negative | 4
4 inverse | 4
0.4 repeating | 0.4
x=4 \text{ is impossible} | 4
x(x+1)=4 | 4
n(n-1)=4 | 4
a(b+c)=4 | 4
xy=4 | 4
kx=4 | 4
x_1x_2=4 | 4
\text{twice }x=4 | 4
\text{half of }x=4 | 4
\text{the square of }x=4 | 4
\text{reciprocal of }x=4 | 4
\int f(x)dx=4 | 4
\sum a=4 | 4
\neg x=4 | 4
\pi=4 | 4
e=4 | 4
i=4 | 4
\infty=4 | 4
x=1,y=2 | 2,1
a=3,b=4 | 4,3
a=3,b=4 | \{3,4\}
\max(x,10) | \max(y,10)
|x-100| | 100-x
100 | \max(x,100)
5 | |x-5|+x
\gcd(a,b) | \gcd(a,c)
1 | \gcd(a,b)
100! | 100!+1
2^{200} | 2^{200}-1
10^{60} | 10^{60}+1
x\ge1 \text{ or } x\le-1 | x\ge1 \text{ and } x\le-1
"""


def pairs(lines: str) -> list[tuple[str, str]]:
    """The two of each line."""
    return [(line.rpartition(" | ")[0], line.rpartition(" | ")[2]) for line in lines.strip().split("\n")]


SAME, DIFFERENT = pairs(SAME_LINES), pairs(DIFFERENT_LINES)
