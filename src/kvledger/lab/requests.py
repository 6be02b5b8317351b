"""One request to an engine of the lab, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvledger.lab import messages
from kvledger.lab.conversation import Answer

REQUEST_SECONDS = 600.0
"""Longest wait for one answer, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """An adapter for one request: its name, a positive id, and its directory."""

    name: str
    id: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one request.

    Attributes:
        request_id: what the engine's own id, and so that of the account, begins with.
        prompt_tokens: length of the prompt.
        token_ids: generated tokens.
        local_hit_tokens: prompt tokens found in the engine's own prefix cache.
        external_hit_tokens: prompt tokens that the connector loaded.
        ttft_seconds: from submission to the first token; 0 if there was none.
        total_seconds: from submission to the end.
        finish_reason: vLLM's word: "length", "stop", "abort", "error".
        kv_transfer_params: what the connector said about the request at its end.
    """

    request_id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    local_hit_tokens: int
    external_hit_tokens: int
    ttft_seconds: float
    total_seconds: float
    finish_reason: str
    kv_transfer_params: Mapping[str, object] | None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.local_hit_tokens + self.external_hit_tokens


class Request:
    """One submitted request; see :meth:`kvledger.lab.engine.EngineProcess.submit`."""

    def __init__(
        self,
        *,
        prompt_tokens: int,
        answer: Answer,
        await_report: Callable[[Answer, float], messages.Report],
        await_first_token: Callable[[Answer, float], None],
        abort: Callable[[], None],
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._answer = answer
        self._await_report = await_report
        self._await_first_token = await_first_token
        self._abort = abort

    def done(self) -> bool:
        """Whether the request has ended, well or not."""
        return self._answer.report.done()

    def wait_first_token(self, timeout_seconds: float = REQUEST_SECONDS) -> None:
        """Block until the request has generated something, or has ended.

        Raises:
            EngineError: neither happened in time.
        """
        self._await_first_token(self._answer, timeout_seconds)

    def result(self, timeout_seconds: float = REQUEST_SECONDS) -> Result:
        """Block until the request has ended.

        Raises:
            EngineError: the engine refused it, died, or took longer.
        """
        report = self._await_report(self._answer, timeout_seconds)
        assert isinstance(report, messages.Finished)
        return Result(
            request_id=messages.request_id(report.id) + "-",
            prompt_tokens=self._prompt_tokens,
            token_ids=tuple(report.token_ids),
            local_hit_tokens=report.local_hit_tokens,
            external_hit_tokens=report.external_hit_tokens,
            ttft_seconds=report.ttft_seconds,
            total_seconds=report.total_seconds,
            finish_reason=report.finish_reason,
            kv_transfer_params=report.kv_transfer_params,
        )

    def abort(self) -> None:
        """Abort it; :meth:`result` then says finish reason "abort". Harmless if it has ended."""
        self._abort()
