"""The math score of Prime Intellect's verifiers as a grader for `pvg attack`.

pvg attack examples/graders/verifiers_grader.py:grade --data examples/graders/boxed.jsonl
"""

from verifiers.v1.utils.score import verify_boxed_math_answer


def grade(problem, text):
    return verify_boxed_math_answer(text, problem.answer)
