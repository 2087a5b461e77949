"""Opening language models from the source that an experiment names. Importing this package does not load torch.

Invariants: the caller of `open_model` owns the model until closing it; this package keeps no reference. It unpickles
nothing and runs no code that comes with a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pvg.errors import ConfigurationError, MissingRequirementError

if TYPE_CHECKING:
    import torch

    from pvg.config.training import DataType, ModelSection
    from pvg.models.language_model import LanguageModel

__all__ = ["open_model", "pick_device"]


def open_model(section: ModelSection, device: torch.device, dtype: DataType = "float32") -> LanguageModel:
    """Load the model of `section` onto `device` in eval mode, with weights of `dtype`. The caller owns and closes it.

    Raises UsageError for an unknown source, ConfigurationError for an unusable directory, and MissingRequirementError
    for a package that is not installed.
    """
    from pvg.models.sources import open_source

    return open_source(section, device, dtype)


def pick_device(name: str) -> torch.device:
    """The device of that name. "auto" is the first CUDA device if there is one, otherwise the CPU. A CUDA
    device always has its number, so that it equals the device of its tensors.

    Raises ConfigurationError for a name unknown to torch, MissingRequirementError for a device that does not exist.
    """
    import torch

    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(
            f"models.device = {name!r} is not a torch device.", 'Use "auto", "cpu" or "cuda".'
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MissingRequirementError(
            f"models.device = {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices.",
            'Use "cpu", or install a CUDA build of torch.',
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
