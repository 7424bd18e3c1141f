"""The step thread: it alone touches the engine, one job after the other: load, configure, plans."""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from lockstep_common.errors import Conflict, LockstepError, Unavailable
from lockstep_common.steps import GroupConfig, Plan, WorkerFacts
from lockstep_worker.profile import DONE, STARTED, Timeline
from lockstep_worker.protocol import Coalescer, Engine, GroupLost, PlanLog, StepResult

T = TypeVar("T")

log = logging.getLogger(__name__)

_POLL_S = 0.00025  # how often results are looked for while the next plan may come
_SIGN_OF_LIFE_S = 0.5  # how often followers hear from an idle worker, and look after their own jobs


class State(enum.IntEnum):
    """What a worker can do now. The numbers are those of the wire."""

    LOADING = 1
    WAITING = 2  # loaded, not in a group
    READY = 3  # warmed up in this epoch
    FAILED = 4


class Driver:
    """Runs an engine on a thread of its own and records in `plans` what came of it.

    Of the workers of a DP rank the first gets the plans and forwards their bytes before it runs them; the others follow: they run
    what comes, and nobody asks for their outcomes. `read_plan` makes a plan of its bytes.
    `changed` is called on the step thread whenever an outcome was recorded or the state changed; it must not block.
    `timeline` takes the moments of plans; the engine may mark its own there.
    """

    def __init__(
        self,
        engine: Engine,
        plans: PlanLog,
        changed: Callable[[], None] = lambda: None,
        timeline: Timeline | None = None,
        read_plan: Callable[[bytes], Plan] | None = None,
    ) -> None:
        self.plans = plans
        self.read_plan = read_plan
        self.changed = changed
        self.timeline = timeline or Timeline()
        self.state = State.LOADING
        self.message = ""
        self.loaded = 0.0
        self.facts: WorkerFacts | None = None
        self.group: GroupConfig | None = None
        self.steps = 0
        self.tokens = 0
        self.nonfinite_rows = 0  # that ended because their logits were NaN or infinite
        self._engine = engine
        self._jobs: queue.SimpleQueue[Callable[[], None] | Plan | None] = queue.SimpleQueue()
        self._open: deque[Coalescer] = deque()  # of plans whose results are not all there, oldest first
        self._free_ns = 0  # since when the engine has had nothing to do
        self._thread = threading.Thread(target=self._main, name="steps", daemon=True)

    def start(self) -> None:
        """Begins to load the model."""
        self._thread.start()

    def submit(self, plan: Plan) -> None:
        """Runs a plan that the log has accepted, after those submitted before."""
        self._jobs.put(plan)

    def interrupt(self, epoch: int) -> None:
        """A new epoch is there: steps that wait for workers of an older one need wait no longer. May take a while."""
        if self.group is not None and self.group.epoch < epoch:
            self._engine.interrupt()

    def configure(self, group: GroupConfig) -> Future[WorkerFacts]:
        """Joins a group once the running plan has ended; the same request again gets the same answer."""
        return self.between_plans(lambda: self._configure(group), "configure")

    def between_plans(self, work: Callable[[], T], what: str) -> Future[T]:
        """Does `work` on the step thread once the plans submitted before have ended, unless it is cancelled before.

        A LockstepError goes to the caller only; any other exception is the engine's end.
        """
        answer: Future[T] = Future()

        def job() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except LockstepError as error:
                answer.set_exception(error)
            except BaseException as error:
                answer.set_exception(LockstepError(f"{what} failed: {error}"))
                raise

        if self.state == State.FAILED:
            answer.set_exception(Unavailable(f"this worker has failed: {self.message}"))
        else:
            self._jobs.put(job)
        return answer

    def report(self, message: str) -> None:
        """Shows a message (of a step that takes too long) until the next plan has run; from any thread."""
        log.error("%s", message)
        self._enter(self.state, message)

    def expel(self, reason: str) -> None:
        """Fails, whatever the step thread is in; from any thread."""
        log.error("expelled from the group: %s", reason)
        self._enter(State.FAILED, f"expelled from the group: {reason}")

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the plans already submitted; False if it was still busy when the time was over."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            self.facts = self._engine.load(self._progress)
            self.loaded = 1.0
            self._enter(State.WAITING, "loaded, waiting for a scheduler")
            while True:
                try:
                    if (job := self._next_job()) is None:
                        break
                    if isinstance(job, Plan):
                        self._run(job)
                    else:
                        self._finish_steps()
                        job()
                except GroupLost as error:
                    self._lose(error)
            self._book(self._engine.poll(wait=True))
            self._engine.close()
        except BaseException as error:
            log.exception("the engine failed")
            self._enter(State.FAILED, error.message if isinstance(error, LockstepError) else repr(error))

    def _next_job(self) -> Callable[[], None] | Plan | None:
        """The next job; until it comes, results of steps in flight are booked as they come."""
        while self._engine.in_flight:
            try:
                return self._jobs.get(timeout=_POLL_S)
            except queue.Empty:
                self._book(self._engine.poll(wait=False))
        while self.followed:
            try:
                return self._jobs.get(timeout=_SIGN_OF_LIFE_S)
            except queue.Empty:
                self._engine.forward_plan(b"")
        while self.follows:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get_nowait()
            if data := self._engine.next_plan():
                return self._forwarded(data)
        return self._jobs.get()

    def _forwarded(self, data: bytes) -> Plan:
        assert self.read_plan is not None, "a worker that follows must know how plans are written"
        try:
            plan = self.read_plan(data)
            if not self.plans.accept(plan, time.perf_counter_ns()):
                raise Conflict(f"plan {plan.header.seq} was forwarded twice")
        except LockstepError as error:
            raise GroupLost(f"the plan that was forwarded cannot run here: {error.message}") from error
        return plan

    @property
    def follows(self) -> bool:
        """Whether plans come from another worker."""
        return self.group is not None and self.group.cp_rank > 0

    @property
    def followed(self) -> bool:
        """Whether other workers wait for this one's plans."""
        return self.group is not None and self.group.cp > 1 and self.group.cp_rank == 0

    def _finish_steps(self) -> None:
        try:
            self._book(self._engine.poll(wait=True))
        except GroupLost as error:
            self._lose(error)

    def _lose(self, error: GroupLost) -> None:
        log.error("%s; waiting to be configured again", error.message)
        self._engine.leave()  # those who still wait for this worker learn of it now
        self._leave("; ".join(filter(None, (error.message, self.message))))

    def _leave(self, message: str) -> None:
        """Gives up the group; its plans in flight are cut."""
        self.group = None
        self._open.clear()
        self.plans.close()
        self._enter(State.WAITING, message)

    def _progress(self, loaded: float, message: str) -> None:
        self.loaded = loaded
        self._enter(State.LOADING, message)

    def _configure(self, group: GroupConfig) -> WorkerFacts:
        if group == self.group and self.facts is not None and group.epoch == self.plans.epoch:
            return self.facts
        self.plans.check_configure(group.epoch, group.term)
        self._leave(f"joining epoch {group.epoch} as rank {group.rank}")
        self.facts = self._engine.configure(group)
        self.plans.configure(group, self.facts)
        self.group = group
        self._free_ns = time.perf_counter_ns()
        self._enter(State.READY, "")
        return self.facts

    def _run(self, plan: Plan) -> None:
        if self.group is None or not self.plans.start(plan):
            return
        if self.followed:
            self._engine.forward_plan(plan.data)
        start_ns = time.perf_counter_ns()
        self.timeline.mark(STARTED, plan.header.seq)
        self._open.append(
            Coalescer(
                plan.header,
                dp_rank=self.group.dp_rank,
                notice=plan.body.notice,
                start_ns=start_ns,
                idle_ns=0 if self._open else start_ns - self._free_ns,
            )
        )
        self._book(self._engine.run(plan))
        if self.message:
            self._enter(State.READY, "")

    def _book(self, results: Iterator[StepResult]) -> None:
        """Adds results to the oldest plan that lacks some, and records what is due."""
        for result in results:
            self.steps += 1
            self.tokens += len(result.words)
            self.nonfinite_rows += len(result.faults)
            now_ns = time.perf_counter_ns()
            oldest = self._open[0]
            self.timeline.mark(DONE, oldest.seq, oldest.done)
            if oldest.add(result, now_ns):
                self.plans.record(oldest.flush(self.plans.turnaround(oldest.seq, oldest.notice_ns)))
                if self.follows:
                    self.plans.take()  # nobody asks for them
                self.changed()
            if oldest.complete:
                self._open.popleft()
                self._free_ns = now_ns
                if self._open:
                    self._open[0].begin(now_ns)

    def _enter(self, state: State, message: str) -> None:
        self.state, self.message = state, message
        self.changed()
