"""A wrong connector: its workers, the channel, the identity, the policy, the hooks."""

from __future__ import annotations

from mutant import Mutant, mutant, mutant_of

SCENARIO = "sim/test_mutant_scenarios.py::test_"
HOLE = "sim/test_mutant_holes.py::test_"
WORKER = "vllm.worker_side"

WORKERS: list[Mutant] = [
    mutant(
        "reports_a_finish_twice",
        WORKER,
        "        self._finished, self._failed = set(), set()\n",
        "",
        tests=SCENARIO + "failing_load",
        why="vLLM asserts and dies.",
    ),
    mutant(
        "answers_every_load_with_success",
        WORKER,
        "        if not arrived:\n            self._failed.add",
        "        if False:\n            self._failed.add",
        tests=SCENARIO + "failing_load",
        why="Blocks that were never written are taken for loaded: wrong answers.",
    ),
    mutant(
        "applies_old_slots_to_a_new_server",
        WORKER,
        "return (self.boot, self.arena_generation) == (given.boot, given.arena_generation)",
        "return True",
        tests=SCENARIO + "replaced_server",
        why="Slots of the old server are read in the new one's arena: wrong answers.",
    ),
    mutant_of(
        "rescues_too_late",
        (WORKER, "        self._store(plan, plan.rescues)\n", ""),
        (
            WORKER,
            "            self._store(plan, copies)\n",
            "            self._store(plan, copies)\n            self._store(plan, plan.rescues)\n",
        ),
        tests=SCENARIO + "late_ends",
        why="Blocks of finished requests are read after others have written into them.",
    ),
    mutant(
        "every_rank_loads_the_first_part",
        WORKER,
        "self._part_offsets[copy.group]\n            )\n            load.chunk",
        "0\n            )\n            load.chunk",
        tests=SCENARIO + "ranks_and_layout",
        why="With tensor parallelism all ranks hold the first one's heads.",
    ),
    mutant(
        "commits_what_it_could_not_write",
        WORKER,
        "None if stored else Reason.WRITER_FAILED",
        "None",
        tests=HOLE + "reader_of_a_write_that_fails",
        why="A block that nobody has written is a hit: wrong answers.",
    ),
    mutant(
        "follows_plans_of_another_namespace",
        WORKER,
        "ours = attachment.has_given(given) and given.namespace == self._namespace",
        "ours = attachment.has_given(given)",
        tests="test_vllm_worker_side.py::test_a_plan_of_another_namespace_is_not_followed",
        why="KV of the old weights is stored under the new ones' namespace.",
    ),
    mutant(
        "does_not_look_again_after_a_copy",
        WORKER,
        "            self._poll()  # see the module: the slots must have been ours until here\n",
        "",
        tests="test_vllm_worker_side.py::test_a_load_that_was_overtaken_by_an_epoch_fails",
        why="A load whose slots were taken away meanwhile is believed.",
    ),
    mutant(
        "stores_nothing_without_the_last_hook",
        WORKER,
        "        self.store_planned()  # some ranks are never asked to save what a step computed\n",
        "",
        tests="test_vllm_worker_side.py::"
        "test_a_rank_that_is_not_asked_to_save_stores_before_the_next_step",
        why="With pipeline parallelism some ranks never store, and nothing is ever found.",
    ),
    mutant(
        "load_skips_a_chunk_at_each_budget",
        WORKER,
        "            load.chunk = some.stop\n",
        "            load.chunk = some.stop + (some.stop < len(offsets))\n",
        tests="sim/test_loads.py::test_load_budget_spreads_a_load_over_steps",
        why="Long loads leave holes: wrong answers.",
    ),
    mutant(
        "cancelled_loads_are_answered_twice",
        WORKER,
        "            if request_id in self._loads:\n                self._answer",
        "            if True:\n                self._answer",
        tests="test_vllm_worker_side.py::test_a_load_that_is_complete_cannot_be_cancelled",
        why="vLLM is told of a load that it no longer waits for, and dies.",
    ),
]

CHANNEL: list[Mutant] = [
    mutant(
        "breaker_never_opens",
        "vllm.channel",
        "                self._silent = self._silent or trip\n",
        "",
        tests="test_vllm_channel.py::test_the_breaker_opens_in_vain_and_closes_when_heard",
        why="A stopped server costs every step its longest wait.",
    ),
    mutant(
        "breaker_never_closes",
        "vllm.channel",
        "        if replies:\n            self._silent = False\n",
        "        if replies:\n",
        tests="test_vllm_channel.py::test_the_breaker_opens_in_vain_and_closes_when_heard",
        why="After one hiccup the engine runs without cache for ever.",
    ),
    mutant(
        "answers_of_the_old_server_reach_new_questions",
        "vllm.channel",
        "        self._connection = None\n        self._handlers.clear()\n"
        "        self._silent = False\n",
        "        self._connection = None\n        self._silent = False\n",
        tests="test_vllm_channel.py::test_a_killed_server_is_lost_once_and_a_new_one_is_found",
        why="Handlers of a dead server's questions pile up and count as owed answers.",
    ),
    mutant(
        "never_hears_that_a_server_is_gone",
        "vllm.channel",
        "        self._silent = False\n        self._listener.on_lost()\n",
        "        self._silent = False\n",
        tests=HOLE + "boot_without_another_chunk",
        why="What the old server knew is believed for ever.",
    ),
    mutant(
        "does_not_come_back",
        "link",
        "            self._connection = None\n            connection.close()\n",
        "            connection.close()\n            return\n",
        tests=HOLE + "boot_without_another_chunk",
        why="After a restart of the server every engine must be restarted.",
    ),
]

IDENTITY: list[Mutant] = [
    mutant(
        "counts_the_epoch",
        "vllm.identity",
        "if version else secrets.token_hex(16))",
        "if version else str(int(self.current) + 1))",
        tests=HOLE + "updates_of_two_engines",
        why="The first update of one engine meets the first update of another: wrong answers.",
    ),
    mutant(
        "names_weights_by_their_path",
        "vllm.identity",
        'fields[f"{prefix}.content"] = digest.value',
        'fields[f"{prefix}.content"] = str(model_config.model)',
        tests="test_vllm_identity.py::test_a_checkpoint_saved_over_another_is_another",
        why="A checkpoint saved over another one is answered from the old one's KV.",
    ),
    mutant(
        "leaves_the_cache_dtype_out",
        "vllm.identity",
        '        "cache.dtype": str(cache.cache_dtype),\n',
        "",
        tests="test_vllm_identity.py::test_a_difference_is_named_where_it_is[cache dtype]",
        why="An fp8 engine finds the blocks of a bf16 engine.",
    ),
    mutant(
        "leaves_the_operators_namespace_out",
        "vllm.identity",
        '        "namespace": namespace,\n',
        "",
        tests="sim/test_sharing.py::test_a_difference_never_shares[namespace]",
        why="Tenants that were told apart share.",
    ),
    mutant(
        "a_named_version_is_used_twice",
        "vllm.identity",
        "version, self._next_version = self._next_version, None",
        "version = self._next_version",
        tests="test_vllm_identity.py::test_a_named_version_stands_for_one_update_only",
        why="The second update is answered from the first one's KV.",
    ),
    mutant(
        "does_not_describe_itself_anew",
        "vllm.identity_feed",
        "if self._described is connection and not self._changed:",
        "if self._described is connection:",
        tests="sim/test_sharing.py::test_new_weights[1-sync-chunk16]",
        why="After an update of the weights the engine never gets its new namespace.",
    ),
]

POLICY: list[Mutant] = [
    mutant(
        "never_loads",
        "vllm.policy",
        "        if self._options.min_hit_tokens is not None:\n",
        "        return 1 << 30\n        if self._options.min_hit_tokens is not None:\n",
        tests=SCENARIO + "two_rounds",
        why="The cache is written and never read.",
    ),
    mutant(
        "adapters_share_the_base_models_rules",
        "vllm.policy",
        'if getattr(request, "lora_request", None) is not None:',
        "if False:",
        tests="test_vllm_policy.py",
        why="An adapter's changed file is answered from the old one's KV.",
    ),
    mutant(
        "consumers_store",
        "vllm.policy",
        'self._stores = may_store and options.store != "none"',
        'self._stores = options.store != "none"',
        tests="sim/test_switches.py::test_roles",
        why="An engine that may only read writes.",
    ),
    mutant(
        "reads_for_who_must_not_read",
        "vllm.policy",
        "        if request.skip_reading_prefix_cache:\n",
        "        if False:\n",
        tests="sim/test_loads.py::test_reading_skipped_loads_nothing",
        why="Prompt log-probabilities are missing, because their tokens were loaded.",
    ),
    mutant(
        "ignores_the_requests_own_switch",
        "vllm.policy",
        "    if isinstance(value, bool):\n        return value\n",
        "",
        tests="sim/test_switches.py::test_switches_of_a_request",
        why="A user who asks that a prompt is not stored finds it stored.",
    ),
]

HOOKS: list[Mutant] = [
    mutant(
        "preemptions_pass_unnoticed",
        "vllm.connector",
        "scheduler_output.preempted_req_ids or set()",
        "set()",
        tests=HOLE + "resumed_in_other_blocks",
        why="Blocks that went to another request are stored as the preempted one's.",
    ),
    mutant(
        "takes_every_end_for_an_abort",
        "vllm.connector",
        "aborted=not sampled_to_the_end",
        "aborted=True",
        tests=HOLE + "edges_in_flight",
        why="The last sampled token, which was never fed, counts as a token with KV.",
    ),
    mutant(
        "asks_vllm_to_keep_the_blocks",
        "vllm.connector",
        "        return False, None\n",
        "        return True, None\n",
        tests=HOLE + "hooks_keep_no_block",
        why="Blocks of finished requests are never given back: the engine runs out of memory.",
    ),
    mutant(
        "a_raising_hook_ends_the_engine",
        "vllm.guard",
        "except Exception",
        "except ZeroDivisionError",
        tests="test_vllm_guard.py::test_a_hook_that_raises_is_answered_and_shown",
        why="A bug of the cache takes the engine down.",
    ),
]
