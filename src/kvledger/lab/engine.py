"""Drives a real vLLM engine in a child process.

The child leads a process group of its own, so that a test can kill the whole engine, or only its
core or a worker, and nothing else. Requests overlap: :meth:`EngineProcess.submit` returns at once.
Whatever vLLM prints goes to a log file, whose end is part of every error.

Start one with ``EngineProcess(...)`` (returns at once, so that two can start side by side), wait
with :meth:`EngineProcess.wait_ready`, end it with :meth:`EngineProcess.close`; or use ``with``.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType
from typing import Self

from kvledger.errors import KVLedgerError
from kvledger.lab import messages
from kvledger.lab.conversation import Answer, Conversation
from kvledger.lab.processes import EnginePids, engine_pids, kill_group
from kvledger.lab.requests import REQUEST_SECONDS, Lora, Request, Result

START_SECONDS = 300.0
"""An engine is up after 15 to 35 s on two idle cores; ten times that is a hang."""

CLOSE_SECONDS = 60.0
"""vLLM takes 5 s to end in order."""

_LOG_TAIL_BYTES = 4_000

PATIENT: Mapping[str, object] = {"lookup_deadline_ms": 10_000.0, "load_deadline_ms": 60_000.0}
"""Connector options for where hits are counted: a busy machine turns no hit into a miss."""


class EngineError(KVLedgerError):
    """The engine ended, failed a request or did not answer in time; shows the end of its log."""


def connector_config(
    socket_path: Path | str,
    *,
    engine_id: str | None = None,
    load_failure_policy: str | None = None,
    options: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """vLLM's ``kv_transfer_config`` for kvledger's connector.

    Args:
        socket_path: the server's socket.
        engine_id: the name under which the engine's accounts are found; random if None.
        load_failure_policy: vLLM's ``kv_load_failure_policy``; its own default if None.
        options: more of the connector's options, without the prefix "kvledger.".
    """
    config: dict[str, object] = {
        "kv_connector": "KVLedgerConnector",
        "kv_connector_module_path": "kvledger.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvledger.socket": str(socket_path),
            **{f"kvledger.{name}": value for name, value in (options or {}).items()},
        },
    }
    if engine_id is not None:
        config["engine_id"] = engine_id
    if load_failure_policy is not None:
        config["kv_load_failure_policy"] = load_failure_policy
    return config


class EngineProcess:
    """One engine in a child process; see the module.

    Args:
        model: directory of the model.
        connector: vLLM's ``kv_transfer_config``; None for an engine without a connector.
        dtype: of weights, activations and KV.
        block_size: tokens in a block; the CPU attention wants a multiple of 32.
        max_num_batched_tokens: tokens in one step; smaller than a prompt means chunked prefill.
        max_model_len, max_num_seqs: vLLM's.
        kv_cache_bytes: memory for KV blocks; enough for ``max_model_len`` at least.
        num_blocks: exact number of blocks, instead of ``kv_cache_bytes``.
        hf_overrides: fields over the model's config.json.
        engine_args: more keyword arguments of AsyncEngineArgs; they win.
        env: environment variables over the inherited ones.
        log_path: file that takes whatever the engine prints; a temporary one if None.
    """

    def __init__(
        self,
        model: Path,
        *,
        connector: Mapping[str, object] | None = None,
        dtype: str = "float32",
        block_size: int = 32,
        max_num_batched_tokens: int = 8_192,
        max_model_len: int = 8_192,
        max_num_seqs: int = 16,
        kv_cache_bytes: int = 512 << 20,
        num_blocks: int | None = None,
        hf_overrides: Mapping[str, object] | None = None,
        engine_args: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        arguments: dict[str, object] = {
            "model": str(model),
            "dtype": dtype,
            "block_size": block_size,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "enforce_eager": True,
        }
        if num_blocks is not None:
            arguments["num_gpu_blocks_override"] = num_blocks
        if hf_overrides is not None:
            arguments["hf_overrides"] = dict(hf_overrides)
        if connector is not None:
            arguments["kv_transfer_config"] = dict(connector)
        arguments.update(engine_args or {})

        self.log_path = log_path or _temporary_log()
        own, childs = socket.socketpair()
        with childs:
            self._process = _spawn(childs, self.log_path, env or {})
        self._pidfd = os.pidfd_open(self._process.pid)
        self._conversation = Conversation(own)
        self._conversation.start(messages.Start(engine_args=arguments))

    # ------------------------------------------------------------ life

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> Self:
        """Block until the engine takes requests.

        Raises:
            EngineError: it ended instead, or is not up in time (it is killed then).
        """
        try:
            self._await_report(self._conversation.ready, timeout_seconds)
        except BaseException:
            self.kill()
            raise
        return self

    def __enter__(self) -> Self:
        return self.wait_ready()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Shut down in order; kill what is left after ``timeout_seconds``. Twice is harmless."""
        if self._process.returncode is not None:
            return
        self._conversation.end()
        select.select([self._pidfd], [], [], timeout_seconds)
        self.kill()

    def kill(self) -> None:
        """End every process of the engine at once, as a crash of its container would."""
        if self._process.returncode is not None:
            return
        kill_group(self._process.pid)
        self._process.wait()
        self._conversation.close()
        os.close(self._pidfd)

    def pids(self) -> EnginePids:
        """Processes of the engine.

        Raises:
            EngineError: they are not all there.
        """
        found = engine_pids(self._process.pid)
        if found is None:
            raise self.error("not all processes of the engine are running")
        return found

    # ------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 32,
        cache_salt: str | None = None,
        lora: Lora | None = None,
        kv_transfer_params: Mapping[str, object] | None = None,
        priority: int = 0,
        sampling: Mapping[str, object] | None = None,
    ) -> Request:
        """Hand one prompt in and return at once.

        Args:
            prompt: token ids.
            max_tokens: exact number of tokens to generate, greedily (end tokens are ignored).
            kv_transfer_params: per-request switches of the connector.
            sampling: more of vLLM's SamplingParams; they win.
        """
        parameters: dict[str, object] = {
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if kv_transfer_params is not None:
            parameters["extra_args"] = {"kv_transfer_params": dict(kv_transfer_params)}
        parameters.update(sampling or {})
        command = messages.Generate(
            id=self._conversation.next_id(),
            prompt=list(prompt),
            sampling=parameters,
            cache_salt=cache_salt,
            lora=(lora.name, lora.id, str(lora.path)) if lora is not None else None,
            priority=priority,
        )
        return Request(
            prompt_tokens=len(prompt),
            answer=self._conversation.send(command),
            await_report=self._await_report,
            await_first_token=self._await_first_token,
            abort=lambda: self._abort(command.id),
        )

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 32) -> list[Result]:
        """Hand all prompts in at once and wait for all; results are in the prompts' order.

        Raises:
            EngineError: see :meth:`Request.result`.
        """
        requests = [self.submit(prompt, max_tokens=max_tokens) for prompt in prompts]
        return [request.result() for request in requests]

    def reset_prefix_cache(
        self, *, reset_running: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget the engine's own prefix cache; False if blocks of running requests forbid it."""
        report = self._ask(
            messages.ResetPrefixCache(
                id=self._conversation.next_id(),
                reset_running=reset_running,
                reset_connector=reset_connector,
            )
        )
        assert isinstance(report, messages.Done)
        return report.value

    def metrics(self) -> dict[str, float]:
        """The engine's counters and gauges: ``name{label="value"}`` to value.

        Labels that name the engine or the model are left out.
        """
        report = self._ask(messages.ReadMetrics(id=self._conversation.next_id()))
        assert isinstance(report, messages.Metrics)
        return report.samples

    # ------------------------------------------------------------ errors

    def log_tail(self) -> str:
        """The end of what the engine has printed."""
        with open(self.log_path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")

    def error(self, what: str) -> EngineError:
        """An error that says ``what`` and shows the end of the log."""
        return EngineError(f"{what}; the end of {self.log_path}:\n{self.log_tail()}")

    # ------------------------------------------------------------ conversation

    def _abort(self, target: int) -> None:
        self._ask(messages.Abort(id=self._conversation.next_id(), target=target))

    def _ask(self, command: messages.Numbered) -> messages.Report:
        return self._await_report(self._conversation.send(command), REQUEST_SECONDS)

    def _await_report(self, answer: Answer, timeout_seconds: float) -> messages.Report:
        try:
            report = answer.report.result(timeout_seconds)
        except FutureTimeoutError:
            raise self.error(f"no answer from the engine in {timeout_seconds:.0f} s") from None
        except EOFError:
            raise self.error("the engine has ended") from None
        if isinstance(report, messages.Failed):
            raise self.error(report.error)
        return report

    def _await_first_token(self, answer: Answer, timeout_seconds: float) -> None:
        if not answer.first_token.wait(timeout_seconds):
            raise self.error(f"no first token within {timeout_seconds:.0f} s")


def _spawn(
    child_socket: socket.socket, log_path: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # vLLM reserves a core for its scheduler and one more where a connector is configured. On
        # two cores that runs out, and an engine with a connector then gets *more* threads than
        # one without: no fair comparison. One reserved core for both.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    }
    with open(log_path, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "kvledger.lab.engine_child", str(child_socket.fileno())],
            env={**defaults, **os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[child_socket.fileno()],
            start_new_session=True,
        )


def _temporary_log() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="kvledger-engine-", suffix=".log")
    os.close(descriptor)
    return Path(name)
