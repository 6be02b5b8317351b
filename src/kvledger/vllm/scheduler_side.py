"""The scheduler's half of the connector: look-ups, loads, stores and accounts of live requests.

At every step it reads vLLM's absolute numbers of every live request, derives which chunks are valid
at the end of the step, and hands the workers one flat plan. It owns no block of the engine and
never makes it wait longer than the bounds below.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvledger.ledger import Account
from kvledger.naming import chunk_names
from kvledger.protocol import Closed, Error, Opened, Settled, Welcome
from kvledger.reasons import Reason
from kvledger.vllm.accounts import Accounts
from kvledger.vllm.channel import Channel, Listener
from kvledger.vllm.identity_feed import IdentityFeed
from kvledger.vllm.loads import Loads
from kvledger.vllm.lookups import Lookups
from kvledger.vllm.metadata import StepPlan
from kvledger.vllm.policy import RequestPolicy
from kvledger.vllm.stores import Stores
from kvledger.vllm.tracked import EngineRequest, Tracked, waits_for_load

logger = logging.getLogger("kvledger")

ANSWER_WAIT_SECONDS = 1e-3
"""A step waits so long for slots; then its blocks stay owed to the next."""
LAST_WAIT_SECONDS = 10e-3
"""A step waits so long for slots of blocks that cannot be read in any later step."""
IDLE_WAIT_SECONDS = 10e-3
"""A step that computes nothing waits so long for the outcome of stores under way."""
MAX_PREFETCHED = 64
"""Look-ups are sent at a request's arrival while fewer than this are leased or under way; beyond,
when the scheduler asks. A long queue must not pin the whole cache."""

BlockTable = Callable[[str], Sequence[Sequence[int]]]
"""Engine blocks of a live request, for each KV-cache group."""


class SchedulerSide(Listener):
    """See the module.

    Args:
        make_channel: makes the channel for this listener.
        identity: describes the engine to each server.
        policy: what may be stored and loaded.
        chunk_tokens: tokens of one chunk.
        blocks_per_chunk: engine blocks of one chunk.
        lookup_deadline_seconds: after this a look-up is a miss.
        load_deadline_seconds: after this a load has failed.
    """

    def __init__(
        self,
        *,
        make_channel: Callable[[Listener], Channel],
        identity: IdentityFeed,
        policy: RequestPolicy,
        chunk_tokens: int,
        blocks_per_chunk: int,
        lookup_deadline_seconds: float,
        load_deadline_seconds: float,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.blocks_per_chunk = blocks_per_chunk
        self.policy = policy
        self.identity = identity
        self.channel = make_channel(self)
        self.lookups = Lookups(self.channel, lookup_deadline_seconds)
        self.loads = Loads(
            self.channel, chunk_tokens=chunk_tokens, deadline_seconds=load_deadline_seconds
        )
        self.stores = Stores(self.channel)
        self.accounts = Accounts(self.channel)
        self.block_table: BlockTable | None = None
        self.live: dict[str, Tracked] = {}
        self.step = 0
        self._unproven_step = 0
        self.boot = ""
        self.arena_generation = 0
        self.namespace = ""

    # ------------------------------------------------------------ requests come and go

    def on_new_request(self, request: EngineRequest) -> None:
        """A request is queued: open its account and send its look-up."""
        self.identity.first_request()
        self.channel.poll()
        tracked = self._tracked(request)
        if tracked.no_load is None and self.lookups.expected_leases < MAX_PREFETCHED:
            self._look_up(tracked)

    def matched_tokens(self, request: EngineRequest, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the local hit that can be loaded, or None: ask again at the next step.

        Changes nothing that a later call with the same argument would see.
        """
        tracked = self._tracked(request)
        tracked.local_tokens = local_tokens
        if tracked.first_local_tokens is None:
            tracked.first_local_tokens = local_tokens
        if tracked.no_load is not None:
            return self._miss(tracked, tracked.no_load)
        if tracked.lookup is None:
            self._look_up(tracked)
        lookup = tracked.lookup
        assert lookup is not None
        chunks = self.lookups.result(lookup)  # may find that the server is gone
        if chunks is None:
            return None, False
        external = chunks * self.chunk_tokens - local_tokens
        if external <= 0:
            return self._miss(tracked, Reason.HELD_LOCALLY if chunks else lookup.reason)
        if external < self.policy.minimum_hit(local_tokens):
            return self._miss(tracked, Reason.BELOW_MIN_HIT)
        first = local_tokens // self.chunk_tokens
        if self.loads.loading(tracked.names(first, first + 1)[0]):
            return None, False  # another request is loading it: then it will be a local hit
        tracked.miss = lookup.reason
        return external, True

    def allocated(self, request: EngineRequest, table: Sequence[int], external_tokens: int) -> None:
        """vLLM has admitted the request: the one point where a hit is taken up or let go."""
        tracked = self._tracked(request)
        if tracked.load is not None:
            return
        if tracked.lookup is not None:
            tracked.account.known_chunks = tracked.lookup.chunks or 0
        if external_tokens:
            self.loads.begin(tracked, table, external_tokens)
        else:
            self._let_go(tracked)

    def finished(self, request: EngineRequest, table: Sequence[int], *, aborted: bool) -> None:
        """The request is over. What it still owes is read at the next step, if one follows."""
        tracked = self.live.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.load is not None:
            valid = tracked.load.local_tokens
        elif tracked.loads_elsewhere:
            self._let_go(tracked)
            valid = tracked.local_tokens
        else:
            self._let_go(tracked)
            known = request.num_tokens
            if not aborted and known > request.num_prompt_tokens:
                known -= 1  # the last sampled token was never fed: it has no KV
            valid = min(request.num_computed_tokens, known)
        self._advance(tracked, valid, table)
        self.accounts.begin_closing(tracked)
        self.lookups.flush()  # the engine may be idle from now on

    def output_arrived(self, finished: set[str], failed: set[str]) -> None:
        """The workers have answered some loads."""
        for request_id in finished | failed:
            tracked = self.loads.end(request_id, arrived=request_id not in failed)
            if tracked is None:
                continue
            self._let_go(tracked)
            if request_id in failed:
                tracked.no_load = Reason.LOAD_FAILED
                self.accounts.failed_loads += 1
        self.accounts.close_settled()
        self.lookups.flush()

    def reset(self) -> None:
        """The cache was reset, perhaps because the weights have changed: no byte of before may
        be stored or loaded by a request of before, or be found by one of after."""
        self.identity.epoch_changed()
        self.namespace = ""
        self.loads.fail_all()
        for tracked in [*self.live.values(), *self.accounts.closing]:
            tracked.no_load = Reason.EPOCH_CHANGED
            if tracked.load is None:
                self._let_go(tracked)
            self.stores.give_back(tracked.account.freeze(Reason.EPOCH_CHANGED))
        self.channel.poll()
        self._flush()
        self.identity.describe(self.channel)

    def shutdown(self) -> None:
        """The engine ends: close every account as it stands, and the conversation."""
        for tracked in list(self.live.values()):
            self.accounts.begin_closing(tracked)
        self.live.clear()
        self.channel.poll()
        for tracked in self.accounts.closing:
            self.stores.give_back(tracked.account.give_up(Reason.ENGINE_IDLE))
        self.accounts.close_settled()
        self._flush()
        self.channel.close()

    # ------------------------------------------------------------ steps

    def build_plan(
        self,
        scheduled_tokens: Mapping[str, int],
        preempted: set[str],
        *,
        others_load: bool = False,
    ) -> StepPlan:
        """What the workers copy in this step, from vLLM's numbers of this step.

        Whether a synchronous load of another connector (``others_load``) has brought what vLLM
        counts shows in the step's output only, which may come after the next plan: until then
        nothing new is taken for valid.
        """
        self.step += 1
        if others_load:
            self._unproven_step = self.step + 1
        proven = self.step > self._unproven_step
        self.channel.poll()
        self.identity.describe(self.channel)
        if not scheduled_tokens and self.stores.under_way:
            self.channel.wait_until(
                lambda: not self.stores.under_way, IDLE_WAIT_SECONDS, trip=False
            )
        lost = [self.live[name] for name in preempted if name in self.live]
        for tracked in lost:
            tracked.account.lose_blocks()
        rescues = lost + self.accounts.to_rescue()
        current = [
            tracked
            for name, tracked in self.live.items()
            if proven and name not in preempted and self._advance_live(tracked, scheduled_tokens)
        ]
        self._ask(rescues, current)
        stores = self.stores.take(current)
        saved = self.stores.take(rescues)
        self._after_rescue(rescues)
        for tracked in lost if proven else ():  # some are resumed in this step, in other blocks
            self._advance_live(tracked, scheduled_tokens)
        self.accounts.close_settled()
        self._flush()
        # Last, so that nothing can go wrong between here and the workers: a load that is handed
        # out and never arrives there would never be answered.
        loads, failed_loads, cancelled_loads = self.loads.take()
        return StepPlan(
            boot=self.boot,
            arena_generation=self.arena_generation,
            namespace=self.namespace,
            stores=stores,
            rescues=saved,
            loads=loads,
            failed_loads=failed_loads,
            cancelled_loads=cancelled_loads,
        )

    def _ask(self, rescues: list[Tracked], current: list[Tracked]) -> None:
        asked = False
        if self.identity.describe(self.channel) and self.namespace and self.channel.usable:
            due = [tracked for tracked in current if tracked.retry_step <= self.step]
            asked = self.stores.ask(rescues + due, self.step)
        due_now = rescues and self.stores.waiting  # asked in an earlier step, last chance in this
        if asked or due_now or self.loads.waiting:
            self._wait_for_answers(LAST_WAIT_SECONDS if rescues else ANSWER_WAIT_SECONDS)
        behind = [t for t in rescues if t.refusal is Reason.BEING_WRITTEN]
        if behind and self.stores.ask(behind, self.step):
            # The commits they were behind may have come after the first question. No later step
            # can read these blocks.
            self._wait_for_answers(LAST_WAIT_SECONDS)

    def _wait_for_answers(self, seconds: float) -> None:
        self.channel.wait_until(
            lambda: not self.stores.waiting and not self.loads.waiting, seconds, trip=False
        )

    def _after_rescue(self, rescues: list[Tracked]) -> None:
        """The last moment in which the blocks of these could be read has been planned."""
        for tracked in rescues:
            self.stores.give_back(tracked.account.forget_blocks())
            if tracked.account.ended:
                reason = self._not_asked() or tracked.refusal or Reason.RESERVE_DEADLINE
                tracked.account.give_up(reason)

    def _advance_live(self, tracked: Tracked, scheduled_tokens: Mapping[str, int]) -> bool:
        """Bring one account up to date; whether it may want something in this step."""
        request = tracked.request
        if tracked.load is not None:
            self._advance(tracked, tracked.load.local_tokens, None)
            return True
        tracked.loads_elsewhere = waits_for_load(request)
        scheduled = scheduled_tokens.get(request.request_id, 0)
        valid = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if tracked.loads_elsewhere or tracked.account.is_closed_at(valid):
            return False
        self._advance(tracked, valid, None)
        return True

    def _advance(self, tracked: Tracked, valid: int, table: Sequence[int] | None) -> None:
        account = tracked.account
        named = tracked.named_chunks
        if named < len(account.fates):
            self.stores.give_back(account.truncate(named * self.chunk_tokens))
        account.advance(min(valid, named * self.chunk_tokens))
        if account.needs_table:
            if table is None:
                assert self.block_table is not None, "bind_kv_cache_manager comes first"
                table = self.block_table(tracked.request.request_id)[0]
            account.capture(table)

    def allocation_failed(self, request_id: str, external_tokens: int) -> None:
        """We could not take note of an allocation: the load that vLLM waits for must fail."""
        tracked = self.live.get(request_id)
        if external_tokens and (tracked is None or tracked.load is None):
            self.loads.orphans.append(request_id)
        elif tracked is not None and tracked.load is not None:
            tracked.load.failed = True

    def plan_after_failure(self) -> StepPlan:
        """The plan could not be made: store nothing, and fail every load that vLLM waits for."""
        self.loads.fail_all()
        _, failed_loads, cancelled_loads = self.loads.take()
        return StepPlan(failed_loads=failed_loads, cancelled_loads=cancelled_loads)

    # ------------------------------------------------------------ what the server says

    def on_connected(self, welcome: Welcome) -> None:
        """A server is there; all that is owed is asked of it."""
        self.boot = welcome.boot
        self.arena_generation = welcome.arena_generation

    def on_lost(self) -> None:
        """The server is gone, and with it every lease, slot and fact."""
        self.boot = self.namespace = ""
        self.lookups.lost()
        self.loads.lost()
        self.stores.lost()
        for tracked in self.live.values():
            tracked.account.lose_server()
            tracked.refusals = tracked.retry_step = 0
            if tracked.load is None:
                tracked.lookup = None
        self.accounts.lose_server()

    def on_push(self, push: Opened | Closed | Settled) -> None:
        """The server opened or closed our namespace, or ended reservations of ours."""
        if isinstance(push, Settled):
            self.stores.settle(push)
        elif isinstance(push, Opened):
            self.namespace = push.namespace
            logger.info(
                "kvledger: attached to the server (boot %s), namespace %s",
                self.boot,
                self.namespace,
            )
        else:
            self.namespace = ""
            self.lookups.lost()
            for tracked in self.live.values():
                if tracked.load is None:
                    tracked.lookup = None  # its lease went with the namespace: ask again

    def on_refused(self, error: Error) -> None:
        """The server refuses this engine; the operator is told once, and it runs without cache."""
        self.accounts.tell_refusal(error.code, error.message)

    # ------------------------------------------------------------ inside

    def _tracked(self, request: EngineRequest) -> Tracked:
        tracked = self.live.get(request.request_id)
        if tracked is None:
            decision = self.policy.decide(request)
            account = Account(
                request.request_id,
                chunk_tokens=self.chunk_tokens,
                blocks_per_chunk=self.blocks_per_chunk,
                rule=decision.store,
            )
            tracked = Tracked(request=request, account=account, no_load=decision.no_load)
            self.live[request.request_id] = tracked
        return tracked

    def _look_up(self, tracked: Tracked) -> None:
        described = self.identity.describe(self.channel)
        unavailable = self._unavailable()
        if unavailable is None and not described:
            unavailable = Reason.IDENTITY_PENDING
        names = chunk_names(tracked.request.block_hashes, self.blocks_per_chunk)
        tracked.lookup = self.lookups.ask(names, unavailable)

    def _let_go(self, tracked: Tracked) -> None:
        if tracked.lookup is not None:
            self.lookups.release(tracked.lookup)
            tracked.lookup = None

    def _miss(self, tracked: Tracked, reason: Reason | None) -> tuple[int, bool]:
        tracked.miss = reason
        return 0, False

    def _unavailable(self) -> Reason | None:
        """Why nothing can be asked of the server now; None if it can."""
        if not self.channel.connected:
            return Reason.SERVER_ABSENT
        if self.channel.silent:
            return Reason.SERVER_SILENT
        return None

    def _not_asked(self) -> Reason | None:
        """Why no slot can be asked for now; None if one can."""
        unavailable = self._unavailable()
        if unavailable is None and not self.identity.describe(self.channel):
            unavailable = Reason.IDENTITY_PENDING
        if unavailable is None and not self.namespace:
            unavailable = Reason.NAMESPACE_OPENING
        return unavailable

    def _flush(self) -> None:
        self.stores.flush()
        self.lookups.flush()
