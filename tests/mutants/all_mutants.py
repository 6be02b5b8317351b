"""The whole list, in the order of the table."""

from __future__ import annotations

import ledger_mutants as ledger
import scheduler_mutants as scheduler
import second_mutants as second
import server_mutants as server
import worker_mutants as worker
from mutant import Mutant

MUTANTS: list[Mutant] = [
    *ledger.LEDGER,
    *ledger.FATES,
    *ledger.NAMING,
    *ledger.PROTOCOL,
    *server.CATALOG,
    *server.ENTRIES,
    *server.SPACE,
    *server.SERVER,
    *scheduler.SCHEDULER,
    *scheduler.LOOKUPS,
    *scheduler.LOADS,
    *scheduler.STORES,
    *worker.WORKERS,
    *worker.CHANNEL,
    *worker.IDENTITY,
    *worker.POLICY,
    *worker.HOOKS,
    *second.SECOND,
]
