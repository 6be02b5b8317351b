"""Options: what is read, and what each refusal says."""

from __future__ import annotations

import pytest

from kvledger.config import (
    HttpAddress,
    default_socket_path,
    format_size,
    make_config,
    parse_document,
    parse_http,
    parse_size,
)
from kvledger.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("20MB", 20_000_000),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("0.1GB", 100_000_000),
        ("1048576", 1048576),
        ("64 kib", 65536),
        ("7B", 7),
        ("0.3B", None),
    ],
)
def test_sizes(text: str, size_bytes: int | None) -> None:
    if size_bytes is None:
        with pytest.raises(ConfigurationError, match="--memory"):
            parse_size(text, option="--memory")
    else:
        assert parse_size(text, option="--memory") == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "8G",
        "8 gigs",
        "-1GiB",
        "0",
        "0GiB",
        "1e9",
        "nan",
        "8GiBx",
        "0x10",
        "99PB",
        "9" * 5000,
        "1." + "0" * 5000 + "GiB",
    ],
)
def test_bad_sizes_name_the_option_and_a_remedy(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--memory .*(write|check)"):
        parse_size(text, option="--memory")


def test_format_size() -> None:
    assert format_size(8 * 1024**3) == "8 GiB"
    assert format_size(24_000 * 1024**2) == "23.4 GiB"
    assert format_size(100) == "100 B"


def test_http() -> None:
    assert parse_http("127.0.0.1:9470") == HttpAddress(host="127.0.0.1", port=9470)
    assert parse_http("[::1]:0") == HttpAddress(host="::1", port=0)
    assert str(HttpAddress(host="::1", port=80)) == "[::1]:80"
    assert parse_http("off") is None


@pytest.mark.parametrize(
    "text",
    ["", "9470", ":9470", "localhost", "host:", "host:x", "h:65536", "h:" + "9" * 5000, "a\0b:1"],
)
def test_bad_http(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--http"):
        parse_http(text)


def test_flags_win_over_the_file() -> None:
    document = parse_document('memory = "1GiB"\nsocket = "/tmp/a.sock"\nhttp = "off"', source="f")
    config = make_config(memory="2GiB", document=document)
    assert config.memory_bytes == 2 * 1024**3
    assert config.socket_path == "/tmp/a.sock"
    assert config.http is None
    assert make_config(document=document).memory_bytes == 1024**3


def test_defaults() -> None:
    config = make_config(memory="1GiB")
    assert config.http == HttpAddress(host="127.0.0.1", port=9470)
    assert config.group is None
    assert config.namespace_floor == 1 / 16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memry = '1GiB'", "unknown key 'memry'; did you mean 'memory'"),
        ("namespace-floor = 0.1", "did you mean 'namespace_floor'"),
        ("zzz = 1", "known are memory, socket"),
        ("memory = true", "memory is a bool; write a str or int"),
        ("socket = 1", "socket is a int"),
        ("memory = ", "not valid TOML"),
        (f"memory = {'9' * 5000}", "not valid TOML"),
        (f"memory = {'[' * 100_000}", "not valid TOML"),
        (f"memory = 0x{'f' * 5000}", "beyond any machine"),
        (f"namespace_floor = {'9' * 400}", "beyond any machine"),
    ],
)
def test_bad_documents(text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=r"file\.toml") as caught:
        parse_document(text, source="file.toml")
    assert expected in str(caught.value)


def test_integer_memory_in_a_file_is_bytes() -> None:
    document = parse_document("memory = 33554432", source="f")
    assert make_config(document=document).memory_bytes == 33554432


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "--memory is missing"),
        ({"memory": "15MiB"}, "at least 16MiB"),
        ({"memory": "1GiB", "socket": "/" + "x" * 107}, "at most 107"),
        ({"memory": "1GiB", "socket": ""}, "--socket"),
        ({"memory": "1GiB", "socket": "/tmp/\udcff.sock"}, "--socket"),
        ({"memory": "1GiB", "namespace_floor": 0.6}, "--namespace-floor"),
    ],
)
def test_bad_options(options: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        make_config(**options)


def test_longest_socket_path_is_taken() -> None:
    path = "/" + "x" * 106
    assert make_config(memory="1GiB", socket=path).socket_path == path


def test_default_socket_path() -> None:
    assert default_socket_path({}) == "/run/kvledger/kvledger.sock"
    user = default_socket_path({"XDG_RUNTIME_DIR": "/run/user/7"})
    assert user == "/run/user/7/kvledger/kvledger.sock"
    assert default_socket_path({"XDG_RUNTIME_DIR": ""}) == "/run/kvledger/kvledger.sock"
