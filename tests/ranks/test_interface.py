"""The network interface by which nodes reach each other: the one with the address, or the user's choice."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from sp_lightning.experimental.ranks.agreement import VARIABLE, choose_interface, interface_to


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_to("127.0.0.1") is None, "no other node is there"
    assert interface_to("no.such.name.invalid") is None
    addresses = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=False).stdout
    for name, address in re.findall(r"^\d+: (\S+)\s+inet ([\d.]+)/", addresses, re.MULTILINE):
        assert interface_to(address) == (None if address.startswith("127.") else name)


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_lightning.experimental.ranks.agreement.interface_to", lambda address: f"to-{address}")
    monkeypatch.setenv(VARIABLE, "mine")
    choose_interface("10.0.0.1")
    assert os.environ[VARIABLE] == "mine"
    monkeypatch.delenv(VARIABLE)
    choose_interface("10.0.0.1")
    assert os.environ[VARIABLE] == "to-10.0.0.1"
