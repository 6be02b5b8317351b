"""An engine that the server keeps, because a rank may still be writing, comes back as another."""

from __future__ import annotations

from conversation import attach, held, names, reserve
from servers import StartServer, wait_until


def test_an_engine_that_was_kept_gets_a_new_generation(server: StartServer) -> None:
    """The process lives, so the slot is quarantined and the engine remembered; a plan that names
    the generation of before must still be recognised."""
    running = server()
    scheduler, (worker,) = attach(running.socket_path)
    before = scheduler.connection.welcome.arena_generation
    wait_until(lambda: bool(reserve(scheduler, names("a", 1))))
    worker.connection.close()
    scheduler.wait_closed()
    assert held(running) == (0, 0, 1)
    scheduler, (worker,) = attach(running.socket_path)
    after = {talker.connection.welcome.arena_generation for talker in (scheduler, worker)}
    assert len(after) == 1
    assert before not in after
    assert held(running) == (0, 0, 0)
