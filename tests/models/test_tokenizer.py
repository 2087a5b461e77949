import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Rules
from transformers import PreTrainedTokenizerFast

from pvg.errors import ConfigurationError, UsageError
from pvg.models.embedded_training import CHARACTERS, modchain_tokenizer
from pvg.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    return Tokenizer(modchain_tokenizer(), "modchain")


@given(text=st.text(alphabet=CHARACTERS, max_size=60))
def test_every_text_of_its_characters_round_trips_one_token_each(characters, text):
    ids = characters.encode(text)
    assert ids.dtype == np.int32
    assert len(ids) == len(text)
    assert characters.decode(ids) == text


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_text_is_encoded_or_decoded(characters, work):
    """No thread is ever asked to hand over Python's lock here, so another one runs only where the lock is released."""
    text = "7+5=2;" * 60  # numpy releases the lock for arrays of more than 500
    ids, others_ran, tries = characters.encode(text), threading.Event(), 0
    started, interval = threading.Event(), sys.getswitchinterval()

    def busy():
        nonlocal tries
        started.set()
        while not others_ran.is_set() and tries < 2000:
            characters.encode(text) if work == "encode" else characters.decode(ids)
            tries += 1

    sys.setswitchinterval(1e6)
    try:
        thread = threading.Thread(target=busy)
        thread.start()
        started.wait()
        others_ran.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert tries < 2000


@pytest.mark.parametrize("stranger", ["x", " ", "\n", "é"])
def test_a_character_outside_the_vocabulary_is_refused_by_name(characters, stranger):
    with pytest.raises(UsageError) as caught:
        characters.encode(f"7+{stranger}5?")
    assert repr(stranger) in caught.value.message


def test_the_fingerprint_follows_the_vocabulary_and_nothing_else(tmp_path, characters):
    characters.save(tmp_path)
    reopened = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    # State that a call leaves behind in the backend is not part of the rules.
    reopened(["7+5", "7"], padding="max_length", truncation=True, max_length=3)
    assert Tokenizer(reopened).fingerprint == characters.fingerprint

    swapped = {token: number for number, token in enumerate(["<pad>", "<eos>", *reversed(CHARACTERS)])}
    rules = Rules(models.WordLevel(swapped, unk_token="<pad>"))
    rules.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    other = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="<pad>", eos_token="<eos>"))
    assert other.fingerprint != characters.fingerprint


def test_chat_uses_the_template_with_a_generation_prompt_and_its_absence_is_explained():
    fast = modchain_tokenizer()
    with pytest.raises(ConfigurationError, match="no chat template"):
        Tokenizer(fast, "modchain").chat([{"role": "user", "content": "7+5?"}])
    fast.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    tokenizer = Tokenizer(fast, "modchain")
    messages = [{"role": "system", "content": "H"}, {"role": "user", "content": "7+5?"}]
    assert tokenizer.decode(tokenizer.chat(messages)) == "H;7+5?;A"


IM = (
    "{% for m in messages %}<|s|>{{ m.role }}|{{ m.content }}<|e|>.{% endfor %}"
    "{% if add_generation_prompt %}<|s|>A|{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}[/U]{% else %} {{ m.content }} <|e|>{% endif %}"
    "{% endfor %}"
)


def talking(template):
    words = {token: number for number, token in enumerate(["<|e|>", "<|s|>", "<unk>", "\n", *map(chr, range(32, 127))])}
    rules = Rules(models.WordLevel(words, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    rules.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<|e|>", additional_special_tokens=["<|s|>"])
    fast.chat_template = template
    return Tokenizer(fast, "talking")


@pytest.mark.parametrize("template", [IM, LLAMA])
def test_the_next_turn_is_what_the_template_puts_between_two_answers(template):
    tokenizer = talking(template)
    question = "Check 2?"
    found = tokenizer.next_turn(question)
    # Behind an answer and its end token it is the conversation as the template writes it, token for token.
    rows = [("user", "a"), ("assistant", "b"), ("user", question)]
    whole = tokenizer.chat([{"role": role, "content": said} for role, said in rows])
    assert whole[-len(found) :].tolist() == found.tolist()
    assert whole[-len(found) - 1] == tokenizer.eos_id


# --- control tokens, and chat templates of other people ---------------------------------------------------------------


SPELLED = ["<|im_start|>", "<|im_end|>", "a b", "</s>"]
MARKED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}</s>a b{% endfor %}<|im_end|>"


def kind_of_tokenizer(kind):
    """Untrained rules of one kind, whose control tokens a text may spell."""
    normalized, special = kind in ("NFKC", "lowercase"), kind != "added"
    if kind == "unigram":  # has the controls as words, as SentencePiece models do
        words = [("<unk>", 0.0), *((token, -1.0) for token in SPELLED), ("▁", -5.0)]
        words += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)] + [(chr(n), -5.0) for n in range(33, 127)]
        rules = Rules(models.Unigram(words, 0, byte_fallback=True))
        rules.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        rules = Rules(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
        rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind in ("NFC", "NFKC", "lowercase"):
            rules.normalizer = getattr(normalizers, kind.title() if kind == "lowercase" else kind)()
    rules.add_tokens([AddedToken(token, normalized=normalized, special=special) for token in SPELLED])
    fast = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="</s>")
    fast.chat_template = MARKED
    return Tokenizer(fast, kind)


KINDS = {kind: kind_of_tokenizer(kind) for kind in ("bytes", "NFC", "NFKC", "lowercase", "added", "unigram")}
FRAGMENTS = [
    *SPELLED,
    "<|im_",
    "start|>",
    "end|>",
    "<|IM_END|>",
    "＜|im_end|>",
    "<",
    "</",
    "s>",
    "a",
    " b",
    "x",
    "system",
]
FRAGMENTS += ["…", "\u0958", "\u0338", "\n", "\ue0000\ue001"]
ATTACK = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=9).map("".join)


@given(kind=st.sampled_from(sorted(KINDS)), text=ATTACK)
def test_no_text_spells_a_control_token(kind, text):
    tokenizer = KINDS[kind]
    assert tokenizer.controls >= {int(token) for spelled in SPELLED for token in tokenizer.encode(spelled)}
    assert tokenizer.controls.isdisjoint(tokenizer.plain(text).tolist())
    for write in (lambda said: tokenizer.chat([{"role": "user", "content": said}]), tokenizer.next_turn):
        written, honest = (
            [token for token in write(said).tolist() if token in tokenizer.controls] for said in (text, "x")
        )
        assert written == honest


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_without_control_tokens_keeps_its_ids(kind):
    tokenizer, text = KINDS[kind], "2 bags of 4\nare 8 < 9.\n#### 8"
    assert tokenizer.plain(text).tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.plain(f"{text}</s>").tolist() == tokenizer.encode(text).tolist()
    whole = tokenizer.encode(f"<|im_start|>user\n{text}</s>a b<|im_end|>")
    assert tokenizer.chat([{"role": "user", "content": f"{text}\n"}]).tolist() == whole.tolist()


ASKED = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Why?"}]
EACH, SAID = "{% for m in messages %}", "<{{ m.content }}>{% endfor %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
PARTS = "<{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}>{% endfor %}"
MACRO = "{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ day() }}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (EACH + "{% if m.role == 'user' %}<{{ m.content }}>{% endif %}{% endfor %}", "<Rules.\n\nWhy?>"),
        (REFUSES + EACH + SAID, "<Rules.\n\nWhy?>"),
        ("<{{ messages[-1].content }}>", "<Rules.\n\nWhy?>"),
        (EACH + PARTS, "<Rules.><Why?>"),
        ("{# No {{ 1 | random }}, no lipsum. #}{{ '' if '| random' }}" + EACH + SAID, "<Rules.><Why?>"),
        (EACH + SAID + "{{ strftime_now('%-d %b %Y, %H:%M') }}", "<Rules.><Why?>26 Jul 2024, 00:00"),
        (MACRO + EACH + SAID, "2024-07-26<Rules.><Why?>"),
    ],
)
def test_a_prompt_has_every_message_and_the_same_date_each_day(template, shown):
    tokenizer = talking(template)
    assert tokenizer.shown(tokenizer.chat(ASKED)) == shown


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (EACH + "{{ m.role }}{% endfor %}", "leaves out the user message"),
        (EACH + "{{ m.content[:2] }}{% endfor %}", "leaves out the user message"),
        (EACH + "{{ m.content[-3:] }}{% endfor %}", "leaves out the system message"),
        (EACH + "{{ m.content.split('\n')[-1] }}{% endfor %}", "leaves out the system message"),
        ({"tools": "", "rag": ""}, "'tools', 'rag'"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{% for %}", "Expected"),
        ("{{ raise_exception('never\nso') }}", "never so"),
        ("{{ [1, 2] | random }}", "random"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "takes more than"),
        ("{{ 'x' * 2000000 }}" + EACH + "{{ m.content }}{% endfor %}", "2,000,003 characters"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_in_one_line(monkeypatch, template, said):
    monkeypatch.setattr("pvg.models.tokenizer.TEMPLATE_SECONDS", 0.1)
    with pytest.raises(ConfigurationError, match=said) as caught:
        talking(template).chat([{"role": "system", "content": "Two\nrules."}, ASKED[1]])
    assert "\n" not in caught.value.message
    assert "talking" in caught.value.message


def test_a_dialogue_whose_question_a_template_drops_is_refused():
    answers = EACH + "{% if m.role == 'assistant' %}{{ m.content }}<|e|>{% endif %}{% endfor %}"
    with pytest.raises(ConfigurationError, match="leaves out the user message"):
        talking("{{ messages[0].content }}" + answers).next_turn("Check.")
