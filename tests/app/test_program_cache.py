"""Compiled programs on disk: the second process compiles nothing, gives the same bits, and changes no configuration."""

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from smoothgrad_jax import SmoothedLDA, save_model
from smoothgrad_jax.app import program_cache
from smoothgrad_jax.app.cli import main
from smoothgrad_jax.core._xla import BEFORE_JAX_0_12

ROOT = Path(__file__).parents[2]
STORES = sys.platform == "linux" and not BEFORE_JAX_0_12
PROGRAM = """
import json, os, sys, zlib
import jax, numpy as np
from smoothgrad_jax import SmoothedLDA
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.split("/")[-1]))
before = jax.config.values.copy()
model = SmoothedLDA(3, max_iter=2, random_state=0, n_jobs=1).fit(np.random.default_rng(0).poisson(0.5, (60, 30)))
changed = [name for name, value in jax.config.values.items() if before[name] != value]
hits, misses = events.count("cache_hits"), events.count("cache_misses")
jax.jit(lambda x: x * 3 + 1)(np.ones(5))  # a program of the user
own = events.count("cache_hits") + events.count("cache_misses") - hits - misses
print(json.dumps([hits, misses, own, changed, zlib.crc32(model.components_.tobytes())]))
"""


def run(cache, **environment):
    base = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=ROOT,
        env=base | {"XDG_CACHE_HOME": str(cache)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def test_the_second_process_reads_what_the_first_compiled(tmp_path):
    hits, misses, own, changed, bits = run(tmp_path)
    assert (hits, own, changed) == (0, 0, [])
    assert (misses > 10) == STORES
    folder = tmp_path / "smoothgrad_jax" / "programs"
    if not STORES:
        assert not folder.exists()
        return
    assert len(list(folder.iterdir())) == misses
    assert folder.stat().st_mode & 0o777 == 0o700
    assert run(tmp_path) == [misses, 0, 0, [], bits]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the user's cache, with jax's cache turned on, which conftest turns off."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    yield tmp_path / "smoothgrad_jax"
    jax.config.update("jax_enable_compilation_cache", False)
    program_cache._is_usable.cache_clear()


@pytest.mark.skipif(not STORES, reason="programs are not stored on this system")
def test_configuration_is_restored_after_calls_within_calls_and_after_errors(cache):
    def setting():
        return jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs

    before = setting()

    @program_cache.stored_programs()
    def call():
        inside = setting()
        with program_cache.stored_programs():
            assert setting() == inside == (str(cache / "programs"), 0)
        assert setting() == inside
        raise KeyError

    with pytest.raises(KeyError):
        call()
    assert setting() == before


@pytest.mark.parametrize("forbidden", ["by others", "by jax", "by a folder of the user", "no home", "a file", "full"])
def test_no_program_is_stored_where_that_is_unsafe_or_unwanted(cache, monkeypatch, forbidden):
    if forbidden == "by others":
        (cache / "programs").mkdir(parents=True)
        (cache / "programs").chmod(0o777)
    elif forbidden == "by jax":
        jax.config.update("jax_enable_compilation_cache", False)
    elif forbidden == "by a folder of the user":
        jax.config.update("jax_compilation_cache_dir", str(cache / "own"))
    elif forbidden == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    elif forbidden == "a file":
        cache.touch()
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1_000))
    before = jax.config.jax_compilation_cache_dir
    try:
        with program_cache.stored_programs():
            assert jax.config.jax_compilation_cache_dir == before
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


@pytest.mark.skipif(not STORES, reason="programs are not stored on this system")
def test_every_command_that_infers_stores_its_programs_and_no_other_does(cache, tmp_path):
    path, model = tmp_path / "dated.csv", tmp_path / "model"
    path.write_text("text,year\n" + "anchor harbour,2001\n" * 3)
    vocabulary = ["anchor", "harbour"]
    save_model(model, SmoothedLDA(2, max_iter=1).fit(np.ones((3, 2))).to_model(vocabulary))
    shutil.rmtree(cache)
    for commands in (["topics"], ["verify"]):
        assert main([*commands, str(model)]) == 0
    assert not cache.exists()
    program_cache._is_usable.cache_clear()
    jax.clear_caches()
    assert main(["groups", str(model), str(path), "--field", "text", "--by", "year"]) == 0
    assert list((cache / "programs").glob("*-cache"))


@pytest.mark.skipif(not STORES, reason="programs are not stored on this system")
def test_the_oldest_programs_and_damaged_ones_are_removed(cache, monkeypatch):
    monkeypatch.setattr(program_cache, "_MAX_BYTES", 250)
    folder = cache / "programs"
    folder.mkdir(parents=True, mode=0o700)
    for age, size in enumerate([100, 0, 100, 100]):
        path = folder / f"{age}-cache"
        path.write_bytes(bytes(size))
        os.utime(path, (1_000 - age, 1_000 - age))
    with program_cache.stored_programs():
        assert sorted(path.name for path in folder.iterdir()) == ["0-cache", "2-cache"]
