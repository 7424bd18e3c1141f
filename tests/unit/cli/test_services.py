"""Which processes `lockstep up` starts, and how they find each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_cli.config import UpConfig
from lockstep_cli.services import Machine, Role, Service, compose, groups, has_routed_experts
from lockstep_common.errors import ConfigError


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return model(tmp_path, {"model_type": "llama"})


def model(folder: Path, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def machine(dp: int, gpus: tuple[str, ...] = ()) -> Machine:
    return Machine(
        cores=4,
        gpus=gpus,
        ports=tuple(range(100, 100 + 2 * dp)),
        rest_port=8000,
        valkey=("/bin/valkey-server",),
        valkey_socket="/run/valkey.sock",
    )


def flag(service: Service, name: str) -> str:
    (value,) = (word.partition("=")[2] for word in service.command if word.startswith(f"--{name}="))
    return value


def of(services: tuple[Service, ...], role: Role) -> list[Service]:
    return [service for service in services if service.role is role]


@given(st.integers(1, 64), st.integers(1, 4), st.booleans(), st.sampled_from(["auto", "always"]))
def test_every_worker_has_a_place_in_one_group(dp: int, cp: int, experts: bool, lockstep: str) -> None:
    result = groups(UpConfig(dp=dp, cp=cp, lockstep=lockstep), experts)
    assert len(result) == (1 if experts or lockstep == "always" else dp)
    for group in result:
        assert [seat.rank for seat in group] == list(range(len(group)))
        assert {(seat.dp * seat.cp, seat.cp) for seat in group} == {(len(group), cp)}
    assert sum(len(group) for group in result) == dp * cp


def test_one_of_each_on_a_small_machine(dense: Path) -> None:
    services = compose(UpConfig(), dense, machine(1), "secret")
    assert [service.name for service in services] == ["valkey", "worker-0", "scheduler-0", "router"]
    _, worker, scheduler, router = services
    assert flag(scheduler, "workers") == worker.address
    assert flag(router, "schedulers") == scheduler.address
    assert flag(scheduler, "redis-url") == flag(router, "redis-url") == "unix:///run/valkey.sock"


def test_dense_models_get_a_scheduler_for_each_worker(dense: Path) -> None:
    services = compose(UpConfig(dp=2), dense, machine(2), "secret")
    workers, schedulers = of(services, Role.WORKER), of(services, Role.SCHEDULER)
    assert [flag(s, "workers") for s in schedulers] == [w.address for w in workers]
    assert flag(of(services, Role.ROUTER)[0], "schedulers") == ",".join(s.address for s in schedulers)
    assert len({flag(s, "shard-id") for s in schedulers}) == 2


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_models_with_experts_are_coupled(tmp_path: Path, field: str) -> None:
    services = compose(UpConfig(dp=2), model(tmp_path, {field: 8}), machine(2), "secret")
    (scheduler,) = of(services, Role.SCHEDULER)
    assert flag(scheduler, "workers") == ",".join(w.address for w in of(services, Role.WORKER))


def test_workers_of_a_rank_stand_together(tmp_path: Path, dense: Path) -> None:
    services = compose(UpConfig(dp=2, cp=2), dense, machine(4), "secret")
    workers, schedulers = of(services, Role.WORKER), of(services, Role.SCHEDULER)
    assert [flag(s, "workers").split(",") for s in schedulers] == [
        [w.address for w in workers[i : i + 2]] for i in (0, 2)
    ]
    assert [(flag(w, "dp"), flag(w, "cp"), flag(w, "rank")) for w in workers] == [("1", "2", "0"), ("1", "2", "1")] * 2
    (tmp_path / "moe").mkdir()
    services = compose(UpConfig(dp=2, cp=2), model(tmp_path / "moe", {"num_experts": 8}), machine(4), "secret")
    workers = of(services, Role.WORKER)
    assert [flag(w, "rank") for w in workers] == list("0123") and {flag(w, "dp") for w in workers} == {"2"}
    assert len(of(services, Role.SCHEDULER)) == 1


def test_experts_move_only_where_there_are_some(tmp_path: Path, dense: Path) -> None:
    (tmp_path / "moe").mkdir()
    moe = model(tmp_path / "moe", {"num_experts": 8})
    (scheduler,) = of(
        compose(UpConfig(dp=2, enable_eplb=True, eplb_interval_s=5), moe, machine(2), "s"), Role.SCHEDULER
    )
    assert "--enable-eplb" in scheduler.command and flag(scheduler, "eplb-interval-s") == "5"
    (scheduler,) = of(compose(UpConfig(dp=2), moe, machine(2), "s"), Role.SCHEDULER)
    assert not any("eplb" in argument for argument in scheduler.command)
    services = compose(UpConfig(dp=2, num_redundant_experts=2), moe, machine(2), "s")
    assert [flag(worker, "num-redundant-experts") for worker in of(services, Role.WORKER)] == ["2", "2"]
    for config, name in (UpConfig(enable_eplb=True), "--enable-eplb"), (UpConfig(num_redundant_experts=1), "--num-red"):
        with pytest.raises(ConfigError, match=name):
            compose(config, dense, machine(1), "s")


def test_halves_of_a_step_need_experts_on_several_workers(tmp_path: Path, dense: Path) -> None:
    (tmp_path / "moe").mkdir()
    moe = model(tmp_path / "moe", {"num_experts": 8})
    config = UpConfig(dp=2, enable_dbo=True, dbo_decode_token_threshold=4)
    (scheduler,) = of(compose(config, moe, machine(2), "s"), Role.SCHEDULER)
    assert "--enable-dbo" in scheduler.command and flag(scheduler, "dbo-decode-token-threshold") == "4"
    (scheduler,) = of(compose(UpConfig(dp=2), moe, machine(2), "s"), Role.SCHEDULER)
    assert not any("dbo" in argument for argument in scheduler.command)
    for directory, why in (moe, "give --dp"), (dense, "has none"):
        with pytest.raises(ConfigError, match=f"--enable-dbo.*{why}"):
            compose(UpConfig(enable_dbo=True), directory, machine(1), "s")


def test_experts_inside_a_text_config_and_absent_ones(tmp_path: Path) -> None:
    assert has_routed_experts(model(tmp_path, {"text_config": {"num_experts": 4}}))
    assert not has_routed_experts(model(tmp_path, {"num_experts": None}))
    assert not has_routed_experts(model(tmp_path, {"num_local_experts": 1}))


def test_a_directory_without_config_is_an_error_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        has_routed_experts(tmp_path)


def test_always_couples_dense_models(dense: Path) -> None:
    services = compose(UpConfig(dp=2, lockstep="always"), dense, machine(2), "secret")
    assert len(of(services, Role.SCHEDULER)) == 1


def test_shards_of_a_group_know_each_other_and_all_workers(dense: Path) -> None:
    services = compose(UpConfig(dp=4, shards=2, lockstep="always"), dense, machine(4), "secret")
    schedulers = of(services, Role.SCHEDULER)
    addresses = ",".join(s.address for s in schedulers)
    assert [flag(s, "shard") for s in schedulers] == ["0", "1"]
    assert {flag(s, "shards") for s in schedulers} == {addresses} == {flag(of(services, Role.ROUTER)[0], "schedulers")}
    assert {flag(s, "workers") for s in schedulers} == {",".join(w.address for w in of(services, Role.WORKER))}
    assert [s.name for s in schedulers] == ["scheduler-0", "scheduler-1"]
    assert [flag(s, "shard-id") for s in schedulers] == ["shard-0", "shard-1"]


def test_shards_that_have_nothing_to_share_are_an_error(dense: Path) -> None:
    with pytest.raises(ConfigError, match="--lockstep always"):
        compose(UpConfig(dp=4, shards=2), dense, machine(4), "secret")
    with pytest.raises(ConfigError, match="each needs a DP rank"):
        compose(UpConfig(dp=2, shards=3, lockstep="always"), dense, machine(2), "secret")


@pytest.mark.parametrize("url", ["none", "redis://elsewhere:6379/0"])
def test_no_valkey_of_our_own_if_told_so(dense: Path, url: str) -> None:
    services = compose(UpConfig(redis_url=url), dense, machine(1), "secret")
    assert not of(services, Role.VALKEY)
    assert flag(of(services, Role.ROUTER)[0], "redis-url") == url


def test_cores_are_divided_and_gpus_dealt_out(dense: Path) -> None:
    on_cpu = compose(UpConfig(dp=2), dense, machine(2), "secret")
    assert [flag(w, "threads") for w in of(on_cpu, Role.WORKER)] == ["2", "2"]
    assert all("CUDA_VISIBLE_DEVICES" not in w.env for w in of(on_cpu, Role.WORKER))
    on_gpu = compose(UpConfig(dp=2), dense, machine(2, ("3", "5")), "secret")
    assert [w.env["CUDA_VISIBLE_DEVICES"] for w in of(on_gpu, Role.WORKER)] == ["3", "5"]


def test_secrets_are_not_among_the_arguments(dense: Path) -> None:
    services = compose(UpConfig(api_key="hunter2"), dense, machine(1), "t0ken")
    assert not any("hunter2" in word or "t0ken" in word for service in services for word in service.command)
    assert of(services, Role.ROUTER)[0].env["LOCKSTEP_ROUTER_API_KEY"] == "hunter2"
    assert "hunter2" not in repr(services)
