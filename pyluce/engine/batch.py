"""Many requests at once on one runner: every step is planned by the scheduler, carried out here, and shown in the stats."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from pyluce.engine.admission import AdmissionGate
from pyluce.engine.board import Board
from pyluce.engine.decoding import Decoder
from pyluce.engine.errors import DeadlineError, EngineError, RequestCancelledError
from pyluce.engine.events import Event, FinishReason, PrefillEvent
from pyluce.engine.generate import Generation, GenerationRequest, Resources, chunk_bounds
from pyluce.engine.idle import IdlePrefill, IdlePrompt
from pyluce.engine.live import Live, announce
from pyluce.engine.plan import Admission, Chunk, Plan, StepResult
from pyluce.engine.protocols import Launching, Logits, PrefixStore, Row, Runner, SequenceLike
from pyluce.engine.scheduler import Scheduler
from pyluce.engine.stats import Activity, EngineStats, Outcome
from pyluce.engine.ticket import Ticket
from pyluce.spec.speculator import Speculator

S = TypeVar("S", bound=SequenceLike)

KEEP_EVERY = 4096  # prompt tokens; ends of chunks at its multiples are offered to the store

log = logging.getLogger(__name__)


class BatchCore(Generic[S]):
    """Runs on the engine thread; only `reserve` and `stats` are called from others. `close` is called last.

    What ends one request (its own logits, sampler, text or state) ends no other one; a native step that fails ends the requests whose
    rows or chunk it computed. Events are delivered after the stats that include them were published: at the end of a step, or, by a runner
    that says when it launches, at the launch of the next one. Who handles events needs the interpreter, which the engine needs between
    two launches, and a device that computes does not.
    """

    def __init__(
        self,
        resources: Resources[S],
        close: Callable[[], None],
        *,
        n_slots: int,
        max_queue: int,
        prefill_share: float,
        store: PrefixStore[S] | None = None,
        idle_prefill: bool = True,
        speculator: Speculator[S] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`n_slots`: the runner's, all of them free. `store`: where prompts' states are kept; `clock`: seconds, as the tickets'."""
        if resources.runner.n_free_slots != n_slots:
            raise ValueError(f"n_slots: expected the runner's {resources.runner.n_free_slots}, found {n_slots}")
        self.resources = resources
        self._store = store
        self._idle = IdlePrefill(resources, store) if store is not None and idle_prefill else None
        self._close = close
        self._clock = clock
        self._decoder = Decoder(speculator, clock)
        self._gate = AdmissionGate(n_slots, max_queue, clock)
        self._scheduler = Scheduler(n_slots, prefill_share, resources.prompt_streams)
        self._tickets: dict[int, Ticket] = {}  # in the queue or in a slot
        self._live: dict[int, Live[S]] = {}
        self._outbox: list[tuple[Ticket, Event]] = []
        self._answers: list[tuple[Ticket, BaseException | None]] = []
        self._board = Board(self._gate, self._decoder.stats, clock)
        self._counters = self._board.counters
        self._board.ask_memory(resources.runner)
        self._checked = True  # nothing has run since the invariants were checked
        self._publish()
        self._at_launch = False
        self._listen()

    # from any thread

    def reserve(self, request: GenerationRequest) -> Callable[[], None]:
        """See `Core.reserve`: the request's own limits first, then the queue's."""
        self.resources.check(request)
        self._gate.enter()
        return self._gate.leave

    def stats(self) -> EngineStats:
        """The last published numbers, with what the engine does at this moment."""
        return self._board.stats()

    # on the engine thread

    def admit(self, ticket: Ticket) -> None:
        """Queue a request."""
        request = ticket.request
        chunks = chunk_bounds(len(request.prompt), self.resources.chunk_tokens, request.cuts)
        self._scheduler.submit(ticket.id, chunks, request.cuts)
        self._tickets[ticket.id] = ticket

    def step(self) -> bool:
        """Drop who is not wanted any more, fill free slots, compute one row graph and one chunk; False when nobody is left."""
        self._checked = False
        self._drop_unwanted()
        if self._tickets and self._idle is not None:
            self._idle.pause()
        admitted = False
        while (admission := self._scheduler.admit()) is not None:
            self._begin(admission)
            admitted = True
        plan = self._scheduler.plan()
        delivered = not (plan and self._at_launch) and self._deliver()
        if admitted and not delivered:
            self._publish()
        if plan:
            self._scheduler.commit(self._run(plan))
            if not (self._at_launch and self._scheduler.busy) and not self._deliver():
                self._publish()
        return self._scheduler.busy or self._use_idle_time()

    def warm(self, prompt: IdlePrompt) -> None:
        """Compute a prompt that is expected, when there is nothing else to do."""
        if self._idle is not None:
            self._idle.add(prompt)

    def _use_idle_time(self) -> bool:
        """One chunk of a prompt that is expected; True while there is more of them."""
        if self._idle is None or not self._idle.busy:
            return False
        self._board.act(Activity.PREFILL)
        self._idle.step()
        self._counters.idle_tokens = self._idle.tokens
        if not self._idle.busy:
            self._board.ask_memory(self.resources.runner)
        self._publish()
        return self._idle.busy

    def idle(self) -> None:
        """Check the invariants once after work ran out; show that the engine is alive."""
        self._board.act(Activity.IDLE)
        if not self._checked:
            self._checked = True
            for violation in self.violations():
                self._board.violated(violation)
        self._publish()

    def violations(self) -> list[str]:
        """What contradicts itself between the scheduler, the requests and the runner; empty when all is well. To be called between steps."""
        found = self._scheduler.violations()
        in_slots = {owner for owner in self._scheduler.slots if owner is not None}
        if in_slots != set(self._live):
            found.append(f"sequences in slots: expected {sorted(in_slots)}, found {sorted(self._live)}")
        if in_slots | set(self._scheduler.queue) != set(self._tickets):
            found.append(f"requests: expected those in slots and in the queue, found {sorted(self._tickets)}")
        if len({id(live.state) for live in self._live.values()}) != len(self._live):
            found.append("two requests share a state")
        n_free = self.resources.runner.n_free_slots
        expected_free = self._gate.n_slots - len(self._live) - (self._idle is not None and self._idle.holds_slot)
        if n_free != expected_free:
            found.append(f"free slots of the runner: expected {expected_free}, found {n_free}")
        for number, live in self._live.items():
            sequence = self._scheduler.get(number)
            if sequence is None:
                continue
            expected = sequence.prompt_done + max(0, live.generation.count - 1)
            if live.state.length != expected:
                found.append(f"sequence {number}: expected {expected} tokens in its state, found {live.state.length}")
        return found

    def drop_all(self, error: BaseException) -> None:
        """End every request with `error` and free what it holds."""
        for number in list(self._tickets):
            self._end(number, Outcome.FAILED, error)
        if self._idle is not None:
            self._idle.close()
        self._deliver()

    # parking (`ParkingCore`)

    def pause(self) -> None:
        """Give back the slot of what is computed ahead, which is begun again later, and deliver."""
        self._deliver()
        if self._idle is not None:
            self._idle.pause()

    def running(self) -> dict[int, S]:
        """The states of the requests in slots."""
        return {number: live.state for number, live in self._live.items()}

    def exchange(self, runner: Runner[S], store: PrefixStore[S], states: Mapping[int, S]) -> None:
        """Go on with another runner, and with `states` in place of those of the requests in slots."""
        self.resources = replace(self.resources, runner=runner)
        self._listen()
        self._store = store if self._store is not None else None
        if self._idle is not None:
            self._idle.move(self.resources, store)
        for number, state in states.items():
            self._live[number].state = state
        self._board.ask_memory(self.resources.runner)
        self._publish()

    def refuse(self, numbers: Iterable[int], error: BaseException) -> None:
        """End these requests with `error`."""
        for number in numbers:
            if number in self._tickets:
                self._end(number, Outcome.FAILED, error)
        self.sweep()

    def sweep(self) -> None:
        """End the requests that nobody waits for any more, and deliver; nothing is computed."""
        self._drop_unwanted()
        if not self._deliver():
            self._publish()

    def close(self) -> None:
        """Free the runner and what belongs to it."""
        self._board.act(Activity.CLOSED)
        self._publish()
        self._close()

    def _run(self, plan: Plan) -> StepResult:
        begun = self._clock()
        if plan.decode:
            self._board.act(Activity.DECODE)
            self._decode(plan.decode)
            if plan.prefill is not None and not self._at_launch:
                self._deliver()
        decoded = self._clock()
        if plan.prefill is not None and self._still_wanted(plan.prefill.sequence):
            self._board.act(Activity.PREFILL)
            self._prefill(plan.prefill)
        done = self._clock()
        return StepResult(plan, decoded - begun, done - decoded)

    def _decode(self, numbers: tuple[int, ...]) -> None:
        candidates = [self._live[number].candidate(self.resources.n_ctx) for number in numbers]
        try:
            wants_logits = [self._live[number].generation.wants_logits for number in numbers]
            verified = self._decoder.compute(self.resources.runner, candidates, wants_logits)
        except Exception as error:
            for number in numbers:
                self._end(number, Outcome.FAILED, error)
            return
        self._counters.add_rows(sum(len(rows.rows) for rows in verified))
        for candidate, rows in zip(candidates, verified, strict=True):
            try:
                self._decoder.accept(candidate, rows, partial(self._choose, candidate.number))
            except Exception as error:
                self._end(candidate.number, Outcome.FAILED, error)

    def _prefill(self, chunk: Chunk) -> None:
        live = self._live[chunk.sequence]
        tokens = live.ticket.request.prompt[chunk.begin : chunk.end]
        try:
            announce(self.resources.runner, self._live, self._scheduler.after(chunk))
            logits = self.resources.runner.prefill(live.state, tokens, want="last" if chunk.last else "none")
        except Exception as error:
            self._end(chunk.sequence, Outcome.FAILED, error)
            return
        self._counters.add_chunk(self._clock(), len(tokens))
        self._keep(live, chunk, logits)
        self._outbox.append((live.ticket, PrefillEvent(done=chunk.end, total=len(live.ticket.request.prompt))))
        if chunk.last:
            self._choose(chunk.sequence, logits)

    def _choose(self, number: int, row: Row | None) -> int | None:
        """The next token of a sequence, from its row; None when the answer ended."""
        live = self._live[number]
        generation = live.generation
        try:
            if row is None:
                raise EngineError("the runner returned no logits for the last chunk of a prompt")
            token = generation.commit(row)
            live.next_token = token.token
            self._counters.add_token(self._clock())
            self._outbox.append((live.ticket, token))
            if not generation.finished:
                return token.token
            finish = generation.finish()
        except Exception as error:
            self._end(number, Outcome.FAILED, error)
            return None
        self._outbox.append((live.ticket, finish))
        self._end(number, Outcome.STOP if finish.reason is FinishReason.STOP else Outcome.LENGTH)
        return None

    def _listen(self) -> None:
        """Be told of the runner's launches, if it tells."""
        runner = self.resources.runner
        self._at_launch = isinstance(runner, Launching)
        if isinstance(runner, Launching):
            runner.on_launch = self._deliver

    # requests come and go

    def _begin(self, admission: Admission) -> None:
        ticket = self._tickets[admission.sequence]
        try:
            generation = Generation.begin(self.resources, ticket.request, ticket.submitted_at, self._clock)
            try:
                state = self.resources.runner.new_sequence()
            except BaseException:
                generation.close()
                raise
        except Exception as error:
            self._end(ticket.id, Outcome.FAILED, error)
            return
        self._live[ticket.id] = Live(ticket, generation, state)
        if self._store is not None:
            self._start_from_store(self._live[ticket.id], self._store)

    def _start_from_store(self, live: Live[S], store: PrefixStore[S]) -> None:
        """Begin where a kept prefix ends, if there is one; a prompt that is kept whole is answered at once."""
        number, prompt = live.ticket.id, live.ticket.request.prompt
        sequence = self._scheduler.get(number)
        if sequence is None:
            return
        try:
            start = store.start(live.state, prompt, {end for _, end in sequence.chunks})
        except Exception as error:
            self._end(number, Outcome.FAILED, error)
            return
        if not start.length:
            return
        self._scheduler.skip(number, start.length)
        live.generation.cached_tokens = start.length
        self._counters.cached_tokens += start.length
        self._outbox.append((live.ticket, PrefillEvent(done=start.length, total=len(prompt))))
        if start.logits is not None:
            self._choose(number, start.logits)

    def _keep(self, live: Live[S], chunk: Chunk, logits: Logits | None) -> None:
        """Offer the state at the end of a message, of the prompt, and now and then within a long one."""
        if self._store is None:
            return
        if chunk.last or chunk.end in live.ticket.request.cuts or chunk.end % KEEP_EVERY == 0:
            try:
                self._store.offer(live.state, logits if chunk.last else None)
            except Exception as failure:  # the request itself is fine
                log.error("a state could not be kept: %s: %s", type(failure).__name__, failure)

    def _drop_unwanted(self) -> None:
        for number in list(self._tickets):
            self._still_wanted(number)

    def _still_wanted(self, number: int) -> bool:
        """The request runs on; if it was cancelled or its time is over it ends here."""
        ticket = self._tickets.get(number)
        if ticket is None:
            return False
        deadline = ticket.deadline_at
        if ticket.cancelled:
            self._end(number, Outcome.CANCELLED, RequestCancelledError("the request was cancelled"))
        elif deadline is not None and self._clock() >= deadline:
            seconds = ticket.request.deadline_s
            self._end(number, Outcome.DEADLINE, DeadlineError(f"deadline_s: the answer took longer than {seconds:g} s"))
        else:
            return True
        return False

    def _end(self, number: int, outcome: Outcome, error: BaseException | None = None) -> None:
        """Free everything that a request holds; its answer goes out with the next delivery."""
        ticket = self._tickets.pop(number)
        live = self._live.pop(number, None)
        self._decoder.end(number)
        for free in self._owned_by(live) if live is not None else ():
            try:
                free()
            except Exception as failure:
                self._board.violated(f"request {number} could not be freed: {type(failure).__name__}: {failure}")
        self._scheduler.retire(number)
        self._counters.requests[outcome] += 1
        self._answers.append((ticket, error))

    def _owned_by(self, live: Live[S]) -> list[Callable[[], None]]:
        """What frees a request's parts, in order."""
        kept = [partial(self._store.end, live.state)] if self._store is not None else []
        return [*kept, live.generation.close, live.state.free]

    def _deliver(self) -> bool:
        """Publish, then report: whoever gets an event finds it in the stats. False when there is nothing to report."""
        if not self._outbox and not self._answers:
            return False
        if self._answers:
            self._board.ask_memory(self.resources.runner)
        self._publish()
        outbox, self._outbox = self._outbox, []
        answers, self._answers = self._answers, []
        for ticket, event in outbox:
            ticket.put(event)
        for ticket, error in answers:
            if error is None:
                ticket.finish()
            else:
                ticket.fail(error)
        return True

    def _publish(self) -> None:
        slots = (
            (self._live.get(number), self._scheduler.get(number)) if number is not None else None
            for number in self._scheduler.slots
        )
        self._board.publish(slots)
