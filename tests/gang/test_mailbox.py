"""Commands in, status out, one run per directory."""

from pathlib import Path

import pytest

from raytrain3d.errors import ConfigError
from raytrain3d.gang.mailbox import SOCKET, SocketMailbox, Status, ask_socket


def test_a_command_arrives_and_the_status_returns(tmp_path: Path) -> None:
    mailbox = SocketMailbox(tmp_path, "a")
    mailbox.publish(Status(run="a", state="running", step=3, num_steps=9))
    try:
        assert ask_socket(tmp_path, "status") == Status(run="a", state="running", step=3, num_steps=9)
        assert mailbox.commands() == []
        ask_socket(tmp_path, "stop")
        assert mailbox.commands() == ["stop"]
        assert mailbox.commands() == []
    finally:
        mailbox.close()
    assert ask_socket(tmp_path, "status") is None
    assert not (tmp_path / SOCKET).exists()


def test_a_directory_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    first = SocketMailbox(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"run\.name is 'a': a run of that name is under way .*raytrain3d stop a"):
        SocketMailbox(tmp_path, "a")
    first.close()
    SocketMailbox(tmp_path, "a").close()


def test_what_a_killed_driver_leaves_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / SOCKET).touch()
    SocketMailbox(tmp_path, "a").close()


def test_a_long_path_works(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 120)
    mailbox = SocketMailbox(directory, "a")
    assert ask_socket(directory, "status") is not None
    mailbox.close()
