"""The graders of `task.kind = "data"`: each reads the answer in a completion, and compares it with the row's answer.

| grader       | the prompt asks for           | correct                                                        |
|--------------|-------------------------------|----------------------------------------------------------------|
| `exact`      | `<answer>TEXT</answer>`       | the same text; runs of white space count as one space          |
| `number`     | a last line `#### NUMBER`     | the same number, exactly (pvg.tasks.answers)                   |
| `choice`     | a last line `Answer: LETTER`  | the same letter, A to J                                        |
| `regex`      | what `task.form` says  | what the pattern's group finds is the same text                |
| `expression` | `<answer>EXPRESSION</answer>` | the same value as an exact fraction (pvg.tasks.graders)    |

An answer that cannot be read is not well-formed. Invariant: no grader raises for any completion, and each takes time
linear in it.
"""

from __future__ import annotations

import ast
import operator
import re
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from pvg.config.task import DataTask
from pvg.records import Grade, Wording
from pvg.tasks.answers import NO_MARKER, extract, parse_number, read
from pvg.tasks.wordings import CLOSED, NUMBER, OPENED, tag_wording, wording_with

# The exact value of an arithmetic expression, for graders. Nothing is executed.


LONGEST = 300  # characters
MOST_BITS = 2048  # numbers of about 600 digits
MOST_POWER = 256

SPELLED = str.maketrans({"^": "**", "×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "\n": " ", "\t": " "})
ALLOWED = re.compile(r"[-+*/().0-9 ]+")  # no names, so no calls; no e, x, j or _, so numbers are plain decimals
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class _Refused(Exception):
    """The text has no value that this module computes."""


def value_of(text: str) -> Fraction | None:
    """The exact value of an expression; None for a text that is not one, is too large, or divides by zero."""
    if len(text) > LONGEST:
        return None
    text = text.strip().translate(SPELLED)
    if not ALLOWED.fullmatch(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about "5 (3)", which looks like a call
            tree = ast.parse(text, mode="eval")
        return _value(tree.body, text)
    except (_Refused, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None  # MemoryError: what Python's parser raises for deep nesting


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        # From the text, because the parser has rounded 0.1 to a float.
        return _bounded(Fraction(text[node.col_offset : node.end_col_offset]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if operation := OPERATIONS.get(type(node.op)):
            return _bounded(operation(left, right))
    raise _Refused


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MOST_POWER:
        raise _Refused
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(int(exponent)) > MOST_BITS:
        raise _Refused
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise _Refused
    return value


LONGEST_ANSWER = 4000  # characters of an answer in a tag


class AnswerGrader(Protocol):
    """`wording`: how prompts ask for the answer (pvg.tasks.wordings)."""

    @property
    def wording(self) -> Wording | str: ...

    def reference(self, answer: str) -> str:
        """The row's answer as problems carry it. Raises ValueError, with the reason, for one that cannot be graded."""
        ...

    def same(self, first: str, second: str) -> bool:
        """Whether two references are the same answer."""
        ...

    def grade(self, reference: str, completion: str) -> Grade: ...


def grader_of(section: DataTask) -> AnswerGrader:
    if section.pattern is not None and section.form is not None:  # only with grader = "regex"
        return Regex(re.compile(section.pattern), section.form)
    graders: dict[str, type[AnswerGrader]] = {
        "exact": Exact,
        "number": Number,
        "choice": Choice,
        "expression": Expression,
    }
    return graders[section.grader]()


# --- the answer in a tag ----------------------------------------------------------------------------------------------


def tagged(completion: str) -> tuple[str, str] | None:
    """(answer, note): the content of the last tag, which may be unclosed; without one, the last line that is not
    blank. None without an answer, and for one that is too long."""
    start = completion.rfind(OPENED)
    if start >= 0:
        answer, note = completion[start + len(OPENED) :].partition(CLOSED)[0].strip(), ""
    else:
        answer, note = completion.strip().rpartition("\n")[2].strip(), NO_MARKER.format("the last line")
    return (answer, note) if 0 < len(answer) <= LONGEST_ANSWER else None


def normal(text: str) -> str:
    """The text in Unicode's composed form, with one space for each run of white space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


@dataclass(frozen=True, slots=True)
class Exact:
    @property
    def wording(self) -> Wording:
        return tag_wording("answer", "11", "9")

    def reference(self, answer: str) -> str:
        if OPENED in answer or CLOSED in answer:
            raise ValueError(f"the answer contains {OPENED} or {CLOSED}, which marks answers in solutions")
        if len(answer) > LONGEST_ANSWER:
            raise ValueError(f"the answer has {len(answer)} characters, and at most {LONGEST_ANSWER} are possible")
        return normal(answer)

    def same(self, first: str, second: str) -> bool:
        return first == second

    def grade(self, reference: str, completion: str) -> Grade:
        if (found := tagged(completion)) is None:
            return Grade(False, False, note="no final answer")
        answer, note = found
        return Grade(normal(answer) == reference, True, answer, note)


@dataclass(frozen=True, slots=True)
class Expression:
    @property
    def wording(self) -> Wording:
        return tag_wording("number or arithmetic expression", "3 + 2 * 4", "3 + 6")

    def reference(self, answer: str) -> str:
        if value_of(answer) is None:
            raise ValueError(f"the answer {_short(answer)} is not an arithmetic expression with a value")
        return answer.strip()

    def same(self, first: str, second: str) -> bool:
        return value_of(first) == value_of(second)

    def grade(self, reference: str, completion: str) -> Grade:
        if (found := tagged(completion)) is None:
            return Grade(False, False, note="no final answer")
        answer, note = found
        value = value_of(answer)
        if value is None:
            return Grade(False, False, answer, "the answer is not an arithmetic expression")
        return Grade(value == value_of(reference), True, answer, note)


# --- numbers and letters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number:
    """As in gsm8k: a row's answer is a number, or a worked solution that ends in `#### NUMBER`."""

    @property
    def wording(self) -> str:
        return NUMBER

    def reference(self, answer: str) -> str:
        if parse_number(answer) is not None:
            return answer.strip()
        found = extract(answer)
        if found is None or found.marker != "####":
            raise ValueError(f"the answer {_short(answer)} is not a number, and does not end in '#### NUMBER'")
        return found.text

    def same(self, first: str, second: str) -> bool:
        return parse_number(first) == parse_number(second)

    def grade(self, reference: str, completion: str) -> Grade:
        found = read(completion)
        if isinstance(found, str):
            return Grade(False, False, note=found)
        note = NO_MARKER.format("the last number") if found.marker == "last number" else ""
        return Grade(found.value == parse_number(reference), True, found.text, note)


LETTER = r"(?:\\(?:boxed|text|textbf|mathbf|mathrm)\{|\\\(){0,3}(?P<open>[(\[]?)(?P<letter>[A-Ja-j])"
LETTERS_ALONE = re.compile(rf"[\s*_`$\"']*{LETTER}[)\].:}}*_`$\"'\\\s]*")
# After "answer", a letter, on the same line or below it.
MARKED = re.compile(
    r"\banswer[*_`]{0,3}\s?(?:is\b\s?:?|[:=])[ \t\r*_`$\"']{0,8}+"
    r"(?:\n[\s*_`$\"']{0,8}(?=(?P<below>[^\n]{0,200}))|(?P<rest>[^\n]{0,200}))",
    re.IGNORECASE,
)
# The text of the choice may follow a bracket, a dot, a colon or a dash, or be in brackets.
CHOSEN = re.compile(rf"(?i:(?:the )?(?:(?:option|choice) )?){LETTER}(?P<after>[)\].:}}*_`$\"'\\ ]{{0,8}})(?P<text>.*)")
SEPARATED = re.compile("[(\u2013\u2014-]")
# A second letter that is offered: directly after the first one, and later in the text. A text such as "Both A and B"
# names other choices and offers none.
OTHERS = re.compile(r"[)\].:*_ ]*(?:\b(?:or|and)\b|[,/&(\u2013\u2014-])\s*[(\[]?[A-J](?![A-Za-z])")
LATER = re.compile(r"(?:\bor\b|,)\s*[(\[]?[A-J](?![A-Za-z]|\.[A-Za-z])")
ONE = r"[(\[]?[A-J](?![A-Za-z])[)\]]?"
NAMES = re.compile(rf"(?i:both|neither|either) {ONE} (?:and|n?or) {ONE}|(?i:all|none)\b(?: of)?(?: {ONE}(?:,| and)?)*")
NEXT = re.compile(r"\s*[(\[]?[A-J][)\].:]")


@dataclass(frozen=True, slots=True)
class Choice:
    """Letters A to J, in either case, with or without brackets. A line that offers two letters has no answer."""

    @property
    def wording(self) -> Wording:
        return wording_with(
            "End with a line 'Answer: ' followed by the letter of the right choice.",
            "End with a line 'Answer: ' followed by the letter of a wrong choice.",
            "Tom has 3 apples. He buys 2 bags with 4 apples in each. How many apples does Tom have now?\n"
            "A) 9\nB) 11\nC) 14",
            (
                "The bags hold 2 * 4 = 8 apples.\nTom has 3 + 8 = 11 apples.\nAnswer: B",
                "The bags hold 2 * 4 = 6 apples.\nTom has 3 + 6 = 9 apples.\nAnswer: A",
            ),
            "Answer: {answer}",
        )

    def reference(self, answer: str) -> str:
        found = LETTERS_ALONE.fullmatch(answer)
        if found is None:
            raise ValueError(f"the answer {_short(answer)} is not a letter from A to J")
        return found["letter"].upper()

    def same(self, first: str, second: str) -> bool:
        return first == second

    def grade(self, reference: str, completion: str) -> Grade:
        note = ""
        marks = list(MARKED.finditer(completion))
        if marks:
            letter = _chosen(marks[-1]["rest"] or marks[-1]["below"] or "")
            if marks[-1]["below"] and NEXT.match(completion, marks[-1].end("below")):
                letter = None  # a list of the choices
        else:
            last = completion.strip().rpartition("\n")[2]
            found = LETTERS_ALONE.fullmatch(last) if len(last) <= 40 else None
            letter = found["letter"].upper() if found else None
            note = NO_MARKER.format("the last line")
            if letter is None:
                return Grade(False, False, note="no final answer")
        if letter is None:
            return Grade(False, False, note="the answer is not one letter")
        return Grade(letter == reference, True, letter, note)


def _chosen(rest: str) -> str | None:
    """The letter at the start of what follows "Answer:"; None for an article ("A dog"), and for several letters."""
    found = CHOSEN.fullmatch(rest.strip())
    if found is None or OTHERS.match(found["after"] + found["text"]):
        return None
    text, letter = found["text"], found["letter"].upper()
    mark = next((mark for mark in found["after"] if mark in ")].:"), "")
    if text and not mark and not SEPARATED.match(text):
        return None
    # Another choice with a text: the next of a list, as in "A) 9 B) 11", or one after "and". In "P(B)" it is none.
    following = rf"(?<![A-Za-z.])(?<![A-Za-z0-9]\(){chr(ord(letter) + 1)}{re.escape(mark)}\s*\S"
    joined = rf"(?:\b(?:and|or)\b|[,;&/])\s*[(\[]?[A-J]{re.escape(mark)}\s*\S"
    if mark and (re.search(following, text) or re.search(joined, text)):
        return None
    return None if LATER.search(NAMES.sub("", text, count=1)) else letter


# --- a pattern of the user --------------------------------------------------------------------------------------------

# Python's patterns may take time that grows fast with the length of a line. So only the last lines that are not blank
# are searched, and the last characters of each.
REGEX_LINES, REGEX_LINE = 10, 200


@dataclass(frozen=True, slots=True)
class Regex:
    """The last line with a match counts. The answer is the pattern's group, or the match if it has none."""

    pattern: re.Pattern[str]
    form: str

    @property
    def wording(self) -> Wording:
        return wording_with(self.form, self.form, "", ("", ""))

    def reference(self, answer: str) -> str:
        return normal(answer)

    def same(self, first: str, second: str) -> bool:
        return first == second

    def grade(self, reference: str, completion: str) -> Grade:
        lines = [found for line in completion.splitlines() if (found := line.strip())]
        for line in reversed(lines[-REGEX_LINES:]):
            if matches := list(self.pattern.finditer(line, max(0, len(line) - REGEX_LINE))):
                answer = matches[-1][1 if self.pattern.groups else 0] or ""
                return Grade(normal(answer) == reference, True, answer)
        return Grade(False, False, note=f"none of the last {REGEX_LINES} lines fits task.pattern")


def _short(answer: str) -> str:
    return repr(answer if len(answer) <= 40 else answer[:37] + "...")
