"""A language model on the mesh pipeline x node x local x tensor trains as on one rank, in every factorisation."""

from __future__ import annotations

import pytest

from tests.ranks.parallel.layouts import ContinuedTests, LayoutTests, pack_tokens as pack
from tests.ranks.parallel.mesh_cases import FAMILY

__all__ = ["FAMILY", "pack"]
pytestmark = [pytest.mark.launches, pytest.mark.timeout(3600)]  # a fixture makes all launches


class TestFactorisations(LayoutTests, ContinuedTests):
    pass
