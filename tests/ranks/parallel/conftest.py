"""What the tests of a family of trainings have: its data, what its ranks found, and the cases of its matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.parallel.layouts import Family, Found, pack_rows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    family: Family | None = getattr(metafunc.module, "FAMILY", None)
    for name, cases in ("trained", "layouts"), ("continued", "continued"), ("overflowing", "overflowing"):
        if family is not None and name in metafunc.fixturenames:
            found = getattr(family, cases)()
            metafunc.parametrize(name, found, ids=[f"{ranks}-{of}" for ranks, of in found])


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.module.FAMILY
    return found


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("family")
    getattr(request.module, "pack", pack_rows)(where)
    return where


@pytest.fixture(scope="module")
def launches(family: Family, directory: Path) -> dict[int, list[Found]]:
    """By number of ranks what each rank found; each launch continues what those before it have saved."""
    return family.start(directory)
