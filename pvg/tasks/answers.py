"""Reads the final answer of a written solution, and compares numbers exactly. For all tasks with numbers as answers.

    extract("... so 48/2 = 24.\\n#### $1,200.00 a year")  -> FinalAnswer(text="1,200.00", value=1200, marker="####")
    extract("#### 7 or 8")                              -> None: two numbers are not an answer
    same_number("1 1/2", "1.50")                        -> True

Three markers announce an answer: `####`, `\\boxed{...}`, and "answer is", "answer:" or "answer =". Rules:

1. The last marked answer counts, whatever its marker. So a later answer replaces an earlier one, also if it cannot be
   read. Headings (`#### Step 2`), notes (`#### Note: 3 steps`) and prose without a number ("the answer is correct")
   announce nothing; but other words at the end of a text ("the answer is red") are an answer that cannot be read,
   unless a marker before them has a number.
2. The answer must be the only number of its line (`####`), its box, or its sentence ("answer is"). Units, currency
   signs, markup and plain words may surround it, and a calculation with `=` may lead to it. So a solution that names
   several candidates, denies a number, or asks for one earns nothing. Nor does a box with a part of a number next to
   it (`-\\boxed{18}`, `\\boxed{18}/20`), or a line or sentence of more than LONGEST characters.
3. LaTeX that is more than a number, such as `\\sqrt{25}` or `10^6`, counts with its value if this is rational. A sum or
   a product is no answer: a solution must write its result.
4. If a text has no marker, its last number is the answer. If it has notes alone, this is the last one before the first
   note, or else the last one outside of them.

A percent sign is a unit: `50%` is 50. `5k` and `5 thousand` are 5000. Of all words, only "minus" and "negative" change
the sign: "a loss of 18" is 18, because the question may ask for the loss.

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
from functools import lru_cache
from typing import Literal

from pvg.tasks.expressions import value_of_latex

Marker = Literal["####", "boxed", "phrase", "last number"]

# A number with more digits, or a larger power of ten, is noise or an attack, never the answer of a word problem.
MOST_DIGITS = 200
# An answer begins within this many characters after its marker; a box has at most this many characters.
SEGMENT = 200
# A longer line, sentence or reference is not read, because some patterns take time quadratic in its length.
LONGEST = 6 * SEGMENT
# Of more equal values than this, such as in 7 = 7 = 7, none is read.
MOST_EQUALS = 10

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
    text = plain(text)
    marks = _marks(text)
    for mark in reversed(marks):
        if mark.marker == "boxed" or not _announces_nothing(text, mark):
            end = mark.end if mark.marker == "boxed" else _answer_end(text, mark, len(text))
            denied = mark.marker == "boxed" and (
                NO_BOX.search(text, max(0, mark.start - 60), mark.start) or _is_continued(text, mark.end)
            )
            said = None if denied or RETRACTED.match(text, end) else text[mark.start : end]
            # Its only number, the result of its calculation, or the value of its expression.
            found = said and (_written(said, solution=True) or _from_latex(said))
            return FinalAnswer(*found, mark.marker) if found else UNCLEAR
    if marks and _ends_text(text, marks[-1]):
        return UNCLEAR
    kept, end = [], 0  # what is not in a note
    for mark in marks:
        if mark.start >= end and NOTE.match(text, mark.start, mark.end):
            kept.append(text[end : mark.start])
            end = _answer_end(text, mark, len(text))
    kept.append(text[end:])
    before = _last_number(kept[0])
    return _last_number("".join(kept)) if before == NO_ANSWER else before


def by_fallback(note: str) -> bool:
    """Whether the note of a grade says that the answer has no marker."""
    return note.startswith(NO_MARKER.partition(":")[0])


def parse_number(text: str) -> Fraction | None:
    """The value of a text that consists of one number with formatting or units (`$1,200`, `-3/4`, `72 apples`)."""
    found = _written(plain(text), solution=False)
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
    """A marker, and the range of the text in which its answer may begin. A box has nothing else in it."""

    marker: Marker
    start: int
    end: int


HASHES = re.compile(r"#{4,}+(?>(?:[ \t]*+#{4,}+)*)")
BRACES = re.compile(r"(?P<box>\\f?boxed ?\{)|[{}]")
BARE_BOX = re.compile(r"\\f?boxed(?! ?\{)([^$\n]{0,60})")
PHRASE = re.compile(
    r"\banswers?[*_`]{0,3}(?: (?:to|of|for)\b[^.\n:=]{0,60}?)?[ \t]{0,3}"
    r"(?:\b(?:is|are|was|equals|(?:should|must|would|will) be)(?:\b ?:?|(?=n't))|"
    r"\b(?=[a-z]{2,6}n't\b|cannot\b|[a-z]{2,6} (?:not|never)\b)|[:=]>?)[*_`]{0,3}",
    re.IGNORECASE,
)
BULLET = re.compile(r"\s*\n\s*[-*•] ")
# Also a line that opens a formula or a block.
BLANK = re.compile(r"(?>\s*+(?:\\\[|\$\$|```)[ \t]*+(?=\n))?\s*+")
SENTENCE_END = re.compile(
    r"(?<!\b[RDM][sr])(?<!\bMrs)(?<!\bapprox)(?:(?:(?<!!)!{2,}+|[.!])(?=[\s*_`$)]|$)|(?<=\?)(?=[\s*_`$)]|$)|\n)"
)
# Numbers in words, without "one": "5 for each one" has no second number.
WORDS = (
    "zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
SPOKEN = dict(zip(WORDS.split(), (0, *range(2, 20), *range(20, 100, 10)), strict=True))
# A marker announces an answer, although none that pvg can read, if the text after it denies one or says it in words.
DENIED = (
    r"\b(?:no|not|none|never|nothing|neither|nor|cannot|undefined|impossible|unknown|unclear|unsure|indeterminate|"
    r"infinit\w+|wrong|incorrect|false|nope|nah|hardly|nowhere|unlike(?:ly)?|unequal|different|far from|idk|"
    r"(?:any(?:thing)?|all) but)\b|n't\b"
)
UNREAD = re.compile(
    rf"{DENIED}|^\W*(?:an? )?(?:one|half|third|quarter|dozen|hundred|thousand|million)\b(?! of)|"
    rf"\b(?:pi|dne|nan|null|nil|empty|void|error|inconclusive|insufficient|{'|'.join(SPOKEN)})\b|\?",
    re.IGNORECASE,
)
NOTE = re.compile(
    r"\W*(?:foot)?(?:notes?|n\.?b|p\.?s|remarks?|hints?|comments?|explanation|reason(?:ing)?|checks?|checking|"
    r"verification|confidence|difficulty|sources?)\b[^\n:]{0,30}:",
    re.IGNORECASE,
)
COMMENT = re.compile(
    r"\W*(?:\w+ ){0,2}(?:correct|right|verified|checked|found|given|shown|above|below|here|clear|obvious|easy|"
    r"reasonable|consistent|final|complete|unique|done|in \w+)\b",
    re.IGNORECASE,
)
MORE = re.compile(r"\s*\S")
LETTER = re.compile(r"\w")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}")
# What before a box denies it or makes another number of it.
OPERATORS = r"pi|sqrt|log|ln|sin|cos|tan|pm|mp|neq?|leq?|geq?|[lg]t|times|cdot|div|[dtc]?frac"
NO_BOX = re.compile(
    r"(?:(?:\b(?:not|never|cannot)|n't)(?: be)?[\s:$*(\\\[]*|"
    r"(?:[\^√π±<≤≥≠×÷·]|(?<!\n)\+|!=|(?<=\S )>|[0-9)}] ?/|[0-9)] ?\*|[0-9]\}(?=\{)|(?<![A-Za-z])[A-Za-z](?=\()|"
    rf"\\(?:{OPERATORS}|not ?=)(?:\[[0-9]\])?) ?[{{(]?[ $]*|"
    r"(?:[-—0-9]|(?<![A-Za-z\\])[A-Za-z])\$?|(?:[=(:0-9]|\bis) ?- \$?|[0-9)}]\$? or (?:\$|\\\()?|"
    r"\b(?:at (?:least|most)|(?:less|more|fewer|greater) than|half(?: of)?|twice) \$?)\\f?boxed ?\{?\s*$",
    re.IGNORECASE,
)
# What ends the formula of a box, such as \tag, but no operator and no letter; and what may stand next to the box: the
# rest of its word, and words or an operator.
FORMULA_END = re.compile(
    rf"\n|\\(?:\\|(?!(?:text(?!degree)\w*|math\w+|mbox|rm|bf|circ|left|right|d?binom|over|{OPERATORS}|infty|alpha|beta|"
    r"gamma|theta|lambda|phi|epsilon)(?![A-Za-z]))[A-Za-z])"
)
BESIDE = re.compile(r"\S*(?: (?:[a-z][A-Za-z'-]*[,;:)]?(?!\S)|[-+*/^<>≤≥≠±×÷·](?= ?\$?[0-9(\\]))){0,3}")
RETRACTED = re.compile(
    r"\W{0,20}(?:(?:but|oh|hm+|actually)\W+){0,2}(?:actually\W+(?:\w+ ){0,3}[-$]?\d[\d,.]*+\W*(?:$|\n)|"
    r"no\b *(?:[,.:!;-]|wait\b)|wait\b|oops\b|sorry\b|scratch that\b|correction\b|"
    r"I meant?\b|I (?:made|was|am)\b.{0,12} (?:mistaken?|error|wrong)\b|(?:(?:that|this|it|which) ?)?"
    r"(?:is|was|'s) (?:wrong|incorrect|not the answer)|(?:\w+ ){0,2}(?:not|\w+n't) (?:right|correct|the answer)\b)",
    re.IGNORECASE,
)


def _marks(text: str) -> list[_Mark]:
    """All markers in the order of the text. A marker within the line of a `####` answer belongs to that answer."""
    hashed: list[_Mark] = []
    lines: list[tuple[int, int]] = []  # start and end of the lines of `####` with a number
    for match in HASHES.finditer(text):
        if not lines or match.start() > lines[-1][1]:
            hashed.append(mark := _Mark("####", *_window(text, match.end())))
            if ANSWER.match(_tidy(text[mark.start : mark.end])):
                lines.append((mark.start, _answer_end(text, mark, len(text))))
    marks = hashed.copy()
    for mark in (*_boxes(text), *(_Mark("phrase", *_window(text, match.end())) for match in PHRASE.finditer(text))):
        line = bisect_left(lines, mark.start, key=lambda each: each[1])
        if line == len(lines) or mark.start < lines[line][0]:
            marks.append(mark)
    return sorted(marks, key=lambda mark: mark.start)


def _boxes(text: str) -> Iterator[_Mark]:
    """The content of each box; an empty one for a box that is too long or does not end."""
    opened: list[int] = []  # start of the inside of each open brace; negative for a brace that is no box
    for match in BRACES.finditer(text):
        if match[0] != "}":
            opened.append(match.end() if match["box"] else -1)
        elif opened and (start := opened.pop()) >= 0:
            yield _Mark("boxed", start, match.start() if match.start() - start <= SEGMENT else start)
    yield from (_Mark("boxed", start, start) for start in opened if start >= 0)
    yield from (_Mark("boxed", *match.span(1)) for match in BARE_BOX.finditer(text))


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


def _answer_end(text: str, mark: _Mark, limit: int) -> int:
    """The end of the line or sentence of a mark, at most `limit`."""
    if mark.marker == "phrase":
        sentence = SENTENCE_END.search(text, mark.start, limit)
        return sentence.start() if sentence else limit
    line = text.find("\n", mark.start, limit)
    return line if line >= 0 else limit


def _announces_nothing(text: str, mark: _Mark) -> bool:
    """Whether a heading, a note or prose without a number follows a marker. A heading may have a number, with text
    below it."""
    end = _answer_end(text, mark, mark.end)
    content = text[mark.start : end]
    if UNREAD.search(content) or not WORD.search(content):
        return False
    if NOTE.match(content) or not DIGIT.search(content):
        return True
    return mark.marker == "####" and not ANSWER.match(_tidy(content)) and MORE.match(text, end) is not None


def _ends_text(text: str, mark: _Mark) -> bool:
    """Whether words that nothing follows are an answer that cannot be read: no note, no comment on the answer, and no
    heading, which has text below it."""
    end = _answer_end(text, mark, mark.end)
    return not LETTER.search(text, end) and not (
        NOTE.match(text, mark.start, end) or COMMENT.match(text, mark.start, end)
    )


def _is_continued(text: str, end: int) -> bool:
    """Whether what stands next to the end of a box makes another number of a number in it."""
    if text[end : end + 1] not in ("}", "$"):
        return False
    sentence = SENTENCE_END.search(text, end + 1, end + 60)
    after = text[end + 1 : sentence.start() if sentence else end + 60]
    beside = BESIDE.match(_tidy("1" + FORMULA_END.split(after, 1)[0]))
    found = _written(beside[0], solution=False) if beside else None
    return found is None or found[1] != 1


# --- numbers -----------------------------------------------------------------------------------------------------


def _number(sign: str, currency: str, joint: str = "") -> str:
    """The pattern of a number. `currency`: what may follow the sign. `joint`: another pattern that may join digits.

    Its run is a maximal run of characters that may belong to one number. Once begun it never fails, so scanning a text
    is linear. `_value` decides whether the run is a number."""
    return (
        rf"(?<![A-Za-z0-9])(?<![A-Za-z0-9]\.)(?:(?<!\))(?P<sign>{sign}))?(?:{currency}(?:(?P<inner>-) ?)?)?"
        rf"(?P<run>\.?[0-9](?>(?:[0-9]|[.,'_ ](?=[0-9])|{joint} ?/ ?(?=[0-9])|[eE][-+]?(?=[0-9]))*))"
        r"(?: ?(?:x|\*|×|·|⋅|\\times|\\cdot) ?10 ?(?:\^|\*\*) ?\{?(?P<power>[-+]?[0-9]+)\}?)?"
    )


# Some texts use an em dash as a minus sign. In running text it counts as one only directly before the digits.
NUMBER = re.compile(_number(r"[-+](?! )|(?:(?<=[=:(] )|(?<=\bis ))[-+] |—", r"\\?[$€£¥₹] ?"))
# After a marker, a sign may be a word or stand before a bracket, and `1, 000` is one number, not a list.
MARKED = _number(
    r"(?:[-+—]|(?i:minus|negative)\b)[\s(\[~]*",
    r"(?:(?:US|CA?|AU?|HK|NZ)?\\?[$€£¥₹]|(?i:USD?|EUR|GBP|INR|CAD|AUD|Rs\b\.?)) ?[(\[]*",
    r", (?=[0-9]{3}(?![0-9]))|",
)
ANYWHERE = re.compile(MARKED)
ANSWER = re.compile(
    r"(?>(?:[-=]>|[\s~≈:=→⇒\"'(\[]|\$(?=[-\\$])|"
    r"\\(?:implies|[Rr]ightarrow)(?![A-Za-z])|"
    r"(?i:\b(?:the|final|answer|is|about|approx|approximately|around|roughly|simply|just|only|exactly|therefore|thus|"
    rf"so|now|either|between|from|maybe|perhaps|possibly|equal|equals|to|an?|total|of)\b\.?))*){MARKED}"
)
# Other words before a number, and those that make another number of it.
PLAIN_WORDS = re.compile(r"(?:[A-Za-z,:;\"'() ]|(?<=[A-Za-z])-(?=[A-Za-z])){0,120}")
OTHER_NUMBER = re.compile(
    rf"{DENIED}|\b(?:less|more|fewer|greater|larger|smaller|than|half|twice|double|triple|thirds?|quarters?|over|under|"
    r"above|below|least|most|exceed\w*|within|roots?|squared?|cubed?|sum|product|difference|quotient|multiples?|"
    r"factor\w*|powers?|log|ln|sin|cos|tan|mod|modulo|plus|minus|times|divi\w+|remainder|or|either|based|steps?|if|"
    r"unless|except|up to|base|sqrt|abs|floor|ceil|exp|min|max|gcd|lcm|one and)\b|[a-z]\(\s*$",
    re.IGNORECASE,
)
DENIED_FIRST = re.compile(r"^not [^.]{1,40}? but ")
POWERS = {"k": 3, "m": 6, "b": 9, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
LARGE = "hundred|thousand|million|billion|trillion"
SCALE = re.compile(rf"(?P<letter>[kKMB]|[bm]n)(?![A-Za-z0-9])|(?i:[ -]?(?:{LARGE})s?\b)+")
# Digits that belong to a unit: 5 cm2, 5 m ^ 2, 3 kg of CO2. In "12 pens in 3 boxes" they do not.
UNIT = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:[kcmd]?m|s|in|ft|yd|mi|inch(?:es)?|feet|foot|yards?|miles?|(?:kilo|centi)?met(?:er|re)s?|"
    r"units?)(?: ?\}? ?\^ ?\{?|\*\*)?[23]\}?|CO_?\{?2\}?|H_?\{?2\}?O)(?![A-Za-z0-9])"
)
DIGIT = re.compile(r"[0-9]")
CHOICE = re.compile(rf"\b(?:(?P<spoken>{'|'.join(SPOKEN)})|or)\b", re.IGNORECASE)
# What after a number makes another number of it: an operator, a variable, a function, a question, a denial.
NEXT = r"^[\s)\]\"'$]*"
NOT_ALONE = re.compile(
    r"[0-9^+?√π∞±×÷·‰≤≥≠]|\\[A-Za-z]|[<>](?![A-Za-z/|])|\b(?:is|was)(?: not|n't)\b|[✗✘❌]|"
    r"\b(?:wrong|incorrect|false|ruled out|scratch that|at (?:most|least))\b|"
    rf"{NEXT}(?:[!*]|[-/]\s*$)|{NEXT}[-/]?\s*(?:(?!a\s)[a-fi-kn-rt-zBDEGHKMO-UX-Z](?![A-Za-z'.])|[α-λν-ω](?!\w)|"
    r"(?i:(?:and an? )?(?:half|halves|thirds?|quarters?)|(?:fif|six|seven|eigh|nin|ten|(?:hundre|thousan)d|"
    r"\w+illion)ths|lakhs?|crores?|tens|mil|(?!mill|bill|trill)[a-z]{1,6}illions?|pi|sqrt|squared|cubed|factorial|"
    r"mod(?:ulo)?|log|ln|sin|cos|tan|infinity|plus|minus|divided|(?:times|more than|less than) [a-z])\b)|"
    r"^(?i:(?!st|nd|rd|th|[kcmd]m|[km]g|[mcd]l|lb|oz|ft|in|yd|mi|hr|am|pm|p[txc]|hz|ms|k[wn]|[kmgt]b)"
    r"[a-z]{2})(?![A-Za-z])"
)
# A calculation whose result follows an equals sign, and a left side that says that the right side is not the answer.
TERMS = r"[\s$€£0-9.,()%+*/×÷·⋅x=^-]*"
CALCULATION = re.compile(rf"(?:[A-Za-z ]*[=:])?{TERMS}[0-9)%] ?[-+*/×÷·⋅x^]\*? ?[-($€£]*[0-9]{TERMS}")
UNEQUAL = re.compile(rf"[!/~]\s*$|[<>≠≤≥±√|]|\\sqrt|\\(?:neq?|leq?|geq?|pm)\b|^\s*-|{DENIED}", re.IGNORECASE)
# The name of a number with an index or an argument, such as a_1 or f(2). Its digits are none of a calculation.
NAME = re.compile(
    r"(?<![\\A-Za-z0-9)])(?:[A-Za-z]_[0-9A-Za-z]{1,9}|[A-Zf-hp-v](?=\())(?:\([^()]{1,20}\))?(?![0-9A-Za-z^'!(])"
)
# In a text without markers: what is before and after a number that is a part of an expression.
PART_BEFORE = re.compile(
    r"(?i:\b(?:not|never|cannot)|n't)(?: be)? $|"
    r"(?:[\^√±<≤≥≠]|!=|(?<![-=])>|\\(?:sqrt|log|ln|sin|cos|tan|pm|neq?|leq?|geq?)) ?[{(]?$"
)
PART_AFTER = re.compile(
    r" ?(?:\^|√|π|∞|\\(?:pi|sqrt|cdot|times)\b)|[ix](?![A-Za-z])|(?i: (?:is|was)(?: not|n't)? (?:the|wrong)\b)"
)
GROUPED = "|".join(rf"[0-9]{{1,3}}(?>(?:{mark}[0-9]{{3}})+)" for mark in (",", " ", "'", "_", ", "))
DECIMAL = rf"(?:(?:{GROUPED}|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][-+]?[0-9]++)?"
SINGLE = re.compile(DECIMAL)
RATIO = re.compile(rf"({DECIMAL}) ?/ ?({DECIMAL})")
MIXED = re.compile(r"([0-9]++) ([0-9]++) ?/ ?([0-9]++)")


def _written(segment: str, *, solution: bool, equals_left: int = MOST_EQUALS) -> tuple[str, Fraction] | None:
    """Text and value of the only number. `solution`: whether other words and a calculation (3 * 6 = 18) may lead to
    it."""
    if len(segment) > LONGEST:
        return None
    tidy = DENIED_FIRST.sub("", _tidy(segment))
    equals = tidy.rfind("=")
    if equals >= 0 and (match := ANSWER.match(tidy, equals + 1)):
        left, right = tidy[:equals], _alone(match, tidy)
        if _may_equal(left, solution):
            return right
        if solution and right and equals_left:  # 0.5 = 1/2
            same = _written(left, solution=True, equals_left=equals_left - 1)
            if same and same[1] == right[1]:
                return right
    if match := ANSWER.match(tidy):
        return _alone(match, tidy)
    match = ANYWHERE.search(tidy)
    if not solution or match is None or (match["sign"] or "").endswith(" "):  # in words, `- 5` is a dash or a minus
        return None
    lead = tidy[: match.start()]
    return _alone(match, tidy) if PLAIN_WORDS.fullmatch(lead) and not OTHER_NUMBER.search(lead) else None


def _may_equal(left: str, solution: bool) -> bool:
    """Whether the left side of an equals sign names the answer or, in a solution, calculates it."""
    if DIGIT.search(left := NAME.sub("x", left)):
        return solution and CALCULATION.fullmatch(left) is not None
    return not UNEQUAL.search(left)


def _alone(match: re.Match[str], text: str) -> tuple[str, Fraction] | None:
    """Text and value of a match of MARKED, None if what follows makes another number of it."""
    value, rest = _value(match["run"]), text[match.end() :]
    scale = SCALE.match(rest)
    others = UNIT.sub("", rest[scale.end() :] if scale else rest)
    if value is None or NOT_ALONE.search(others):
        return None
    if any(not choice["spoken"] or SPOKEN[choice["spoken"].lower()] != value for choice in CHOICE.finditer(others)):
        return None
    return _signed(match, match["run"], value, scale)


def _last_number(text: str) -> FinalAnswer | str:
    """The last number of a text without markers, or the reason why it is none."""
    text = UNIT.sub("", _fractions(re.sub(TAG, " ", text)))
    numbers = deque(NUMBER.finditer(text), maxlen=1)
    if not numbers:
        return NO_ANSWER
    start, end = numbers[0].span()
    if PART_BEFORE.search(text[max(0, start - 10) : start]) or PART_AFTER.match(text, end):
        return UNCLEAR
    run = numbers[0]["run"]
    if _value(run) is None and " " in run and "/" not in run:
        run = run.rpartition(" ")[2]  # of several numbers, the last one
    value = _value(run)
    found = None if value is None else _signed(numbers[0], run, value, SCALE.match(text, end))
    return FinalAnswer(*found, "last number") if found else NO_ANSWER


def _signed(
    match: re.Match[str], run: str, value: Fraction, scale: re.Match[str] | None
) -> tuple[str, Fraction] | None:
    """Text and value with the sign and the power of ten of `match`. `scale`: a match of SCALE after it."""
    if match["power"]:
        if len(match["power"]) > 4 or abs(int(match["power"])) > MOST_DIGITS:
            return None
        value *= Fraction(10) ** int(match["power"])
        run += f"e{match['power']}"
    if scale:
        words = [scale["letter"][0]] if scale["letter"] else re.findall(LARGE, scale[0].lower())
        if (power := sum(POWERS[word.lower()] for word in words)) > MOST_DIGITS:
            return None
        value *= 10**power
        run = str(value)
    # The text must have the value: that of 1/2 x 10^3 would be read as 1/(2 x 10^3). Two signs are not one number.
    if _value(run) != value or (match["sign"] and match["inner"]):
        return None
    negative = match["inner"] or (match["sign"] or "+")[0] != "+"
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


# --- expressions -------------------------------------------------------------------------------------------------

AROUND = re.compile(
    r"^(?:[A-Za-z\s]*=)?[\s$*]*|\\[()\[\]]|(?<![\s$*.])[\s$*.]*+$|\\(?:left|right|displaystyle)(?![A-Za-z])"
)
LATEX = re.compile(
    r"(?>(?:[0-9]{1,15}+(?:\.[0-9]{1,15}+)?(?![0-9.]|\s+[0-9])|[-+/^!(){}|\s]|\[[0-9]\]|(?<=\\log)_\{?[0-9]+\}?|"
    r"\\(?:[dtc]?frac|sqrt|d?binom|cdot|times|div|log|ln|sin|cos|tan|pi|[lr]floor|[lr]ceil)(?![A-Za-z]))+)"
)
BRACED = re.compile(r"\{[^{}]*\}")
# A sum or product outside of braces is a calculation. 1/2^2, 1/2! and 5!! can be read in two ways.
OPERATION = re.compile(r"[0-9A-Za-z)!|]\s*(?:[-+]|\\(?:cdot|times|div))|/.*[/^!]|!\s*!")


def _from_latex(segment: str) -> tuple[str, Fraction] | None:
    """Text and value of an expression that is more than a number, such as a root or a power."""
    latex = AROUND.sub("", segment) if len(segment) <= LONGEST else ""
    if len(latex) > SEGMENT or not LATEX.fullmatch(latex) or not re.search(r"[\\^!{]", latex) or segment.count("$") % 2:
        return None
    outside = latex
    while outside != (outside := BRACED.sub("0", outside)):
        pass
    value = None if OPERATION.search(outside) else value_of_latex(latex)
    return None if value is None or _value(str(abs(value))) is None else (str(value), value)


# --- spelling ----------------------------------------------------------------------------------------------------

# GSM8K's calculator annotations: <<48/2=24>>. And what is struck out.
ANNOTATION = re.compile(
    r"<<[^<>\n]{0,200}>>|~~[^~\n]{1,200}~~|<(s|del)>[^<>\n]{0,200}</\1>|\\(?:[xb]?cancel|sout)\{[^{}\n]{0,200}\}"
)
FRACTION = re.compile(  # also \frac12
    r"(?:([0-9]) ?)?\\[dtc]?frac ?(?:\{ ?(-?[0-9.,]{1,60}) ?\}|([0-9])) ?(?:\{ ?([0-9.,]{1,60}) ?\}|([0-9]))"
)
# Of {3 \over 4}.
PART = r"(\.?[0-9][0-9.,]{0,60})"
OVER = re.compile(rf"(?:(\{{) ?|(?<![0-9.,])(?<![0-9.,] )){PART} ?\\over(?![A-Za-z]) ?{PART}(?(1) ?\}}?)")
REPEATING = re.compile(  # 0.\overline{3}
    r"(?<![0-9.,])(?<![0-9.,] )([0-9]{0,15})\.([0-9]{0,15})\\(?:overline|bar) ?\{ ?([0-9]{1,15}) ?\}(?! ?\.?[0-9])"
)
LATEX_SPACE = re.compile(r"\\[,;: ]|\\!|\{,\}|(?<=[0-9])~(?=[0-9])|\\q?quad\b|[ \t]{2,}|\t")
RAISED, LOWERED = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "₀₁₂₃₄₅₆₇₈₉"
FOREIGN = re.compile(
    rf"[{RAISED}]{{1,20}}|[{LOWERED}]{{1,20}}|√ ?(?:[0-9]{{1,20}}|\([0-9]{{1,20}}\))|\uff01[=\uff1d]|[^\x00-\x7f]"
)
SPELLED = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
    "\u2015": "\u2014",  # the horizontal bar
    **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", ""),  # invisible
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u3002\uff61\uff01", ". "),  # full-width stops; this exclamation mark is no factorial
    **dict.fromkeys("\u2018\u2019", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"'),
}
TAG = r"</?[A-Za-z|][^<>\n]{0,30}>"
# What LaTeX, Markdown and HTML put around a number and its units. Also the end of 5^{\text{th}}.
POWER = r"\^ ?\{? ?(?:\\(?:text|textrm|mathrm|rm)(?![A-Za-z]) ?\{? ?)?"
MARKUP = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|style)?|math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm|bf|rm|mbox|emph|underline|left|right|"
    r"displaystyle|operatorname|large|Large|huge|[Bb]igg?[lr]?|degree|ldots|dots|checkmark|blacksquare|square|newline|f?boxed|"
    r"approx|simeq|sim|therefore)(?![A-Za-z])|\^ ?\{? ?\\circ ?\}?|\\[()\[\]\\]|"
    rf"(?:(?<=1){POWER}st|(?<=2){POWER}nd|(?<=3){POWER}rd|(?<=[0-9]){POWER}th)(?![A-Za-z]|[}} ]{{0,3}}\.?[0-9])|"
    rf"{TAG}|[{{}}`]|(?<![^\s(\[+:$=~≈\"'-])(?:[*_]++(?=\S)|[*_]{{2,}}+(?=\s|$))|"
    r"(?<=[^\s*_])[*_]++(?=[\s.,;:!?)\]]|$)"
)


def _tidy(segment: str) -> str:
    """An answer without markup, with fractions as a/b and LaTeX's operators as characters."""
    segment = MARKUP.sub("", _fractions(segment))
    for command, character in (("times", "×"), ("cdot", "×"), ("div", "÷")):
        segment = segment.replace(f"\\{command}", character)
    return re.sub(r"\s{2,}", " ", segment).strip()


def _fractions(text: str) -> str:
    text = OVER.sub(lambda match: f"{' ' if match[1] else ''}{match[2]}/{match[3]}", text)
    return FRACTION.sub(_ratio, REPEATING.sub(_repeating, text))


def _repeating(match: re.Match[str]) -> str:
    fixed, digits = match[1] + match[2], match[3]
    value = Fraction(int(fixed + digits) - int(fixed or 0), 10 ** len(match[2]) * (10 ** len(digits) - 1))
    return f"{value.numerator}/{value.denominator}"


def _ratio(match: re.Match[str]) -> str:
    whole = f"{match[1]} " if match[1] else ""
    return f"{whole}{match[2] or match[3]}/{match[4] or match[5]}"


def plain(text: str) -> str:
    """The same text with other scripts' digits, spaces and signs in ASCII, and without marks."""
    text = ANNOTATION.sub("", FOREIGN.sub(lambda match: _ascii(match[0]), text))
    return LATEX_SPACE.sub(lambda match: {"{,}": ",", "\\!": ""}.get(match[0], " "), text)


@lru_cache(maxsize=4096)
def _ascii(found: str) -> str:
    spelled = unicodedata.normalize("NFKC", found).replace("\u2212", "-")
    if found[0] in RAISED:
        found = f"^{{{spelled}}}"
    elif found[0] in LOWERED:
        found = f"_{{{spelled}}}"
    elif found[0] == "√" and len(found) > 1:
        found = f"\\sqrt{{{found[1:].strip(' ()')}}}"
    elif found in SPELLED:
        found = SPELLED[found]
    elif "\uff01" <= found <= "\uff5e":  # full-width forms
        found = spelled
    elif (category := unicodedata.category(found)) == "Nd":
        found = str(unicodedata.decimal(found))
    elif category == "Zs":
        found = " "
    elif "\u2044" in spelled:
        found = " " + spelled.replace("\u2044", "/")  # a half as one character: 1½ is 1 1/2
    return found
