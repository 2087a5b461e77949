"""Reading final answers: written forms of a number, where in a text it is looked for, and what no text may do."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.tasks.answers import MOST_DIGITS, UNCLEAR, extract, parse_number, read, same_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        ("-72", -72),
        ("\u221272", -72),  # minus sign
        ("- 72", -72),
        ("+72", 72),
        ("72.0", 72),
        ("72.", 72),
        ("0.25", Fraction(1, 4)),
        (".25", Fraction(1, 4)),
        ("007", 7),
        ("1,080", 1080),
        ("109,200,000", 109_200_000),
        ("1,234.50", Fraction("1234.5")),
        ("1 000 000", 1_000_000),
        ("1\u202f000\u00a0000", 1_000_000),  # narrow and ordinary no-break space
        ("1'000", 1000),
        ("1_000", 1000),
        ("1{,}000", 1000),
        ("1\\,000", 1000),
        ("$1,200", 1200),
        ("\\$1,200", 1200),
        ("-$5", -5),
        ("$-5", -5),
        ("€ 3.50", Fraction(7, 2)),
        ("US$5", 5),
        ("Rs. 500", 500),
        ("50%", 50),  # a percent sign is a unit
        ("12.5 %", Fraction(25, 2)),
        ("72 apples", 72),
        ("72nd", 72),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("3 / 4 cup", Fraction(3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        ("\u00bd", Fraction(1, 2)),
        ("1\u00bd", Fraction(3, 2)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("1\\frac{1}{2}", Fraction(3, 2)),
        ("\\dfrac12", Fraction(1, 2)),
        ("\\frac1{20}", Fraction(1, 20)),
        ("\\frac{3} 4", Fraction(3, 4)),
        ("1.5e3", 1500),
        ("2E-2", Fraction(1, 50)),
        ("1.5 \u00d7 10^3", 1500),
        ("1.5 \\times 10^{-1}", Fraction(3, 20)),
        ("2*10**3", 2000),
        ("**72**", 72),
        ("__72__", 72),
        ("`72`", 72),
        ("(72)", 72),
        ("~72", 72),
        ("\\text{72 dollars}", 72),
        ("\\mathbf{72}", 72),
        ("\uff17\uff12", 72),  # full width
        ("\u0667\u0662", 72),  # Arabic-Indic
        ("\u096d\u0968", 72),  # Devanagari
        ("7\u200b2", 72),  # a space of no width
        ("5 m²", 5),
        ("x = 72", 72),
        ("5 m^2", 5),
        ("12\\text{ cm}^{2}", 12),
        ("12\\text{ cm}^3", 12),
        ("12 cm2 of paper", 12),
        ("3 kg of CO2", 3),
        ("\u201472", -72),  # em dash
        ("\u2014 72", -72),
        ("\u2015$72", -72),
        ("1, 000", 1000),
        ("$1, 234, 567 a year", 1234567),
        ("5k", 5000),
        ("$2.5K", 2500),
        ("5 km", 5),
        ("5 thousand", 5000),
        ("1/2 million", 500_000),
        ("3 hundred dollars", 300),
        ("6 dozen", 6),
        ("7 (seven)", 7),
        ("5 for each one", 5),
        ("0/5", 0),
        ("1e200", 10**200),
    ],
)
def test_written_forms_of_a_number(text, value):
    assert parse_number(text) == value
    found = extract(f"Some 3 steps.\n#### {text}")
    assert found is not None
    assert (found.value, found.marker) == (value, "####")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "3/0",
        "1 1/0",
        "1/0.0",
        "\\frac{1}{0}",
        "72,5",
        "1,000,00",
        "1.2.3",
        "1/2/3",
        "1e999999999",
        "1e201",
        "x2",
        "²",
        "48 + 24 = 72",
        "72 (= 6 dozen)",
        "72 clips, 3 more than before",
        "5-6",
        "5\u20146",
        "5 to 6",
        "7 or 8 or 9",
        "7or8",
        "5 or six",
        "5 and six",
        "2 + 3",
        "2+3=5",
        "5, 6",
        "5 6",
        "5 = 6",
        "5^2",
        "3:30",
        "either 5 or 6",
        "-",
        "$",
    ],
)
def test_what_is_no_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "written", "marker"),
    [
        ("#### 5\nno wait\n#### 6", "6", "####"),  # the last one counts
        ("#### 72 ####", "72", "####"),
        ("####72", "72", "####"),
        ("####\n72", "72", "####"),
        ("#### 72 clips" + " and so on" * 100, "72", "####"),
        ("#### Answer: 72 clips", "72", "####"),
        ("#### The final answer is \\boxed{72}", "72", "####"),
        ("#### Step 1: add\n#### 7\n#### Done", "7", "####"),  # headings
        ("#### 4\nThe answer is 5. \\boxed{6}", "6", "boxed"),  # the last marked answer, whatever its marker
        ("#### 5\nActually I am wrong, the answer is 6.", "6", "phrase"),
        ("\\boxed{5}\nso #### 6\nThat was easy.", "6", "####"),
        ("#### 5 or 6\n#### 7", "7", "####"),
        ("#### Step 2: the answer is 7", "7", "phrase"),
        ("The answer is 5, so \\boxed{6} of 9", "6", "boxed"),
        ("\\boxed{5} then \\boxed{\\frac{1}{2}} 9", "1/2", "boxed"),
        ("\\boxed{6", "6", "last number"),  # never closed
        ("$\\boxed{\\text{72 dollars}}$", "72", "boxed"),
        ("The answer is 72.", "72", "phrase"),
        ("The final answer is: **$1,200**. It took 3 steps.", "1,200", "phrase"),
        ("**Answer:** 72", "72", "phrase"),
        ("ANSWER = 72", "72", "phrase"),
        ("the answer is\n\n- 72 clips. In 2 months.", "72", "phrase"),  # a bullet is no minus
        ("The answer to the second question is therefore 72.\nThat is out of 100", "72", "phrase"),
        ("The answer is 3.5 hours! It was 4 before.", "3.5", "phrase"),
        ("The answer is 5. No, the answer is 6. In 7 days.", "6", "phrase"),
        ("The answer is not 5 but 72", "72", "last number"),
        ("so 5 - 3 = 2, pages 5-6", "6", "last number"),
        ("He has <<48/2=24>>24 clips left.", "24", "last number"),
        ("24 clips, that is <<3*4=12>> few", "24", "last number"),  # an annotation is not the solution's text
        ("in H2O and x3 there are 4", "4", "last number"),
    ],
)
def test_where_the_answer_is_looked_for(text, written, marker):
    found = extract(text)
    assert found is not None
    assert (found.text, found.marker) == (written, marker)


@pytest.mark.parametrize(
    "text",
    [
        "#### 7 or 8 or 9",
        "The answer is 5 or 6 or 7 or 8",
        "#### 5-6",
        "#### 2 + 3",
        "#### 5. No, 6",
        "\\boxed{5, 6}",
        "\\boxed{5} #### 6 or 7",
        "#### either 5 or 6",
        "#### 5, the answer is 6",  # one line: two numbers
        "#### 5 #### 6",
        "#### 5" + " " * 1000 + "or 6",
        "#### 5\nActually the answer is 6 or 7.",  # a later unclear answer disqualifies
        "#### 5\n#### 3/0",
    ],
)
@pytest.mark.parametrize("before", ["", "So 2 + 3 = 5.\n", "#### 5\n"])
def test_a_hedged_answer_is_no_answer(text, before):
    assert read(before + text) == UNCLEAR
    assert extract(before + text) is None


@pytest.mark.parametrize(
    "text", ["", "no digits", "first 7, then 3/0", "7 and 1,2,3", "7 " + "1" * 400, "#### " + "1" * 400, "#" * 50]
)
def test_texts_without_an_answer(text):
    assert extract(text) is None


def test_comparison_is_exact():
    assert same_number("0.1", "1/10")
    assert same_number("$1,200.00", "1200")
    assert not same_number("0.33", "1/3")
    assert not same_number("9007199254740993", "9007199254740992")  # equal as floats
    assert not same_number("none", "none")  # what has no value equals nothing


def test_absurdly_long_numbers_are_none():
    for text in (
        "9" * (MOST_DIGITS + 1),
        "1e" + "9" * 50,
        "1 x 10^" + "9" * 5000,
        "0." + "1" * MOST_DIGITS,
        "1/" + "9" * 5000,
    ):
        assert parse_number(text) is None
    assert parse_number("9" * MOST_DIGITS) == 10**MOST_DIGITS - 1


@settings(deadline=None)
@given(st.text() | st.text(alphabet="#0123456789.,/ -+eE$%=(){}\\boxedfrac½²٣ answer is\n"))
def test_any_text_is_survived(text):
    found = extract(text)
    if found is not None:
        assert abs(found.value) < 10 ** (3 * MOST_DIGITS)
        assert parse_number(found.text) == found.value  # an answer as given is read the same again


@pytest.mark.timeout(60)  # quadratic time would take hours over these
@pytest.mark.parametrize(
    "piece",
    [
        "9",
        "#",
        "####\n",
        "#### ",
        "\\boxed{",
        "answer ",
        "answer: ",
        "answer:\n",
        "answer to ",
        "111 ",
        "1,",
        "1/",
        "1e",
        "-",
        "<",
        "<<a",
        "\\frac{",
        "{",
        "(",
        "=",
        "$",
        "the ",
        " ",
        "\n",
        "½",
        "1 x 10^",
        "1.",
        "** ",
        "\\",
        "_1",
    ],
)
def test_huge_texts_are_read(piece):
    text = piece * (280_000 // len(piece))
    extract(text)
    extract("#### " + text)
    assert (found := extract(text + "\n#### 72")) is not None
    assert found.value == 72
