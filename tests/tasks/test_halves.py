"""The halves of the training problems (invariant 4)."""

from pvg.config.task import ModchainTask
from pvg.tasks import open_task
from pvg.tasks.task import half_of, problems_of_half


def test_halves_are_disjoint_complete_and_about_equal():
    task = open_task(ModchainTask(problems=2000, test_problems=10))
    prover, verifier = ([p.id for p in problems_of_half(task, half)] for half in ("prover", "verifier"))
    assert not set(prover) & set(verifier)
    assert sorted(prover + verifier) == sorted(p.id for p in task.problems("train"))
    assert 900 < len(prover) < 1100


def test_the_half_of_an_id_never_changes():
    # As `sha256sum` has it: the digest of the first begins with 0x77 (odd), of the second with 0xb4 (even).
    assert half_of("modchain-10-1+2") == "verifier"
    assert half_of("modchain-10-1+6") == "prover"
