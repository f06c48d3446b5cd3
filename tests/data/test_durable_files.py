"""Test durable files: they are read as written, or the error names the file; replacement is atomic."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from smoothgrad_jax.data import durable_files
from smoothgrad_jax.data.durable_files import LoadError, SaveError, VersionError


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.float32(0.5), np.zeros((0, 4))],
)
def test_an_array_is_read_as_it_was_written(tmp_path, array):
    path = tmp_path / "array.npy"
    entry = durable_files.write_array(path, array)
    read = durable_files.read_array(path, entry)
    assert entry == {"bytes": path.stat().st_size, "crc32": entry["crc32"], "dtype": read.dtype.name}
    np.testing.assert_array_equal(read, array)
    np.testing.assert_array_equal(np.load(path), array)


def test_bfloat16_is_stored_as_bits(tmp_path):
    array = jnp.arange(5, dtype=jnp.bfloat16) / 3
    read = durable_files.read_array(tmp_path / "a.npy", durable_files.write_array(tmp_path / "a.npy", array))
    assert read.dtype == jnp.bfloat16
    np.testing.assert_array_equal(read, array)
    assert np.load(tmp_path / "a.npy").dtype == np.uint16


def test_a_changed_file_is_an_error(tmp_path):
    path = tmp_path / "file"
    entry = durable_files.write_file(path, [b"abc", np.frombuffer(b"def", np.uint8)])
    durable_files.verify(path, entry)
    with pytest.raises(FileExistsError):
        durable_files.write_file(path, [])
    path.write_bytes(b"abcxef")
    durable_files.verify(path, entry, checksum=False)
    with pytest.raises(LoadError, match="file: damaged: expected the checksum"):
        durable_files.verify(path, entry)
    path.write_bytes(b"abcde")
    for checksum in (True, False):
        with pytest.raises(LoadError, match="file: damaged: expected 6 bytes, got 5"):
            durable_files.verify(path, entry, checksum=checksum)
    path.unlink()
    for checksum in (True, False):
        with pytest.raises(LoadError, match="file: missing"):
            durable_files.verify(path, entry, checksum=checksum)
    with pytest.raises(LoadError, match="not named in the description"):
        durable_files.verify(path, None)


def test_bytes_that_are_not_an_array_are_an_error(tmp_path):
    entry = durable_files.write_file(tmp_path / "a.npy", [b"\x93NUMPY\x01\x00nothing"])
    with pytest.raises(LoadError, match=r"a\.npy: damaged: expected an array"):
        durable_files.read_array(tmp_path / "a.npy", entry)
    np.savez(tmp_path / "b.npz", a=1)
    with pytest.raises(LoadError, match="an archive of several"):
        durable_files.read_array(tmp_path / "b.npz", {"bytes": (tmp_path / "b.npz").stat().st_size}, checksum=False)


def test_json_contains_its_own_checksum(tmp_path):
    path, body = tmp_path / "a.json", {"format": "thing", "version": 2, "words": ["naïve"]}
    durable_files.write_json(path, body)
    assert durable_files.read_json(path, "thing", 2) == body
    with pytest.raises(LoadError, match="not a other"):
        durable_files.read_json(path, "other", 2)
    with pytest.raises(VersionError, match="format version 2, this package reads version 3: make it again"):
        durable_files.read_json(path, "thing", 3, if_older="make it again")
    with pytest.raises(VersionError, match="version 1: upgrade this package"):
        durable_files.read_json(path, "thing", 1)
    path.write_text(path.read_text().replace("2", "3"))
    with pytest.raises(LoadError, match="damaged, or edited by hand") as caught:
        durable_files.read_json(path, "thing", 2)
    assert not isinstance(caught.value, VersionError)
    path.write_text("[")
    with pytest.raises(LoadError, match="damaged, or not a thing"):
        durable_files.read_json(path, "thing", 2)


def test_values_are_converted_as_by_json():
    values = {"a": (1, np.float32(0.5)), "b": np.arange(2), "c": None}
    assert durable_files.json_values("settings", values) == {"a": [1, 0.5], "b": [0, 1], "c": None}
    with pytest.raises(ValueError, match="settings must be a value that JSON can represent, got object"):
        durable_files.json_values("settings", object())


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_path_is_replaced_when_its_content_is_complete(tmp_path, kind):
    path = tmp_path / "path"

    def write(target, content):
        if kind == "file":
            target.write_text(content)
        else:
            target.mkdir()
            (target / "inside").write_text(content)

    def read():
        return (path if kind == "file" else path / "inside").read_text()

    if kind == "link":
        write(tmp_path / "elsewhere", "zero")
        path.symlink_to(tmp_path / "elsewhere")
    for content in ("one", "two"):
        with durable_files.replacing(path) as temporary:
            write(temporary, content)
        assert read() == content
    with pytest.raises(ZeroDivisionError), durable_files.replacing(path) as temporary:
        write(temporary, f"three {1 / 0}")
    with pytest.raises(FileExistsError), durable_files.replacing(path, overwrite=False) as temporary:
        write(temporary, "four")
    assert read() == "two"
    assert {each.name for each in tmp_path.iterdir()} - {"elsewhere"} == {"path"}


def test_a_file_does_not_replace_a_folder_nor_a_folder_a_file(tmp_path):
    folder, path = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    (folder / "inside").write_text("kept")
    with pytest.raises(IsADirectoryError), durable_files.replacing(folder) as temporary:
        temporary.write_text("new")
    path.write_text("kept")
    with pytest.raises(NotADirectoryError), durable_files.replacing(path) as temporary:
        temporary.mkdir()
    assert (folder / "inside").read_text() == path.read_text() == "kept"
    assert {each.name for each in tmp_path.iterdir()} == {"folder", "file"}


def test_a_folder_that_cannot_be_replaced_is_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "path"
    path.mkdir()
    rename, calls = os.rename, []

    def second_call_fails(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no")
        rename(*args)

    monkeypatch.setattr(os, "rename", second_call_fails)
    with pytest.raises(OSError, match="no"), durable_files.replacing(path) as temporary:
        (temporary / "inside").mkdir(parents=True)
    assert list(tmp_path.iterdir()) == [path]
    assert not list(path.iterdir())


def test_system_errors_name_the_path_and_the_remaining_data(tmp_path):
    message = r"x: could not be written: .*; nothing is left"
    with pytest.raises(SaveError, match=message) as caught, durable_files.saving("x", lambda: "nothing is left"):
        durable_files.write_file(tmp_path / "missing" / "file", [])
    assert caught.value.errno == 2
    with pytest.raises(LoadError, match="x: damaged, or not written by this package"), durable_files.loading("x"):
        _ = {}["missing"]


def test_folders_are_made_with_their_parents(tmp_path):
    for _ in range(2):
        durable_files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
