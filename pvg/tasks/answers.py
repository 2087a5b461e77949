"""The final answer of a written solution, and exact comparison of numbers. For every task whose answers are numbers.

    extract("... so 48/2 = 24.\\n#### $1,200.00 a year")  -> FinalAnswer(text="1,200.00", value=1200, marker="####")
    same_number("1 1/2", "1.50")                        -> True

Where the answer is looked for, in this order; within a kind the last one counts:

1. `####` with a number behind it (the published form of GSM8K; a heading such as `#### Step` is none),
2. `\\boxed{...}`,
3. "answer is", "answer:", "answer =" with a number behind it,
4. no marker: the last number of the text. If that one cannot be read (`3/0`, `1,2,3`), there is no answer.

Behind a marker the answer is the number that leads the line, after markup, currency signs and a few filler words. What
follows the number (units, percent signs, text) is ignored; of `48 + 24 = 72` the side without a calculation is taken.
So a percent sign is a unit: `50%` is 50. Nothing is evaluated.

Invariants: no text makes these functions raise or take more than time linear in its length; values are exact
rationals, so `0.1 + 0.2` problems do not exist and `0.33` is not one third.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Marker = Literal["####", "boxed", "phrase", "last number"]

# A digit string or a power of ten beyond this is noise or an attack, never the answer of a word problem.
MOST_DIGITS = 200
# Characters behind a marker that may hold its answer; the rest of a longer line is text about it.
SEGMENT = 200


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The answer as written (sign and digits, markup and currency removed), its value, and what gave it away."""

    text: str
    value: Fraction
    marker: Marker


def extract(text: str) -> FinalAnswer | None:
    """The final answer of `text` by the rules of this module, None when there is none."""
    text = _plain(text)
    marked: tuple[tuple[Marker, Iterator[str]], ...] = (
        ("####", _hashed(text)),
        ("boxed", _boxed(text)),
        ("phrase", _phrased(text)),
    )
    for marker, segments in marked:
        for segment in segments:
            if found := _leading(segment):
                return FinalAnswer(*found, marker)
    numbers = deque(NUMBER.finditer(text), maxlen=1)
    found = _read(numbers[0], piece=-1) if numbers else None
    return FinalAnswer(*found, "last number") if found else None


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number and formatting or units around it (`$1,200`, `-3/4`, `72 apples`)."""
    found = _leading(_plain(text))
    return found[1] if found else None


def same_number(first: str, second: str) -> bool:
    """Whether both are numbers of exactly the same value."""
    value = parse_number(first)
    return value is not None and value == parse_number(second)


def same_answer(first: str | None, second: str | None) -> bool:
    """Whether two answers that a task has found say the same: numbers of one value, or the same text."""
    if first is None or second is None:
        return False
    return first.strip() == second.strip() or same_number(first, second)


# --- markers: the text behind each, the last one first -----------------------------------------------------------

HASHES = re.compile(r"#{4,}+")
BOX = re.compile(r"\\f?boxed ?\{")
PHRASE = re.compile(
    r"\banswer[*_`]{0,3}(?: (?:to|of|for)\b[^.\n:=]{0,60}?)?[ \t]{0,3}(?:\b(?:is|are|was|equals)\b ?:?|[:=])[*_`]{0,3}",
    re.IGNORECASE,
)
BULLET = re.compile(r"\s*\n\s*[-*•] ")


def _hashed(text: str) -> Iterator[str]:
    for match in reversed(list(HASHES.finditer(text))):
        yield _line(text, match.end())


def _phrased(text: str) -> Iterator[str]:
    for match in reversed(list(PHRASE.finditer(text))):
        yield _line(text, match.end())


def _boxed(text: str) -> Iterator[str]:
    for match in reversed(list(BOX.finditer(text))):
        depth = 1
        for offset, character in enumerate(text[match.end() : match.end() + SEGMENT]):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                yield text[match.end() : match.end() + offset]
                break


def _line(text: str, start: int) -> str:
    """The line behind a marker, or the next line when that one is blank; a bullet there is not a minus sign."""
    segment = text[start : start + SEGMENT]
    if start + SEGMENT < len(text):  # cut between words: half a number would be another number
        segment = segment[: max(segment.rfind(" "), segment.rfind("\n")) + 1]
    if bullet := BULLET.match(segment):
        segment = segment[bullet.end() :]
    return segment.strip().partition("\n")[0]


# --- numbers -----------------------------------------------------------------------------------------------------

# A maximal run of what may belong to one number. It never fails once it has begun, so that scanning a text is linear;
# whether the run is a number is for `_value` to say.
RUN = r"(?<![A-Za-z0-9])(?<![A-Za-z0-9]\.)\.?[0-9](?:[0-9]|[.,'_ ](?=[0-9])| ?/ ?(?=[0-9])|[eE][-+]?(?=[0-9]))*+"
TIMES = r"(?:x|\*|×|·|⋅|\\times|\\cdot)"
NUMBER = re.compile(
    rf"(?:(?<![A-Za-z0-9)])(?P<sign>[-+]) ?)?(?:\\?[$€£¥₹] ?(?P<inner>-)?)?(?P<run>{RUN})"
    rf"(?: ?{TIMES} ?10 ?(?:\^|\*\*) ?\{{?(?P<power>[-+]?[0-9]+))?"
)
LEAD = re.compile(
    r"(?:[\s*_`~≈:=>\"'(\[{]|\\[a-zA-Z]++|\\\(|\\\[|\$(?=[-\\*$])|"
    r"\b(?:the|final|answer|is|about|approximately|around|roughly|simply|just|only|exactly|therefore|thus|so|now|"
    r"equal|equals|to|USD?|EUR|GBP|Rs)\b\.?)*+",
    re.IGNORECASE,
)
CALCULATION = re.compile(rf"\s*(?:[-+/÷]|{TIMES})\s*[$€£¥₹]?[0-9]")
GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})++|[0-9]{1,3}(?: [0-9]{3})++|[0-9]{1,3}(?:'[0-9]{3})++|[0-9]{1,3}(?:_[0-9]{3})++"
DECIMAL = rf"(?:(?:{GROUPED}|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][-+]?[0-9]++)?"
SINGLE = re.compile(DECIMAL)
RATIO = re.compile(rf"({DECIMAL}) ?/ ?({DECIMAL})")
MIXED = re.compile(r"([0-9]++) ([0-9]++) ?/ ?([0-9]++)")


def _leading(segment: str) -> tuple[str, Fraction] | None:
    """The number that leads `segment`; of an equation, its rightmost side that is one number and not a calculation."""
    head = segment.rpartition("=")[0]
    sides = segment.split("=") if head.count("(") == head.count(")") else [segment]
    for side in reversed(sides):
        lead = LEAD.match(side)
        match = NUMBER.match(side, lead.end() if lead else 0)
        if match and (len(sides) == 1 or not CALCULATION.match(side, match.end())):
            return _read(match, piece=0)
    return None


def _read(match: re.Match[str], piece: int) -> tuple[str, Fraction] | None:
    """Text and value of a match of NUMBER. Where the run is several numbers, `piece` tells which is meant."""
    run = match["run"]
    value = _value(run)
    if value is None and " " in run and "/" not in run:
        run = run.split(" ")[piece]
        value = _value(run)
    if value is None:
        return None
    if match["power"]:
        if len(match["power"]) > 4 or abs(int(match["power"])) > MOST_DIGITS:
            return None
        value *= Fraction(10) ** int(match["power"])
        run += f"e{match['power']}"
    negative = (match["sign"] == "-") != (match["inner"] == "-")
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
    """The value of a DECIMAL, None for one of absurd size (Fraction would build every digit of 1e999999999)."""
    digits, _, exponent = re.sub("[, '_]", "", text).lower().partition("e")
    if len(digits) > MOST_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > MOST_DIGITS:
        return None
    return Fraction(digits) * Fraction(10) ** int(exponent or 0)


# --- spelling ----------------------------------------------------------------------------------------------------

ANNOTATION = re.compile(r"<<[^<>\n]{0,200}>>")  # GSM8K's calculator marks: <<48/2=24>>
FRACTION = re.compile(r"\\[dt]?frac ?\{([^{}]{1,60})\}\{([^{}]{1,60})\}")
LATEX_SPACE = re.compile(r"\\[,;: ]|\\!|\{,\}|(?<=[0-9])~(?=[0-9])")
FOREIGN = re.compile(r"[^\x00-\x7f]")
SPELLED = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
    **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", ""),  # invisible
    "\u2044": "/",  # the fraction slash
}


def _plain(text: str) -> str:
    """The same text with other scripts' digits, spaces and signs in ASCII, LaTeX fractions as a/b, marks removed."""
    text = FOREIGN.sub(lambda match: _ascii(match[0]), text)
    text = ANNOTATION.sub("", text)
    text = FRACTION.sub(r" \1/\2", text)
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
