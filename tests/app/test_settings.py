"""Settings: defaults that follow from the corpus, JSON and text forms, and refused values."""

import ast
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from smoothgrad_jax import Exponential, annealed, phase_out, robbins_monro
from smoothgrad_jax.app import runs
from smoothgrad_jax.app.estimator import SCIKIT_LEARN_NAMES, SmoothedLDA
from smoothgrad_jax.app.runs import check_same_run, step_size
from smoothgrad_jax.app.settings import (
    DEFAULT_VALUES,
    OPTIONS,
    Settings,
    default_eta,
    parse_option,
    remembered_minibatches,
)
from smoothgrad_jax.app.window_text import window_object
from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.window import Moving
from smoothgrad_jax.training import driver


def test_every_setting_has_an_option_with_help():
    assert list(OPTIONS) == list(DEFAULT_VALUES)
    assert all(option.help for option in OPTIONS.values())


def test_every_option_reaches_the_run_and_the_estimator():
    """The parts that CONTRIBUTING.md lists under "Add an option" know the same names."""
    # The model has the first eight, the step sizes the next three, and the run or its caller the others.
    not_in_fit = {
        "topics",
        "method",
        "sweeps",
        "execution",
        "alpha",
        "eta",
        "local_tol",
        "local_max_iter",
        "tau",
        "kappa",
        "schedule",
    }
    not_in_fit |= {"early_stopping", "patience", "min_improvement", "seed", "checkpoint_every"}
    assert set(OPTIONS) - set(inspect.signature(driver.fit).parameters) == not_in_fit

    read = {node.attr for node in ast.walk(ast.parse(inspect.getsource(runs))) if isinstance(node, ast.Attribute)}
    assert set(OPTIONS) - read == {"seed", "held_out"}  # the callers of Run read these two

    parameters = inspect.signature(SmoothedLDA).parameters
    names = SCIKIT_LEARN_NAMES | {"held_out": "validation_fraction", "seed": "random_state"}
    assert {name for name in OPTIONS if names.get(name, name) not in parameters} == {"score_every"}


def test_settings_are_chosen_for_the_corpus():
    small, large = Settings().resolve(400), Settings(topics=20).resolve(1_000_000)
    assert (small.batch_size, small.passes, small.held_out) == (32, 10, 20)
    assert small.tau == pytest.approx(380 / 32)
    assert (large.batch_size, large.passes, large.held_out, large.tau) == (256, 1, 1_000, 64)
    assert [Settings(held_out=0).resolve(d).batch_size for d in (8_000, 16_000, 64_000)] == [32, 64, 256]
    assert Settings(held_out=0, method="mean").resolve(4_000).batch_size == 125
    assert Settings(rho=0.1).resolve(400).tau is None
    assert Settings(early_stopping=True).resolve(5).held_out == 1
    with pytest.raises(OptionError, match="held_out must leave documents to train on: 400 of 400"):
        Settings(held_out=400).resolve(400)


@pytest.mark.parametrize(
    ("options", "schedule", "kappa"),
    [
        ({}, "annealed", 0.5),
        ({"schedule": "robbins-monro"}, "robbins-monro", 0.6),
        ({"method": "collapsed", "kappa": 0.8}, "annealed", 0.8),
        ({"early_stopping": True}, "robbins-monro", 0.6),
        ({"method": "variational"}, "robbins-monro", 0.7),
        ({"rho": robbins_monro(64, 0.9)}, "robbins-monro", 0.9),
        ({"rho": 0.1}, None, None),
    ],
    ids=str,
)
def test_step_sizes_are_annealed_where_the_run_has_a_known_end(options, schedule, kappa):
    settings = Settings(**options).resolve(1_000)
    assert (settings.schedule, settings.kappa) == (schedule, kappa)
    if schedule == "annealed":
        assert step_size(settings, 50) == annealed(settings.tau, kappa, 50)


def weights(rho):
    """Return the weight of each step in λ after the last one, from its definition."""
    keep = np.cumprod((1 - rho)[::-1])[::-1]
    return rho * np.append(keep[1:], 1)


@pytest.mark.parametrize("steps", [2_000, 50_000])
@pytest.mark.parametrize("schedule", ["annealed", "robbins-monro"])
def test_the_remembered_minibatches_follow_from_the_weights_of_the_steps(schedule, steps):
    settings = Settings(schedule=schedule, tau=64.0, kappa=0.5).resolve(1_000)
    rho = np.asarray(step_size(settings, steps)(np.arange(steps)), float)
    expected = 1 / (weights(rho) ** 2).sum()
    last = (64 + steps) ** -0.5
    assert remembered_minibatches(schedule, last, steps) == pytest.approx(expected, rel=0.1)


def test_eta_grows_where_fewer_documents_are_remembered_than_there_are():
    assert default_eta("sampled", 1_000, 2_000) == 0.05
    assert default_eta("sampled", 8_000, 2_000) == pytest.approx(0.2)
    assert default_eta("variational", 8_000, 2_000) == 0.1


@pytest.mark.parametrize("window", [1, 10, "inf", "adaptive", "adaptive:64", "exponential:10", "phase-out:100:5:10"])
def test_settings_survive_json(window):
    settings = Settings(window=window, alpha="auto", early_stopping=True, patience=3).resolve(1_000)
    assert Settings.from_json(settings.as_json() | {"corpus": "ignored"}) == settings


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("window", Exponential(10)),
        ("window", Exponential(2.5)),
        ("window", Adaptive(64, 500)),
        ("window", Moving(10)),
        ("window", phase_out(100, 5, 10)),
        ("rho", robbins_monro(10, 0.6)),
        ("rho", 0.1),
    ],
    ids=repr,
)
def test_objects_survive_json(option, value):
    settings = Settings(**{option: value}).resolve(1_000)
    again = Settings.from_json(json.loads(json.dumps(settings.as_json())))
    assert again == settings
    if option == "window":
        assert window_object(again.window) == (10 if value == Moving(10) else value)
    else:
        assert step_size(again, 10) == value


def test_schedules_are_equal_if_their_parameters_are():
    assert phase_out(8, 2, 9) == phase_out(8, 2, 9) != phase_out(8, 2, 10)
    assert len({robbins_monro(2, 0.7), robbins_monro(2, 0.7), robbins_monro(3, 0.7)}) == 2
    assert repr(robbins_monro(2, 0.7)) == "RobbinsMonro(tau=2, kappa=0.7)"


@pytest.mark.parametrize(
    ("stored", "given"),
    [
        ({"window": phase_out(8, 2, 9)}, {"window": phase_out(8, 2, 10)}),
        ({"window": Adaptive(64, 500)}, {"window": Adaptive(64, 501)}),
        ({"window": Exponential(4)}, {"window": Exponential(5)}),
        ({"window": Exponential(phase_out(8, 2, 9))}, {"window": Exponential(phase_out(8, 2, 10))}),
        ({"rho": robbins_monro(10, 0.6)}, {"rho": robbins_monro(11, 0.6)}),
        ({"rho": robbins_monro(10, 0.6)}, {"rho": 0.1}),
    ],
)
def test_a_checkpoint_of_another_schedule_is_refused(stored, given):
    then, now, same = (Settings(**each).resolve(1_000) for each in (stored, given, stored))
    checkpoint = SimpleNamespace(settings=then.as_json())
    check_same_run(checkpoint.settings, same, {})
    with pytest.raises(OptionError, match=r"in the checkpoint, and is .* now; a resumed run cannot change it"):
        check_same_run(checkpoint.settings, now, {})


def test_a_checkpoint_of_a_version_without_an_option_has_its_default():
    settings = Settings().resolve(1_000)
    stored = {name: value for name, value in settings.as_json().items() if name != "local_max_iter"}
    check_same_run(stored, settings, {})
    with pytest.raises(OptionError, match="local_max_iter was 100 in the checkpoint, and is 50 now"):
        check_same_run(stored, Settings(local_max_iter=50).resolve(1_000), {})


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
        ({"window": "adaptive:64:32"}, "window must be"),
        ({"seed": True}, "seed must be an integer"),
        ({"replace": 1.0}, "replace must be true or false, got 1.0"),
        ({"alpha": -1}, "alpha must be a positive number"),
        ({"slots": "float16"}, "slots must be one of float32, bfloat16, uint8, got 'float16'"),
        ({"slots": "bfloat16", "window": math.inf}, "slots has no effect with an infinite window"),
        ({"rho": 0.1, "tau": 3}, "tau has no effect with a constant step size"),
        ({"rho": 0.1, "kappa": 0.6}, "kappa has no effect with a constant step size"),
        ({"rho": 0.1, "schedule": "annealed"}, "schedule has no effect with a constant step size"),
        ({"schedule": "linear"}, "schedule must be one of annealed, robbins-monro, got 'linear'"),
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
    program = "import sys, smoothgrad_jax.app.settings; assert not {'numpy', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
