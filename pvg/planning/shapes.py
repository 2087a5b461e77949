"""`ModelShape`: the sizes of a model, read from its config.json, without its weights and without torch.

    shape = read_shape("hf:Qwen/Qwen2.5-1.5B-Instruct", say)
    shape.parameters, shape.kv_bytes(2)

The number of parameters is that of the weights file if there is one (its header lists all tensors). Otherwise it
follows from the sizes, for the families in FAMILIES. Only for other families torch is loaded, which makes the model
without memory for its weights.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import orjson

import pvg
from pvg.config.base import is_hub_id, is_run_id, parse_run_id
from pvg.errors import ConfigurationError, MissingRequirementError, user_paths
from pvg.hub import Say, fetch_config
from pvg.inputs import expanded
from pvg.store.run_players import find_player

EMBEDDED = Path(pvg.__file__).parent / "models" / "embedded"
# Decoders with three MLP matrices and two norms per layer: (biases of queries, keys and values; norms of queries and
# keys).
FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
LONGEST_HEADER = 100 << 20  # bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`width`: of the hidden states. `queries` and `keys`: columns of the projections of queries, and of keys or
    values. `counted`: how `parameters` were found."""

    name: str
    layers: int
    width: int
    inner: int
    queries: int
    keys: int
    vocabulary: int
    parameters: int
    counted: str

    def kv_bytes(self, number_bytes: int) -> int:
        """Bytes of the KV cache per token."""
        return 2 * self.layers * self.keys * number_bytes

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of low-rank adapters on all linear layers but the head."""
        attention = 2 * (self.width + self.queries) + 2 * (self.width + self.keys)
        return self.layers * rank * (attention + 3 * (self.width + self.inner))


def read_shape(source: str, say: Say) -> ModelShape:
    """The shape of a model source (pvg.config.training.ModelSection). Downloads at most a config.json, after a line to
    `say`. Raises MissingRequirementError or ConfigurationError if there is none, or if it lacks a size."""
    kind, separator, rest = source.partition(":")
    if is_run_id(source):
        saved = find_player(parse_run_id(source))
        return replace(read_shape(saved.section.source, say), name=saved.name)
    if is_hub_id(source):
        return _of_folder(fetch_config(source, say).parent, source)
    if separator and kind == "embedded":
        return _of_folder(EMBEDDED / rest, source)
    if separator and kind == "gguf":
        return _of_gguf(rest)
    return _of_folder(expanded(source, "models"), source)


def _of_folder(folder: Path, source: str) -> ModelShape:
    path = folder / "config.json"
    if not path.is_file():
        raise MissingRequirementError(
            f"There is no config.json of the model {source!r}.",
            "Set models.prover.source and models.verifier.source to models or folders that have one.",
        )
    with user_paths():
        text = path.read_bytes()
    try:
        config = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} is not a table of settings.")
    return shape_of(config, path)


def shape_of(config: Mapping[str, Any], path: Path) -> ModelShape:
    """The shape that a config.json at `path` describes."""

    def size(*names: str) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise ConfigurationError(f"{path} has no {names[0]}, which the planner needs.", "Name another model.")

    width, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    layers = size("num_hidden_layers", "n_layer")
    head = size("head_dim") if isinstance(config.get("head_dim"), int) else width // heads
    key_heads = size("num_key_value_heads") if config.get("num_key_value_heads") else heads
    inner = size("intermediate_size", "n_inner") if config.get("intermediate_size") else 4 * width
    tied = bool(config.get("tie_word_embeddings", config.get("model_type") not in FAMILIES))
    queries, keys, vocabulary = heads * head, key_heads * head, size("vocab_size")
    family = str(config.get("model_type"))
    found = _in_weights(path.parent)
    if found is not None:
        parameters, counted = found, "its weights file"
    elif family in FAMILIES:
        biases, norms = FAMILIES[family]
        layer = 2 * width * (queries + keys) + 3 * width * inner + 2 * width
        layer += biases * (queries + 2 * keys) + norms * 2 * head
        parameters = layers * layer + (1 if tied else 2) * vocabulary * width + width
        counted = "its sizes"
    else:
        parameters, counted = _by_torch(path.parent), "transformers"
    return ModelShape(path.parent.name, layers, width, inner, queries, keys, vocabulary, parameters, counted)


def _in_weights(folder: Path) -> int | None:
    """Parameters in the headers of the safetensors files; None without files."""
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if not files or (
        index.is_file() and len(files) < len(set(orjson.loads(index.read_bytes())["weight_map"].values()))
    ):
        return None
    return sum(_in_file(file) for file in files)


def _in_file(file: Path) -> int:
    """A safetensors file begins with the length of its header (8 bytes, little-endian), then the header as JSON."""
    with open(file, "rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LONGEST_HEADER
        header = opened.read(length) if length < LONGEST_HEADER else b""
    try:
        tensors = orjson.loads(header)
        return sum(prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ConfigurationError(f"{file} is not a whole safetensors file.", "Download or save it again.") from None


def _by_torch(folder: Path) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder} cannot be opened: {str(error).splitlines()[0]}") from error
    return sum(parameter.numel() for parameter in module.parameters())


def _of_gguf(package: str) -> ModelShape:
    """The shape in the metadata of a GGUF file. Its reader loads torch, as opening the model does."""
    from pvg.models.sources import gguf_file

    file = gguf_file(package.replace("-", "_"))
    from gguf import GGUFReader

    reader = GGUFReader(file)
    family = str(reader.fields["general.architecture"].contents())

    def field(name: str, otherwise: int | None = None) -> int:
        found = reader.fields.get(f"{family}.{name}")
        if found is None and otherwise is not None:
            return otherwise
        if found is None:
            raise ConfigurationError(f"{file} has no {family}.{name}, which the planner needs.", "Name another model.")
        return int(found.contents())

    width, heads = field("embedding_length"), field("attention.head_count")
    head = field("attention.key_length", width // heads)
    tensors = {tensor.name: [int(side) for side in tensor.shape] for tensor in reader.tensors}
    return ModelShape(
        file.stem,
        field("block_count"),
        width,
        field("feed_forward_length"),
        heads * head,
        field("attention.head_count_kv", heads) * head,
        prod(tensors["token_embd.weight"]) // width,
        sum(prod(shape) for shape in tensors.values()),
        "its GGUF file",
    )
