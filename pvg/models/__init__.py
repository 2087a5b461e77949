"""Opening language models from where an experiment says they are. Importing this package loads no torch.

    with open_model(ModelSection(source="embedded:modchain-prover"), pick_device("auto")) as model:
        ids = model.tokenizer.encode("H7+5+8+3+6?")

Invariants: a model belongs to whoever opened it and lives until closed; nothing here keeps a reference to one. Nothing
is unpickled, and no code that comes with a model is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pvg.errors import ConfigurationError, MissingRequirementError

if TYPE_CHECKING:
    import torch

    from pvg.config.sections import ModelSection
    from pvg.models.language_model import LanguageModel

__all__ = ["open_model", "pick_device"]


def open_model(section: ModelSection, device: torch.device) -> LanguageModel:
    """Load the model of `section` onto `device`, in eval mode; the caller owns it and closes it.

    Raises UsageError for a source that names nothing, ConfigurationError for a directory that cannot be used, and
    MissingRequirementError for a package that is not installed.
    """
    from pvg.models.sources import open_source

    return open_source(section, device)


def pick_device(name: str) -> torch.device:
    """ "auto" is the first CUDA device where there is one, else the CPU; any other name is torch's own.

    Raises ConfigurationError for a name torch does not know, MissingRequirementError for a device that is not there.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(
            f"models.device = {name!r} is no device that torch knows.", 'Use "auto", "cpu" or "cuda".'
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MissingRequirementError(
            f"models.device = {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices.",
            'Use "cpu", or install a CUDA build of torch.',
        )
    return device
