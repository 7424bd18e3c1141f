"""The names of all flags, frozen: they are the interface of every script and manifest out there. Adding one is a line here."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

SERVICE = "host port metrics_port log_level tls_cert tls_key tls_ca internal_token"
FLAGS = {
    ("lockstep_cli.config", "UpConfig"): """
        model served_model_name dp cp shards lockstep tensor_parallel_size dtype kv_cache_dtype device max_model_len max_num_seqs
        max_num_batched_tokens block_size kv_cache_memory_gb threads vote_interval_ms seed redis_url host port grpc_port
        api_key log_dir log_level start_timeout_s num_redundant_experts enable_eplb eplb_window eplb_interval_s
        eplb_threshold enable_dbo dbo_decode_token_threshold dbo_prefill_token_threshold""",
    ("lockstep_scheduler.config", "SchedulerConfig"): f"""{SERVICE}
        advertise workers shards shard vote_timeout shard_id lockstep max_num_seqs max_model_len max_num_batched_tokens max_waiting vote_interval_ms
        prefill_attempt_interval prefill_any_attempt_interval max_window max_prefill_tokens_per_point attention_span watermark
        enable_prefix_caching worker_timeout load_timeout reform_timeout session_grace redis_url ledger_ttl model
        enable_eplb eplb_window eplb_interval_s eplb_threshold eplb_prefill_weight eplb_nodes expert_load_interval_s
        enable_dbo dbo_decode_token_threshold dbo_prefill_token_threshold""",
    ("lockstep_worker.config", "WorkerConfig"): f"""{SERVICE}
        model served_model_name dtype kv_cache_dtype load_format device max_num_seqs max_model_len max_num_batched_tokens
        block_size kv_cache_memory_gb gpu_memory_utilization enforce_eager logprobs_mode deterministic threads seed
        num_redundant_experts all2all_backend dp cp rank collectives debug_collectives
        collective_deadline_s reform_timeout_s null_step_ms null_vocab_size null_max_model_len""",
    ("lockstep_router.config", "RouterConfig"): f"""{SERVICE}
        grpc_port schedulers redis_url model served_model_name api_key seed accept_timeout reconnect_timeout
        drain_timeout ssl_certfile ssl_keyfile""",
}


@pytest.mark.parametrize(
    ("place", "names"), FLAGS.items(), ids=lambda value: value[1] if isinstance(value, tuple) else ""
)
def test_flags_are_the_frozen_ones(place: tuple[str, str], names: str) -> None:
    module, cls = place
    fields = dataclasses.fields(getattr(importlib.import_module(module), cls))
    assert sorted(field.name for field in fields if field.init) == sorted(names.split())


@pytest.mark.parametrize("place", FLAGS, ids=lambda place: place[1])
def test_every_flag_says_what_it_is(place: tuple[str, str]) -> None:
    module, cls = place
    for field in dataclasses.fields(getattr(importlib.import_module(module), cls)):
        assert field.metadata.get("help"), field.name


@pytest.mark.parametrize("place", FLAGS, ids=lambda place: place[1])
def test_secrets_are_marked(place: tuple[str, str]) -> None:
    module, cls = place
    for field in dataclasses.fields(getattr(importlib.import_module(module), cls)):
        words = field.name.replace("token_threshold", "").replace("tokens", "")  # numbers of tokens
        named_so = any(word in words for word in ("api_key", "token", "password"))
        assert bool(field.metadata.get("secret")) == named_so, field.name
