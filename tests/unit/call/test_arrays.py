"""Large arrays are mapped from the file of a call, and equal what NumPy's own pickles give; memmaps stay their file."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallelize.call.pickling import dump, load
from parallelize.errors import LaunchError

CPU = torch.device("cpu")
ROWS = np.arange(60_000.0).reshape(100, 200, 3)
PAIRS = np.zeros(20_000, dtype=[("name", "U3"), ("value", "<f4")])


def size_of_pickle(file: Any) -> int:
    """Return the bytes that each reader copies; the rest of the file is mapped."""
    with zipfile.ZipFile(file) as archive:
        return sum(each.file_size for each in archive.infolist() if each.filename.endswith("data.pkl"))


def sent(item: object, folder: Path, *, is_local: bool = False) -> tuple[Any, int]:
    """Return an object as another process gets it, and the bytes that it would copy."""
    path = folder / "file"
    dump(item, path, is_local=is_local)
    size = size_of_pickle(path)
    loaded = load(path, device=CPU)
    path.unlink()
    return loaded, size


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


PLAIN: dict[str, np.ndarray] = {
    "rows": ROWS,
    "Fortran": np.asfortranarray(ROWS),
    "permuted": ROWS.transpose(1, 0, 2),
    "slice": ROWS[:, ::2],
    "slice of Fortran": np.asfortranarray(ROWS)[::2],
    "reversed": ROWS[::-1],
    "broadcast": np.broadcast_to(ROWS[0], (50, 200, 3)),
    "read-only": read_only(ROWS),
    "read-only slice": read_only(ROWS)[:, ::2],
    "one element wide": ROWS[:, :1, :1].repeat(200, axis=0),
    "bool": ROWS > 5,
    "half": ROWS.astype(np.float16),
    "complex": ROWS.astype(np.complex64),
    "long double": ROWS.astype(np.longdouble),
    "unsigned": ROWS.astype(np.uint64),
    "big endian": ROWS.astype(">f4"),
    "dates": ROWS.astype("datetime64[s]"),
    "text": ROWS.astype("U8"),
    "bytes": ROWS.astype("S8"),
    "structured": PAIRS,
    "a field": PAIRS["value"],
    "records": PAIRS.view(np.recarray),
    "matrix": ROWS.reshape(300, 200).view(np.matrix),
    "read-only matrix": read_only(ROWS.reshape(300, 200).view(np.matrix)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_large_array_is_mapped(name: str, tmp_path: Path) -> None:
    """Its elements are beside the pickle; type, order of the axes and the read-only flag are those of a pickle."""
    array = PLAIN[name]
    expected = pickle.loads(pickle.dumps(array, protocol=pickle.HIGHEST_PROTOCOL))
    loaded, size = sent(array, tmp_path)
    assert size < 2000
    assert type(loaded) is type(expected)
    assert (loaded.dtype, loaded.shape) == (expected.dtype, expected.shape)
    # Before 2.4, NumPy's pickles lose the order of three axes.
    assert loaded.strides == (array if name == "permuted" else expected).strides
    assert loaded.flags.writeable == expected.flags.writeable
    np.testing.assert_array_equal(loaded, array)


class Named(np.ndarray):
    """Keeps a name, by a reduction of its own, as NumPy's guide to subclasses tells."""

    name = ""

    def __reduce__(self) -> Any:
        function, arguments, state = super().__reduce__()
        return function, arguments, (*state, self.name)

    def __setstate__(self, state: Any) -> None:
        self.name = state[-1]
        super().__setstate__(state[:-1])


class Registered(np.ndarray):
    """Its program has told copyreg how it is pickled."""


copyreg.pickle(Registered, lambda array: (Registered, (array.shape,)))
NAMED = ROWS.view(Named)
NAMED.name = "mine"

BY_VALUE: dict[str, np.ndarray] = {
    "objects": np.array([[1], None, "x"] * 5000, dtype=object),
    "masked": np.ma.masked_less(ROWS, 5.0),
    "own reduction": NAMED,
    "small": np.arange(5),
    "no dimensions": np.array(1.5),
    "empty": np.empty((0, 7)),
}


@pytest.mark.parametrize("name", BY_VALUE)
def test_other_arrays_are_pickled_as_numpy_does(name: str, tmp_path: Path) -> None:
    """Arrays of objects, small ones, and classes that say how they are pickled."""
    array = BY_VALUE[name]
    loaded, _ = sent(array, tmp_path)
    assert type(loaded) is type(array)
    assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(loaded, array)
    assert getattr(loaded, "name", "") == getattr(array, "name", "")


def test_a_class_that_is_registered_with_copyreg_keeps_its_reduction(tmp_path: Path) -> None:
    """The elements do not travel if its function leaves them out."""
    loaded, size = sent(ROWS.view(Registered), tmp_path)
    assert (type(loaded), loaded.shape) == (Registered, ROWS.shape)
    assert size < 2000


def test_arrays_in_containers_and_many_of_them(tmp_path: Path) -> None:
    """A thousand arrays of 40 kB, of which one is there twice, and is one array in the reader, too."""
    arrays = [np.full(10_000, index, dtype=np.float32) for index in range(1000)]
    loaded, size = sent({"all": arrays, "first": arrays[0]}, tmp_path)
    assert size < 500_000
    assert loaded["all"][0] is loaded["first"]
    assert [array[-1] for array in loaded["all"]] == list(range(1000))


def test_readers_have_private_arrays(tmp_path: Path) -> None:
    """As they have private tensors; the file may be gone."""
    dump(ROWS, tmp_path / "file")
    one, other = (load(tmp_path / "file", device=CPU) for _ in range(2))
    (tmp_path / "file").unlink()
    one += 1
    np.testing.assert_array_equal(other, ROWS)
    np.testing.assert_array_equal(one, ROWS + 1)


@pytest.mark.parametrize("to_file", [True, False], ids=["file", "bytes"])
def test_memory_that_arrays_and_tensors_share(tmp_path: Path, to_file: bool) -> None:
    """torch.save refuses memory of which it gets two types: all arrive, and one type of it is mapped."""
    array = ROWS.copy()
    items = [array, torch.from_numpy(array), array.view(np.int64), array.view(np.uint8), array[50:]]
    file: Any = tmp_path / "file" if to_file else io.BytesIO()
    for each in (items, items[:2]):
        dump(each, file)
        loaded = load(file if to_file else file.getvalue(), device=CPU)
        for mine, theirs in zip(each, loaded, strict=True):
            np.testing.assert_array_equal(np.asarray(theirs), np.asarray(mine))
        if not to_file:
            file.seek(0)
            file.truncate()
    assert size_of_pickle(file) < 2000 if to_file else True


def test_a_data_frame_is_mapped(tmp_path: Path) -> None:
    """Its columns are arrays."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": np.arange(50_000.0), "n": np.arange(50_000), "y": np.ones(50_000)})
    loaded, size = sent(frame, tmp_path)
    assert size < 4000
    pandas.testing.assert_frame_equal(loaded, frame)
    loaded.loc[0, "x"] = 5.0
    assert loaded["x"][0] == 5.0


# Memmaps of files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ROWS.tofile(tmp_path / "rows")
    return tmp_path / "rows"


def opened(path: Path, mode: Any = "r", **options: Any) -> np.memmap:
    return np.memmap(path, mode=mode, **{"dtype": np.float64, "shape": ROWS.shape, **options})


@pytest.mark.parametrize("mode", ["r", "r+", "w+", "c"])
def test_a_memmap_is_the_same_file(path: Path, tmp_path: Path, mode: str) -> None:
    """A page that was not read before the file was changed has the change; what is written reaches a writable file."""
    memmap = opened(path, mode)
    if mode == "w+":
        memmap[:] = ROWS
    loaded, size = sent(memmap, tmp_path, is_local=True)
    assert size < 2000
    assert type(loaded) is np.memmap
    assert (loaded.filename, loaded.offset, loaded.shape) == (memmap.filename, 0, ROWS.shape)
    assert loaded.mode == {"w+": "r+"}.get(mode, mode)
    np.testing.assert_array_equal(loaded, ROWS)
    assert loaded.flags.writeable == (mode != "r")
    if mode != "r":
        loaded[0, 0, 0] = 77.0
        reaches_file = mode != "c"
        assert (opened(path)[0, 0, 0] == 77.0) == reaches_file


def test_offset_order_and_type_of_a_memmap(path: Path, tmp_path: Path) -> None:
    """They are those of the caller; a file given by its name, by a link or as a file object."""
    link = path.with_name("link")
    link.symlink_to(path)
    with path.open("rb") as file:
        for name in (path, str(path), link, file):
            memmap = np.memmap(name, dtype=">i4", mode="r", offset=4100, shape=(500, 40), order="F")
            loaded, size = sent(memmap, tmp_path, is_local=True)
            assert size < 2000
            assert (loaded.dtype, loaded.strides, loaded.offset) == (memmap.dtype, memmap.strides, 4100)
            assert (type(loaded.filename), loaded.filename) == (type(memmap.filename), memmap.filename)
            np.testing.assert_array_equal(loaded, memmap)


def test_views_of_a_memmap_are_views_of_one_memmap(path: Path, tmp_path: Path) -> None:
    """Slices, other types, plain arrays; what is written through one of them is there in the others."""
    memmap = opened(path, "r+")
    plain = np.asarray(memmap)
    locked = memmap[5:]
    locked.flags.writeable = False
    views = [memmap[10:20], memmap[::-2, 3], memmap.T, plain, plain[7:, 1], memmap.view(np.int64), locked, memmap]
    loaded, size = sent(views, tmp_path, is_local=True)
    assert size < 4000
    for view, theirs in zip(views, loaded, strict=True):
        assert type(theirs) is type(view)
        assert (theirs.strides, theirs.flags.writeable) == (view.strides, view.flags.writeable)
        np.testing.assert_array_equal(theirs, view)
    assert loaded[0].filename == path
    loaded[3][12, 0, 0] = -1.0
    assert [loaded[0][2, 0, 0], loaded[-1][12, 0, 0], opened(path)[12, 0, 0]] == [-1.0] * 3


def test_an_array_of_npy_files(tmp_path: Path) -> None:
    """np.load(mmap_mode=) begins behind a header."""
    np.save(tmp_path / "x.npy", ROWS)
    loaded, size = sent(np.load(tmp_path / "x.npy", mmap_mode="r"), tmp_path, is_local=True)
    assert (type(loaded), size < 2000) == (np.memmap, True)
    np.testing.assert_array_equal(loaded, ROWS)


def replace(path: Path, _: np.memmap) -> None:
    other = path.with_name("other")
    np.zeros_like(ROWS).tofile(other)
    other.replace(path)


def reopen_and_replace(path: Path, memmap: np.memmap) -> None:
    replace(path, memmap)
    HELD.append(opened(path))


def rename_over_link(path: Path, _: np.memmap) -> None:
    other = path.with_name("other")
    path.rename(path.with_name("renamed"))
    np.zeros_like(ROWS).tofile(other)
    path.symlink_to(other)


HELD: list[np.memmap] = []


@pytest.mark.parametrize(
    "change",
    [lambda path, _: path.unlink(), replace, reopen_and_replace, rename_over_link],
    ids=["deleted", "replaced", "replaced, and opened again", "renamed"],
)
def test_a_memmap_whose_file_is_gone_is_sent_by_value(path: Path, tmp_path: Path, change: Any) -> None:
    """The path leads to another file, or to none."""
    memmap = opened(path)
    change(path, memmap)
    loaded, _ = sent([memmap, memmap[50:]], tmp_path, is_local=True)
    np.testing.assert_array_equal(loaded[0], ROWS)
    np.testing.assert_array_equal(loaded[1], ROWS[50:])


def test_private_changes_of_a_memmap_are_sent(path: Path, tmp_path: Path) -> None:
    """Of mode "c", in any page; the file does not have them."""
    for place in (0, -1):
        memmap = opened(path, "c")
        memmap[place, place, place] = 5.5
        loaded, _ = sent(memmap, tmp_path, is_local=True)
        assert loaded[place, place, place] == 5.5
    np.testing.assert_array_equal(opened(path), ROWS)


def test_what_is_no_memmap_of_a_named_file(path: Path, tmp_path: Path) -> None:
    """A copy is an array; a file without a name has only its content."""
    with (tmp_path / "nameless").open("w+b") as file:
        Path(file.name).unlink()
        file.write(path.read_bytes())
        items = [opened(path).copy(), opened(path) + 1, np.memmap(file, dtype=np.float64, mode="r+")]
    loaded, size = sent(items, tmp_path, is_local=True)
    assert size < 4000
    for item, theirs in zip(items, loaded, strict=True):
        np.testing.assert_array_equal(theirs, item)
        theirs.reshape(-1)[0] = -1.0
    assert opened(path)[0, 0, 0] == 0.0


def test_another_machine_gets_the_content(path: Path, tmp_path: Path) -> None:
    """Its file system may have another file at the path, or none."""
    dump([opened(path), opened(path)[3:]], tmp_path / "file")
    path.unlink()
    whole, part = load(tmp_path / "file", device=CPU)
    np.testing.assert_array_equal(whole, ROWS)
    np.testing.assert_array_equal(part, ROWS[3:])


@pytest.mark.parametrize("change", [lambda path, _: os.truncate(path, 100), replace], ids=["truncated", "replaced"])
def test_a_file_that_changes_while_the_call_starts_is_named(path: Path, tmp_path: Path, change: Any) -> None:
    """NumPy would make a truncated file longer, with zeros, and would open another one."""
    dump(opened(path, "r+"), tmp_path / "file", is_local=True)
    change(path, None)
    size = path.stat().st_size
    with pytest.raises(LaunchError, match="the file of a memmap has changed"):
        load(tmp_path / "file", device=CPU)
    assert path.stat().st_size == size
