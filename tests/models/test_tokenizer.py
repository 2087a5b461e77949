import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rules
from tokenizers import decoders, models, pre_tokenizers
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
    words = {token: number for number, token in enumerate(["<|e|>", "<|s|>", "<unk>", *map(chr, range(32, 127))])}
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


def test_text_that_spells_special_tokens_loses_them():
    assert talking(IM).without_controls("a<|e|>b<|<|s|>e|>c") == "abc"
