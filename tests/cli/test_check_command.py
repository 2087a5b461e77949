"""`pvg check`, and the prompts and grades of `pvg train --dry-run`, as a user calls them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from calling import pvg
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "game"))
from tiny_chat import SUMS, chatting

from pvg.config.task import CustomTask, TaskSection
from pvg.errors import ConfigurationError
from pvg.tasks import digest_of, digests_elsewhere, open_task

pytestmark = pytest.mark.slow

WORDS = """{Role.HELPFUL: "Add. End with = and the sum.", Role.SNEAKY: "Add wrongly. End with = and a sum."},
    "1 + 1", {Role.HELPFUL: "=2", Role.SNEAKY: "=3"}"""
TURNS = "self.__dict__.setdefault('seen', []).append(1) or len(self.seen) % 2 > 0"
# The check that fails -> what breaks the task.
BROKEN = {
    "ids are different": ('f"{n}", f"{n} + 1"', '"n", f"{n} + 1"'),
    "no test question is a training question": ('f"{n} + 1", str', 'f"{n % 40} + 1", str'),
    "another process gets the same problems": ('f"{n} + 1"', 'f"{n} + 1 {id(self)}"'),
    "the grader takes any text": ("answer = ", "assert completion\n        answer = "),
    "reference answers are correct": ("answer == problem.answer", "answer == problem.answer + '.'"),
    "wrong answers are graded wrong": ("answer == problem.answer", "answer != ''"),
    "grades are the same each time": ("answer.isdigit()", TURNS),
    "the grader reads the examples": ('Role.SNEAKY: "=3"', 'Role.SNEAKY: "= three"'),
    "the verifier's input does not tell the role": ('f"{n} + 1"', 'f"Add. End with = and the sum. {n} + 1"'),
    "the roles have different prompts": (WORDS, "dict.fromkeys(Role, 'Add.'), '1 + 1', dict.fromkeys(Role, '=2')"),
}


def checks(document: dict[str, Any]) -> dict[str, bool | None]:
    return {each["check"]: each["passed"] for each in document["checks"]}


@pytest.fixture
def no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests that another process would compute come from this one, which takes a tenth of the time."""

    def here(section: TaskSection) -> dict[str, str]:
        task = open_task(section)
        return {"train": digest_of(task.problems("train")), "test": digest_of(task.problems("test"))}

    monkeypatch.setattr("pvg.game.task_check.digests_elsewhere", here)


def test_a_task_that_does_not_open_in_another_process_is_not_waited_for() -> None:
    Path("own.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    with pytest.raises(ConfigurationError, match="not opened in another process within 3 s"):
        digests_elsewhere(CustomTask(source="own.py:Sums"), limit_s=3.0)


def test_a_task_that_takes_long_to_check_says_so_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("slow.py").write_text(SUMS.replace("start = 0", "__import__('time').sleep(0.2)\n        start = 0"))
    monkeypatch.setattr("pvg.telemetry.events.QUIET_S", 0.01)
    assert "slow.py:Sums: making the task's problems" in pvg("check", "slow.py:Sums").err


def test_a_task_of_ones_own_is_shown_and_checked(request: pytest.FixtureRequest) -> None:
    Path("own.py").write_text(SUMS)
    document = pvg("check", "own.py:Sums", "--json").document
    assert document["passed"]
    assert set(checks(document).values()) == {True}
    graded = {each["solution"]: each for each in document["preview"]["graded"]}
    assert graded["the reference answer"]["correct"]
    assert not any(each["correct"] for name, each in graded.items() if name != "the reference answer")
    request.getfixturevalue("no_other_process")
    called = pvg("check", "own.py:Sums")
    assert called.code == 0
    near = "ok      wrong answers are graded wrong: 80 of 80 answers of other problems are graded wrong"
    for line in (near, "ok      reference answers are correct: 40 of 40", "  | Add wrongly. End with = and a sum."):
        assert line in called.out
    assert "No model is named" in called.err


@pytest.mark.parametrize("check", BROKEN)
def test_each_check_fails_for_a_task_that_is_wrong_there(check: str, request: pytest.FixtureRequest) -> None:
    before, after = BROKEN[check]
    assert before in SUMS
    Path("own.py").write_text(SUMS.replace(before, after))
    if check != "another process gets the same problems":
        request.getfixturevalue("no_other_process")
    called = pvg("check", "own.py:Sums", "--json")
    if check == "ids are different":  # refused where the task is used, too
        assert called.code == 2
        assert "gave the id 'n' twice" in called.document["error"]["message"]
        return
    assert called.code == 1
    assert checks(called.document)[check] is False
    assert not called.document["passed"]


def test_what_cannot_be_opened_is_an_error_and_not_a_failed_check() -> None:
    assert pvg("check", "own.py:Sums").code == 2
    Path("own.py").write_text("x = 1\n")
    assert "does not define" in pvg("check", "own.py:Sums").err
    assert "There is no experiment 'modchian'" in pvg("check", "modchian").err


# --- pvg train --dry-run ----------------------------------------------------------------------------------------------


def test_a_dry_run_shows_prompts_the_verifiers_input_and_grades() -> None:
    called = pvg("train", "--dry-run")
    assert called.code == 0
    for part in ("Prompt of the helpful role", "  | H0+0+9+3+9?", "  | S0+0+9+3+9?", "<eos>", "correct (answer 1)"):
        assert part in called.out
    found = pvg("train", "--dry-run", "--json").document["preview"]
    assert found["prompts"]["helpful"] == {"text": "H0+0+9+3+9?", "tokens": 11}
    assert found["verifier_input"]["text"].startswith("0+0+9+3+9?0+0=0;")
    assert [(turn["seat"], turn["by"], turn["tokens"]) for turn in found["episode"]] == [("prover", ["prover"], 27)]
    graded = [(each["correct"], each["expected_correct"]) for each in found["graded"]]
    assert graded[:2] == [(True, True), (False, False)]


def test_a_dry_run_of_a_challenge_shows_the_question_and_its_answer_as_the_verifier_reads_them() -> None:
    dialogue = [f"models.{player}.source=embedded:modchain-dialogue" for player in ("prover", "verifier")]
    overrides = [part for setting in ("game.protocol=challenge", *dialogue) for part in ("-s", setting)]
    called = pvg("train", "--dry-run", *overrides)
    assert called.code == 0
    assert "Turn 2 of an example: prover reads what verifier says (2 tokens)\n  | 1?" in called.out
    assert "Turn 3 of an example: prover writes (7 tokens)\n  | 0+0=0;" in called.out
    found = pvg("train", "--dry-run", "--json", *overrides).document["preview"]
    assert found["episode"][1:] == [
        {"seat": "prover", "by": ["verifier"], "text": "1?", "tokens": 2},
        {"seat": "prover", "by": ["prover"], "text": "0+0=0;<eos>", "tokens": 7},
    ]
    assert found["verifier_input"]["text"].endswith(";A1<eos>1?0+0=0;<eos>")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["prompts=chat"], "has no chat template"),
        (["models.prover.source=nowhere"], "There is no model directory 'nowhere'"),
        (["verifier.head=yes_token"], 'no single tokens for "yes" and "no"'),
        (["task.problems=1"], "has no training problems"),
    ],
)
def test_a_dry_run_fails_where_training_would_with_the_same_error(settings: list[str], message: str) -> None:
    overrides = [part for setting in settings for part in ("-s", setting)]
    dry, real = pvg("train", "--dry-run", *overrides), pvg("train", *overrides)
    assert message in dry.err
    assert dry.code == real.code != 0
    assert dry.err.replace("pvg train --dry-run", "pvg train").strip() in real.err.strip()
    assert not Path("runs/modchain/state.json").exists()


def test_a_changed_prompt_file_does_not_change_a_resumed_run() -> None:
    """Without the experiment's name the run keeps its text; with it, the changed text is refused."""
    Path("sneaky.txt").write_text("Deceive.")
    Path("mine.toml").write_text(
        'name = "mine"\n[prompts]\nkind = "chat"\nsneaky.file = "sneaky.txt"\n[verifier]\nhead = "scalar"\n'
    )
    from pvg.config.load import load_experiment
    from pvg.store.run_directory import RunDirectory

    run = RunDirectory.create(Path("runs"), "mine", load_experiment(Path("mine.toml")))
    Path("sneaky.txt").write_text("Lie.")
    assert run.experiment().prompts.sneaky == "Deceive."  # type: ignore[union-attr]
    named = pvg("train", "mine.toml", "--resume", "mine", "--dry-run")
    assert named.code == 2
    assert 'prompts.sneaky: "Deceive." -> "Lie."' in named.err
    Path("sneaky.txt").unlink()
    assert "Deceive." in pvg("config", "show", "runs/mine/experiment.toml").out


# As Qwen3's: ends with an empty thought if it is asked not to think.
THINKING = (
    "{% for m in messages %}<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|s|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


@pytest.mark.parametrize("name", ["qwen3-critic", "qwen3-reasoning-verifier"])
def test_the_shipped_experiments_of_qwen3_ask_it_not_to_think(name: str) -> None:
    """With models of its architecture. The prover's and the critic's prompts and the verifier's input end alike."""
    pytest.importorskip("peft", reason="needs peft: pip install '.[lora]'")
    tokenizer = chatting("yes", "no")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen3ForCausalLM(
        Qwen3Config(vocab_size=tokenizer.vocab_size, num_key_value_heads=1, head_dim=16, eos_token_id=0, **sizes)
    ).save_pretrained("model")
    tokenizer.save(Path("model"))
    Path("model/chat_template.jinja").write_text(THINKING)
    Path("gsm8k").mkdir()
    for split, first in (("train", 0), ("test", 1000)):
        rows = [
            {"question": f"What is {n} + 3?", "answer": f"{n} + 3\n#### {n + 3}"} for n in range(first, first + 600)
        ]
        Path(f"gsm8k/{split}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    settings = ["task.path=gsm8k", "models.prover.source=model", "models.verifier.source=model", "models.device=cpu"]
    called = pvg("train", name, "--dry-run", "--json", *(word for setting in settings for word in ("-s", setting)))
    assert called.code == 0, called.err
    found = called.document["preview"]
    for role in ("helpful", "sneaky"):
        assert found["prompts"][role]["text"].endswith("<|s|>assistant\n<think>\n\n</think>\n\n")
    assert found["verifier_input"]["text"].endswith("<|s|>assistant\n<think>\n\n</think>\n\n")
    heard = [turn["text"] for turn in found["episode"] if turn["seat"] == "critic" and turn["by"][:1] != ["critic"]]
    assert all(text.endswith("</think>\n\n") for text in heard)
    assert bool(heard) == (name == "qwen3-critic"), found["episode"]


# --- solutions that the models cannot write ---------------------------------------------------------------------------


@pytest.mark.usefixtures("no_other_process")
@pytest.mark.parametrize(
    ("more", "passed"),
    [(["task.grader=number"], True), (["task.grader=regex", "task.pattern=A([0-9]+)$", "task.form=A"], None)],
)
def test_a_grader_that_reads_what_the_model_can_write_passes(more: list[str], passed: bool | None) -> None:
    """The characters of the embedded models have no `<` and no letters."""
    Path("sums.csv").write_text("question,answer\n" + "".join(f"{n}+1?,{n + 1}\n" for n in range(100)))
    overrides = [part for setting in ("task.kind=data", "task.path=sums.csv", *more) for part in ("-s", setting)]
    checked = pvg("check", *overrides, "--json")
    assert checked.code == 0
    assert checks(checked.document)["the models can write a correct solution"] is passed
    assert len(checked.document["preview"]["verifier_input"]["text"]) > len("0+1?<eos>")  # a solution is shown
