"""A grader with a well-known hole: it accepts every text that contains the answer.

pvg attack examples/graders/substring_grader.py:grade --data examples/graders/boxed.jsonl
"""


def grade(problem, text):
    return problem.answer in text
