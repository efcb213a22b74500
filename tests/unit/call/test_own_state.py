"""Caches of an object are no result of a call, whatever keeps them; what else changes is named."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallelize.call.unreturned import UnreturnedChanges, data_of


class Table:
    def __init__(self) -> None:
        self.rows, self._cached_rows = [1, 2], dict[int, int]()

    @functools.cached_property
    def total(self) -> int:
        return sum(self.rows)

    def read(self) -> None:
        self._cached_rows[0] = self.total


@dataclasses.dataclass
class Fields:
    rows: list[int] = dataclasses.field(default_factory=list)
    seen: dict[int, int] = dataclasses.field(default_factory=dict, compare=False)

    def read(self) -> None:
        self.seen[0] = len(self.rows)


@dataclasses.dataclass(frozen=True)
class Frozen:
    rows: list[int] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def total(self) -> int:
        return sum(self.rows)

    def read(self) -> None:
        assert self.total == 0


Slots = dataclasses.make_dataclass(
    "Slots", [(field.name, field.type, field) for field in dataclasses.fields(Fields)], slots=True
)
FrozenSlots = dataclasses.make_dataclass(
    "FrozenSlots", [(field.name, field.type, field) for field in dataclasses.fields(Fields)], slots=True, frozen=True
)


class Pickled(Table):
    """Says what its state is by `__getstate__`."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def read(self) -> None:
        self.lookups += 1


class Renamed(Pickled):
    """Pickles its state under other names than its attributes'."""

    def __getstate__(self) -> Any:
        return {"version": 1, "content": self.rows}

    def __setstate__(self, state: Any) -> None:
        self.rows = state["content"]


class Remade:
    """Pickles the arguments to make it anew."""

    def __init__(self, rows: list[int]) -> None:
        self.rows, self._seen = rows, dict[int, int]()

    def __reduce__(self) -> Any:
        return Remade, (self.rows,)

    def read(self) -> None:
        self._seen[0] = 1


def config() -> Any:
    omegaconf = pytest.importorskip("omegaconf")
    return omegaconf.OmegaConf.create({"rows": [1], "net": {"width": 3}})


def frame() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"rows": [1.0, 2.0]})


def of_attrs(**options: Any) -> Any:
    attrs = pytest.importorskip("attrs")

    class Fields:
        rows: list[int] = attrs.field(factory=list)
        seen: dict[int, int] = attrs.field(factory=dict, eq=False)

        @functools.cached_property
        def total(self) -> int:
            return sum(self.rows)

        def read(self) -> None:
            self.seen[0] = self.total

    return attrs.define(Fields, **options)()


def of_pydantic() -> Any:
    pydantic = pytest.importorskip("pydantic")

    class Settings(pydantic.BaseModel):
        rows: list[int] = pydantic.Field(default_factory=list)

        @functools.cached_property
        def total(self) -> int:
            return len(self.rows)

    return Settings()


def append(item: Any) -> None:
    item.rows.append(3)


def distribution() -> torch.distributions.Distribution:
    zeros, ones = torch.zeros(2), torch.eye(2)
    exp = torch.distributions.ExpTransform(cache_size=1)
    return torch.distributions.TransformedDistribution(
        torch.distributions.MultivariateNormal(zeros, scale_tril=ones), [exp]
    )


def use(item: Any) -> None:
    base = item.base_dist
    item.log_prob(torch.ones(2))
    assert base.covariance_matrix.shape == base.precision_matrix.shape == item.transforms[0].inv(torch.eye(2)).shape


# How an object is made, read and changed, and the attribute that is named; "": the object is.
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], object], str]] = {
    "cached_property": (Table, Table.read, append, ".rows"),
    "compare=False": (Fields, Fields.read, append, ".rows"),
    "frozen": (Frozen, Frozen.read, append, ".rows"),
    "slots": (Slots, Fields.read, append, ""),
    "frozen slots": (FrozenSlots, Fields.read, append, ""),
    "__getstate__": (Pickled, Pickled.read, append, ".rows"),
    "__getstate__ of other names": (Renamed, Renamed.read, append, ""),
    "__reduce__": (lambda: Remade([1]), Remade.read, append, ".rows"),
    "attrs": (of_attrs, lambda it: it.read(), append, ""),
    "attrs without slots": (lambda: of_attrs(slots=False), lambda it: it.read(), append, ".rows"),
    "distribution": (distribution, use, lambda it: it.base_dist.loc.add_(1), ".base_dist"),
    "OmegaConf": (config, lambda it: (it.rows[0], it.net.width), lambda it: it.net.update(width=4), "._content"),
    "pandas": (frame, lambda it: (it["rows"].sum(), it.describe()), lambda it: it.__setitem__("x", 1.0), "._mgr"),
    "attributes of pandas": (frame, lambda it: it["rows"], lambda it: it.attrs.update(x=1), ".attrs"),
    "pydantic": (of_pydantic, lambda it: it.total, append, ".rows"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("where", ["argument", "attribute", "list"])
@pytest.mark.parametrize("name", OBJECTS)
def test_what_is_only_read_has_not_changed(name: str, where: str) -> None:
    """Alone, in an attribute and in a list; a change is named."""
    make, read, change, attribute = OBJECTS[name]
    item = make()
    whole = {"argument": item, "attribute": SimpleNamespace(it=item), "list": [item]}[where]
    names = {"argument": f"x{attribute}", "attribute": "x.it", "list": "x"}
    changes = UnreturnedChanges([], lambda: data_of("x", whole))
    read(item)
    assert changes.names() == []
    change(item)
    assert changes.names() == [names[where]]


class Extended(torch.nn.Module):
    """A user's model with a value that it computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    @functools.cached_property
    def size(self) -> int:
        return 3


def test_a_cached_property_of_a_model_is_not_named() -> None:
    """Its other attributes are, since only its tensors come back."""
    model = Extended()
    changes = UnreturnedChanges([model], lambda: data_of("model", model))
    assert model.size == 3
    assert changes.names() == []
    model.epoch = 1
    assert changes.names() == ["model.epoch"]


class Secretive(Table):
    """Cannot be pickled now."""

    def __getstate__(self) -> Any:
        raise RuntimeError("not now")


def test_an_object_that_refuses_to_be_pickled_is_compared_by_its_attributes() -> None:
    """Alone: inside of another object it cannot be compared."""
    item = Secretive()
    changes = UnreturnedChanges([], lambda: data_of("x", item))
    item.read()
    assert changes.names() == []
    append(item)
    assert changes.names() == ["x.rows"]


def test_a_method_that_was_replaced_is_no_cache() -> None:
    """It hides a function, which no attribute has been computed by."""
    item = Table()
    changes = UnreturnedChanges([], lambda: data_of("x", item))
    vars(item)["read"] = 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert changes.names() == ["x.read"]
