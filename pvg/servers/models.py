"""The folder that vLLM loads a model from: the one where it lies already, or one made once below `weights.root`.

    folder = model_folder(experiment, "prover")

vLLM reads Hugging Face directories. A model out of a GGUF file is written as one, and a verifier with a `scalar` head
as one that ends in a score instead of a vocabulary. Such folders are named after the weights in them, appear whole or
not at all, and are used again by the next server.

    python -m pvg.servers.models KIND SOURCE DTYPE ROOT      what `model_folder` runs where that needs torch

Invariant: this process loads no torch, and holds no weights beside those of the server it starts.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import orjson

import pvg
from pvg import errors, hub
from pvg.config.experiment import Experiment, nearest
from pvg.config.sections import ModelSection
from pvg.errors import ConfigurationError, MissingRequirementError, PvgError, UsageError
from pvg.inputs import expanded
from pvg.store.atomic import make_directory, sync_directory, temporary_beside

if TYPE_CHECKING:
    from pvg.models.language_model import LanguageModel

Purpose = Literal["prover", "verifier", "reference"]  # what a server is for
Kind = Literal["generator", "classifier"]

EMBEDDED = Path(pvg.__file__).parent / "models" / "embedded"  # as pvg.models.sources has it, which imports torch
FOLDER = "models"  # below weights.root
DIGITS = 16  # of a model's fingerprint in the name of its folder


def section_for(experiment: Experiment, purpose: Purpose) -> ModelSection:
    """The model that a server of that purpose serves."""
    return experiment.models.prover if purpose == "prover" else experiment.models.verifier


def kind_for(experiment: Experiment, purpose: Purpose) -> Kind:
    """What the model is served as. Raises ConfigurationError for a head that no server computes."""
    if purpose == "prover":
        return "generator"
    head = experiment.verifier.head
    if purpose == "reference" and head != "implicit":
        raise ConfigurationError(
            f"A reference is what the implicit head compares with, and verifier.head is {head!r}.",
            "Start the verifier alone: pvg serve EXPERIMENT --for verifier",
        )
    if head not in ("scalar", "implicit"):
        raise ConfigurationError(
            f"verifier.head = {head!r} is computed by torch only: vLLM does not serve it.",
            "Set verifier.engine to 'torch', or verifier.head to 'implicit' or 'scalar'.",
        )
    return "classifier" if head == "scalar" else "generator"


def model_folder(experiment: Experiment, purpose: Purpose) -> Path:
    """The absolute path of the folder that vLLM is to load. Raises a PvgError for a model that is not there."""
    section, kind = section_for(experiment, purpose), kind_for(experiment, purpose)
    source, separator, name = section.source.partition(":")
    if separator and source == "gguf":
        return _made(kind, section, experiment.weights.root)
    if separator and source == "embedded":
        folder = _embedded(name)
    elif hub.is_hub_id(section.source):
        folder = _directory(str(hub.fetch(section.source, "model")))
    else:
        folder = _directory(section.source)
    return folder if kind == "generator" else _made(kind, section, experiment.weights.root)


def _embedded(name: str) -> Path:
    known = sorted(path.parent.name for path in EMBEDDED.glob("*/model.safetensors"))
    if name not in known:
        hint = nearest(name, known)
        raise UsageError(
            f"No embedded model is called {name!r}." + (f" Did you mean {hint!r}?" if hint else ""),
            f"Known: {', '.join(known) or 'none'}.",
        )
    return EMBEDDED / name


def _directory(source: str) -> Path:
    """A Hugging Face directory with safetensors: vLLM would open pickles too."""
    folder = expanded(source, "models").absolute()
    if not folder.is_dir():
        raise MissingRequirementError(
            f"There is no model directory {source!r}.",
            'A source is "embedded:NAME", "hf:OWNER/NAME", "gguf:PACKAGE", or the path of a Hugging Face directory.',
        )
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigurationError(
            f"{source} is no model that can be served: it needs config.json and *.safetensors.",
            "Save the model with safe_serialization=True.",
        )
    return folder


# --- folders that are made ------------------------------------------------------------------------------------------


def _made(kind: Kind, section: ModelSection, root: Path) -> Path:
    """Have a process of its own, which imports torch, make the folder."""
    command = [sys.executable, "-P", "-m", __name__, kind, section.source, section.dtype, str(root.absolute())]
    # Its words end up on our stderr; what it found, or what was wrong, is one JSON line on its stdout.
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    found = orjson.loads(done.stdout or b"{}")
    if error := found.get("error"):
        raise getattr(errors, error["type"])(error["message"], error["remedy"])
    if done.returncode or "folder" not in found:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
    return Path(found["folder"])


def make_folder(kind: Kind, section: ModelSection, root: Path) -> Path:
    """Open the model and write it below `root`, unless it lies there already. Imports torch."""
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
    """Write `language_model` into the new folder `directory` as vLLM's pooling runner wants it: a Hugging Face
    `*ForSequenceClassification` of one label, whose score.weight [1, D] is zero, without the vocabulary's head.

    The parent of `directory` must exist; the folder appears whole or not at all. Raises ConfigurationError for an
    architecture that is no `*ForCausalLM`.
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
    config.pad_token_id = language_model.tokenizer.pad_id  # transformers wants it of a classifier

    def write(folder: Path) -> None:
        config.save_pretrained(folder)
        language_model.tokenizer.save(folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    _whole(directory, write)


def _whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a temporary folder, and give it the name `folder` when it lies safely on the disk."""
    temporary = temporary_beside(folder)
    temporary.mkdir()
    try:
        write(temporary)
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(temporary)  # another server was faster, with the same weights
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(folder.parent)


def _main(kind: Kind, source: str, dtype: Literal["float32", "bfloat16"], root: str) -> int:
    try:
        folder = make_folder(kind, ModelSection(source=source, dtype=dtype), Path(root))
    except PvgError as error:
        name = next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
        document: object = {"error": {"type": name, "message": error.message, "remedy": error.remedy}}
        sys.stdout.buffer.write(orjson.dumps(document))
        return error.exit_code
    sys.stdout.buffer.write(orjson.dumps({"folder": str(folder)}))
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))  # type: ignore[arg-type]
