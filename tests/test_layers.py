"""Who may import whom: imports point downwards only, and the server knows no engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "kvledger"

PURE, MACHINERY, INTEGRATION, FACES = range(4)
LAYERS = {
    # The pure core: no clock, thread, socket, logger or tensor.
    "audit": PURE,
    "catalog": PURE,
    "config": PURE,
    "entries": PURE,
    "errors": PURE,
    "eviction": PURE,
    "fates": PURE,
    "ledger": PURE,
    "naming": PURE,
    "protocol": PURE,
    "reasons": PURE,
    "slabs": PURE,
    "space": PURE,
    # Machinery.
    "arena": MACHINERY,
    "client": MACHINERY,
    "connection": MACHINERY,
    "link": MACHINERY,
    "native": MACHINERY,
    "server": MACHINERY,
    "tiers": MACHINERY,
    # What knows an engine.
    "sim": INTEGRATION,
    "vllm": INTEGRATION,
    # What people and programs meet, and the program that puts everything together.
    "__init__": FACES,
    "__main__": FACES,
    "cli": FACES,
    "bench": FACES,
    "lab": FACES,
    "server.admin": FACES,
    "server.daemon": FACES,
    "server.http_thread": FACES,
}
"""Layer of each module or package; the longest prefix counts."""
NOT_IN_THE_CORE = {
    "asyncio",
    "concurrent",
    "logging",
    "multiprocessing",
    "numpy",
    "random",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uvloop",
    "vllm",
}


def module_name(path: Path) -> str:
    """Dotted, without "kvledger."; a package goes by its own name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


SOURCES = {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        layer = LAYERS.get(".".join(parts[:length]))
        if layer is not None:
            return layer
    raise AssertionError(f"kvledger.{module} has no layer: give it one in {Path(__file__).name}")


def imported(source: str, *, at_run_time: bool = False) -> Iterator[str]:
    """Full dotted names, wherever the import stands; ``at_run_time``: what importing imports."""
    stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not used here"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not at_run_time or not (checking or function):
            stack.extend(ast.iter_child_nodes(node))


def own_imports(source: str, *, at_run_time: bool = False) -> set[str]:
    """Modules of kvledger that a source imports, without "kvledger."."""
    names = {n.removeprefix("kvledger.") for n in imported(source, at_run_time=at_run_time)}
    return names & SOURCES.keys() - {"__init__"}


def violations(sources: dict[str, str]) -> list[str]:
    found: list[str] = []
    for module, source in sources.items():
        for other in sorted(own_imports(source)):
            if layer_of(other) > layer_of(module):
                found.append(f"{module} imports {other}, which is above it")
        if layer_of(module) == PURE:
            roots = {name.split(".")[0] for name in imported(source)}
            found += [f"{module} imports {name}" for name in sorted(roots & NOT_IN_THE_CORE)]
    return found


def test_imports_point_downwards() -> None:
    assert violations(SOURCES) == []


def test_the_server_does_not_import_a_client_nor_a_client_the_server() -> None:
    for module, source in SOURCES.items():
        others = {other.split(".")[0] for other in own_imports(source)}
        root = module.split(".")[0]
        if root == "server":
            assert not others & {"client", "connection", "link"}, module
        if root in {"client", "connection", "link", "vllm"}:
            assert "server" not in others, module


def test_there_is_no_ring_of_imports() -> None:
    graph = {m: own_imports(source, at_run_time=True) for m, source in SOURCES.items()}
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a ring: {' → '.join([*path, module])}"
        if module not in finished:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            finished.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("catalog", "from kvledger.client import Client"),
        ("ledger", "import time"),
        ("naming", "from torch.nn import Module"),
        ("space", "def later() -> None:\n    import threading"),
        ("server.session", "from kvledger.server.daemon import Daemon"),
        ("server.service", "import kvledger.vllm.connector"),
        ("vllm.stores", "from kvledger import cli"),
    ],
)
def test_an_import_that_points_upwards_is_found(module: str, line: str) -> None:
    assert len(violations({module: SOURCES[module] + "\n" + line})) == 1


def loaded_by(statement: str) -> set[str]:
    """Modules that a fresh interpreter holds after it."""
    script = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["server.daemon", "cli", "client"])
def test_no_torch_and_no_vllm_outside_the_engine(module: str) -> None:
    if module not in SOURCES:
        pytest.skip(f"kvledger.{module} does not exist yet")
    loaded = loaded_by(f"import kvledger.{module}")
    assert f"kvledger.{module}" in loaded
    assert not loaded & {"torch", "vllm", "transformers"}


def test_what_is_loaded_is_really_seen() -> None:
    assert "decimal" in loaded_by("import decimal")
