"""The scorer of a dataset of reasoning-gym as a grader for `pvg attack`.

pvg attack examples/graders/reasoning_gym_grader.py:grade --data examples/graders/tagged.jsonl --threshold 1
"""

import reasoning_gym
from reasoning_gym.utils import extract_answer

SCORER = reasoning_gym.get_score_answer_fn("chain_sum")


def grade(problem, text):
    """A score from 0 to 1. The answer is in <answer>...</answer>; without it, it is the whole text."""
    return SCORER(extract_answer(text) or text, {"question": str(problem), "answer": problem.answer, "metadata": {}})
