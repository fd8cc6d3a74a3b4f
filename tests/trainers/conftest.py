"""Training tests compute with tensors of a few numbers, for which a second thread is only something to wait for."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

# A program of its own; to look for doctests in it would be to import torch.
collect_ignore = ["processes_run.py"]


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None:  # the quick tests do without
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
