"""Options of the server: parsing, defaults, and the file that may hold them.

Pure: text in, values out. Whether the machine can satisfy them is checked by
:mod:`kvledger.server.preflight`. Every refusal names the option and says what to write instead.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from kvledger.errors import ConfigurationError

MIN_MEMORY_BYTES = 16 << 20
MAX_MEMORY_BYTES = 1 << 50
MAX_SOCKET_PATH_BYTES = 107
"""The kernel's limit for a Unix socket (108 with its closing zero)."""

DEFAULT_HTTP = "127.0.0.1:9470"
DEFAULT_NAMESPACE_FLOOR = 1 / 16
SYSTEM_SOCKET_PATH = "/run/kvledger/kvledger.sock"

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"([0-9]{1,32}(?:\.[0-9]{1,32})?)\s*([a-z]*)", re.IGNORECASE)
_KEYS: dict[str, tuple[type, ...]] = {
    "memory": (str, int),
    "socket": (str,),
    "http": (str,),
    "group": (str,),
    "namespace_floor": (float, int),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAddress:
    """Where HTTP is served; port 0 takes any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything `kvledger serve` can be told.

    Attributes:
        memory_bytes: arena and catalog together.
        socket_path: the Unix socket engines connect to.
        http: where HTTP is served; None serves none.
        group: Unix group whose members may connect too; None admits only the server's own user
            (and root).
        namespace_floor: share of the arena below which no other namespace can push one.
    """

    memory_bytes: int
    socket_path: str
    http: HttpAddress | None
    group: str | None
    namespace_floor: float


def default_socket_path(environment: Mapping[str, str] | None = None) -> str:
    """Where server, engines and tools meet unless told otherwise.

    ``$XDG_RUNTIME_DIR/kvledger/kvledger.sock`` for a user with a runtime directory, else the
    system's ``/run/kvledger/kvledger.sock``.
    """
    variables = os.environ if environment is None else environment
    runtime_directory = variables.get("XDG_RUNTIME_DIR", "")
    if runtime_directory.startswith("/"):
        return os.path.join(runtime_directory, "kvledger", "kvledger.sock")
    return SYSTEM_SOCKET_PATH


def parse_size(text: str, *, option: str) -> int:
    """Bytes in "8GiB", "512 MiB", "20MB", "1.5GiB" or "1048576"; fractions of a byte are cut.

    Raises:
        ConfigurationError: not a size, zero, or beyond any machine.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigurationError(
            f"{option} {text!r:.60} is not a size; write a positive number and a unit, "
            "such as 8GiB, 512MiB or 20MB"
        )
    size_bytes = int(Fraction(match[1]) * unit)
    if size_bytes == 0:
        raise ConfigurationError(f"{option} {text!r} is nothing; write a size such as 8GiB")
    if size_bytes > MAX_MEMORY_BYTES:
        raise ConfigurationError(f"{option} {text!r} is beyond any machine; check the unit")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """The shortest readable form: exact ("8 GiB") or to one decimal ("23.5 GiB")."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{size_bytes} B"


def parse_http(text: str) -> HttpAddress | None:
    """ "host:port", "[v6]:port", or "off".

    Raises:
        ConfigurationError: anything else.
    """
    if text == "off":
        return None
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    valid_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16
    if not (separator and host and host.isprintable() and valid_port):
        raise ConfigurationError(
            f"--http {text!r:.300} is not an address; "
            f"write host:port such as {DEFAULT_HTTP}, or off"
        )
    return HttpAddress(host=host, port=int(port))


def parse_document(text: str, *, source: str) -> dict[str, str | int | float]:
    """Options in a TOML file, by their names without dashes.

    Raises:
        ConfigurationError: not TOML, an unknown key (the nearest right one is named), or a value
            of the wrong type.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of any length, nesting of any depth
        raise ConfigurationError(f"{source} is not valid TOML: {error}") from error
    options: dict[str, str | int | float] = {}
    for key, value in document.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key.replace("-", "_"), _KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_KEYS)}"
            raise ConfigurationError(f"{source}: unknown key {key!r:.60}; {hint}")
        right_kind = isinstance(value, _KEYS[key]) and not isinstance(value, bool)
        if not (right_kind and isinstance(value, str | int | float)):
            wanted = " or ".join(kind.__name__ for kind in _KEYS[key])
            raise ConfigurationError(
                f"{source}: {key} is a {type(value).__name__}; write a {wanted}"
            )
        if isinstance(value, int) and abs(value) > MAX_MEMORY_BYTES:
            raise ConfigurationError(f"{source}: {key} is beyond any machine; write a smaller one")
        options[key] = value
    return options


def make_config(
    *,
    memory: str | None = None,
    socket: str | None = None,
    http: str | None = None,
    group: str | None = None,
    namespace_floor: float | None = None,
    document: Mapping[str, str | int | float] | None = None,
) -> ServerConfig:
    """Options given as flags, over those of a file, over the defaults.

    Raises:
        ConfigurationError: an option cannot be right.
    """
    flags: dict[str, str | float | None] = {
        "memory": memory,
        "socket": socket,
        "http": http,
        "group": group,
        "namespace_floor": namespace_floor,
    }
    options: dict[str, str | int | float] = dict(document or {})
    for key, value in flags.items():
        if value is not None:
            options[key] = value
    if "memory" not in options:
        raise ConfigurationError(
            "--memory is missing; say how much memory to use, such as --memory 8GiB"
        )
    memory_bytes = parse_size(str(options["memory"]), option="--memory")
    if memory_bytes < MIN_MEMORY_BYTES:
        raise ConfigurationError(
            f"--memory {options['memory']} is too little to cut into pages; "
            f"give at least {format_size(MIN_MEMORY_BYTES).replace(' ', '')}"
        )
    return ServerConfig(
        memory_bytes=memory_bytes,
        socket_path=_checked_socket_path(str(options.get("socket", default_socket_path()))),
        http=parse_http(str(options.get("http", DEFAULT_HTTP))),
        group=str(options["group"]) if options.get("group") else None,
        namespace_floor=_checked_floor(
            float(options.get("namespace_floor", DEFAULT_NAMESPACE_FLOOR))
        ),
    )


def _checked_socket_path(path: str) -> str:
    if not path or "\0" in path:
        raise ConfigurationError(f"--socket {path!r} is not a path; write an absolute path")
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"--socket {path!r} is not UTF-8; choose a path that can be shown"
        ) from error
    absolute = os.path.abspath(path)
    length = len(os.fsencode(absolute))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(
            f"--socket has {length} bytes, and a Unix socket's path at most "
            f"{MAX_SOCKET_PATH_BYTES}; choose a shorter directory"
        )
    return absolute


def _checked_floor(share: float) -> float:
    if not 0.0 <= share <= 0.5:
        raise ConfigurationError(
            f"--namespace-floor {share} is not a share of the arena; "
            "write a number from 0 (no floor) to 0.5"
        )
    return share
