"""Settings: defaults that follow from the corpus, JSON and text forms, and refused values."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.training.settings import DEFAULT_VALUES, OPTIONS, Settings, parse_option, window_object


def test_every_setting_has_an_option_with_help():
    assert list(OPTIONS) == list(DEFAULT_VALUES)
    assert all(option.help for option in OPTIONS.values())


def test_settings_are_chosen_for_the_corpus():
    small, large = Settings().resolve(400), Settings(topics=20).resolve(1_000_000)
    assert (small.batch_size, small.passes, small.held_out) == (32, 10, 20)
    assert small.tau == pytest.approx(380 / 32)
    assert (large.batch_size, large.passes, large.held_out, large.tau) == (256, 1, 1_000, 64)
    assert Settings(rho=0.1).resolve(400).tau is None
    assert Settings(early_stopping=True).resolve(5).held_out == 1
    with pytest.raises(OptionError, match="held_out must leave documents to train on: 400 of 400"):
        Settings(held_out=400).resolve(400)


@pytest.mark.parametrize("window", [1, 10, "inf", "adaptive", "adaptive:64", "exponential:10", "phase-out:100:5:10"])
def test_settings_survive_json(window):
    settings = Settings(window=window, alpha="auto", early_stopping=True, patience=3).resolve(1_000)
    assert Settings.from_json(settings.as_json() | {"corpus": "ignored"}) == settings


def test_objects_have_a_json_form():
    assert Settings(window=math.inf).as_json()["window"] == "inf"
    assert Settings(window=Adaptive(64)).as_json()["window"] == "adaptive:64"
    assert Settings(alpha=[0.1, 0.2]).as_json()["alpha"] == [0.1, 0.2]


def test_text_forms_of_windows_become_objects():
    assert window_object(parse_option("window", "7")) == 7
    assert window_object(parse_option("window", "inf")) == math.inf
    assert window_object("adaptive") == Adaptive()
    assert window_object("adaptive:64") == Adaptive(64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topics": 0}, "topics must be an integer of at least 1, got 0"),
        ({"topics": True}, "topics must be an integer"),
        ({"window": "10"}, "window must be an integer"),
        ({"window": "adaptive:3"}, "window must be"),
        ({"window": "phase-out:10:9:9"}, "window must be"),
        ({"alpha": -1}, "alpha must be a positive number"),
        ({"slots": "float16"}, "slots must be one of float32, bfloat16, uint8, got 'float16'"),
        ({"rho": 0.1, "tau": 3}, "tau has no effect with a constant step size"),
        ({"rho": 0.1, "kappa": 0.6}, "kappa has no effect with a constant step size"),
        ({"patience": 3}, "patience has no effect without early stopping"),
        ({"early_stopping": True, "held_out": 0}, "held_out must be at least 1 for early stopping"),
        ({"held_out": 0, "score_every": 5}, "score_every has no effect without held-out documents"),
        ({"window": "adaptive", "warmup": "zeros"}, 'warmup must be "mean" with an adaptive window'),
        ({"window": "exponential:5", "slots": "uint8"}, "slots has no effect with an exponential window"),
    ],
)
def test_invalid_settings_are_refused_by_name(values, message):
    with pytest.raises(OptionError, match=message):
        Settings(**values)


def test_the_module_imports_no_numpy():
    program = "import sys, smoothgrad_jax.training.settings; assert not {'numpy', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
