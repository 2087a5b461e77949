"""Which experiments get workers, and how many."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pvg.config.experiment import Experiment
from pvg.config.load import assign, build_experiment, read_override
from pvg.config.operation import AutoCluster, LocalCluster, NoCluster, RayCluster
from pvg.errors import ConfigurationError, MissingRequirementError, UsageError
from pvg.workers import choice, process
from pvg.workers.choice import cluster_settings, open_supply, with_workers
from pvg.workers.frames import Frame


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(choice, "usable_cores", lambda: 4)
    monkeypatch.setattr("pvg.config.training.usable_gpus", lambda: 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_the_embedded_game_gets_a_worker_per_core(monkeypatch):
    assert with_workers(Experiment()).cluster == LocalCluster(workers=4)
    monkeypatch.setattr(choice, "usable_cores", lambda: 64)
    assert with_workers(Experiment()).cluster == LocalCluster(workers=choice.MOST_WORKERS)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the share of a process of a study
    assert with_workers(Experiment()).cluster == LocalCluster(workers=3)
    monkeypatch.setattr(choice, "usable_cores", lambda: 1)
    assert with_workers(Experiment()).cluster == NoCluster()


def test_workers_compute_on_any_gpu():
    for kind in ("local", "ray"):
        cluster = {"cluster": {"kind": kind, "workers": 2}}
        assert build_experiment({"models": {"device": "cuda"}, **cluster}).models.device == "cuda"
        with pytest.raises(ConfigurationError, match=r"cannot use models\.device = 'cuda:1'; set it to 'cuda'"):
            build_experiment({"models": {"device": "cuda:1"}, **cluster})
    servers = {"cluster": {"kind": "ray", "gpus_per_worker": 1}, "rollout": {"engine": "vllm"}}
    with pytest.raises(ConfigurationError, match="Ray reserves the trainer's GPU"):
        build_experiment({"models": {"device": "cuda:1"}, **servers})


@pytest.mark.parametrize(
    "settings",
    [
        {"models": {"prover": {"source": "hf:some/model"}}},
        {"models": {"device": "cuda"}},
        {"cluster": {"kind": "none"}},
    ],
)
def test_others_get_none(settings):
    assert with_workers(build_experiment(settings)).cluster == NoCluster()


def test_a_machine_with_a_gpu_computes_there(monkeypatch):
    monkeypatch.setattr("pvg.config.training.usable_gpus", lambda: 1)
    assert with_workers(Experiment()).cluster == NoCluster()
    assert with_workers(build_experiment({"models": {"device": "cpu"}})).cluster == LocalCluster(workers=4)
    monkeypatch.setattr(choice, "usable_gpus", lambda: 3)
    assert with_workers(build_experiment({"cluster": "local"})).cluster == LocalCluster(workers=3)  # one for each GPU
    assert with_workers(build_experiment({"cluster": "ray"})).cluster == RayCluster(workers=2)  # and one the trainer's
    with pytest.raises(MissingRequirementError, match="one for the trainer, but this machine has 3"):
        open_supply(build_experiment({"cluster": {"kind": "ray", "workers": 3}}))


def test_a_resumed_run_keeps_its_workers():
    resumed = build_experiment({"cluster": {"kind": "local", "workers": 3}})
    assert with_workers(Experiment(), resumed) == resumed
    assert with_workers(build_experiment({"cluster": "local"}), resumed) == resumed
    other = build_experiment({"cluster": {"kind": "local", "workers": 2}})
    assert with_workers(other, resumed) == other
    divided = {"cluster": {"kind": "local", "workers": 3, "trainers": 1}, "rollout": {"prefetch": "fresh"}}
    resumed = build_experiment(divided)
    assert with_workers(build_experiment({**divided, "cluster": "local"}), resumed) == resumed
    assert with_workers(build_experiment({**divided, "cluster": "ray"}), resumed).cluster == RayCluster(
        workers=3, trainers=1
    )
    assert with_workers(Experiment(), Experiment()).cluster == AutoCluster()
    assert with_workers(build_experiment({"cluster": "ray"})).cluster == RayCluster(workers=4)


def test_a_run_resumes_on_the_kind_of_cluster_that_is_given():
    local = build_experiment({"cluster": "local"})
    assert with_workers(local, build_experiment({"cluster": "none"})).cluster == LocalCluster(workers=4)
    ray = {"kind": "ray", "workers": 3, "address": "10.0.0.1:6379"}
    assert with_workers(local, build_experiment({"cluster": ray})).cluster == LocalCluster(workers=3)


@pytest.mark.parametrize(
    ("chosen", "cluster"),
    [
        (None, LocalCluster(workers=3, trainers=1)),
        ("none", NoCluster()),
        ("local", LocalCluster(workers=3, trainers=1)),
        ("ray", RayCluster(workers=3, trainers=1)),
        ("10.0.0.1:6379", RayCluster(workers=3, trainers=1, address="10.0.0.1:6379")),
    ],
)
def test_the_option_cluster_keeps_the_numbers_of_workers(chosen, cluster):
    table = {"cluster": {"kind": "local", "workers": 3, "trainers": 1}, "rollout": {"prefetch": "fresh"}}
    for text in cluster_settings(chosen, build_experiment(table).cluster):
        ((key, value, _),) = read_override(text)
        assign(table, key, value)
    assert build_experiment(table).cluster == cluster


def test_a_cluster_that_pvg_cannot_use_is_refused():
    with pytest.raises(UsageError, match="HOST:PORT"):
        cluster_settings("slurm", NoCluster())
    with pytest.raises(ConfigurationError, match=r"cluster\.address needs cluster\.workers"):
        build_experiment({"cluster": {"kind": "ray", "address": "10.0.0.1:6379"}})
    with pytest.raises(ConfigurationError, match="cluster = 'local' computes with torch"):
        build_experiment({"cluster": "local", "rollout": {"engine": "vllm"}, "serving": {"servers": ["http://a:1"]}})


def test_limits_of_the_number_of_processes_decide_an_open_number_of_shards():
    limits = {"kind": "local", "min_workers": 1, "max_workers": 3}
    assert with_workers(build_experiment({"cluster": limits})).cluster == LocalCluster(
        workers=3, min_workers=1, max_workers=3
    )
    found = with_workers(build_experiment({"cluster": {"kind": "ray", "min_workers": 6}})).cluster
    assert found == RayCluster(workers=6, min_workers=6)  # more than the four cores
    begun = build_experiment({"cluster": {"kind": "local", "workers": 2}})
    assert with_workers(build_experiment({"cluster": limits}), begun).cluster.workers == 2
    build_experiment({"cluster": {"kind": "ray", "address": "10.0.0.1:6379", "max_workers": 3}})


@pytest.mark.parametrize(("gpus", "worker", "number"), [(1, 0, 0), (8, 5, 5), (2, 3, 1)])
def test_worker_k_computes_on_gpu_k_of_its_machine(gpus, worker, number, monkeypatch):
    opened = []

    def open_model(source, device, dtype):
        opened.append((str(device), dtype))
        raise MissingRequirementError("this test has no GPU")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: opened.append(str(device)))
    monkeypatch.setattr(process, "open_model", open_model)
    adapters = {"adapters": {"rank": 4}}
    settings = {"models": {"dtype": "bfloat16"}, "training": adapters, "verifier": {**adapters, "head": "scalar"}}
    plain = build_experiment(settings).plain()

    async def start():
        answers = asyncio.Queue()
        with ThreadPoolExecutor(1) as executor:
            there = process.Worker(answers.put_nowait, executor)
            there.take(Frame("start", {"id": 1, "experiment": plain, "device": "cuda", "worker": worker}))
            answer = await answers.get()
            await there.leave()
        return answer

    answer = asyncio.run(start())
    assert opened == [f"cuda:{number}", (f"cuda:{number}", "bfloat16")]
    assert answer.fields["message"] == "this test has no GPU"
