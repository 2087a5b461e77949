"""TRL's `accuracy_reward` as a grader for `pvg attack`, called as GRPOTrainer calls it.

pvg attack examples/graders/trl_grader.py:grade --data examples/graders/boxed.jsonl
"""

from trl.rewards import accuracy_reward


def grade(problem, text):
    """None (TRL skips the example) counts as an error of the grader."""
    completion = [{"role": "assistant", "content": text}]
    return accuracy_reward([completion], [f"${problem.answer}$"])[0]
