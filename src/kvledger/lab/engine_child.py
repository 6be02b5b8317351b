"""The child process that holds one vLLM engine: ``python -m kvledger.lab.engine_child FD``.

Reads commands from the socket FD and carries them out side by side, so that requests overlap as
they do in a server. Ends when the other end of the socket is closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from typing import TYPE_CHECKING

from kvledger.lab import messages

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_MAX_LINE_BYTES = 64 << 20
"""A prompt of ten million tokens; asyncio wants a bound."""

_ABORT_SECONDS = 0.01
_HIDDEN_LABELS = frozenset({"model_name", "engine"})
"""Labels that are the same for every sample of one engine."""


class HitCounter:
    """Where the cached tokens of each request came from.

    vLLM tells its front end local and external hits apart for every request, but passes only
    their sum on; so this listens where they arrive.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._processor = engine.output_processor
        self._inner = self._processor.process_outputs
        self._hits: dict[str, tuple[int, int]] = {}
        self._processor.process_outputs = self._process_outputs

    def _process_outputs(self, outputs: list[object], *args: object, **options: object) -> object:
        for output in outputs:
            stats = getattr(output, "prefill_stats", None)
            state = self._processor.request_states.get(getattr(output, "request_id", None))
            if stats is not None and state is not None:
                hits = stats.num_local_cached_tokens, stats.num_external_cached_tokens
                self._hits[state.external_req_id] = hits
        return self._inner(outputs, *args, **options)

    def take(self, request_id: str) -> tuple[int, int]:
        """Tokens from the engine's own prefix cache and from the connector; forgets them."""
        return self._hits.pop(request_id, (0, 0))


class Child:
    """One engine and the conversation about it."""

    def __init__(self, engine: AsyncLLM, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._writer = writer
        self._hits = HitCounter(engine)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def report(self, report: messages.Report) -> None:
        """Send one report; does not wait."""
        self._writer.write(messages.encode([report]))

    def start(self, command: messages.Command) -> None:
        """Carry out one command in a task of its own."""
        assert not isinstance(command, messages.Start), "an engine is started once"
        task = asyncio.create_task(self._carry_out(command))
        self._tasks[command.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(command.id))

    async def _carry_out(self, command: messages.Numbered) -> None:
        try:
            self.report(await self._answer(command))
        except Exception as error:
            self.report(messages.Failed(id=command.id, error=f"{type(error).__name__}: {error}"))

    async def _answer(self, command: messages.Numbered) -> messages.Report:
        match command:
            case messages.Generate():
                return await self._generate(command)
            case messages.Abort():
                await self._abort(command.target)
                return messages.Done(id=command.id, value=True)
            case messages.ResetPrefixCache():
                value = await self._engine.reset_prefix_cache(
                    command.reset_running, command.reset_connector
                )
                return messages.Done(id=command.id, value=bool(value))
            case messages.ReadMetrics():
                return messages.Metrics(id=command.id, samples=_metric_samples())

    async def _abort(self, target: int) -> None:
        """Abort until the request has ended: vLLM ignores it before it knows the request."""
        task = self._tasks.get(target)
        while task is not None and not task.done():
            await self._engine.abort(messages.request_id(target))
            await asyncio.wait([task], timeout=_ABORT_SECONDS)

    async def _generate(self, command: messages.Generate) -> messages.Finished:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        request_id = messages.request_id(command.id)
        prompt: dict[str, object] = {"prompt_token_ids": command.prompt}
        if command.cache_salt is not None:
            prompt["cache_salt"] = command.cache_salt
        sampling = SamplingParams(
            **command.sampling, output_kind=RequestOutputKind.DELTA, detokenize=False
        )
        lora = LoRARequest(*command.lora) if command.lora is not None else None
        tokens: list[int] = []
        reason, parameters, first = "", None, 0.0
        start = time.perf_counter()
        async for output in self._engine.generate(
            prompt, sampling, request_id, lora_request=lora, priority=command.priority
        ):
            (completion,) = output.outputs
            if completion.token_ids and not tokens:
                first = time.perf_counter() - start
                self.report(messages.FirstToken(id=command.id))
            tokens.extend(completion.token_ids)
            reason = completion.finish_reason or reason
            parameters = output.kv_transfer_params or parameters
        local, external = self._hits.take(request_id)
        return messages.Finished(
            id=command.id,
            token_ids=tokens,
            local_hit_tokens=local,
            external_hit_tokens=external,
            ttft_seconds=first,
            total_seconds=time.perf_counter() - start,
            finish_reason=reason,
            kv_transfer_params=parameters,
        )


def _metric_samples() -> dict[str, float]:
    from prometheus_client import REGISTRY

    samples: dict[str, float] = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            labels = ",".join(
                f'{name}="{value}"'
                for name, value in sorted(sample.labels.items())
                if name not in _HIDDEN_LABELS
            )
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


async def _converse(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_LINE_BYTES)
    first = messages.commands.decode(await reader.readline())
    assert isinstance(first, messages.Start), "the first command starts the engine"
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**first.engine_args))
    try:
        child = Child(engine, writer)
        child.report(messages.Ready(vllm_version=vllm.__version__))
        while line := await reader.readline():
            child.start(messages.commands.decode(line))
    finally:
        engine.shutdown()
        writer.close()


def main() -> None:
    """Serve the conversation on the socket whose number is the only argument."""
    descriptor = int(sys.argv[1])
    # The engine's own processes must not hold the socket open when this one is gone.
    os.set_inheritable(descriptor, False)
    asyncio.run(_converse(socket.socket(fileno=descriptor)))
    sys.stdout.flush()
    sys.stderr.flush()
    # The engine is shut down; taking the interpreter apart would cost two more seconds and print
    # complaints of destructors that find their modules gone.
    os._exit(0)


if __name__ == "__main__":
    main()
