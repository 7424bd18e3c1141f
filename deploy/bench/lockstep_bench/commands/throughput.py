"""`throughput`: the offline workloads on an engine that it starts (or on a running one), beside peers, goals and limits."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep_bench import engine, host_time, peer, routing, shapes, skew
from lockstep_bench.client import SchedulerSession
from lockstep_bench.commands import add_output_flags, console, log
from lockstep_bench.engine import Engine, Settings
from lockstep_bench.results import Results
from lockstep_bench.throughput import Bench
from lockstep_bench.workloads import STANDARD, WORKLOADS, Workload, parse
from lockstep_cli.client import record_profile
from lockstep_common.errors import ConfigError, LockstepError

_KEPT = (
    "load_format", "dtype", "dp", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "max_window", "worker_flags",
    "scheduler_flags", "seed", "enable_eplb", "num_redundant_experts", "enable_dbo", "all2all_backend", "zipf",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    add = parser.add_argument
    add(
        "--model", action="append", default=[], metavar="NAME|DIR",
        help=f"a shape ({', '.join(shapes.names())}) or a model directory; may be given again",
    )  # fmt: skip
    add("--work", action="append", default=[], metavar="NAME", help=f"{', '.join(WORKLOADS)}, or NAME=REQUESTSxPROMPTxOUTPUT (default: {', '.join(STANDARD)})")  # fmt: skip
    add("--scheduler", default="", metavar="HOST:PORT", help="measure this running scheduler instead of starting one")
    add("--load-format", default="dummy", help="dummy: random weights, config.json is enough; auto: the model's own")
    add("--dtype", default="auto")
    add("--dp", type=int, default=1, metavar="N", help="workers that step together, one GPU each")
    add("--max-num-seqs", type=int, default=256)
    add("--max-model-len", type=int, default=8192)
    add("--max-num-batched-tokens", type=int, default=16384)
    add("--max-window", type=int, default=16, metavar="K", help="decode steps of a plan")
    add("--enable-eplb", action="store_true", help="experts move between workers until they are equally busy")
    add("--num-redundant-experts", type=int, default=0, metavar="N", help="slots of a layer beyond one for each expert")
    add("--enable-dbo", action="store_true", help="large steps are computed as two halves")
    add("--all2all-backend", default="auto", metavar="NAME", help="how tokens reach experts on other workers")
    add(
        "--zipf", type=float, default=0.0, metavar="S",
        help="skewed routing: the i-th expert's row of the gate is scaled by i^-S; --seed says which expert is the i-th",
    )  # fmt: skip
    add("--worker-flags", default="", metavar="STRING", help="more flags for the worker")
    add("--scheduler-flags", default="", metavar="STRING", help="more flags for the scheduler")
    add("--start-timeout-s", type=float, default=900.0)
    add(
        "--time-limit", type=float, default=0.0, metavar="S", help="stop after so many seconds; what was measured stays"
    )
    add("--log-dir", type=Path, metavar="DIR", help="keep the processes' logs")
    add("--profile", type=Path, metavar="DIR", help="after each workload, run it again and record a trace of its steps")
    add("--profile-steps", type=int, default=16, metavar="N")
    add(
        "--experts",
        action="store_true",
        help="count the distinct experts of a decode step, on an engine started for it",
    )
    add(
        "--host-time",
        action="store_true",
        help="what scheduler and worker take of the host for a decode step, by the timeline of an engine started for it",
    )
    add("--peer", choices=("vllm",), help="run the same work on an installed peer, for a ratio side by side")
    add("--peer-venv", type=Path, metavar="DIR", help="virtual environment of the peer (default: this one)")
    add("--peer-options", type=json.loads, default={}, metavar="JSON", help="more arguments of the peer's engine class")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """1 if a cell could not be measured; those that could are in the table and in the file."""
    works = parse(args.work or STANDARD)
    if bool(args.model) == bool(args.scheduler):
        raise ConfigError("give --model (an engine is started for it) or --scheduler (a running one), and not both")
    if args.dp == 1 and (args.enable_eplb or args.enable_dbo or args.num_redundant_experts):
        raise ConfigError(
            "--enable-eplb, --enable-dbo and --num-redundant-experts need --dp: one worker has all experts"
        )
    if args.scheduler and (args.peer or args.profile):
        raise ConfigError("--peer and --profile need --model: they must know the model and its worker")
    engines = [_settings(args, shapes.resolve(model)) for model in args.model]
    for settings in engines:
        _check_lengths(settings, works)
    expected = [(settings.name, work.name) for settings in engines for work in works]
    results = Results(args.json, {name: getattr(args, name) for name in _KEPT}, expected, log)
    try:
        asyncio.run(_measure(args, engines, works, results))
    finally:
        results.show(console)
    return results.exit_code(args.check)


def _settings(args: argparse.Namespace, model: Path) -> Settings:
    worker, scheduler = [args.worker_flags], [args.scheduler_flags]
    if args.dp > 1:
        worker.append(f"--all2all-backend {args.all2all_backend} --num-redundant-experts {args.num_redundant_experts}")
    scheduler += [flag for flag, on in (("--enable-eplb", args.enable_eplb), ("--enable-dbo", args.enable_dbo)) if on]
    skewed = {skew.VARIABLE: f"{args.zipf},{args.seed}"} if args.zipf else {}
    return Settings(
        worker_module="lockstep_bench.skew" if skewed else "lockstep_worker",
        worker_env=skewed,
        model=model,
        load_format=args.load_format,
        dtype=args.dtype,
        dp=args.dp,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_window=args.max_window,
        start_timeout_s=args.start_timeout_s,
        worker_flags=" ".join(worker),
        scheduler_flags=" ".join(scheduler),
    )


def _check_lengths(settings: Settings, works: Sequence[Workload]) -> None:
    for work in works:
        if work.length > settings.length:
            raise ConfigError(
                f"{work.name} needs {work.length} tokens a sequence, {settings.name} has {settings.length}"
            )


async def _measure(
    args: argparse.Namespace, engines: Sequence[Settings], works: Sequence[Workload], results: Results
) -> None:
    """Everything, one after the other, until the time limit. An engine that fails does not keep the others from their turn."""
    try:
        async with asyncio.timeout(args.time_limit or None):
            if args.scheduler:
                async with await SchedulerSession.open(args.scheduler) as session:
                    await _cells(args, session, works, results)
            for settings in engines:
                try:
                    await _own(args, settings, works, results)
                    if args.experts:
                        await _experts(args, settings, works, results)
                    if args.host_time:
                        await _host_time(args, settings, works, results)
                    if args.peer:
                        await _peer(args, settings, works, results)
                except LockstepError as error:
                    log(f"{settings.name}: {error.message}")
    except TimeoutError:
        log(f"the time limit of {args.time_limit:g} s is over")


async def _own(args: argparse.Namespace, settings: Settings, works: Sequence[Workload], results: Results) -> None:
    log(f"{settings.name}: starting")
    async with engine.running(settings, log, args.log_dir) as started:
        session = started.session
        row = {"model": session.model, "startup_s": round(started.startup_s, 2), **_options(args)}
        results.add(row | session.facts)
        await _cells(args, session, works, results, started)


async def _cells(
    args: argparse.Namespace,
    session: SchedulerSession,
    works: Sequence[Workload],
    results: Results,
    started: Engine | None = None,
) -> None:
    """All workloads on one engine; one that fails is reported, and the next is tried as long as the engine lives."""
    bench = Bench(session, args.seed)
    await bench.warm_up()
    for work in works:
        try:
            before = await started.counters() if started else None
            row = {"model": session.model, **await bench.measure(work), **session.facts, **_options(args)}
            if started and before:
                row["counters"] = (await started.counters()).since(before)
            results.add(row)
        except LockstepError as error:
            log(f"{session.model} {work.name}: {error.message}")
            if started:
                started.fleet.check()
    if started and args.profile:  # when nothing is timed any more: a profiler that was on once slows every launch
        for work in works:
            await _profile(args, bench, work, started)


def _options(args: argparse.Namespace) -> dict[str, str]:
    """What makes a row another one than that of the same cell without: in its column `options`."""
    words = [f"--{name.replace('_', '-')}" for name in ("enable_eplb", "enable_dbo") if getattr(args, name)]
    for name, plain in (("num_redundant_experts", 0), ("all2all_backend", "auto"), ("zipf", 0.0)):
        if getattr(args, name) != plain:
            words.append(f"--{name.replace('_', '-')} {getattr(args, name)}")
    return {"options": " ".join(words)} if words else {}


async def _profile(args: argparse.Namespace, bench: Bench, work: Workload, started: Engine) -> None:
    """Runs the workload again, and again if it is short, until enough steps are recorded."""
    over = asyncio.Event()
    recording = asyncio.create_task(record_profile(started.workers[0], args.profile_steps, recorded=over.set))
    recording.add_done_callback(lambda _: over.set())
    try:
        while not over.is_set():
            await bench.seconds(work)
        trace = await recording
    finally:
        recording.cancel()
    args.profile.mkdir(parents=True, exist_ok=True)
    path = args.profile / f"{started.session.model}-{work.name}.json.gz"
    path.write_bytes(trace.data)
    log(f"{trace.steps} steps in {path}")


async def _experts(args: argparse.Namespace, settings: Settings, works: Sequence[Workload], results: Results) -> None:
    """Runs the beginning of each decode workload on a worker that counts; counts are told apart by their rows."""
    experts = routing.routed_experts(shapes.config(str(settings.model)))
    decoding = [work for work in works if work.output > 1] if experts else []
    if not decoding:
        return
    log(f"{settings.name}: counting experts")
    with tempfile.TemporaryDirectory(prefix="lockstep-") as scratch:
        counts = Path(scratch) / "routing-0.json"
        counting = replace(
            settings,
            worker_module="lockstep_bench.routing",
            worker_env={**settings.worker_env, routing.VARIABLE: f"{scratch}/routing-{engine.RANK}.json"},
            worker_flags=f"{settings.worker_flags} --enforce-eager",
        )
        async with engine.running(counting, log, args.log_dir) as started:
            bench = Bench(started.session, args.seed)
            for work in decoding:
                await bench.seconds(replace(work, output=min(work.output, routing.STEPS)))
        for work in decoding:
            found = routing.read(counts, min(-(-work.requests // settings.dp), settings.max_num_seqs))
            results.annotate(settings.name, work.name, "distinct_experts", found)
            results.annotate(settings.name, work.name, "routed_experts", experts)


async def _host_time(args: argparse.Namespace, settings: Settings, works: Sequence[Workload], results: Results) -> None:
    """Runs the decode workloads on a worker that keeps its timeline; what belongs to which is told apart by the clock. Vote points
    lie whole windows apart, so that plans are as long as they may be."""
    decoding = [work for work in works if work.output > 1]
    log(f"{settings.name}: host time")
    with tempfile.TemporaryDirectory(prefix="lockstep-") as scratch:
        moments, spans = Path(scratch) / "moments-0.json", []
        keeping = replace(
            settings,
            worker_module="lockstep_bench.host_time",
            worker_env={**settings.worker_env, host_time.VARIABLE: f"{scratch}/moments-{engine.RANK}.json"},
            scheduler_flags=f"--prefill-attempt-interval {settings.max_window} {settings.scheduler_flags}",
        )
        async with engine.running(keeping, log, args.log_dir) as started:
            bench = Bench(started.session, args.seed)
            await bench.warm_up()
            for work in decoding:
                before, begin = await started.counters(), time.perf_counter_ns()
                await bench.seconds(work)
                end = time.perf_counter_ns()
                spans.append((work, begin, end, (await started.counters()).since(before)["plan_round_trip_s"]))
        for work, begin, end, round_trip_s in spans:
            found = host_time.per_step(host_time.read(moments, begin, end), settings.max_window, round_trip_s)
            results.annotate(settings.name, work.name, "host_per_step", found)


async def _peer(args: argparse.Namespace, settings: Settings, works: Sequence[Workload], results: Results) -> None:
    log(f"{settings.name}: the same on {args.peer}")
    try:
        async for row in peer.vllm(peer.interpreter(args.peer_venv), settings, works, args.peer_options, args.log_dir):
            results.add_peer(row)
    except peer.NotInstalled as error:
        log(error.message)
