"""math-verify as a grader for `pvg attack`: does the text contain an expression equal to the answer?

pvg attack examples/graders/math_verify_grader.py:grade --data examples/graders/boxed.jsonl
"""

from math_verify import parse, verify


def grade(problem, text):
    """`problem` is the question, a str; `problem.answer` is its answer."""
    return verify(parse(f"${problem.answer}$"), parse(text))
