"""Runs one situation in a forked child, so that nothing a connector does can end the audit.

A hook that blocks cannot be interrupted from inside. The child's watchdog says where it stands and
ends the child; a child that cannot even do that is killed from outside.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

KILL_SECONDS = 15.0
"""How much longer than its watchdog a child may live."""


class ChildDiedError(Exception):
    """The child ended without a result; the message says how."""


def run_in_child(
    call: Callable[[], object],
    on_timeout: Callable[[str], object],
    *,
    timeout_seconds: float,
    log_path: Path | None,
) -> object:
    """The result of ``call`` in a forked child, or of ``on_timeout`` when it takes too long.

    Args:
        call: what to do; its result is pickled.
        on_timeout: called in the child, on another thread, with the place where ``call`` stands.
        log_path: file that takes what the child prints, after what is there; None drops it.

    Raises:
        ChildDiedError: the child died, by a signal or by itself, or had to be killed.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _live(call, on_timeout, timeout_seconds, writer, log_path)
    os.close(writer)
    data, killed = b"", True
    try:
        data, killed = _read_all(reader, timeout_seconds + KILL_SECONDS)
    finally:
        os.close(reader)
        if killed:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if data:
        return pickle.loads(data)
    raise ChildDiedError(_how_it_ended(status, killed))


def _read_all(reader: int, seconds: float) -> tuple[bytes, bool]:
    """Everything until the other end is closed, and whether the time was over first."""
    end = time.monotonic() + seconds
    pieces: list[bytes] = []
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(reader, 1 << 16)
        if not piece:
            return b"".join(pieces), False
        pieces.append(piece)
    return b"", True


def _how_it_ended(status: int, killed: bool) -> str:
    if killed:
        return "the process of the situation did not end by itself and was killed"
    if os.WIFSIGNALED(status):
        return f"the process died of {signal.Signals(os.WTERMSIG(status)).name}"
    return f"the process ended without a result, exit code {os.WEXITSTATUS(status)}"


def _live(
    call: Callable[[], object],
    on_timeout: Callable[[str], object],
    timeout_seconds: float,
    writer: int,
    log_path: Path | None,
) -> NoReturn:
    """The child's whole life; it leaves without the parent's clean-ups."""
    log = os.open(log_path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Compute threads do not survive a fork; more than one would be waited for in vain.
    torch.set_num_threads(1)
    first = threading.Lock()

    def deliver(result: object) -> NoReturn:
        """The first result wins; whoever comes second waits for the end of the process."""
        first.acquire()
        view = memoryview(pickle.dumps(result))
        while view:
            view = view[os.write(writer, view) :]
        os._exit(0)

    main = threading.get_ident()

    def watch() -> None:
        time.sleep(timeout_seconds)
        deliver(on_timeout(_place(sys._current_frames().get(main))))

    threading.Thread(target=watch, daemon=True).start()
    try:
        deliver(call())
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _place(frame: FrameType | None) -> str:
    """The innermost place that belongs to neither Python nor the simulated engine."""
    best = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" in name or ("/sim/" not in name and "/lib/python" not in name):
            best = frame
            break
        frame = frame.f_back
    if best is None:
        return "an unknown place"
    short = "/".join(Path(best.f_code.co_filename).parts[-3:])
    return f"{best.f_code.co_name} ({short}:{best.f_lineno})"


def describe(error: BaseException, connector_files: set[str]) -> tuple[str, str]:
    """An exception in one line, and the innermost place that is not the simulated engine's."""
    places = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    own = [place for place in places if place[0] in connector_files]
    others = [place for place in places if "/kvledger/sim/" not in place[0]]
    name, line, function = (own or others or places or [("?", 0, "?")])[-1]
    first = str(error).strip().splitlines()[:1]
    what = f"{type(error).__name__}: {first[0][:300]}" if first else type(error).__name__
    short = "/".join(Path(name).parts[-3:])
    return what, f"in {function} ({short}:{line})"
