"""The command line, as a user types it."""

from __future__ import annotations

import grp
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

import kvledger
from conversation import attach, hello, names
from kvledger.protocol import Chain, Match, Report, Reserve, Role, encode
from servers import StartServer, kvledger_command, kvledger_environment


def run(*arguments: str, seconds: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        kvledger_command(*arguments),
        env={**kvledger_environment(), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"kvledger {kvledger.__version__}\n")


def test_no_arguments_show_help() -> None:
    done = run()
    assert "serve" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--memory is missing"),
        (["--memory", "8 gigs"], "is not a size"),
        (["--memory", "0"], "is nothing"),
        (["--memory", "1MiB"], "at least 16MiB"),
        (["--memory", "900TiB"], "give less"),
        (["--memory", "64MiB", "--http", "nonsense"], "--http"),
        (["--memory", "64MiB", "--group", "no-such-group"], "--group"),
        (["--memory", "9" * 5000], "is not a size"),
        (["--memory", "64MiB", "--http", f"{'ü' * 70}.example:1"], "not a host name"),
        (["--memory", "64MiB", "--config", "/no/such/file"], "--config"),
        (["--memory", "64MiB", "--namespace-floor", "2"], "--namespace-floor"),
        (["--memory", "64MiB", "--socket", "/proc/kvledger/x.sock"], "cannot create the directory"),
        (["--memory", "64MiB", "--socket", "/" + "x" * 200], "at most 107"),
        (["--memory", "64MiB", "--nonsense"], "No such option"),
        (["--memory", "64MiB", "--namespace-floor", "much"], "Invalid value"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(arguments: list[str], expected: str) -> None:
    done = run("serve", *arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_unknown_command() -> None:
    assert run("sreve").returncode == 2


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["clear"], ["explain"]])
def test_without_a_server_is_one_sentence_and_code_1(command: list[str], tmp_path: Path) -> None:
    done = run(*command, "--socket", str(tmp_path / "none.sock"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "kvledger serve" in done.stderr


def test_a_file_holds_options_and_flags_win(server: StartServer, tmp_path: Path) -> None:
    config = tmp_path / "kvledger.toml"
    config.write_text('memory = "32MiB"\nnamespace_floor = 0.25\nhttp = "127.0.0.1:1"\n')
    running = server("--config", str(config), memory="48MiB")
    assert "memory 48 MiB, no HTTP" in running.ready_line


def test_a_typo_in_a_file_names_the_right_key(tmp_path: Path) -> None:
    config = tmp_path / "kvledger.toml"
    config.write_text('memory = "32MiB"\nsockett = "x"\n')
    done = run("serve", "--config", str(config))
    assert done.returncode == 2
    assert "did you mean 'socket'" in done.stderr


def serve(path: str | Path) -> subprocess.CompletedProcess[str]:
    return run("serve", "--memory", "64MiB", "--http", "off", "--socket", str(path))


def test_a_socket_in_use_is_refused(server: StartServer) -> None:
    running = server()
    done = serve(running.socket_path)
    assert done.returncode == 2
    assert "in use" in done.stderr
    assert running.process.poll() is None


def test_a_socket_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        done = serve(path)
    assert done.returncode == 2
    assert "in use" in done.stderr
    assert path.exists()


def test_what_is_no_socket_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    done = serve(path)
    assert done.returncode == 2
    assert "not a socket" in done.stderr
    assert path.read_text() == "precious"


def test_the_socket_of_a_dead_server_is_replaced(server: StartServer) -> None:
    dead = server()
    dead.kill()
    assert os.path.exists(dead.socket_path)
    server(socket_path=dead.socket_path)


def test_of_servers_that_start_together_one_wins(tmp_path: Path) -> None:
    path = str(tmp_path / "contested.sock")
    command = kvledger_command("serve", "--memory", "64MiB", "--http", "off", "--socket", path)
    contenders = [
        subprocess.Popen(
            command, env=kvledger_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    losers = []
    end = time.monotonic() + 30
    while len(losers) < 3 and time.monotonic() < end:
        losers = [contender for contender in contenders if contender.poll() is not None]
        time.sleep(0.02)
    assert [loser.returncode for loser in losers] == [2, 2, 2]
    (winner,) = [contender for contender in contenders if contender not in losers]
    assert run("status", "--socket", path).returncode == 0
    winner.terminate()
    assert winner.wait(20) == 0
    for contender in contenders:
        contender.communicate()


def test_a_taken_http_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        path = str(tmp_path / "s.sock")
        done = run("serve", "--memory", "64MiB", "--http", address, "--socket", path)
    assert done.returncode == 2
    assert "--http off" in done.stderr
    assert not os.path.exists(path)


def test_only_the_owner_may_open_the_socket(server: StartServer) -> None:
    running = server()
    assert os.stat(running.socket_path).st_mode & 0o777 == 0o600


def test_the_group_may_open_the_socket(server: StartServer) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    running = server("--group", group)
    assert os.stat(running.socket_path).st_mode & 0o777 == 0o660


def test_status_as_tables_and_as_json(server: StartServer) -> None:
    running = server()
    fields = {"weights.digest": "w", "display.model": "tiny/model"}
    scheduler, workers = attach(running.socket_path, "engine-one", scheduler_fields=fields)
    other = attach(
        running.socket_path, "engine-two", scheduler_fields={**fields, "weights.digest": "x"}
    )
    scheduler.ask(Match, lease=1, group=0, names=names("a", 1))
    orphan = Chain(parent=names("none", 1), names=names("a", 1))
    scheduler.ask(Reserve, step=1, group=0, chains=[orphan])
    shown = run("status", "--socket", running.socket_path)
    assert shown.returncode == 0
    for word in (
        "engine-one",
        "tiny/model",
        "weights.digest",
        "1 of 1",
        "parent_missing",
        "the chunk before it is not in the cache",
        "63 MiB",
    ):
        assert word in shown.stdout
    document = json.loads(run("status", "--json", "--socket", running.socket_path).stdout)
    assert document["totals"]["lookups"] == 1
    assert [e["label"] for e in document["engines"]] == ["test scheduler 0"] * 2
    assert workers
    assert other


def test_clear(server: StartServer) -> None:
    done = run("clear", "--socket", server().socket_path)
    assert (done.returncode, done.stdout) == (0, "0 objects dropped\n")


def test_explain(server: StartServer) -> None:
    running = server()
    scheduler, workers = attach(running.socket_path, "engine-one")
    assert "No engine has reported" in run("explain", "--socket", running.socket_path).stdout
    scheduler.ask(
        Report,
        request="cmpl-7",
        tokens=100,
        chunk_tokens=16,
        local_tokens=0,
        external_tokens=32,
        miss="never_seen",
        fates=[("loaded", 2), ("skipped:no_room", 4)],
        dropped={"stored": 1},
        imbalance="",
    )
    shown = run("explain", "cmpl", "--socket", running.socket_path).stdout
    for word in ("cmpl-7", "balanced", "32 to 96", "every candidate for eviction", "cut off"):
        assert word in shown
    assert "No engine" in run("explain", "other", "--socket", running.socket_path).stdout
    assert workers


def test_texts_from_the_wire_do_not_steer_the_terminal(server: StartServer) -> None:
    running = server()
    request = "chatcmpl-[/b]:smile:\x1b[31m\x1b]0;title\x07"
    fields = {"weights.digest": "w", "display.model": request}
    scheduler, workers = attach(running.socket_path, "engine-[/b]\x1b", scheduler_fields=fields)
    scheduler.ask(
        Report,
        request=request,
        tokens=16,
        chunk_tokens=16,
        local_tokens=0,
        external_tokens=0,
        miss="[/miss]\x1b",
        fates=[("stored", 1)],
        dropped={},
        imbalance="[/imbalance]\x1b",
    )
    shown = run("explain", "--socket", running.socket_path)
    for text in ("chatcmpl-[/b]:smile:\ufffd[31m", "[/miss]", "[/imbalance]", "engine-[/b]"):
        assert text in shown.stdout, shown.stderr
    status = run("status", "--socket", running.socket_path)
    assert "chatcmpl-[/b]:smile:\ufffd[31m" in status.stdout, status.stderr
    nothing = run("explain", "[/none]", "--socket", running.socket_path)
    assert "[/none]" in nothing.stdout
    for done in (shown, status, nothing):
        assert done.returncode == 0
        assert "\x1b" not in done.stdout + done.stderr
        assert "\x07" not in done.stdout + done.stderr
    assert workers


def test_a_zero_byte_in_a_file_of_options_is_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "kvledger.toml"
    config.write_text('memory = "32MiB"\ngroup = "a\\u0000b"\n')
    done = run("serve", "--config", str(config), "--socket", str(tmp_path / "s.sock"))
    assert done.returncode == 2
    assert "--group" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_that_became_a_file_does_not_keep_it_from_ending(
    server: StartServer, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    running = server(socket_path=str(directory / "s.sock"))
    directory.rename(tmp_path / "moved")
    directory.write_text("")
    assert running.terminate() == 0
    assert "Traceback" not in running.log()


def test_sigterm_ends_it_in_good_order(server: StartServer) -> None:
    running = server()
    assert running.terminate() == 0
    assert not os.path.exists(running.socket_path)
    assert "Traceback" not in running.log()


def test_a_server_does_not_remove_the_socket_of_its_successor(server: StartServer) -> None:
    running = server()
    os.unlink(running.socket_path)
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(running.socket_path)
        assert running.terminate() == 0
        assert os.path.exists(running.socket_path)


GROUP_OF_STRANGER = next((g for g in grp.getgrall() if 0 < g.gr_gid < 60000), None)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.skipif(GROUP_OF_STRANGER is None, reason="needs a group besides root's")
@pytest.mark.parametrize(("is_member", "admitted"), [(False, False), (True, True)])
def test_another_user_needs_the_group(
    server: StartServer, tmp_path: Path, is_member: bool, admitted: bool
) -> None:
    assert GROUP_OF_STRANGER is not None
    running = server("--group", GROUP_OF_STRANGER.gr_name)
    for directory in [tmp_path, *tmp_path.parents[:-2]]:
        os.chmod(directory, 0o711)
    os.chmod(running.socket_path, 0o666)
    pid = os.fork()
    if pid == 0:
        welcome = 2  # whatever goes wrong here must not run the other tests as somebody else
        try:
            os.setgroups([GROUP_OF_STRANGER.gr_gid] if is_member else [])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            welcome = is_welcome(running.socket_path)
        finally:
            os._exit(welcome)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == admitted
    assert ("not our user" in running.log()) == (not admitted)


def is_welcome(path: str) -> int:
    """1 if the server answers this process, 0 if it hangs up, be it before we have spoken."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        try:
            stranger.connect(path)
            stranger.send(encode(hello("", Role.CLIENT)))
            return int(stranger.recv(1) != b"")
        except OSError:
            return 0
