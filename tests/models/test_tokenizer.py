import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rules
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pvg.errors import ConfigurationError, UsageError
from pvg.models.characters import CHARACTERS, modchain_tokenizer
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


def test_special_tokens_are_neither_added_nor_decoded(characters):
    ids = characters.encode("7+5?")
    assert characters.eos_id not in ids
    assert characters.pad_id not in ids
    assert characters.decode(np.concatenate([ids, [characters.eos_id, characters.pad_id]]).astype(np.int32)) == "7+5?"


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


def test_a_tokenizer_without_an_end_token_is_refused():
    fast = modchain_tokenizer()
    fast.eos_token = None
    with pytest.raises(ConfigurationError, match="end-of-sequence"):
        Tokenizer(fast, "headless")


def test_padding_falls_back_to_the_end_token():
    fast = modchain_tokenizer()
    fast.pad_token = None
    assert Tokenizer(fast).pad_id == Tokenizer(fast).eos_id == 1
