"""Names to factories: own names, third parties' entry points, close names, overrides."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch

from fabric import Fabric
from fabric.core import registry as module
from fabric.core.errors import ConfigurationError
from fabric.core.registry import Registry, did_you_mean, unknown_name_message


class Thing:
    def __init__(self, size=1, colour="red"):
        self.size, self.colour = size, colour

    class Inner:
        pass


@pytest.fixture
def things():
    made = Registry("thing", "tests.things")
    made.register("small", Thing, "a small one", size=1)
    made.register("large", f"{__name__}:Thing", "a large one", size=9)
    return made


@pytest.fixture
def points(monkeypatch):
    """The entry points of a pretended distribution; the list of groups that were asked for."""
    asked = []

    def entry_points(group):
        asked.append(group)
        return [
            EntryPoint("foreign", f"{__name__}:Thing", group),
            EntryPoint("nested", f"{__name__}:Thing.Inner", group),
            EntryPoint("broken", "no_such_module_anywhere:Thing", group),
            EntryPoint("small", "no_such_module_anywhere:Thing", group),
        ]

    monkeypatch.setattr(module, "entry_points", entry_points)
    return asked


def test_a_name_makes_a_new_object_with_its_keywords(things):
    first, second = things.get("large"), things.get("large")
    assert isinstance(first, Thing)
    assert first is not second
    assert (first.size, first.colour) == (9, "red")


def test_overrides_win_over_registered_keywords(things):
    assert things.get("large", size=2).size == 2
    assert things.get("large").size == 9, "and are not remembered"


def test_a_taken_name_needs_override(things):
    with pytest.raises(ConfigurationError, match=r"'small' is taken by .*Thing.*override=True"):
        things.register("small", dict)
    things.register("small", dict, override=True)
    assert things.get("small") == {}


def test_registered_keywords_are_copied(things):
    defaults = {"size": 3}
    things.register("third", Thing, **defaults)
    defaults["size"] = 4
    assert things.get("third").size == 3


def test_an_unknown_name_shows_the_close_ones_and_all(things):
    with pytest.raises(ConfigurationError) as caught:
        things.get("smal")
    assert str(caught.value) == "thing='smal' is not known. Did you mean 'small'? Known: large, small."


def test_a_name_like_no_other_gets_no_guess():
    assert unknown_name_message("thing", "xyz", ["ab"]) == "thing='xyz' is not known. Known: ab."


@pytest.mark.parametrize(
    ("kind", "given", "instead"),
    [
        ("precision", "bfloat16", "'bf16-mixed' or 'bf16-true'"),
        ("precision", "FP16", "'16-mixed' or '16-true'"),
        ("precision", "amp", "'16-mixed' or '16-true'"),
        ("precision", "no", "'32-true'"),
        ("precision", torch.bfloat16, "'bf16-mixed' or 'bf16-true'"),
        ("precision", torch.float64, "'64-true'"),
        ("precision", "float", "'32-true'"),
        ("precision", "fp8", "'float8'"),
        ("strategy", "zero-3", "'zero3'"),
        ("strategy", "tp", "ModelParallelStrategy(parallelize_fn)"),
        ("strategy", "context_parallel", "FSDPStrategy(context_parallel=ContextParallel())"),
        ("strategy", "DiLoCo", "LocalSGDStrategy(outer_optimizer=lambda p: SGD(p, 0.7, 0.9, nesterov=True))"),
    ],
)
def test_names_of_other_libraries_say_what_to_write(kind, given, instead):
    with pytest.raises(ConfigurationError) as caught:
        Fabric(accelerator="cpu", devices=1, **{kind: given})
    shown = given.lower() if kind == "strategy" else given
    assert str(caught.value).startswith(f"{kind}={shown!r} is not known. Write {kind}={instead}. Known: ")


@pytest.mark.parametrize(
    ("argument", "given", "instead"),
    [
        ("strategy", "cpu", "accelerator='cpu'"),
        ("strategy", "bf16-mixed", "precision='bf16-mixed'"),
        ("precision", "ddp", "strategy='ddp'"),
        ("accelerator", "ddp", "strategy='ddp'"),
        ("accelerator", "cuda:0", "accelerator='cuda', devices=[0]"),
    ],
)
def test_a_name_of_another_argument_says_which(argument, given, instead):
    with pytest.raises(ConfigurationError) as caught:
        Fabric(**{argument: given})
    assert str(caught.value).startswith(f"{argument}={given!r} is not known. Write {instead}. Known: ")


def test_names_of_other_libraries_belong_to_one_kind():
    assert unknown_name_message("accelerator", "tp", ["cpu"]) == "accelerator='tp' is not known. Known: cpu."


def test_guesses_ignore_case():
    assert did_you_mean("DDP_SPAWN", ["ddp_spawn", "fsdp"]) == " Did you mean 'ddp_spawn'?"
    assert did_you_mean("zzz", ["ddp"]) == ""


def test_names_of_other_distributions(things, points):
    assert "foreign" in things
    assert isinstance(things.get("foreign", size=5), Thing)
    assert isinstance(things.get("nested"), Thing.Inner)
    assert things.names() == ["broken", "foreign", "large", "nested", "small"]
    assert things.entry("foreign").description == f"from {__name__}:Thing"
    assert points == ["tests.things"], "asked for once"


def test_entry_points_are_looked_at_only_for_unknown_names(things, points):
    things.get("small")
    assert "large" in things
    assert points == []


def test_a_broken_distribution_harms_only_its_own_name(things, points):
    assert things.get("small").size == 1, "an own name wins over an entry point"
    with pytest.raises(ConfigurationError, match="Did you mean 'foreign'"):
        things.get("foreing")
    assert things.get("foreign").size == 1
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        things.get("broken")


def test_remove(things):
    things.remove("small")
    assert "small" not in things
    with pytest.raises(ConfigurationError):
        things.remove("small")


def test_a_registry_is_a_collection_of_names(things, points):
    assert list(things) == things.names() == things.available_strategies()
    assert len(things) == 5
    assert 3 not in things
    assert [] not in things, "names are strings, whatever a user may ask about"


def test_factories_given_by_name_are_imported_late():
    late = Registry("thing", "tests.things")
    late.register("broken", "no_such_module_anywhere:Thing")
    assert late.entry("broken").factory == "no_such_module_anywhere:Thing"
    with pytest.raises(ModuleNotFoundError):
        late.get("broken")


def test_every_name_of_the_package_leads_to_a_factory():
    from fabric.accelerators.select import ACCELERATOR_REGISTRY
    from fabric.plugins.environments.detect import ENVIRONMENT_REGISTRY
    from fabric.precision.precision import PRECISION_REGISTRY
    from fabric.strategies.registry import STRATEGY_REGISTRY

    for registry in (ACCELERATOR_REGISTRY, ENVIRONMENT_REGISTRY, PRECISION_REGISTRY, STRATEGY_REGISTRY):
        for name in registry:
            entry = registry.entry(name)
            assert callable(entry.load()), SimpleNamespace(registry=registry.kind, name=name)
            assert entry.description, name
