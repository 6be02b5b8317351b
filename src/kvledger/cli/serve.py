"""``kvledger serve``."""

from __future__ import annotations

import logging

from kvledger.config import make_config, parse_document
from kvledger.errors import ConfigurationError

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_serve(
    *,
    memory: str | None,
    socket: str | None,
    http: str | None,
    group: str | None,
    namespace_floor: float | None,
    config_path: str | None,
) -> None:
    """Run the server; returns when it has been told to stop.

    Raises:
        ConfigurationError: an option cannot be right, or cannot be satisfied on this machine.
        ArenaError: the arena cannot be made.
    """
    config = make_config(
        memory=memory,
        socket=socket,
        http=http,
        group=group,
        namespace_floor=namespace_floor,
        document=_read_document(config_path) if config_path is not None else None,
    )
    from kvledger.server.daemon import run_server

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    run_server(config, lambda line: print(line, flush=True))


def _read_document(path: str) -> dict[str, str | int | float]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--config {path} cannot be read ({error}); give the path of a TOML file"
        ) from error
    return parse_document(text, source=path)
