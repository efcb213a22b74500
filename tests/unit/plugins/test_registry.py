"""Lookup of plug-ins by name, built-in or from another distribution."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from parallelize.backends.ddp import DDPBackend
from parallelize.errors import ConfigError
from parallelize.plugins import registry
from parallelize.plugins.base import Backend, Launcher, Precision

BASE_CLASSES = {"backends": Backend, "launchers": Launcher, "precision": Precision}


@pytest.mark.parametrize("kind", BASE_CLASSES)
def test_every_listed_name_is_found(kind):
    """Every listed name belongs to a class of its kind with that name; names are sorted, and have the default's."""
    names = registry.names(kind)
    assert list(names) == sorted(names)
    assert set(names) & {"ddp", "native", "local"}
    for name in names:
        plugin = registry.find(kind, name)
        assert issubclass(plugin, BASE_CLASSES[kind])
        assert plugin.name == name


@pytest.mark.parametrize("name", ["", "dpp", "__init__", "ddp.DDPBackend", "..errors", "os", "é"])
def test_unknown_names(name):
    """`find` returns None for a name without a plug-in."""
    assert registry.find("backends", name) is None


def test_a_plug_in_is_imported_alone(run_script):
    """Looking up one backend, or the names of all, does not import the others."""
    done = run_script("""
        import sys
        from parallelize.plugins import base
        from parallelize.plugins import registry

        before = set(sys.modules)
        registry.names("backends")
        registry.find("backends", "ddp")
        print(sorted(name for name in set(sys.modules) - before if name.startswith("parallelize.")))
    """)
    loaded = set(eval(done.stdout))
    assert "parallelize.backends.ddp" in loaded
    others = ("dp", "ddp2", "fsdp", "balanced", "balanced.plugin")
    assert loaded.isdisjoint(f"parallelize.backends.{name}" for name in others)


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Another distribution on sys.path, with entry points for some backends."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[parallelize.backends]\n"
        "other = other_backend:OtherBackend\n"
        "ddp = other_backend:OtherBackend\n"
        "absent = other_backend_that_is_not_there:Backend\n"
        "unnamed = other_backend:Nothing\n"
        "function = other_backend:function\n"
    )
    Path(tmp_path / "other_backend.py").write_text(
        "from parallelize.plugins.base import Backend\n"
        "class OtherBackend(Backend):\n"
        "    name = 'other'\n"
        "    process_per = 'device'\n"
        "    def engine(self, inner, *, world, devices): raise NotImplementedError\n"
        "def function(): return OtherBackend()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("other_backend", None)


@pytest.mark.usefixtures("distribution")
def test_other_distributions():
    """A backend from another distribution's entry point is found by its name, and listed."""
    assert registry.find("backends", "other").name == "other"
    assert "other" in registry.names("backends")


@pytest.mark.usefixtures("distribution")
def test_built_in_plug_ins_win():
    """An entry point cannot replace a built-in plug-in."""
    assert registry.find("backends", "ddp") is DDPBackend


@pytest.mark.usefixtures("distribution")
@pytest.mark.parametrize(
    ("name", "what", "why"),
    [
        ("absent", "(other_backend_that_is_not_there:Backend) cannot be imported: No module", "distribution declares"),
        ("unnamed", "(other_backend:Nothing) cannot be imported: module 'other_backend' has no", "declares it in"),
        ("function", "(other_backend:function) is <function", "must be a subclass of parallelize.plugins.base.Backend"),
    ],
)
def test_broken_distributions(name, what, why):
    """A plug-in that cannot be loaded is reported with its entry point instead of a bare ImportError."""
    with pytest.raises(ConfigError) as caught:
        registry.find("backends", name)
    (fault,) = caught.value.faults
    assert fault.what.startswith(f"plug-in '{name}' {what}")
    assert why in fault.why
    assert "parallelize.backends" in fault.why
    assert fault.fix.startswith("update or remove")
