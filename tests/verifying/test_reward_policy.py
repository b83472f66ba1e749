"""What counts as the same answer: docs/verification.md, one section after the other, by example."""

from __future__ import annotations

import pytest

from hacpo.verifying.answers.algebra import TooLargeError, UnreadableError
from hacpo.verifying.answers.equivalence import equivalent

# section -> gold answer -> (answers that are correct, answers that are wrong)
POLICY: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "notation": {
        "5": (
            [
                "$5$",
                r"\(5\)",
                "5.",
                "**5**",
                " 5\n",
                r"\displaystyle 5",
                "{5}",
                "(5)",
                r"\text{5}",
                r"\mathbf{5}",
                "５",
                "5?",
            ],
            ["", r"\frac{5}", r"5\cdot", "5i", r"\overline{5}", "5'", "see above", r"5 \text{ is not the answer}"],
        ),
        r"\frac{3}{4}": (["3/4", r"\dfrac34", r"\tfrac 3 4", "¾", ".75", "75/100", r"\frac{6}8"], ["4/3", "3/4x"]),
        r"\frac{\pi}{4}": ([r"\frac \pi4", "π/4", "pi/4", r"\pi / 4", r"\frac{1}{4}\pi"], ["0.785", r"\frac{\pi}{3}"]),
        r"\sqrt{2}": ([r"\sqrt2", r"\sqrt 2", "√2", "sqrt(2)", "2^{1/2}", "2^(1/2)"], ["1.41", r"\sqrt{3}", "2"]),
        r"\sqrt[3]{2}": ([r"\sqrt[3]2", "2^{1/3}"], [r"\sqrt{2}"]),
        r"-\frac{1}{2}": (["-0.5", "−½", r"\frac{-1}{2}", r"\frac{1}{-2}"], ["0.5", r"\frac12"]),
        r"\pi r^2": (["πr²", "pi*r^2", r"r^{2}\pi"], [r"2\pi r"]),
        r"\{-1\} \cup [0,7)": ([r"[0,7)\cup\left\{-1\right\}", "{-1} ∪ [0,7)"], [r"[0,7]\cup\{-1\}"]),
    },
    "numbers": {
        "0": (["-0", "0.0", r"\frac{0}{5}"], ["10^{-30}", r"\emptyset"]),
        "1000": (
            ["1,000", "1 000", r"1\,000", "1{,}000", "1000.0", "10^3", "1.0e3"],
            ["1,00", "1.000", "100 0", "10^4"],
        ),
        "1,000,000": (["1000000", r"1,\!000,\!000", "10^6"], ["1,000"]),
        "32349": ([r"32,\! 349", "32,349"], ["32, 349"]),
        "1/3": (["0.333333", r"0.\overline{3}", r"0.\bar{3}"], ["0.33", "0.3333"]),
        r"0.1\overline{6}": (["1/6"], ["0.16"]),
        "2.5": (["2.50", "5/2", r"2\frac12", "2 1/2", "2½", "2,5"], ["2", "5", "2,500"]),
        "-3/2": ([r"-1\frac{1}{2}", "-1.5"], [r"1\frac{1}{2}", "-1/2"]),
        "1.5": ([r"3\cdot\frac12", "3(1/2)"], [r"3\frac12"]),
        "6": (["2(3)", "(2)3", r"2\cdot3"], ["2 3", "5", "{5}{1}"]),
        "1.2": ([], ["1.2.3"]),
        "16386.17": ([r"\$16,386.17"], ["16386.18", "16386"]),
        "1e-7": ([r"1\times 10^{-7}", "0.0000001"], ["2e-7", "1.1e-7", "0"]),
        "1.38e-23": ([r"1.38 \cdot 10^{-23}", "1.38 × 10⁻²³"], ["2.38e-23", "1.38e-22", "1.38"]),
        "4.5e33": ([r"4.5 \times 10^{33}"], [r"4.6\times 10^{33}", "4.5"]),
        r"\frac{1}{2^{99}}": ([r"2^{-99}"], [r"\frac{1}{2^{98}}"]),
        "123456789012345678901234567890": ([], ["123456789012345678901234567891"]),
        "1024": (["2^{10}", "2^10", "2**10"], ["210"]),
        "64": (["(2^3)^2"], ["2^{3^2}"]),
        "120": (["5!", "5! = 120"], ["5"]),
        r"\infty": (["infinity", "∞", r"+\infty"], [r"-\infty", "10^{100}"]),
        r"\text{four}": (["4"], ["5"]),
        "7": (
            ["7th", r"7^{\text{th}}"],
            [r"__import__('os').system('x') or 7", "eval(7)", "x or 7", "not 7", "lambda: 7"],
        ),
    },
    "rounding": {
        "0.066666793": (["0.0666668"], ["0.067"]),
        "2/3": (["0.666667"], ["0.667", "0.67"]),
        r"\pi": (["3.1415926536"], ["3.14159", "22/7"]),
        r"9\sqrt{2}": (["12.727922"], ["12.73"]),
        "0.001": ([], ["0.0014", "0.00101"]),
    },
    "units": {
        r"5\text{ cm}": (
            ["5", "5 cm", "5cm", r"5\,\mathrm{cm}", r"5 \text{ centimeters}", "5 centimetres", r"5\text{ units}"],
            ["5 m", r"5\text{ m}", r"5\text{ cm}^2", r"6\text{ cm}", "5 inches"],
        ),
        r"15\mbox{ cm}^2": (
            ["15", r"15 \text{ cm}^2", "15 cm^2", "15 cm²", r"15 \text{ square cm}", r"15\text{ sq. centimeters}"],
            [r"15\text{ cm}", r"15\text{ cm}^3"],
        ),
        "5": (
            ["5 apples", "5 cm", r"5\text{ ways}", r"\$5", "£5", "Rs. 5", r"5^\circ", "5 degrees"],
            ["5m", "5t", "5x"],
        ),
        "9.8": ([r"9.8 \text{ m/s}^2", "9.8 m/s^2", r"9.8 \, \mathrm{m/s^2}"], ["9.8 m/s^2 + 1"]),
        r"\$10": (["10", r"10 \text{ dollars}", "$10$", "10 USD", r"\$10.00"], ["€10", r"10\text{ cents}"]),
        r"80\text{ cents}": (["80"], [r"\$0.80", r"\$80"]),
        r"45\text{ mph}": (["45", r"45 \text{ miles per hour}"], [r"45 \text{ km/h}"]),
        "120": (["120 minutes"], ["2 hours"]),
        "5000000": ([], [r"5 \text{ million}"]),
        "12": (["12 eggs per day"], ["12 or more", "12 less than 5", "12 eggs and 3 pears", r"12 \text{ dozen}"]),
        "3": ([], ["3 hours 20 minutes", "3m", "3t", "3x"]),
        "4t": (["4 t"], ["4", "4s"]),
        "2x+3c": ([], ["2x+3"]),
        r"45^\circ": (["45", "45°", "45 degrees", r"45^{\circ}"], [r"\frac{\pi}{4}", r"45\%", r"45\text{ radians}"]),
        r"\frac{1}{2}": ([r"\sin 30^\circ"], [r"\sin 60^\circ"]),
        r"20^\circ\text{C}": (["20", r"20^\circ C"], [r"20^\circ\text{F}"]),
    },
    "percent": {
        r"10\%": (
            ["10", "10%", "10 percent", r"10 \text{ percent}", "0.1", r"\frac{1}{10}"],
            [r"20\%", "0.2", "1", r"10^\circ"],
        ),
        "0.1": ([r"10\%"], ["10"]),
        "10": ([r"10\%"], ["0.1"]),
        r"0.56 = 56\%": ([r"56\%", "0.56"], ["0.65"]),
        r"20\%, 30\%": ([r"30\%, 20\%"], [r"20\%"]),
        r"33\frac{1}{3}\%": ([r"\frac{100}{3}\%"], [r"33\%"]),
    },
    "names and equations": {
        "5": (
            ["x=5", "x = y = 5", "f(2)=5", "|AB|=5", r"\text{Area} = 5", "2+3=5", r"\sqrt{25}=5", r"x \approx 5"],
            ["2x=5", "x+y=5", "x^2=5", "2x+z=5", "5=x", "2+2=5", "x=5=6", r"\sqrt{x}=5"],
        ),
        "30": ([r"\angle ABC = 30^\circ"], [r"2\angle ABC = 30^\circ"]),
        "x=5": (["5", "x = 5.0"], ["y=5", "2x=10", "x+1=6", "x"]),
        "2x+z=5": (["z=5-2x", "4x+2z=10"], ["5", "2x+z", "2x+z=6"]),
        "y=2x+1": (["2x+1", "2x-y+1=0", "y-1=2x"], ["y=2x+2", "2x", "x=2y+1"]),
        r"f(x)=x+1": (["x+1", "f(n)=n+1"], ["f(n)=n+2", "g(x)=x+1"]),
        "x^2+y^2=25": (["x^2+y^2-25=0", "2x^2+2y^2=50"], ["25", "x^2+y^2=5", "x+y=25"]),
        "x^2+y^2=-1": ([], ["x^2+y^2=-3"]),
        r"\frac{1}{2}": ([r"\frac12 = 0.5", r"x=\frac12=0.5", r"\frac{1}{2} \approx 0.51"], [r"x=\frac12=0.6"]),
        r"\$\dfrac23 \approx \$0.67": ([r"\frac{2}{3}"], ["0.6"]),
        "A:B=1": (["1", "A:B=1"], ["2"]),
    },
    "lists": {
        "1,2": (
            [
                "2,1",
                "1;2",
                "{1,2}",
                r"\{2, 1\}",
                r"1 \text{ and } 2",
                "1 or 2",
                "x=1, x=2",
                "x_1=1, x_2=2",
                "(1,2)",
                "1,2,2",
            ],
            ["1", "1,2,3", "1,3", "[1,2]", "x=1", "12"],
        ),
        "1": ([r"\{1\}"], ["1,2", r"\{1,2\}", r"1 \text{ or } 2", r"\pm 1"]),
        "12 $ and $13": (["12, 13"], ["12", "13"]),
        r"\pm 5": (["5,-5", r"\{-5, 5\}", r"x = \pm 5"], ["5", "-5", "5, 6"]),
        r"\{1\pm\sqrt{5},-2\}": ([r"-2, 1+\sqrt5, 1-\sqrt5"], [r"-2, 1+\sqrt5"]),
        r"\frac{-1\pm\sqrt{5}}{2}": ([r"\frac{-1+\sqrt5}{2},\frac{-1-\sqrt5}{2}"], [r"\frac{-1+\sqrt5}{2}"]),
        "x=1,y=2": (["y=2,x=1", "1,2", "(1,2)", "(x,y)=(1,2)"], ["x=2,y=1", "2,1", "(2,1)"]),
        "a=4, -8, -10": (["-10,-8,4"], ["4,-8"]),
        "-1,3,3": (["3,-1"], ["-1,-1,4"]),
        "(1,2),(3,4)": (["(3,4),(1,2)", "(3,4);(1,2)"], ["(1,2),(4,3)", "1,2,3,4"]),
        "p=5,q=2;p=7,q=2": (["(5,2),(7,2)", r"p=5,q=2 \text{ and } p=7,q=2"], ["(2,5),(2,7)", "5,2,7"]),
        "98,634": (["98634", "98{,}634"], ["98", "98.634"]),
        "100,200,300": ([r"\{100,200,300\}"], ["600"]),
        r"\text{Softball, Kickball}": (
            ["Softball, Kickball", r"\text{softball, kickball}"],
            [r"\text{Kickball, Softball}"],
        ),
        r"\text{A, C}": (["A, C", r"\text{C and A}"], ["A", r"\text{A, B}"]),
    },
    "tuples and intervals": {
        "(1,2)": (
            [r"\left(1,2\right)", "(1;2)", r"\langle 1,2\rangle", "1,2", "(1.0,2)", "x=1, y=2"],
            ["(2,1)", "2,1", r"\{1,2\}", "[1,2]", "(1,2)+1", "(1,2,3)", "(1,2]"],
        ),
        "(p,q)=(3,2)": (["(3,2)", "3,2"], ["(2,3)"]),
        "[1,2)": (["[1,2)", r"1 \le x < 2", r"x \in [1,2)"], ["[1,2]", "(1,2)", "1<x<2", "1,2"]),
        r"(2,\infty)": (["x>2", "2<x", r"\{x \mid x>2\}", r"(2,+\infty)"], [r"x\ge 2", r"[2,\infty)", "2"]),
        "x>2": ([r"(2,\infty)", "2<x", r"x \gt 2", "-x<-2"], ["x<2", r"x \ge 2", "2", "y>2"]),
        "2<x<5": (["5>x>2", "(2,5)"], ["2<x<6", r"2\le x<5", "2,5"]),
        r"(-\infty,3)\cup(5,\infty)": (
            [r"(5,\infty)\cup(-\infty,3)", r"x \in (-\infty,3)\cup(5,\infty)"],
            [r"(-\infty,3)\cup(6,\infty)", r"(-\infty,3]\cup(5,\infty)", r"(-\infty,3)"],
        ),
        r"(-\infty,3)\cup(3,\infty)": ([r"x\ne 3", r"\mathbb{R}\setminus\{3\}"], [r"\mathbb{R}"]),
        r"\mathbb{R}": ([r"(-\infty,\infty)", r"\text{all real numbers}", r"x\in\mathbb{R}"], [r"(0,\infty)"]),
        r"\emptyset": ([r"\varnothing", r"\{\}"], ["0", r"\{0\}"]),
    },
    "words and choices": {
        r"\text{Evelyn}": (["Evelyn", r"\textbf{evelyn}"], ["Carla", "5", r"\text{Evelyn and Carla}"]),
        r"\text{odd}": (["odd", "Odd"], ["even", "oddd", "dod", "ddo"]),
        r"\text{two lines}": (["two lines"], ["lines two", "one line"]),
        r"\text{June 20}": (["June 20"], ["June 21", "20"]),
        r"\text{yes}": (["Yes", r"\text{yes}."], [r"\text{no}", r"\text{yes, but}"]),
        "42": (
            [],
            [r"\text{the answer is } 42", r"\text{I think it is 42}", r"\text{42 or 43}", r"\text{There is none}"],
        ),
        r"\text{(C)}": (
            ["C", "(C)", r"\textbf{(C)}", "c", r"\text{Option C}", "(C) 15", r"\text{C) } 15"],
            ["D", "(D) 15", "15"],
        ),
        r"\frac12": ([], [r"\textbf{(D) }\frac{1}{2}"]),
        r"\text{CBAD}": (["CBAD"], ["ABCD"]),
    },
    "bases": {
        "204_5": (["204_{5}", "(204)_5", "204"], ["204_6", "54", "402_5"]),
        "54": (["204_5"], ["204_6", "54_6"]),
        "24_{10}": (["24"], ["24_8", "30_8"]),
        r"\text{A5}_{11}": (["A5_{11}"], ["A6_{11}", "A5_{12}"]),
        "1011_2": (["(1011)_2"], ["11_{10}"]),
        "204": ([], ["204_6", "204_5"]),
        r"\$54": (["204_5"], ["204_6", "1103_6"]),
        "9": (["14_5"], ["9_5", "9_1", "9_{99}"]),
    },
    "ratios and times": {
        "3:1": (["3 : 1", "6:2"], ["3", "1:3", "3:1:1", r"\frac{3}{1}"]),
        "3": ([], ["3:1"]),
        "12:00": (["12:00"], ["1:00", "12", "0"]),
        "3:30": (["3:30", r"3:30\text{ p.m.}"], ["4:30", "7:60", "15:30"]),
        r"8\!:\!34 \text{ p.m.}": (["8:34 PM", r"8:34\text{ p.m.}", "8:34"], ["8:34 AM", "9:34 PM"]),
        r"9\text{ a.m.}": (["9 am", "9"], ["9 pm"]),
    },
    "residues": {
        "9": ([r"9 \pmod{11}", "9 (mod 11)", r"17 \mod 10 + 2"], [r"8 \pmod{11}"]),
        r"3 \pmod 7": ([r"x\equiv 3 \pmod{7}", "3"], [r"3 \pmod 8"]),
    },
    "algebra": {
        "x^2+2x+1": (["(x+1)^2", "x^2 + 2*x - (-1)"], ["x^2+2x+2", "y^2+2y+1"]),
        "R-r": (["-r+R"], ["0", "r-R"]),
        r"\pi(R^2-r^2)": ([r"\pi R^2-\pi r^2"], ["0", r"\pi(r^2-R^2)"]),
        "n(n+1)/2": ([r"\frac{n^2+n}{2}"], [r"\frac{n(n-1)}{2}"]),
        r"\frac{a}{b+c}": (["a/(b+c)"], ["a/b+c"]),
        "6+9i": (["9i+6", "6 + 9 i", "3(2+3i)"], ["6-9i", "6+9"]),
        "-i": ([r"\frac{1}{i}", "i^3"], ["i"]),
        "2i,-2i": ([r"\pm 2i"], ["2i"]),
        "f'": (["f'"], ["f"]),
        "2^{n+1}": (["2^(n+1)", r"2\cdot 2^n"], ["2^n+1"]),
        r"\ln 2": ([r"\ln(2)"], [r"\log 2"]),
        "2": (
            [r"\log 100", r"\log_2 4", r"\sqrt[3]{8}", r"\lfloor 2.7 \rfloor", "[2]", r"\{2\}", "((2))", "2\t\n"],
            [r"\ln 100", "2\0", "\x1b2", "[[2]]", r"\{\{2\}\}", r"\left[ [[2]] \right]"],
        ),
        "10": ([r"\binom{5}{2}", r"{5 \choose 2}", r"\binom52 = 10"], [r"\binom{5}{1}"]),
        "x": ([], [r"\sqrt{x^2}", "y"]),
        r"\frac{1}{3} E_{1}": ([r"\frac{E_1}{3}"], [r"\frac{E_2}{3}"]),
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": (
            [
                r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
                r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]",
                r"\begin{pmatrix}1&2\\3&4.0\\\end{pmatrix}",
            ],
            [
                r"\begin{pmatrix}1&2\\3&5\end{pmatrix}",
                r"\begin{pmatrix}1&3\\2&4\end{pmatrix}",
                r"\begin{vmatrix}1&2\\3&4\end{vmatrix}",
            ],
        ),
        r"\begin{pmatrix}1\\2\end{pmatrix}": (
            [r"\begin{bmatrix}1\\2\end{bmatrix}"],
            [r"\begin{pmatrix}1&2\end{pmatrix}", "(1,2)"],
        ),
    },
}
CASES = [
    pytest.param(gold, answer, expected, id=f"{section}: {gold} <- {answer}")
    for section, golds in POLICY.items()
    for gold, (correct, wrong) in golds.items()
    for expected, answers in ((True, correct), (False, wrong))
    for answer in answers
]


@pytest.mark.parametrize(("gold", "answer", "expected"), CASES)
def test_policy(gold: str, answer: str, expected: bool) -> None:
    assert equivalent(answer, gold) is expected


def test_each_gold_answer_of_the_policy_is_its_own() -> None:
    golds = {gold for section in POLICY.values() for gold in section}
    assert [gold for gold in golds if not equivalent(f" {gold} ", gold)] == []


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^9}}", "1000000!", "((9!)!)!", "10^{10^{10}}", r"\binom{10^9}{5}", "1e999999999"]
)
def test_numbers_too_large_to_write_out_are_refused_at_once(answer: str) -> None:
    with pytest.raises(TooLargeError):
        equivalent(answer, r"\frac{1}{2}")


def test_a_gold_answer_that_cannot_be_read_is_no_zero() -> None:
    with pytest.raises(UnreadableError):
        equivalent("5", "np.arcsin(10/13)")
    assert equivalent("np.arcsin(10/13)", "np.arcsin( 10/13 )")


@pytest.mark.parametrize(
    "words",
    [
        *("squared", "cubed", "factorial", "halves", "thirds", "a third", "thousandths", "tens", "dozen", "lakh"),
        *("gross", "score", "doubled", "bn", "Mio", "negative", "is incorrect", "hundred million", "twentieths"),
        *("times seven", "is a wrong answer", "quarter of a cup", "degrees below zero", "double", "root of two"),
    ],
)
def test_words_that_make_another_number_are_not_dropped(words: str) -> None:
    assert not equivalent(rf"5 \text{{ {words}}}", "5")
    assert not equivalent(f"5 {words}", "5")


@pytest.mark.parametrize(
    "words",
    [
        *("times", "times a day", "times as likely", "times greater", "total times", "Pennsylvania state quarters"),
        *("dozens", "billions", "incorrect answers", "half-gallons", "sixth graders", "fourth grade boys"),
        *("double-flips", "different winning scores", "different negative values", "one-fourths"),
    ],
)
def test_words_that_say_what_is_counted_are_dropped(words: str) -> None:
    """What questions of GSM8K and MATH ask the number of."""
    assert equivalent(rf"5\text{{ {words}}}", "5")


@pytest.mark.parametrize("answer", [r"\text{not }x=5", r"\neg x=5", r"5_{\text{not}}"])
def test_what_denies_an_answer_does_not_give_it(answer: str) -> None:
    assert not equivalent(answer, "5")


def test_two_choices_are_none() -> None:
    assert equivalent("(A) 15", "A")
    assert not any(equivalent(answer, "A") for answer in ("(A)(B)", "A) B)", "(A) or (B)"))
