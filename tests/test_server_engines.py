"""Joining the parts of an engine's processes: layout, digest, disagreement."""

from __future__ import annotations

import pytest

from kvledger.naming import namespace_id
from kvledger.protocol import Role
from kvledger.server.engines import Engine, Process, disagreement, join_parts, lay_out
from kvledger.server.namespaces import MAX_DESCRIPTORS, NamespaceDirectory


def process(role: Role, rank: int, fields: dict[str, str], parts: tuple[int, ...] = ()) -> Process:
    engine = Engine("e", 2, 1)
    return Process(engine, role, rank, "", 0, None, -1, None, fields, parts)


def worker(rank: int, fields: dict[str, str], parts: tuple[int, ...] = (64,)) -> Process:
    return process(Role.WORKER, rank, fields, parts)


def test_layout_of_two_ranks_and_two_groups() -> None:
    object_bytes, offsets = lay_out([(100, 4096), (100, 0)])
    assert offsets == ((0, 0), (128, 4096))
    assert object_bytes == (4096, 4096)


def test_layout_of_a_whole_object() -> None:
    assert lay_out([(4097,)]) == ((8192,), ((0,),))


def test_joined_descriptor() -> None:
    joined = join_parts(
        {"weights": "w", "display.model": "m"},
        [
            worker(0, {"backend": "b", "rank.gpu": "0"}),
            worker(1, {"backend": "b", "rank.gpu": "1"}),
        ],
    )
    assert joined.descriptor == {
        "weights": "w",
        "display.model": "m",
        "backend": "b",
        "rank0.gpu": "0",
        "rank1.gpu": "1",
        "layout.part_bytes": "64;64",
    }
    assert joined.namespace == namespace_id(joined.descriptor)


def test_a_different_layout_is_a_different_namespace() -> None:
    one = join_parts({}, [worker(0, {}, (64,))])
    other = join_parts({}, [worker(0, {}, (128,))])
    assert one.object_bytes == other.object_bytes
    assert one.namespace != other.namespace


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        (worker(0, {"a": "1"}), worker(1, {"a": "1"}), ""),
        (worker(0, {"a": "1"}), worker(1, {"a": "2"}), "a"),
        (worker(0, {"a": "1"}), worker(1, {"a": "1", "b": "1"}), "b"),
        (worker(0, {"rank.x": "1"}), worker(1, {"rank.x": "2"}), ""),
        (worker(0, {"display.x": "1"}), worker(1, {}), ""),
        (worker(0, {}, (1, 2)), worker(1, {}, (1,)), "number of KV-cache groups"),
        (process(Role.SCHEDULER, 0, {"a": "1"}), worker(1, {"b": "2"}), ""),
        (process(Role.SCHEDULER, 0, {"a": "1"}), worker(1, {"a": "2"}), "a"),
    ],
)
def test_disagreement(one: Process, other: Process, field: str) -> None:
    assert disagreement(one, [one, other]) == field
    assert disagreement(other, [one, other]) == field


def test_missing_names_everyone_waited_for() -> None:
    engine = Engine("e", 2, 1)
    assert engine.missing() == ["scheduler", "rank 0", "rank 1"]
    engine.processes[Role.WORKER, 1] = worker(1, {})
    assert engine.missing() == ["scheduler", "rank 0"]


def test_the_nearest_namespace_and_what_differs() -> None:
    directory = NamespaceDirectory()
    one = {"a": "1", "b": "1", "c": "1"}
    two = {"a": "2", "b": "2", "c": "1"}
    three = {"a": "2", "b": "2", "c": "3", "display.x": "anything"}
    ids = [namespace_id(d) for d in (one, two, three)]
    for namespace, descriptor in zip(ids, (one, two, three), strict=True):
        directory.add(namespace, descriptor)
    first, second, third = (directory.get(namespace) for namespace in ids)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.nearest, first.fields) == (ids[1], ("a", "b"))
    assert (second.nearest, second.fields) == (ids[2], ("c",))
    assert (third.nearest, third.fields) == (ids[1], ("c",))
    assert third.display == {"x": "anything"}


def test_old_descriptors_are_forgotten() -> None:
    directory = NamespaceDirectory()
    ids = [namespace_id({"n": str(i)}) for i in range(MAX_DESCRIPTORS + 1)]
    for i, namespace in enumerate(ids):
        directory.add(namespace, {"n": str(i)})
    assert directory.get(ids[0]) is None
    assert all(directory.get(namespace) is not None for namespace in ids[1:])
