"""A second list, made from the source alone by somebody who did not write the tests.

Where the subset begins with a test of a ``test_second_hole`` file, the suite had let the mutant
live, and that test was written for it.
"""

from __future__ import annotations

from dataclasses import replace

from mutant import Mutant, mutant

HOLE = "test_second_holes.py::test_"
LIFE = "sim/test_second_hole_lives.py::test_"

_LIST: list[Mutant] = [
    mutant(
        "an_engine_leaves_its_namespace_attached",
        "catalog",
        "            self.space.detach(books.namespace)  # after attach: it may be the same one\n",
        "",
        tests=("test_catalog.py", "test_catalog_property.py", "test_space.py"),
        why="Each update of the weights leaves a namespace behind that nobody works in and that "
        "keeps its floor: the arena fills with objects that nobody can find.",
    ),
    mutant(
        "the_last_chunk_but_one_is_overlooked",
        "entries",
        "low, high = 0, total - 1",
        "low, high = 0, total - 2",
        tests=("test_catalog.py", "test_catalog_property.py", "sim/test_sharing.py"),
        why="A prompt of which all but the last chunk is there loses one chunk of its hit: the "
        "usual case of a conversation that went on.",
    ),
    mutant(
        "a_name_that_comes_back_stays_counted_as_a_ghost",
        "space",
        "        if index.ghosts.pop(entry.name, None) is not None:\n"
        "            self.total_ghosts -= 1\n",
        "        index.ghosts.pop(entry.name, None)\n",
        tests=("test_space.py", "test_catalog.py", "test_catalog_property.py"),
        why="The count drifts upwards until no name is remembered, and at last every eviction "
        "raises: nothing is stored any more.",
    ),
    mutant(
        "a_cut_request_still_believes_its_old_look_up",
        "ledger",
        "        self.known_chunks = min(self.known_chunks, keep)\n",
        "",
        tests=(HOLE + "what_was_known_beyond_a_cut_is_not_known_of_other_tokens", "test_ledger.py"),
        why="The next turn of a session has other tokens, but its chunks count as present at the "
        "server: they are dropped silently.",
    ),
    mutant(
        "a_skipped_chunk_cannot_be_loaded",
        "fates",
        "    for fate in (Fate.OWED, Fate.ASKED, Fate.PRESENT, Fate.STORED, Fate.LOADED, "
        "Fate.SKIPPED):\n",
        "    for fate in (Fate.OWED, Fate.ASKED, Fate.PRESENT, Fate.STORED, Fate.LOADED):\n",
        tests=(LIFE + "what_a_request_did_not_store_comes_back_by_a_load", "test_fates.py"),
        why="A preempted request whose chunk was skipped and has been stored by another comes "
        "back by a load: the hook raises, and the hit is lost.",
    ),
    mutant(
        "what_a_compaction_lets_go_is_never_queued_again",
        "eviction",
        "            else:\n                candidate.queued = False\n"
        "        heapq.heapify(kept)\n",
        "        heapq.heapify(kept)\n",
        tests=("test_eviction.py", "test_space.py"),
        why="Objects that were in use at the moment of a compaction can never be evicted: the "
        "arena fills up with them, until nothing is stored any more.",
    ),
    mutant(
        "a_field_that_one_rank_lacks_is_no_disagreement",
        "server.engines",
        "names = process.fields.keys() | other.fields.keys()",
        "names = process.fields.keys() & other.fields.keys()",
        tests="test_server_engines.py",
        why="Ranks that arrange their blocks differently are served under the description of one "
        "of them: wrong bytes for whoever shares its namespace.",
    ),
    mutant(
        "layers_at_unequal_distances_are_one_stack",
        "vllm.transfer",
        "        and (len(stack) == 1 or step == _distance(stack[-2], last))\n",
        "",
        tests="test_vllm_transfer.py",
        why="Of models with padded or shared layers other memory than the layer's is copied, out "
        "and in: the layer keeps what a stranger left there.",
    ),
    mutant(
        "the_local_hit_is_noted_only_once",
        "vllm.scheduler_side",
        "        tracked.local_tokens = local_tokens\n"
        "        if tracked.first_local_tokens is None:\n"
        "            tracked.first_local_tokens = local_tokens\n",
        "        if tracked.first_local_tokens is None:\n"
        "            tracked.first_local_tokens = tracked.local_tokens = local_tokens\n",
        tests=("sim/test_preemption.py", "sim/test_loads.py"),
        why="After a preemption, or a wait in the queue, the load begins where the first local "
        "hit ended: blocks count as loaded that hold other bytes.",
    ),
    mutant(
        "commits_for_the_old_server_go_to_the_new_one",
        "vllm.worker_side",
        '        self._namespace = ""\n        self._unsent = []\n',
        '        self._namespace = ""\n',
        tests=(
            HOLE + "a_commit_that_was_not_heard_is_not_repeated_to_another_server",
            "test_vllm_worker_side.py",
        ),
        why="Each server counts its reservations from one. A commit that the old one did not "
        "hear tells the new one that a slot is written which is not: wrong bytes are served.",
    ),
    mutant(
        "stops_reading_at_a_short_piece",
        "connection",
        "            pieces.append(piece)\n            length += len(piece)\n",
        "            pieces.append(piece)\n            length += len(piece)\n"
        "            if len(piece) < READ_BYTES:\n                break\n",
        tests=(HOLE + "one_look_sees_the_last_words_and_the_end", "test_link.py"),
        why="One system call saved; but a rank that has copied a slot does not see that its "
        "connection has ended behind the last message, and believes what it has read.",
    ),
    mutant(
        "rank_zero_speaks_for_all_ranks",
        "server.service",
        "rank = process.rank if process.role is Role.WORKER else None",
        "rank = process.rank or None",
        tests="sim/test_mutant_scenarios.py::test_slot_of_a_failed_rank",
        why="When the first rank gives a slot up, it is free at once, though another rank may "
        "still be writing it: wrong bytes in whatever is stored there next.",
    ),
    mutant(
        "a_rank_that_cannot_be_told_keeps_its_connection",
        "server.attachments",
        "                if session.has_backlog:\n                    session.close()\n",
        "",
        tests=(HOLE + "a_rank_that_cannot_be_told_loses_its_connection", "test_server_backlog.py"),
        why="Its slots are given to others while it cannot know: it takes what it reads there "
        "for its own.",
    ),
    mutant(
        "loads_are_not_answered_after_a_failed_hook",
        "vllm.connector",
        "lambda: worker.start_loads(plan), worker.fail_loads)",
        "lambda: worker.start_loads(plan), lambda: None)",
        tests="sim/test_scenarios_ends.py::test_scenario_20_short_retrieve",
        why="If anything unexpected happens at the start of loads, their requests wait for the "
        "deadline, or get what was half copied.",
    ),
]

SECOND = [replace(item, layer=f"second: {item.layer}") for item in _LIST]
