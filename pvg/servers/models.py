"""The folder from which vLLM loads a model: an existing one, or one created once under `weights.root`.

    folder = model_folder(experiment, "prover")

vLLM reads Hugging Face directories. A GGUF model and a player of another run are converted to one. A verifier with a
`scalar` head is written with a score instead of the vocabulary head. Created folders are named after the fingerprint of
their weights, appear complete or not at all, and are reused by later servers.

Invariant: this process does not load torch, and holds no weights in addition to those of the server it starts.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pvg import hub
from pvg.config.experiment import Experiment
from pvg.config.hub_ids import is_hub_id
from pvg.config.load import embedded_model
from pvg.config.models import ModelSection
from pvg.config.run_ids import is_run_id
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.inputs import expanded
from pvg.store.atomic import make_directory, share_weights, sync_directory, temporary_beside

if TYPE_CHECKING:
    from pvg.models.language_model import LanguageModel

Purpose = Literal["prover", "verifier", "reference"]  # what a server serves
Kind = Literal["generator", "classifier"]

FOLDER = "models"  # under weights.root
DIGITS = 16  # hex digits of the model's fingerprint in its folder name


def section_for(experiment: Experiment, purpose: Purpose) -> ModelSection:
    """The configuration of the model that a server of that purpose serves."""
    return experiment.models.prover if purpose == "prover" else experiment.models.verifier


def kind_for(experiment: Experiment, purpose: Purpose) -> Kind:
    """The type of model to serve. Raises ConfigurationError for a head that vLLM cannot compute."""
    if purpose == "prover":
        return "generator"
    head = experiment.verifier.head.kind
    if purpose == "reference" and head != "implicit":
        raise ConfigurationError(
            f"Only the implicit head has a reference, but verifier.head is {head!r}.",
            "Start the verifier alone: pvg serve EXPERIMENT --for verifier",
        )
    if head not in ("scalar", "implicit"):
        raise ConfigurationError(
            f"vLLM cannot serve verifier.head = {head!r}; only torch computes it.",
            "Set verifier.engine to 'torch', or verifier.head to 'implicit' or 'scalar'.",
        )
    return "classifier" if head == "scalar" else "generator"


def model_folder(experiment: Experiment, purpose: Purpose) -> Path:
    """Absolute path of the folder that vLLM should load. Raises a PvgError for a model that does not exist."""
    section, kind = section_for(experiment, purpose), kind_for(experiment, purpose)
    source, separator, name = section.source.partition(":")
    if (separator and source == "gguf") or is_run_id(section.source):
        return _made(kind, section, experiment.weights.root)
    if separator and source == "embedded":
        folder = embedded_model(name)
    elif is_hub_id(section.source):
        folder = _directory(str(hub.fetch(section.source, "model")))
    else:
        folder = _directory(section.source)
    return folder if kind == "generator" else _made(kind, section, experiment.weights.root)


def _directory(source: str) -> Path:
    """A Hugging Face directory with safetensors. (Without this check vLLM would also open pickles.)"""
    folder = expanded(source, "models").absolute()
    if not folder.is_dir():
        raise MissingRequirementError(
            f"There is no model directory {source!r}.",
            'A source is "embedded:NAME", "hf:OWNER/NAME", "run:NAME", "gguf:PACKAGE", or the path of a Hugging Face '
            "directory.",
        )
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigurationError(
            f"{source} cannot be served: it needs config.json and *.safetensors.",
            "Save the model with safe_serialization=True.",
        )
    return folder


# --- created folders -------------------------------------------------------------------------------------------------


def _made(kind: Kind, section: ModelSection, root: Path) -> Path:
    """Create the folder in a separate process, which imports torch and raises its errors here."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(make_folder, kind, section, root.absolute()).result()


def make_folder(kind: Kind, section: ModelSection, root: Path) -> Path:
    """Open the model and write it under `root` unless it exists already. Imports torch."""
    import torch

    from pvg.models import open_model

    with open_model(section, torch.device("cpu")) as model:
        tail = "-classifier" if kind == "classifier" else ""
        folder = root / FOLDER / f"{model.name}{tail}-{model.fingerprint()[:DIGITS]}"
        if not folder.is_dir():
            make_directory(folder.parent)
            if kind == "classifier":
                export_classifier(model, folder)
            else:
                _whole(folder, model.save)
    return folder


def export_classifier(language_model: LanguageModel, directory: Path) -> None:
    """Write `language_model` to the new folder `directory` for vLLM's pooling runner: a Hugging Face
    `*ForSequenceClassification` with one label and a zero score.weight [1, D], without the vocabulary head.

    The parent of `directory` must exist. The folder appears complete or not at all. Raises ConfigurationError for an
    architecture other than `*ForCausalLM`.
    """
    import torch
    from safetensors.torch import save_file

    module = language_model.module
    architecture = type(module).__name__
    if not architecture.endswith("ForCausalLM"):
        raise ConfigurationError(
            f"{language_model.name} is a {architecture}, which has no classifier.", "Set verifier.head to 'implicit'."
        )
    output = module.get_output_embeddings()
    head = next((f"{name}." for name, part in module.named_modules() if part is output), "lm_head.")
    tensors = {
        name: weight.contiguous().cpu()
        for name, weight in language_model.weights().items()
        if not name.startswith(head)
    }
    size = module.get_input_embeddings().weight.shape[1]
    tensors["score.weight"] = torch.zeros(1, size, dtype=language_model.dtype)
    config = copy.deepcopy(module.config)
    config.architectures = [architecture.removesuffix("ForCausalLM") + "ForSequenceClassification"]
    config.num_labels = 1
    config.tie_word_embeddings = False
    config.pad_token_id = language_model.tokenizer.pad_id  # transformers requires it for a classifier

    def write(folder: Path) -> None:
        config.save_pretrained(folder)
        language_model.tokenizer.save(folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    _whole(directory, write)


def _whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, then rename it to `folder` once it is safely on disk."""
    temporary = temporary_beside(folder)
    temporary.mkdir()
    try:
        write(temporary)
        share_weights(temporary)
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(temporary)  # another server has just created it with the same weights
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(folder.parent)
