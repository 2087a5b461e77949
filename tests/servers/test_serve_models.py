"""The folders that vLLM loads models from."""

from __future__ import annotations

import pickle
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.config.training import ModelSection
from pvg.errors import ConfigurationError, MissingRequirementError, UsageError
from pvg.models import open_model
from pvg.models.heads import ScalarHead
from pvg.servers.command import export_classifier, make_folder, model_folder

VERIFIER = "embedded:modchain-verifier-small"


def experiment_of(root: Path, source: str, head: str = "implicit") -> Experiment:
    return build_experiment(
        {
            "models": {"prover": {"source": source}, "verifier": {"source": source}},
            "verifier": {"head": head},
            "weights": {"root": str(root)},
        }
    )


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean 'modchain-prover'"):
        model_folder(experiment_of(tmp_path, "embedded:modchain-provr"), "prover")
    with pytest.raises(ConfigurationError, match="no model directory"):
        model_folder(experiment_of(tmp_path, str(tmp_path / "nowhere")), "prover")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigurationError, match=r"needs config.json and \*.safetensors"):
        model_folder(experiment_of(tmp_path, str(tmp_path)), "prover")


def test_what_the_other_process_finds_wrong_is_the_same_error_here(tmp_path: Path) -> None:
    with pytest.raises(MissingRequirementError, match="'no_such_package', which contains the model") as caught:
        make_folder("generator", ModelSection(source="gguf:no-such-package"), tmp_path)
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (type(sent), sent.message, sent.remedy) == (type(caught.value), caught.value.message, caught.value.remedy)


def test_a_classifier_is_made_once_and_used_again(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, VERIFIER, head="scalar")
    folder = make_folder("classifier", experiment.models.verifier, tmp_path)
    assert folder.parent == tmp_path / "models"
    assert folder.name.startswith("modchain-verifier-small-classifier-")
    made = (folder / "model.safetensors").stat().st_ino
    assert make_folder("classifier", experiment.models.verifier, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_ino == made
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no temporary is left


def test_a_classifier_scores_as_the_scalar_head_does(tmp_path: Path) -> None:
    section = ModelSection(source=VERIFIER)
    with open_model(section, torch.device("cpu")) as model:
        export_classifier(model, tmp_path / "classifier")
        tensors = load_file(tmp_path / "classifier" / "model.safetensors")
        config = orjson.loads((tmp_path / "classifier" / "config.json").read_bytes())
        assert config["architectures"] == ["LlamaForSequenceClassification"]
        assert config["tie_word_embeddings"] is False
        assert tensors["score.weight"].shape == (1, config["hidden_size"])
        assert not tensors["score.weight"].any()
        assert not any(name.startswith("lm_head") for name in tensors)
        head = ScalarHead(model)
        with torch.no_grad():
            head.weight_D.normal_(generator=torch.Generator().manual_seed(1))
            classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
            assert classifier.num_labels == 1
            classifier.score.weight.copy_(head.weight_D[None])
            ids_BL = torch.randint(2, 19, (3, 9), generator=torch.Generator().manual_seed(2))
            lengths_B = torch.full((3,), 9)
            ours_B = head(ids_BL, lengths_B, torch.full((3,), 4))
            theirs_B = classifier(input_ids=ids_BL).logits[:, 0]
        torch.testing.assert_close(theirs_B, ours_B, atol=1e-4, rtol=1e-4)


def test_a_classifier_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with open_model(ModelSection(source=VERIFIER), torch.device("cpu")) as model, pytest.raises(OSError, match="room"):
        export_classifier(model, tmp_path / "classifier")
    assert not list(tmp_path.iterdir())
