"""The engine for a mesh. Virtual devices must exist before jax starts: the tests run in a process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", ["on_four_devices.py", "lazy_rows_on_four_devices.py"])
def test_on_four_devices(which, file, quick_environment):
    tests = Path(__file__).with_name(file)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(tests)]
    env = quick_environment | {"JAX_NUM_CPU_DEVICES": "4"}
    found = subprocess.run(command, env=env, cwd=tests.parents[2], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout
