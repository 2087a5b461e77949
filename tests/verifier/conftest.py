"""What the tests of scores from servers share."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from score_servers_of_tests import KEY


@pytest.fixture
def control_key(monkeypatch):
    monkeypatch.setenv("PVG_CONTROL_KEY", KEY)


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as found:
        yield found
