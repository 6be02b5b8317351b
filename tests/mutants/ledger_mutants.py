"""Wrong accounts: kvledger.ledger, kvledger.fates, kvledger.naming, kvledger.protocol."""

from __future__ import annotations

from mutant import Mutant, mutant, mutant_of

SCENARIO = "sim/test_mutant_scenarios.py::test_"
HOLE = "sim/test_mutant_holes.py::test_"

LEDGER: list[Mutant] = [
    mutant(
        "cumulative_as_incremental",
        "ledger",
        "self.valid_chunks = valid_tokens // self.chunk_tokens",
        "self.valid_chunks += valid_tokens // self.chunk_tokens",
        tests=SCENARIO + "two_rounds",
        why="The second founding bug: absolute numbers are added up, and blocks that hold nothing "
        "yet are stored.",
    ),
    mutant(
        "keeps_the_old_block_table",
        "ledger",
        "                self._owe(chunk, Event.FORGET)\n        self._blocks.clear()",
        "                self._owe(chunk, Event.FORGET)",
        tests=HOLE + "resumed_in_other_blocks",
        why="After a preemption the old blocks are still taken for the request's (appended to, not "
        "replaced): other requests' bytes are stored.",
    ),
    mutant(
        "keeps_fates_across_a_boot",
        "ledger",
        "if not (self.ended and fate in FINAL):",
        "if fate not in FINAL:",
        tests=HOLE + "boot_without_another_chunk",
        why="What the old server knew is taken for stored in the new one: silent drops.",
    ),
    mutant_of(
        "stores_in_the_step_of_a_failed_load",
        (
            "ledger",
            "del self.fates[self.ever_valid :]\n",
            "self.ever_valid = self.valid_chunks = len(self.fates)\n",
        ),
        (
            "vllm.loads",
            "        account.begin_load(first, stop)\n",
            "        account.begin_load(first, stop)\n"
            "        for n in range(first, stop):\n"
            "            account._blocks[n] = tuple(table[n * width : (n + 1) * width])\n",
        ),
        tests=HOLE + "store_after_a_load_that_failed_half_way",
        why="Blocks that a failed load has half written are stored before they are computed.",
    ),
    mutant(
        "reads_the_null_block",
        "ledger",
        "if len(blocks) == width and all(blocks):",
        "if len(blocks) == width:",
        tests="test_ledger.py::test_the_null_block_is_never_read",
        why="Blocks that vLLM has freed behind a sliding window are stored as whatever block 0 "
        "holds.",
    ),
    mutant(
        "takes_any_answer_for_its_own",
        "ledger",
        "if self._asked.get(chunk) != question:",
        "if chunk not in self._asked:",
        tests="test_ledger.py::test_an_answer_belongs_to_its_question",
        why="A slot that was asked for under another name is used: foreign bytes under a name.",
    ),
    mutant(
        "settles_by_chunk_alone",
        "ledger",
        "if grant is None or grant.reservation != reservation:",
        "if grant is None:",
        tests="test_ledger.py::test_a_settlement_of_an_older_reservation_is_ignored",
        why="An old reservation's end is taken for the new one's: a block counts as stored that "
        "is not.",
    ),
    mutant(
        "rule_reaches_one_chunk_too_far",
        "ledger",
        "self.rule.chunks is not None and chunk >= self.rule.chunks",
        "self.rule.chunks is not None and chunk > self.rule.chunks",
        tests="sim/test_switches.py::test_store_only_the_prompt[chunk16]",
        why="A chunk of generated tokens is stored though only prompts may be.",
    ),
    mutant(
        "heals_for_ever",
        "ledger",
        "or self._heals >= MAX_HEALS",
        "",
        tests="test_ledger_ends.py::test_heal_owes_the_chain_again_a_few_times",
        why="Under eviction pressure a request stores its whole chain anew at every step.",
    ),
    mutant(
        "forgets_a_slot_at_preemption",
        "ledger",
        "                unused.append(self.grants.pop(chunk).reservation)",
        "                self.grants.pop(chunk)",
        tests="test_ledger.py::test_slots_that_were_not_used_in_time_are_returned",
        why="A slot of the server is never given back: memory leaks until the engine ends.",
    ),
    mutant(
        "forgets_a_slot_at_the_end",
        "ledger",
        "                grant = self.grants.pop(chunk, None)\n",
        "                grant = self.grants.pop(chunk, None) and None\n",
        tests="test_ledger_ends.py::test_give_up_returns_granted_slots",
        why="As before, for requests that end.",
    ),
    mutant(
        "skips_what_is_frozen_without_reason",
        "ledger",
        "        if self.frozen is not None:\n            return self.frozen",
        "        if self.frozen is not None:\n            return None",
        tests="sim/test_sharing.py::test_new_weights[1-sync-chunk16]",
        why="A request of before stores bytes of the old weights under the new epoch.",
    ),
    mutant(
        "believes_the_index_of_a_failed_load",
        "ledger",
        "            return\n        self.known_chunks = 0\n        del",
        "            return\n        del",
        tests=HOLE + "store_after_a_load_that_failed_half_way",
        why="What could not be loaded counts as present in the server, and is not stored anew.",
    ),
    mutant(
        "truncates_one_chunk_too_few",
        "ledger",
        "keep = tokens // self.chunk_tokens",
        "keep = -(-tokens // self.chunk_tokens)",
        tests="test_ledger_ends.py::test_truncation_takes_names_away",
        why="A session whose tokens were cut back stores the old tokens' KV under the new name.",
    ),
    mutant(
        "drops_what_was_cut_without_a_word",
        "ledger",
        'self.dropped[f"{final}:{reason}" if final is Fate.SKIPPED else final] += 1',
        "pass",
        tests="test_ledger_ends.py::test_truncation_takes_names_away",
        why="Blocks of tokens that were cut off vanish from the accounts.",
    ),
]

FATES: list[Mutant] = [
    mutant(
        "server_cannot_give_up_a_granted_slot",
        "fates",
        "        (Fate.GRANTED, Event.ABANDON): Fate.SKIPPED,\n",
        "",
        tests="sim/test_stores.py::test_slot_that_is_given_up_before_the_workers_are_told",
        why="A hook raises when a head's copy fails at the wrong moment; its slots leak.",
    ),
    mutant(
        "abandoned_is_stored",
        "fates",
        "(Fate.IN_FLIGHT, Event.ABANDON): Fate.SKIPPED",
        "(Fate.IN_FLIGHT, Event.ABANDON): Fate.STORED",
        tests=HOLE + "reader_of_a_write_that_fails",
        why="Blocks whose copy has failed are reported as stored.",
    ),
    mutant(
        "gives_up_what_workers_copy",
        "fates",
        "for fate in (Fate.OWED, Fate.ASKED, Fate.GRANTED):",
        "for fate in (Fate.OWED, Fate.ASKED, Fate.GRANTED, Fate.IN_FLIGHT):",
        tests="test_fates.py::test_what_workers_copy_is_not_given_up",
        why="A block that is about to be stored is reported as skipped.",
    ),
]

NAMING: list[Mutant] = [
    mutant_of(
        "chunk_is_named_by_its_first_block",
        (
            "naming",
            "first_end = (first_chunk + 1) * blocks_per_chunk - 1",
            "first_end = first_chunk * blocks_per_chunk",
        ),
        (
            "vllm.tracked",
            "name_of(hashes[(chunk + 1) * width - 1])",
            "name_of(hashes[chunk * width])",
        ),
        tests="sim/test_loads.py::test_partial_hits[sync-chunk64]",
        why="Two prompts that differ inside a chunk share it: wrong answers.",
    ),
    mutant(
        "namespace_fields_run_together",
        "naming",
        '            digest.update(len(encoded).to_bytes(4, "little"))\n',
        "",
        tests="test_naming.py::test_a_value_cannot_pass_for_a_field",
        why="Two different engines can have one namespace.",
    ),
    mutant(
        "namespace_depends_on_the_path",
        "naming",
        "        if field.startswith(DISPLAY_PREFIX):\n            continue\n",
        "",
        tests="test_naming.py::test_what_is_for_display_decides_nothing",
        why="The same model at two paths shares nothing.",
    ),
    mutant_of(
        "drops_the_salt",
        (
            "vllm.tracked",
            "        hashes = self.request.block_hashes\n",
            "        block = self.account.chunk_tokens // width\n"
            "        tokens = list(self.request._all_token_ids)\n"
            "        hashes = [\n"
            '            __import__("hashlib").sha256(\n'
            "                repr(tokens[: (n + 1) * block]).encode()\n"
            "            ).digest()\n"
            "            for n in range(len(self.request.block_hashes))\n"
            "        ]\n",
        ),
        (
            "vllm.scheduler_side",
            "names = chunk_names(tracked.request.block_hashes, self.blocks_per_chunk)",
            "names = tracked.names(0, tracked.named_chunks)",
        ),
        tests="sim/test_sharing.py::test_salts_do_not_share",
        why="Names of tokens alone: one tenant is answered from another tenant's KV.",
    ),
    mutant(
        "short_hashes_are_not_padded",
        "naming",
        'return Name(block_hash.ljust(NAME_BYTES, b"\\0"))',
        "return Name(block_hash)",
        tests="test_naming.py::test_a_short_hash_is_padded",
        why="With a 16-byte hash two names are read as one: nothing is found, or the wrong block.",
    ),
]

PROTOCOL: list[Mutant] = [
    mutant(
        "last_frame_waits_for_the_next",
        "protocol",
        "if len(self._buffer) < end:",
        "if len(self._buffer) <= end:",
        tests="test_protocol.py::test_a_stream_may_be_cut_anywhere",
        why="Every answer comes one message late: the engine waits for its deadlines.",
    ),
    mutant(
        "takes_frames_of_any_length",
        "protocol",
        "if length > MAX_FRAME_BYTES:",
        "if length > 1 << 40:",
        tests="test_protocol.py::test_a_frame_that_is_too_long_is_refused_as_soon_as_it_is_announced",
        why="A peer makes the server buffer gigabytes.",
    ),
    mutant(
        "numbers_lose_their_tail",
        "protocol",
        "    if len(packed) % 8:\n        raise",
        "    packed = packed[: len(packed) // 8 * 8]\n    if len(packed) % 8:\n        raise",
        tests="test_protocol.py::test_broken_packs_of_numbers_are_refused",
        why="A damaged message commits fewer blocks than it says, without a word.",
    ),
]
