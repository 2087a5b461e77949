"""Loading traces: how answers and steps are found, columns guessed, and hostile files refused."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from pvg.errors import ConfigurationError, PvgError, UsageError
from pvg.traces.loaders import chosen_together, load_traces, parts_of, read_fields, steps_in

HERE = Path(__file__).parent


def load(file, *fields, pattern=None):
    return load_traces(str(file), read_fields(fields), Path("runs"), pattern)


def lines(tmp_path, *rows, name="t.jsonl"):
    file = tmp_path / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# --- answers and steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reasoning", "cue", "answer", "end"),
    [
        ("48/2 = 24.\n#### 24", "48/2 = 24.", "\n####", " 24", ""),
        ("So \\boxed{\\frac{1}{2}}.", "So", " \\boxed{", "\\frac{1}{2}", "}"),
        ("<think>2+2</think>\n<answer> 4 </answer>", "<think>2+2", "</think>\n<answer>", " 4", " </answer>"),
        (
            "First 3. The answer is 4. Then the answer is **5**.",
            "First 3. The answer is 4. Then the",
            " answer is **",
            "5",
            "",
        ),
        ("7+5=2;2+8=0;A0", "7+5=2;2+8=0;", "A", "0", ""),
        ("#### 3\nNo: \\boxed{4}", "#### 3\nNo:", " \\boxed{", "4", "}"),
        ("2+2 = 4. So answer: 4.0.\n#### 4", "2+2 = 4. So", "\n####", " 4", ""),
        ("answer: 5.\nNo.\n#### 4", "answer: 5.\nNo.", "\n####", " 4", ""),
        ("<think>2+2\n#### 4</think>\nIt is 4.\n\\boxed{4}", "<think>2+2", "</think>\n\\boxed{", "4", "}"),
    ],
)
def test_the_last_stated_answer_is_found(text, reasoning, cue, answer, end):
    parts = parts_of(text)
    assert (parts.reasoning, parts.cue, parts.answer, parts.end) == (reasoning, cue, answer, end)


def test_a_users_pattern_finds_other_answers():
    parts = parts_of("1+1\nResult => 2 (sure)", re.compile(r"Result => (\d+)"))
    assert (parts.reasoning, parts.cue, parts.answer) == ("1+1", "\nResult =>", " 2")
    assert parts_of("no answer here") is None
    assert parts_of("The answer isn't 5.") is None
    assert parts_of("Result: 4 Result: x", re.compile(r"Result: (\d+)?")).answer == " 4"
    assert parts_of("no marker", None, "red").answer == " red"


@given(st.text(alphabet="ab1 \n.;#\\{}<>answerboxd/thinkA", max_size=200))
def test_any_text_is_cut_without_loss(text):
    if (parts := parts_of(text)) is not None:
        assert text.startswith(parts.reasoning)
        assert parts.answer + parts.end in text[len(parts.reasoning) :]
    places = steps_in(text)
    assert all(start < end for start, end in places)
    assert "".join(text[slice(*place)] for place in places).split() == text.split()


def test_hostile_texts_take_linear_time():
    """Each of them would take hours with a pattern that tries all ways to divide a run of spaces."""
    for text in ("<answer>" + " " * 500_000, "####" + " " * 500_000 + "x" * 500, "answer is" + " *" * 300_000):
        assert parts_of(text) is None
    for text in ("\\boxed{{" * 50_000, "answer is " * 20_000, ". " * 100_000, "a;" * 100_000, " " * 300_000 + "x"):
        parts_of(text)
        steps_in(text)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("7+5=2;2+8=0;", ["7+5=2;", "2+8=0;"]),
        ("one\n\ntwo\n", ["one\n\n", "two\n"]),
        ("First this. Then that! End", ["First this. ", "Then that! ", "End"]),
    ],
)
def test_steps(text, steps):
    assert [text[slice(*place)] for place in steps_in(text)] == steps


# --- columns ----------------------------------------------------------------------------------------------------------


def test_columns_are_guessed_and_said_and_can_be_named(tmp_path):
    file = lines(tmp_path, {"question": "2+2?", "response": "#### 4", "answer": 4, "mine": "5", "step": 3})
    loaded = load(file)
    (found,) = loaded.traces
    assert (found.truth, found.correct, found.step, found.problem) == ("4", True, 3, (("user", "2+2?"),))
    assert "text = response" in loaded.said[0]
    (found,) = load(file, "truth=mine").traces
    assert (found.truth, found.correct) == ("5", False)


def test_a_column_may_be_in_later_rows_only(tmp_path):
    rows = [{"question": "q", "text": "#### 4"}, {"question": "q", "text": "#### 4", "truth": "5"}]
    assert [trace.correct for trace in load(lines(tmp_path, *rows)).traces] == [None, False]


def test_equal_answers_need_not_be_written_alike(tmp_path):
    file = lines(tmp_path, {"question": "q", "text": "#### 1,200", "truth": "1200.0"})
    assert load(file).traces[0].correct


@pytest.mark.parametrize(
    ("text", "truth", "correct"),
    [
        ("48/2 = 24.\n#### 24", "Half of 48: <<48/2=24>>24\n#### 24", True),
        ("48/2 = 25.\n#### 25", "Half of 48: <<48/2=24>>24\n#### 24", False),
        ("#### 3*6 = 18", "18", True),
        ("So \\boxed{\\sqrt{25}}.", "5", True),
        ("The answer is $\\frac{1}{2}$.", "1/2", True),
        ("\\boxed{5} is wrong", "5", False),
        ("#### 5 or 6", "5", False),
        ("The answer is 7. No:\n<answer>5</answer>", "5", True),
        ("<answer>5\n6</answer>", "5", False),
        ("7+5=2;2+8=0;A0", "0", True),
        ("So it is 5.", "5", False),
        ("So \\boxed{(B)}.", "B", True),
        ("The answer is (b).", "B", True),
        ("The answer is (C).", "B", False),
        ("#### Chapter 7", "Chapter 7", True),
        ("#### 7", "Chapter 7", False),
    ],
)
def test_an_answer_is_compared_as_a_number_a_letter_or_a_text(tmp_path, text, truth, correct):
    (trace,) = load(lines(tmp_path, {"question": "q", "text": text, "truth": truth})).traces
    assert trace.correct == correct


def test_what_a_reader_answers_is_compared_in_the_same_way(tmp_path):
    row = {"question": "q", "text": "#### 7"}
    number, letter = load(lines(tmp_path, {**row, "truth": "2+3 = 5\n#### 5"}, {**row, "truth": "B"})).traces
    assert [number.is_true(each) for each in ("5", "2+3 = 5", "\\sqrt{25}", "5 or 6", None)] == [True] * 3 + [False] * 2
    assert [letter.is_true(each) for each in ("(B)", "b", "A")] == [True, True, False]


def test_chats_thoughts_and_judges(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]
    said = [
        {"role": "assistant", "content": [{"type": "reasoning", "reasoning": "r"}, {"type": "text", "text": "#### 1"}]}
    ]
    row = {
        "prompt": messages,
        "completion": said,
        "answer": "1",
        "verdict": 0.75,
        "flaw": 1,
        "named": 2,
        "role": "helpful",
    }
    (found,) = load(lines(tmp_path, row)).traces
    assert found.problem == (("system", "s"), ("user", "q"))
    assert found.parts.reasoning == "<think>r"
    assert (found.accepted, found.flaw, found.named, found.role, found.correct) == (True, 1, 2, "helpful", True)


def test_about_the_most_traces_are_all_those_of_some_problems(tmp_path):
    file = lines(tmp_path, *({"question": f"q{n % 10}", "text": f"#### {n}"} for n in range(40)))
    loaded = load(file)
    chosen = loaded.chosen(9)
    assert len(chosen.traces) == 12
    assert {trace.problem_id for trace in chosen.traces} < {trace.problem_id for trace in loaded.traces}
    assert "28 traces" in chosen.said[-1]
    assert loaded.chosen(40) is loaded


def test_two_sources_keep_the_problems_that_both_have(tmp_path):
    many = [{"question": f"q{n}", "text": f"#### {n}"} for n in range(40)]
    (tmp_path / "a").mkdir()
    sides = [load(lines(tmp_path, *many)), load(lines(tmp_path / "a", *many[17:19]))]
    first, second = chosen_together(sides, 4)
    assert {trace.problem_id for trace in second.traces} < {trace.problem_id for trace in first.traces}
    assert (len(first.traces), len(second.traces)) == (4, 2)
    assert first.name != second.name
    with pytest.raises(UsageError, match="no problem in common"):
        chosen_together([load(lines(tmp_path, many[0])), sides[1]], 4)


# --- what the real packages write (write_fixtures.py) -----------------------------------------------------------------

WRITTEN = HERE / "written_by"
CHAINS = ["7+5=2;2+8=0;0+3=3;3+6=9;", "1+2=3;3+3=6;6+4=0;0+5=5;", "4+4=8;8+4=3;3+4=7;7+4=1;"]


def test_completions_that_trl_logged():
    loaded = load(HERE.parents[1] / "examples/traces/trl")
    assert len(loaded.traces) == 32
    assert {trace.step for trace in loaded.traces} == {1, 2}
    first = loaded.traces[0]
    assert first.problem[0][0] == ""  # a raw prompt, which the model continued
    assert first.problem[0][1].startswith("H")
    for trace in loaded.traces:
        assert trace.known == (trace.parts is not None and trace.parts.answer == trace.truth)


@pytest.mark.parametrize(("name", "steps"), [("verifiers", [None] * 3), ("prime-rl", [1, 2, 3])])
def test_episodes_of_verifiers_and_of_prime_rl(name, steps):
    traces = load(WRITTEN / f"{name}.jsonl").traces
    assert [trace.parts.reasoning for trace in traces] == [f"<think>{chain}" for chain in CHAINS]
    assert [trace.parts.answer for trace in traces] == [" 9", " 5", " 1"]
    assert [(trace.truth, trace.known) for trace in traces] == [("9", True), ("5", True), ("0", False)]
    assert traces[0].problem == (("system", "Add modulo 10."), ("user", "7+5+8+3+6?"))
    assert [trace.step for trace in traces] == steps


def test_numbers_in_an_episode_keep_their_digits(tmp_path):
    file = tmp_path / "traces.jsonl"
    for number in ("36811374411028374561", "0.12345678901234567890", "9007199254740993"):
        file.write_text((WRITTEN / "verifiers.jsonl").read_text().replace('"answer":"9"', f'"answer":{number}'))
        assert load(file).traces[0].truth == number


def test_a_log_of_inspect():
    traces = load(WRITTEN / "inspect.eval").traces
    assert [trace.parts.reasoning for trace in traces] == CHAINS
    assert [(trace.truth, trace.known, trace.answer) for trace in traces] == [
        ("9", True, "9"),
        ("5", True, "5"),
        ("0", False, "1"),
    ]
    assert traces[0].problem == (("user", "7+5+8+3+6?"),)


# --- hostile files ----------------------------------------------------------------------------------------------------

GOOD = {"question": "q", "text": "#### 1"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no traces"),
        (b"\n\n", "has no traces"),
        (b"not json\n", "line 1"),
        (b'{"question": "q", "text": "\xff"}\n', "not UTF-8"),
        (b"[1]\n", "not a JSON object"),
        (b'{"question": "q"}\n', "no column has the text"),
        (b'{"text": "t"}\n', "no column has the problem"),
        (json.dumps(GOOD).encode() + b'\n{"question": "q"}\n', "line 2"),
        (b'{"question": 5, "text": "t"}\n', "'question' is 5"),
        (b'{"question": "q", "text": 5}\n', "'text' is 5"),
        (b'{"question": "q", "text": "t", "step": "x"}\n', "'step' is 'x'"),
        (b'{"question": "q", "text": "t", "step": 1.5}\n', "whole number"),
        *(
            (b'{"question": "q", "text": "t", "flaw": %s}\n' % flaw, "the number of a step, from 1")
            for flaw in (b"3.5", b"0.0", b"-1.0", b"0", b"1e9", b"99999999999999999999", b"1e-400")
        ),
        (b'{"question": "q", "text": "t", "flaw": 1e400}\n', "line 1: not valid JSON"),
        (b'{"question": "q", "text": "t", "unused": 1e-99999999999999999999}\n', "line 1: a number in it"),
        (b'{"question": "q", "text": "t", "correct": 0.5}\n', "0 or 1"),
        (b'{"question": "q", "text": "t", "verdict": 3}\n', "between 0 and 1"),
        (b'{"prompt": [{"content": "q"}], "text": "t"}\n', "message with a role"),
        (b'{"question": "q", "question": "r", "text": "t"}\n', "twice"),
        (b'{"question": ' + b"[" * 100_000 + b"\n", "line 1"),
    ],
)
def test_a_wrong_line_is_one_error_with_its_place(tmp_path, content, message):
    file = tmp_path / "t.jsonl"
    file.write_bytes(content)
    with pytest.raises(PvgError, match=re.escape(message)):
        load(file)


def test_a_huge_line_is_read(tmp_path):
    file = lines(tmp_path, {"question": "q", "text": "x" * 5_000_000 + "\n#### 1"})
    assert load(file).traces[0].parts.answer == " 1"


def test_an_unknown_field_or_column_is_refused(tmp_path):
    with pytest.raises(UsageError, match="FIELD=COLUMN"):
        read_fields(["nonsense=1"])
    partly = lines(tmp_path, {**GOOD, "accuracy_reward": 0.5}, name="partly.jsonl")
    with pytest.raises(ConfigurationError, match="0 or 1"):
        load(partly)
    assert load(partly, "correct=").traces[0].known is None
    with pytest.raises(ConfigurationError, match="'missing'"):
        load(lines(tmp_path, GOOD), "truth=missing")


def table(tmp_path, **columns):
    file = tmp_path / "completions_00001.parquet"
    parquet.write_table(pa.table(columns), file)
    return file


def test_truncated_and_empty_parquet_is_refused(tmp_path):
    file = table(tmp_path, prompt=["q"], completion=["#### 1"])
    data = file.read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(ConfigurationError, match="not valid parquet"):
            load(file)
    with pytest.raises(ConfigurationError, match="has no traces"):
        load(table(tmp_path, prompt=pa.array([], pa.string()), completion=pa.array([], pa.string())))
    with pytest.raises(ConfigurationError, match="no column has the text"):
        load(table(tmp_path, prompt=["q"]))


def test_a_folder_of_parquet_is_one_source(tmp_path):
    for step in (1, 2):
        file = table(tmp_path, step=[step], prompt=["q"], completion=["#### 1"])
        file.rename(tmp_path / f"completions_0000{step}.parquet.tmp")
    for step in (1, 2):
        (tmp_path / f"completions_0000{step}.parquet.tmp").rename(tmp_path / f"completions_0000{step}.parquet")
    loaded = load(tmp_path)
    assert [trace.step for trace in loaded.traces] == [1, 2]
    assert loaded.traces[0].place == "completions_00001.parquet, row 1"
    assert len(loaded.said) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no traces that pvg knows"):
        load(tmp_path / "empty")


def test_a_damaged_log_of_inspect_is_refused(tmp_path):
    file = tmp_path / "x.eval"
    file.write_bytes(b"no zip")
    with pytest.raises(ConfigurationError, match="not a whole log"):
        load(file)
    sample = b'{"input": "q", "target": "5"}'
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(file, "w", method) as log:
            log.writestr("samples/1_epoch_1.json", sample)
        whole = file.read_bytes()
        header, entry, data = 0, whole.index(b"PK\1\2"), whole.index(b".json") + len(b".json")
        for changes in (
            {header + 6: 1, entry + 8: 1},  # encrypted
            {header + 8: 97, entry + 10: 97},  # in an unknown compression
            {entry + 46: 0xFF, entry + 9: 8},  # a name that is not UTF-8
            {data: 0xFF, data + 1: 0xFF, data + 4: 0xFF},
        ):
            damaged = bytearray(whole)
            for at, byte in changes.items():
                damaged[at] = byte
            file.write_bytes(damaged)
            with pytest.raises(ConfigurationError, match="not a whole log"):
                load(file)
    for content in (b"{", b"[]", b'{"input": "q"}'):
        with zipfile.ZipFile(file, "w") as log:
            log.writestr("samples/1_epoch_1.json", content)
        with pytest.raises(ConfigurationError):
            load(file)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as log:
        log.writestr("samples/1_epoch_1.json", b"0" * (65 << 20))
    with pytest.raises(ConfigurationError, match="64 MiB"):
        load(file)


def test_a_run_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(UsageError, match="no run"):
        load_traces("missing", {}, tmp_path, None)
