"""The core works without each capability. ``python -m tests.repository.deletion each --all`` runs all tests of the core, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_lightning import registry
from sp_lightning.core.model.rows import row_finder
from sp_lightning.registry import CAPABILITIES, MissingCapabilityError, needed_for
from tests.repository import deletion
from tests.support.tiers import some


@pytest.mark.rest("processes that import torch")
@pytest.mark.parametrize("folder", some(CAPABILITIES, "capabilities.experts", why="the same for other capabilities"))
def test_the_core_works_without(folder: str, tmp_path: Path) -> None:
    copy = deletion.without(folder, tmp_path)
    deletion.imports(copy, folder)
    deletion.option(copy, folder)
    deletion.trainings(copy, folder)


def test_every_capability_has_a_folder_and_a_program() -> None:
    assert set(deletion.ASKED_FOR) == set(CAPABILITIES)
    assert all((deletion.ROOT / deletion.path_of(folder) / "__init__.py").exists() for folder in CAPABILITIES)


def test_the_core_has_what_the_registry_resolves() -> None:
    assert row_finder() is registry.row_finder()


def test_other_missing_modules_are_not_taken_for_a_capability() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package") as raised, needed_for("disk="):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(raised.value, MissingCapabilityError)
    with pytest.raises(ModuleNotFoundError, match="no_such_file") as raised, needed_for("disk="):
        import sp_lightning.capabilities.disk.no_such_file  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(raised.value, MissingCapabilityError)
