"""Reads the final answer of a written solution, and compares numbers exactly. For all tasks with numbers as answers.

    extract("... so 48/2 = 24.\\n#### $1,200.00 a year")  -> FinalAnswer(text="1,200.00", value=1200, marker="####")
    extract("#### 7 or 8")                              -> None: two numbers are not an answer
    same_number("1 1/2", "1.50")                        -> True

Three markers announce an answer: `####` with a number after it, `\\boxed{...}`, and "answer is", "answer:" or
"answer =" with a number after it. Rules:

1. The last marked answer counts, whatever its marker. So a later answer replaces an earlier one.
2. The answer must be the only number of its line (`####`), its box, or its sentence ("answer is"). Units, currency
   signs, markup and a few filler words may surround it. So a solution that names several candidates earns nothing.
3. If a text has no marker, its last number is the answer.

A percent sign is a unit: `50%` is 50. `5k` and `5 thousand` are 5000. Nothing is evaluated.

Invariants: for any text, these functions do not raise and take time linear in its length. Values are exact rationals.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Marker = Literal["####", "boxed", "phrase", "last number"]

# A number with more digits, or a larger power of ten, is noise or an attack, never the answer of a word problem.
MOST_DIGITS = 200
# An answer begins within this many characters after its marker; a box has at most this many characters.
SEGMENT = 200

NO_ANSWER = "no final answer"
NO_MARKER = "no answer marker: {} was taken"  # the note of a grade
UNCLEAR = "the answer is not one number"


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The answer as written (sign and digits, without markup and currency), its value, and the marker before it."""

    text: str
    value: Fraction
    marker: Marker


def extract(text: str) -> FinalAnswer | None:
    """The final answer of `text` by the rules of this module, None without an answer."""
    found = read(text)
    return found if isinstance(found, FinalAnswer) else None


def read(text: str) -> FinalAnswer | str:
    """The final answer of `text`, or the reason why there is none: NO_ANSWER or UNCLEAR."""
    text = _plain(text)
    for mark in reversed(_marks(text)):
        if led := _leading(text, mark.start, mark.end):
            number = _only_number(text, led, mark)
            return FinalAnswer(*number, mark.marker) if number else UNCLEAR
    numbers = deque(NUMBER.finditer(text), maxlen=1)
    found = _last_piece(numbers[0]) if numbers else None
    return FinalAnswer(*found, "last number") if found else NO_ANSWER


def by_fallback(note: str) -> bool:
    """Whether the note of a grade says that the answer has no marker."""
    return note.startswith(NO_MARKER.partition(":")[0])


def parse_number(text: str) -> Fraction | None:
    """The value of a text that consists of one number with formatting or units (`$1,200`, `-3/4`, `72 apples`)."""
    text = _plain(text)
    led = _leading(text, 0, len(text))
    found = _only_number(text, led, _Mark("boxed", 0, len(text))) if led else None
    return found[1] if found else None


def same_number(first: str, second: str) -> bool:
    value = parse_number(first)
    return value is not None and value == parse_number(second)


def same_answer(first: str | None, second: str | None) -> bool:
    """Whether two answers that a task has found are equal: numbers with one value, or the same text."""
    if first is None or second is None:
        return False
    return first.strip() == second.strip() or same_number(first, second)


# --- markers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mark:
    """A marker, and the range of the text in which its answer may begin."""

    marker: Marker
    start: int
    end: int


HASHES = re.compile(r"#{4,}+(?:[ \t]*+#{4,}+)*+")
BRACES = re.compile(r"(?P<box>\\f?boxed ?\{)|[{}]")
PHRASE = re.compile(
    r"\banswer[*_`]{0,3}(?: (?:to|of|for)\b[^.\n:=]{0,60}?)?[ \t]{0,3}(?:\b(?:is|are|was|equals)\b ?:?|[:=])[*_`]{0,3}",
    re.IGNORECASE,
)
BULLET = re.compile(r"\s*\n\s*[-*•] ")
BLANK = re.compile(r"\s*+")


def _marks(text: str) -> list[_Mark]:
    """All markers in the order of the text. A marker within the line of a `####` answer belongs to that answer."""
    hashed: list[_Mark] = []
    ends: list[int] = []  # where the line of each of these ends
    for match in HASHES.finditer(text):
        if not ends or match.start() > ends[-1]:
            mark = _Mark("####", *_window(text, match.end()))
            if _leading(text, mark.start, mark.end):
                hashed.append(mark)
                ends.append(_answer_end(text, mark.start, mark))
    marks = hashed.copy()
    for mark in (*_boxes(text), *(_Mark("phrase", *_window(text, match.end())) for match in PHRASE.finditer(text))):
        line = bisect_left(ends, mark.start)
        if line == len(ends) or mark.start < hashed[line].start:
            marks.append(mark)
    return sorted(marks, key=lambda mark: mark.start)


def _boxes(text: str) -> Iterator[_Mark]:
    """The content of each closed box."""
    opened: list[int] = []  # start of the inside of each open brace; negative for a brace that is no box
    for match in BRACES.finditer(text):
        if match[0] != "}":
            opened.append(match.end() if match["box"] else -1)
        elif opened and (start := opened.pop()) >= 0 and match.start() - start <= SEGMENT:
            yield _Mark("boxed", start, match.start())


def _window(text: str, start: int) -> tuple[int, int]:
    """Start and end of the line after a marker, or of the next line if that is blank; at most SEGMENT characters.

    A bullet at the start of the next line is not a minus sign.
    """
    end = min(start + SEGMENT, len(text))
    skipped = BULLET.match(text, start, end) or BLANK.match(text, start, end)
    start = skipped.end() if skipped else start
    line_end = text.find("\n", start, end)
    if line_end >= 0:
        return start, line_end
    if end < len(text):  # cut between words, because half a number would be another number
        end = max(text.rfind(" ", start, end) + 1, start)
    return start, end


# --- numbers -----------------------------------------------------------------------------------------------------


# A maximal run of characters that may belong to one number. Once begun it never fails, so scanning a text is linear.
# `_value` decides whether the run is a number.
def _number(sign: str, joint: str = "") -> re.Pattern[str]:
    """The pattern of a number. `sign`: its possible signs. `joint`: another pattern that may join its digits."""
    run = (
        r"(?<![A-Za-z0-9])(?<![A-Za-z0-9]\.)\.?[0-9]"
        rf"(?:[0-9]|[.,'_ ](?=[0-9])|{joint} ?/ ?(?=[0-9])|[eE][-+]?(?=[0-9]))*+"
    )
    return re.compile(
        rf"(?:(?<![A-Za-z0-9)])(?P<sign>{sign}))?(?:\\?[$€£¥₹] ?(?P<inner>-)?)?(?P<run>{run})"
        rf"(?: ?{TIMES} ?10 ?(?:\^|\*\*) ?\{{?(?P<power>[-+]?[0-9]+)\}}?)?"
    )


TIMES = r"(?:x|\*|×|·|⋅|\\times|\\cdot)"
# Some texts use an em dash as a minus sign. In running text it counts as one only directly before the digits.
NUMBER = _number(sign=r"[-+] ?|\u2014")
# After a marker, `1, 000` is one number. In running text it may be a list.
MARKED_NUMBER = _number(sign=r"[-+\u2014] ?", joint=r", (?=[0-9]{3}(?![0-9]))|")
LEAD = re.compile(
    r"(?:[\s*_`~≈:=>\"'(\[{]|\\[a-zA-Z]++|\\\(|\\\[|\$(?=[-\\*$])|"
    r"\b(?:the|final|answer|is|about|approximately|around|roughly|simply|just|only|exactly|therefore|thus|so|now|"
    r"either|between|from|maybe|perhaps|possibly|equal|equals|to|USD?|EUR|GBP|Rs)\b\.?)*+",
    re.IGNORECASE,
)
SCALE = re.compile(r"[kK]\b|[ -]?(?P<word>hundred|thousand|million|billion|trillion)s?\b", re.IGNORECASE)
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SENTENCE_END = re.compile(r"[.!?](?=[\s*_`$)]|$)|\n")
# Digits that belong to a unit.
UNIT = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:[kcmd]?m|in|ft|yd|mi|inch(?:es)?|feet|foot|yards?|miles?|(?:kilo|centi)?met(?:er|re)s?|units?)"
    r"(?: ?\}? ?\^ ?\{?| ?\*\*| ?)[23]\}?|CO2|H2O)(?![A-Za-z0-9])"
)
DIGIT = re.compile(r"[0-9]")
# Without "one": "5 for each one" has no second number.
SPOKEN = {"zero": 0, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
SPOKEN |= {"eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16, "seventeen": 17}
SPOKEN |= {"eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60}
SPOKEN |= {"seventy": 70, "eighty": 80, "ninety": 90}
CHOICE = re.compile(rf"\b(?:(?P<spoken>{'|'.join(SPOKEN)})|or)\b", re.IGNORECASE)
GROUPED = (
    r"[0-9]{1,3}(?:,[0-9]{3})++|[0-9]{1,3}(?: [0-9]{3})++|[0-9]{1,3}(?:'[0-9]{3})++|[0-9]{1,3}(?:_[0-9]{3})++|"
    r"[0-9]{1,3}(?:, [0-9]{3})++"
)
DECIMAL = rf"(?:(?:{GROUPED}|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][-+]?[0-9]++)?"
SINGLE = re.compile(DECIMAL)
RATIO = re.compile(rf"({DECIMAL}) ?/ ?({DECIMAL})")
MIXED = re.compile(r"([0-9]++) ([0-9]++) ?/ ?([0-9]++)")


def _leading(text: str, start: int, end: int) -> re.Match[str] | None:
    """The number at the start of `text[start:end]`, or after its last equals sign (`x = 72`)."""
    for begin in (start, text.rfind("=", start, end) + 1):
        if begin >= start:
            lead = LEAD.match(text, begin, end)
            if match := MARKED_NUMBER.match(text, lead.end() if lead else begin, end):
                return match
    return None


def _only_number(text: str, match: re.Match[str], mark: _Mark) -> tuple[str, Fraction] | None:
    """Text and value of the number at the start of an answer; None if the answer has other numbers."""
    value = _value(match["run"])
    if value is None:
        return None
    end = _answer_end(text, match.end(), mark)
    scale = SCALE.match(text, match.end(), end)
    after = scale.end() if scale else match.end()
    others = UNIT.sub("", text[after:end])
    if DIGIT.search(text, mark.start, match.start()) or DIGIT.search(others):
        return None
    if any(not choice["spoken"] or SPOKEN[choice["spoken"].lower()] != value for choice in CHOICE.finditer(others)):
        return None
    return _signed(match, match["run"], value, POWERS.get((scale["word"] or "thousand").lower(), 0) if scale else 0)


def _answer_end(text: str, start: int, mark: _Mark) -> int:
    """The end of the line, sentence or box of a number that ends at `start`."""
    if mark.marker == "boxed":
        return mark.end
    if mark.marker == "phrase":
        sentence = SENTENCE_END.search(text, start)
        return sentence.start() if sentence else len(text)
    line = text.find("\n", start)
    return line if line >= 0 else len(text)


def _last_piece(match: re.Match[str]) -> tuple[str, Fraction] | None:
    """Text and value of a match of NUMBER. If its run is several numbers, the last one counts."""
    run = match["run"]
    value = _value(run)
    if value is None and " " in run and "/" not in run:
        run = run.rpartition(" ")[2]
        value = _value(run)
    return None if value is None else _signed(match, run, value)


def _signed(match: re.Match[str], run: str, value: Fraction, scale: int = 0) -> tuple[str, Fraction] | None:
    """Text and value with the sign and the power of ten of `match`, and a further power of ten `scale`."""
    if match["power"]:
        if len(match["power"]) > 4 or abs(int(match["power"])) > MOST_DIGITS:
            return None
        value *= Fraction(10) ** int(match["power"])
        run += f"e{match['power']}"
    if scale:
        value *= 10**scale
        run = str(value)
    if _value(run) != value:  # for example 1/2 x 10^3, whose text would be read as 1/(2 x 10^3)
        return None
    negative = ((match["sign"] or "+")[0] != "+") != (match["inner"] == "-")
    return ("-" + run, -value) if negative else (run, value)


def _value(run: str) -> Fraction | None:
    """The value of a run that is exactly one number, None for any other."""
    if len(run) > 2 * MOST_DIGITS:
        return None
    if mixed := MIXED.fullmatch(run):
        whole, above, below = (_decimal(part) for part in mixed.groups())
        if whole is not None and above is not None and below is not None and above < below:
            return whole + above / below
    if ratio := RATIO.fullmatch(run):
        above, below = _decimal(ratio[1]), _decimal(ratio[2])
        return above / below if above is not None and below else None
    return _decimal(run) if SINGLE.fullmatch(run) else None


def _decimal(text: str) -> Fraction | None:
    """The value of a DECIMAL; None if it is absurdly large (Fraction would build every digit of 1e999999999)."""
    digits, _, exponent = re.sub("[, '_]", "", text).lower().partition("e")
    if len(digits) > MOST_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > MOST_DIGITS:
        return None
    return Fraction(digits) * Fraction(10) ** int(exponent or 0)


# --- spelling ----------------------------------------------------------------------------------------------------

ANNOTATION = re.compile(r"<<[^<>\n]{0,200}>>")  # GSM8K's calculator annotations: <<48/2=24>>
FRACTION = re.compile(r"\\[dt]?frac ?(?:\{([^{}]{1,60})\}|([0-9])) ?(?:\{([^{}]{1,60})\}|([0-9]))")  # also \frac12
LATEX_SPACE = re.compile(r"\\[,;: ]|\\!|\{,\}|(?<=[0-9])~(?=[0-9])")
FOREIGN = re.compile(r"[^\x00-\x7f]")
SPELLED = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
    "\u2015": "\u2014",  # the horizontal bar
    **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", ""),  # invisible
    "\u2044": "/",  # the fraction slash
}


def _plain(text: str) -> str:
    """The same text with other scripts' digits, spaces and signs in ASCII, LaTeX fractions as a/b, marks removed."""
    text = FOREIGN.sub(lambda match: _ascii(match[0]), text)
    text = ANNOTATION.sub("", text)
    text = FRACTION.sub(lambda match: f" {match[1] or match[2]}/{match[3] or match[4]}", text)
    return LATEX_SPACE.sub(lambda match: {"{,}": ",", "\\!": ""}.get(match[0], " "), text)


def _ascii(character: str) -> str:
    if character in SPELLED:
        return SPELLED[character]
    if "\uff01" <= character <= "\uff5e":  # full-width forms
        return chr(ord(character) - 0xFEE0)
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "Zs":
        return " "
    if category == "No" and "\u2044" in (spelled := unicodedata.normalize("NFKC", character)):
        return " " + spelled.replace("\u2044", "/")  # a half as one character: 1½ is 1 1/2
    return character
