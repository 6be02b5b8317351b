"""A wrong server: catalog, entries, eviction, space, slabs, sessions, attachments."""

from __future__ import annotations

from mutant import Mutant, mutant, mutant_of

SCENARIO = "sim/test_mutant_scenarios.py::test_"
HOLE = "sim/test_mutant_holes.py::test_"

CATALOG: list[Mutant] = [
    mutant(
        "reuses_a_slot_while_a_writer_lives",
        "catalog",
        "        if reservation.waiting_ranks:\n            self.space.slots.change_owner",
        "        if False:\n            self.space.slots.change_owner",
        tests=SCENARIO + "slot_of_a_failed_rank",
        why="A late rank writes into another engine's block: wrong answers.",
    ),
    mutant(
        "first_commit_counts",
        "catalog",
        "            reservation.waiting_ranks &= ~(1 << rank)\n            assert",
        "            reservation.waiting_ranks = 0\n            assert",
        tests=SCENARIO + "slow_rank",
        why="A block is a hit before the last rank has written its part.",
    ),
    mutant(
        "shows_a_chunk_before_its_parent",
        "catalog",
        "            if entry.parent is not None and not entry.parent.visible:",
        "            if False:",
        tests="sim/test_stores.py::test_orphaned_chunks_are_not_readable_before_their_parents",
        why="A look-up finds a tail whose head is not written.",
    ),
    mutant(
        "counts_what_is_being_written_as_present",
        "catalog",
        "            elif not entry.visible:\n",
        "            elif False:\n",
        tests=HOLE + "reader_of_a_write_that_fails",
        why="The second engine's account says that blocks are there which may never be.",
    ),
    mutant(
        "second_look_up_keeps_the_first_lease",
        "catalog",
        "        self.release(engine, [lease])\n",
        "",
        tests="test_catalog.py::test_matching_again_replaces_the_lease",
        why="Leases leak, and with them memory that can never be evicted.",
    ),
    mutant(
        "lease_reaches_one_chunk_too_far",
        "catalog",
        "first + count > tail.depth + 1",
        "first + count > tail.depth + 2",
        tests="test_catalog.py::test_locate_answers_for_leased_chunks_only",
        why="An engine is given the slot of a block that it has no claim on.",
    ),
    mutant(
        "leases_survive_their_engine",
        "catalog",
        "        self.release(engine, list(books.leases))\n",
        "",
        tests=HOLE + "lease_of_an_engine_that_is_gone",
        why="Each killed engine pins memory for ever.",
    ),
    mutant(
        "reservations_never_expire",
        "catalog",
        "late = books.reserved_before(step - self.reservation_steps)",
        "late = books.reserved_before(0)",
        tests="test_catalog.py::test_reservations_expire_by_the_steps_of_their_own_engine",
        why="Slots whose writer has forgotten them are lost.",
    ),
    mutant(
        "a_hit_is_no_use",
        "catalog",
        "            self._touch(tail, now)\n        if chunks == total:",
        "        if chunks == total:",
        tests=HOLE + "what_is_used_is_kept",
        why="The most used prompt is evicted as if nobody had asked for it.",
    ),
    mutant(
        "hangs_a_chunk_on_anybodys_reservation",
        "catalog",
        "reservation.number in books.open)",
        "reservation.number > 0)",
        tests="test_catalog.py",
        why="One engine's abort takes another engine's blocks with it.",
    ),
    mutant(
        "commit_of_one_rank_lifts_all_quarantine",
        "catalog",
        "        if reservation is not None:\n"
        "            self._leave_quarantine(books, reservation, 1 << rank)",
        "        if reservation is not None:\n"
        "            self._leave_quarantine(books, reservation, -1)",
        tests="test_catalog_quarantine.py",
        why="The slot is reused while the other rank still writes.",
    ),
    mutant(
        "no_bound_on_reservations",
        "catalog",
        "if len(books.open) + len(books.quarantine) >= self.max_reservations:",
        "if len(books.open) >= self.max_reservations:",
        tests="test_catalog.py::test_no_more_reservations_than_allowed",
        why="An engine with a hanging rank takes the whole arena.",
    ),
]

ENTRIES: list[Mutant] = [
    mutant_of(
        "evicts_a_parent",
        (
            "entries",
            "return self.visible and not self.leases and self.children is None",
            "return self.visible and not self.leases",
        ),
        (
            "space",
            '        assert entry.children is None, "an entry with children is never removed"\n',
            "",
        ),
        tests="sim/test_sharing.py::test_eviction_leaves_whole_prefixes",
        why="The head of a chain goes first: all behind it is unreachable and takes memory.",
    ),
    mutant(
        "evicts_what_is_leased",
        "entries",
        "return self.visible and not self.leases and self.children is None",
        "return self.visible and self.children is None",
        tests=SCENARIO + "evicted_while_loading",
        why="A block is overwritten while it is being loaded: wrong answers.",
    ),
    mutant(
        "slots_come_in_the_wrong_order",
        "entries",
        "        offsets.reverse()\n",
        "",
        tests=SCENARIO + "two_rounds",
        why="Every load puts the right blocks in the wrong places: wrong answers.",
    ),
    mutant(
        "search_stops_early",
        "entries",
        "while high - low > 1:",
        "while high - low > 2:",
        tests="test_catalog.py::test_a_look_up_finds_the_longest_prefix",
        why="Hits are a chunk shorter than they could be, now and then.",
    ),
    mutant(
        "finds_half_written_chunks",
        "entries",
        "if entry is None or not entry.visible or entry.depth != position:",
        "if entry is None or entry.depth != position:",
        tests=SCENARIO + "slow_rank",
        why="A half-written block is a hit: wrong answers.",
    ),
    mutant(
        "finds_a_name_at_any_depth",
        "entries",
        "if entry is None or not entry.visible or entry.depth != position:",
        "if entry is None or not entry.visible:",
        tests="test_catalog_names.py",
        why="Names that are no chain get slots of other chunks than they ask for.",
    ),
    mutant(
        "never_remembers_what_was_evicted",
        "entries",
        "if evicted_at is not None:",
        "if False:",
        tests=HOLE + "what_is_used_is_kept",
        why="An operator is told that a prompt was never seen, and does not add memory.",
    ),
]

SPACE: list[Mutant] = [
    mutant(
        "evicts_the_newest",
        "eviction",
        "heapq.heappush(self._heap, (candidate.last_used,",
        "heapq.heappush(self._heap, (1e18 - candidate.last_used,",
        tests="test_eviction.py",
        why="The prompt in use is evicted, and the oldest is kept.",
    ),
    mutant(
        "a_later_use_does_not_count",
        "eviction",
        "elif candidate.last_used > key:",
        "elif False:",
        tests=HOLE + "what_is_used_is_kept",
        why="The system prompt that all share is evicted by age.",
    ),
    mutant(
        "parents_never_become_leaves",
        "space",
        "            index.leaves.offer(parent)\n            entry.parent = None",
        "            entry.parent = None",
        tests="sim/test_sharing.py::test_twelve_conversations_in_too_little_memory",
        why="After a while nothing can be evicted, and nothing is stored any more.",
    ),
    mutant(
        "no_floor_for_a_namespace",
        "space",
        "return self.used_bytes(namespace) - lost_bytes >= min(self.floor_bytes, equal_share)",
        "return True",
        tests="test_space.py::test_a_floor_keeps_one_model_from_flushing_another",
        why="One busy model flushes all others out of the cache.",
    ),
    mutant(
        "reclaims_a_page_that_is_leased",
        "space",
        "if entry.leases or not entry.visible:",
        "if not entry.visible:",
        tests="test_space.py",
        why="Another model's blocks overwrite one that is being loaded.",
    ),
    mutant(
        "hands_out_pages_that_are_not_ready",
        "slabs",
        "        self._free_pages.append(self.ready_pages)\n        self.ready_pages += 1",
        "        self.ready_pages += 1\n        self._free_pages.append(self.ready_pages)",
        tests="test_slabs.py",
        why="The first writer of a page pays for its memory, and the last page lies outside.",
    ),
    mutant(
        "frees_a_neighbours_slot",
        "slabs",
        "page.vacate(offset % self.page_bytes // page.object_bytes)",
        "page.vacate(0)",
        tests="test_slabs.py::test_random_traffic_never_overlaps_and_loses_nothing",
        why="Two blocks share one slot: wrong answers.",
    ),
]

SERVER: list[Mutant] = [
    mutant(
        "drops_what_is_not_sent_at_once",
        "server.session",
        "        del self._outgoing[:sent]\n",
        "        self._outgoing.clear()\n",
        tests="test_server_backlog.py",
        why="A busy engine loses answers and waits for its deadlines.",
    ),
    mutant(
        "keeps_everything_for_who_does_not_read",
        "server.session",
        "if len(self._outgoing) + len(frame) > MAX_OUTGOING_BYTES:",
        "if False:",
        tests="test_server_backlog.py",
        why="One stopped engine fills the server's memory.",
    ),
    mutant(
        "closes_without_a_word",
        "server.session",
        "        self._owner.session_closed(self)\n",
        "",
        tests="test_server_going.py::test_all_processes_of_an_engine_get_one_new_generation",
        why="An engine that lost a connection keeps its leases, and cannot come back.",
    ),
    mutant(
        "detaches_one_process_only",
        "server.attachments",
        '            self._detach_all(engine, f"{process} has lost its connection")\n',
        "            engine.namespace, engine.opened = None, False\n",
        tests=(
            "test_server_going.py::"
            "test_a_rank_that_attaches_again_lifts_its_quarantine_and_the_generation_changes",
            "test_server_going.py::test_all_processes_of_an_engine_get_one_new_generation",
        ),
        why="Ranks of one engine follow plans of two attachments.",
    ),
    mutant(
        "one_generation_for_ever",
        "server.attachments",
        "            engine.generation = next(self._generations)\n",
        "            pass\n",
        tests="test_server_generation.py",
        why="A plan from before a lost connection is followed after it.",
    ),
    mutant(
        "quarantine_is_never_lifted",
        "server.attachments",
        "            self._catalog.rank_acknowledged(engine.id, process.rank)\n",
        "            pass\n",
        tests="test_server_going.py::"
        "test_a_rank_that_attaches_again_lifts_its_quarantine_and_the_generation_changes",
        why="Each reconnection loses some slots for good.",
    ),
    mutant(
        "anybody_may_take_an_engines_id",
        "server.attachments",
        "            elif identity is None or identity != holder.identity:",
        "            elif False:",
        tests="test_server_going.py::test_an_engine_id_belongs_to_living_processes",
        why="Two engines with one id throw each other out, for ever.",
    ),
    mutant(
        "drops_before_the_workers_are_told",
        "server.attachments",
        "                session.send(Closed(id=PUSH_ID, reason=reason))\n",
        "                closed = Closed(id=PUSH_ID, reason=reason)\n"
        "                self._loop.call_later(0.5, session.send, closed)\n",
        tests="test_server_hostile.py::test_one_look_after_a_copy_sees_that_the_slots_are_gone",
        why="A worker copies from a slot that is another engine's already.",
    ),
    mutant(
        "ranks_parts_overlap",
        "server.engines",
        "            end + _round_up(size, PART_ALIGNMENT_BYTES)\n",
        "            max(end, _round_up(size, PART_ALIGNMENT_BYTES))\n",
        tests=SCENARIO + "ranks_and_layout",
        why="With tensor parallelism the ranks overwrite each other's parts.",
    ),
    mutant(
        "layout_is_no_part_of_the_namespace",
        "server.engines",
        'descriptor["layout.part_bytes"] = ',
        "_ = ",
        tests="test_server_engines.py::test_a_different_layout_is_a_different_namespace",
        why="Engines with other tensor shapes find each other's blocks.",
    ),
    mutant(
        "settles_without_saying_so",
        "server.service",
        "            self.attachments.settle(settlements)\n        return Done(id=request.id)\n\n"
        "    def _abort",
        "        return Done(id=request.id)\n\n    def _abort",
        tests=SCENARIO + "two_rounds",
        why="Accounts never close, and no operator sees any.",
    ),
]
