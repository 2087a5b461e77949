"""Whether a text for standard input is made like those of the tests, where nothing else says what an input is.

A text is lines of words. How many there are follows from numbers among them as a rule ("n, then n numbers"), in a way
that only the question tells. So a text that is named keeps the lines and the number of words in each of one of the
tests, every number in it that is also the count of something there, and the lengths of its texts; other numbers may be
any between those that stand at their place in the tests.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from decimal import Decimal

INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,17}")

Words = list[list[str]]


def made_of_words_alike(text: str, samples: Sequence[str]) -> bool:
    """Whether its words are integers, decimals or texts as those of the samples are."""
    kinds = {kind_of(word) for sample in samples for line in words_of(sample) for word in line}
    return {kind_of(word) for line in words_of(text) for word in line} <= kinds


def laid_out_alike(text: str, samples: Sequence[str]) -> bool:
    """Whether it lies within the samples, as said above."""
    read = [words_of(sample) for sample in samples]
    return any(
        spaces_of(text) == spaces_of(sample) and _keeps(words_of(text), words, read)
        for sample, words in zip(samples, read, strict=True)
    )


def words_of(text: str) -> Words:
    return [line.split() for line in text.rstrip().split("\n")]


def kind_of(word: str) -> str:
    if INTEGER.fullmatch(word):
        return "integer"
    return "decimal" if DECIMAL.fullmatch(word) else "text"


def spaces_of(text: str) -> str:
    """What stands between its words, and at its end: a right program may split by just that."""
    return re.sub(r"\S+", "x", text)


def _keeps(words: Words, sample: Words, samples: Sequence[Words]) -> bool:
    """Whether `words`, laid out like `sample`, keep its counts and lie within all the samples."""
    counts = counts_in(sample)
    for row, (line, its_line) in enumerate(zip(words, sample, strict=True)):
        for column, (word, its_word) in enumerate(zip(line, its_line, strict=True)):
            if kind_of(word) != kind_of(its_word):
                return False
            if its_word in counts and word != its_word:
                return False
            if not _lies_within(word, its_word, _at(samples, row, column)):
                return False
        if not _order(its_line, samples, row) <= _orders_of(line):
            return False
    return True


def counts_in(words: Words) -> set[str]:
    """As they are written: of lines from anywhere to the end, of words in lines, of letters in texts."""
    lengths = {len(word) for line in words for word in line if kind_of(word) == "text"}
    return {str(count) for count in {*range(len(words) + 1), *map(len, words), *lengths}}


def _at(samples: Sequence[Words], row: int, column: int) -> list[str]:
    """The words that stand there in the samples; in the whole line where lines are not of one length."""
    lines = [sample[row] for sample in samples if row < len(sample)]
    if len({len(line) for line in lines}) == 1:
        return [line[column] for line in lines]
    return [word for line in lines for word in line]


def _lies_within(word: str, its_word: str, there: Sequence[str]) -> bool:
    kind = kind_of(word)
    alike = [other for other in there if kind_of(other) == kind]
    if kind == "text":
        return len(word) == len(its_word) and set(word) <= set("".join(alike))
    return min(map(Decimal, alike)) <= Decimal(word) <= max(map(Decimal, alike))


def _order(line: Sequence[str], samples: Sequence[Words], row: int) -> set[str]:
    """What the lines there that have as many words have in common."""
    return set.intersection(
        *(_orders_of(sample[row]) for sample in samples if row < len(sample) and len(sample[row]) == len(line))
    )


def _orders_of(line: Sequence[str]) -> set[str]:
    """Which pairs of its numbers are "a<=b" or "a>=b", and whether no word comes twice."""
    found = {"distinct"} if len(set(line)) == len(line) else set()
    numbers = [(column, Decimal(word)) for column, word in enumerate(line) if kind_of(word) != "text"]
    for (left, a), (right, b) in itertools.pairwise(numbers):
        found |= {f"{left}<={right}"} if a <= b else set()
        found |= {f"{left}>={right}"} if a >= b else set()
    return found
