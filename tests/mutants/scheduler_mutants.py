"""A wrong connector: its scheduler's side, from look-ups to stores."""

from __future__ import annotations

from mutant import Mutant, mutant, mutant_of

SCENARIO = "sim/test_mutant_scenarios.py::test_"
HOLE = "sim/test_mutant_holes.py::test_"
SIDE = "vllm.scheduler_side"

SCHEDULER: list[Mutant] = [
    mutant(
        "bound_without_the_hit",
        SIDE,
        "account.advance(min(valid, named * self.chunk_tokens))",
        "account.advance(min(valid - tracked.external_tokens, named * self.chunk_tokens))",
        tests=SCENARIO + "two_rounds",
        why="The first founding bug: what was loaded is left out of the upper bound, and as many "
        "blocks are never stored.",
    ),
    mutant(
        "believes_the_loads_of_others",
        SIDE,
        "            self._unproven_step = self.step + 1\n",
        "            self._unproven_step = 0\n",
        tests="sim/test_scenario_two_connectors.py::test_scenario_19_another_one_fails",
        why="What another connector of the engine has failed to load is stored under good names.",
    ),
    mutant(
        "counts_answered_lookups_only",
        "vllm.lookups",
        "return len(self._held) + len(self._asked)",
        "return len(self._held)",
        tests="sim/test_pitfalls_lookup.py::test_a_burst_leases_no_more_than_its_bound",
        why="A burst of arrivals pins the whole cache.",
    ),
    mutant_of(
        "forgets_the_cap_at_num_tokens",
        (
            SIDE,
            "valid = min(request.num_computed_tokens + scheduled, request.num_tokens)",
            "valid = request.num_computed_tokens + scheduled",
        ),
        (
            SIDE,
            "account.advance(min(valid, named * self.chunk_tokens))",
            "account.advance(valid)",
        ),
        # Either bound alone implies the other, because only known tokens are hashed.
        tests="sim/test_stores.py::test_accepted_drafts_of_the_last_step[1-sync]",
        why="Drafts that may be rejected count as tokens with KV.",
    ),
    mutant(
        "stores_the_last_sampled_token",
        SIDE,
        "            valid = min(request.num_computed_tokens, known)\n",
        "            valid = request.num_tokens\n",
        tests=SCENARIO + "edges",
        why="A finished request's last token was never fed; its slot holds anything, and is "
        "stored.",
    ),
    mutant(
        "releases_the_lease_early",
        SIDE,
        "            self.loads.begin(tracked, table, external_tokens)\n",
        "            self.loads.begin(tracked, table, external_tokens)\n"
        "            self._let_go(tracked)\n"
        "            self.lookups.flush()\n",
        tests=SCENARIO + "evicted_while_loading",
        why="What is being loaded may be evicted and overwritten: wrong answers.",
    ),
    mutant(
        "asks_anew_at_every_look_up",
        SIDE,
        "        if tracked.lookup is None:\n            self._look_up(tracked)\n        lookup",
        "        self._look_up(tracked)\n        lookup",
        tests="sim/test_loads.py::test_look_up_is_repeated_while_memory_is_short",
        why="A request that waits leases its hit again and again, and never lets go.",
    ),
    mutant(
        "counts_a_look_up_twice",
        SIDE,
        "        tracked.miss = lookup.reason\n        return external, True",
        "        tracked.miss = lookup.reason\n"
        "        tracked.external_tokens += external\n"
        "        return external, True",
        tests=HOLE + "hit_is_counted_once",
        why="Reports show more loaded tokens than there are.",
    ),
    mutant(
        "ignores_the_reset",
        SIDE,
        "        self.identity.epoch_changed()\n",
        "        return\n",
        tests=SCENARIO + "new_weights",
        why="After an update of the weights old KV is loaded and stored.",
    ),
    mutant(
        "loses_a_settlement",
        SIDE,
        "            self.stores.settle(push)\n",
        "            pass\n",
        tests=SCENARIO + "two_rounds",
        why="Accounts never close.",
    ),
    mutant(
        "believes_a_failed_load",
        SIDE,
        "arrived=request_id not in failed",
        "arrived=True",
        tests="sim/test_failed_loads.py::test_failed_load_is_recomputed[1-sync-chunk16]",
        why="A load that failed is reported as loaded.",
    ),
    mutant(
        "tries_a_failed_load_for_ever",
        SIDE,
        "                tracked.no_load = Reason.LOAD_FAILED\n",
        "",
        tests="sim/test_failed_loads.py::test_failed_load_is_recomputed[1-sync-chunk16]",
        why="A request whose blocks cannot be read never starts.",
    ),
    mutant(
        "loads_in_spite_of_a_twin",
        SIDE,
        "        if self.loads.loading(tracked.names(first, first + 1)[0]):\n",
        "        if False:\n",
        tests="sim/test_loads.py::test_equal_prompts_at_once_are_loaded_once[sync-chunk16]",
        why="Ten equal prompts at once are copied ten times.",
    ),
    mutant(
        "fails_no_allocation_that_it_could_not_note",
        SIDE,
        "            self.loads.orphans.append(request_id)\n",
        "            pass\n",
        tests=HOLE + "allocation_that_cannot_be_noted",
        why="One raised exception, and a request waits for its load for ever.",
    ),
]

LOOKUPS: list[Mutant] = [
    mutant(
        "never_releases",
        "vllm.lookups",
        "        if self._to_release and self._channel.usable:",
        "        if False:",
        tests=SCENARIO + "aborted_in_the_queue",
        why="Every hit stays pinned until the engine ends.",
    ),
    mutant(
        "forgets_the_lease_of_an_unanswered_look_up",
        "vllm.lookups",
        "if lookup.chunks or not lookup.answered:",
        "if lookup.chunks:",
        tests="sim/test_aborts.py::test_queued_before_the_answer[None-chunk16]",
        why="A request that is aborted early leaves a lease that nobody gives back.",
    ),
    mutant(
        "late_answers_keep_their_lease",
        "vllm.lookups",
        "            self.release(lookup)\n            _missed",
        "            _missed",
        tests="test_vllm_lookups.py::test_a_late_answer_is_a_miss_and_gives_its_lease_back",
        why="A slow server's leases pile up.",
    ),
    mutant(
        "waits_for_a_look_up_for_ever",
        "vllm.lookups",
        "return time.monotonic() - lookup.asked_at > self._deadline_seconds",
        "return False",
        tests="test_vllm_lookups.py::test_a_late_answer_is_a_miss_and_gives_its_lease_back",
        why="A stopped server keeps requests in the queue.",
    ),
    mutant(
        "hits_are_a_chunk_too_short",
        "vllm.lookups",
        "lookup.chunks = reply.chunks\n",
        "lookup.chunks = max(reply.chunks - 1, 0)\n",
        tests="sim/test_loads.py::test_partial_hits[sync-chunk16]",
        why="The last chunk of every hit is computed anew.",
    ),
]

LOADS: list[Mutant] = [
    mutant(
        "writes_into_shared_blocks",
        "vllm.loads",
        "table[block] if block in wanted else SKIP_BLOCK",
        "table[block]",
        tests="sim/test_loads.py::test_hit_behind_a_local_one",
        why="A load writes into blocks that running requests read.",
    ),
    mutant(
        "loads_have_no_deadline",
        "vllm.loads",
        "late = now > load.deadline",
        "late = False",
        tests="sim/test_failed_loads.py::test_load_deadline",
        why="A stopped server keeps a request waiting for ever.",
    ),
    mutant(
        "answers_no_load_that_was_not_begun",
        "vllm.loads",
        "                failed.append(request_id)\n",
        "",
        tests="sim/test_failed_loads.py::test_load_deadline",
        why="vLLM waits for a load that nobody makes.",
    ),
    mutant(
        "reset_lets_loads_complete",
        "vllm.loads",
        "            if tracked.load is not None:\n                tracked.load.failed = True\n\n"
        "    def lost",
        "            pass\n\n    def lost",
        tests="test_vllm_loads.py::test_a_reset_fails_all",
        why="KV of the old weights arrives, if the worker's own check fails too.",
    ),
    mutant(
        "a_twin_waits_for_ever",
        "vllm.loads",
        "        self._names.subtract(tracked.loading_names)\n",
        "",
        tests="sim/test_loads.py::test_full_prompt_hit[sync-chunk16]",
        why="Requests wait for a load that has ended long ago.",
    ),
    mutant(
        "rounds_a_hit_up_to_chunks",
        "vllm.loads",
        "written = sum(block != SKIP_BLOCK for block in load.block_ids)",
        "written = len(load.block_ids)",
        tests=HOLE + "hit_is_counted_once",
        why="Reports show more loaded tokens than there are, where a local hit ends in a chunk.",
    ),
]

STORES: list[Mutant] = [
    mutant(
        "never_gives_a_slot_back",
        "vllm.stores",
        "            self._unused.append(number)\n",
        "            pass\n",
        tests=SCENARIO + "preempted_while_owing",
        why="Slots that came too late stay reserved.",
    ),
    mutant(
        "owners_are_off_by_what_was_present",
        "vllm.stores",
        "(tracked, item.chunks.start + result.present + position)",
        "(tracked, item.chunks.start + position)",
        tests=HOLE + "stored_by_another_meanwhile",
        why="Settlements reach the wrong chunks: accounts never close.",
    ),
    mutant(
        "every_chain_begins_at_the_root",
        "vllm.stores",
        'parent = names.pop(0) if chunks.start else b""',
        'parent = (names.pop(0) if chunks.start else b"") and b""',
        tests=SCENARIO + "two_rounds",
        why="Nothing behind the first step of a prompt is ever found.",
    ),
    mutant(
        "forgets_the_rescue_list",
        "vllm.accounts",
        "return [t for t in self.closing if t.account.ended and t.account.open_chunks]",
        "return []",
        tests=SCENARIO + "late_ends",
        why="Blocks of short requests are never stored when the server is slow.",
    ),
    mutant(
        "reports_every_account_twice",
        "vllm.accounts",
        "            self._unsent.popleft()\n",
        "            self._channel.send(_numbered(self._unsent[0]))\n"
        "            self._unsent.popleft()\n",
        tests=HOLE + "every_account_is_reported_once",
        why="The server's totals count requests twice.",
    ),
    mutant(
        "closes_an_account_before_it_is_settled",
        "vllm.accounts",
        "is_settled = tracked.load is None and not tracked.account.open_chunks",
        "is_settled = tracked.load is None",
        tests=SCENARIO + "two_rounds",
        why="Accounts are reported with blocks that have no fate.",
    ),
]
