"""Every family is one record, and a missing dependency is an error of one line."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from longspan import hf, models
from longspan.models.families import FAMILIES
from tests.made import made

ROOT = Path(__file__).parent.parent.parent
TINY = dict(vocab_size=7, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=5)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)


@every_family
def test_a_config_and_its_family_refer_to_each_other(family):
    assert family.config().family is family
    assert family.model_type == family.config().model_type


def test_no_two_families_have_the_same_name():
    assert len({family.model_type for family in FAMILIES}) == len({family.name for family in FAMILIES}) == len(FAMILIES)


@every_family
def test_a_saved_model_of_every_family_and_task_loads(family, tmp_path):
    for task in family.tasks:
        model = made(task.model, family.config(**TINY))
        hf.save(model, tmp_path / task.model.task)
        again = hf.load(tmp_path / task.model.task)
        assert type(again) is task.model
        assert again.config.family is family


def test_a_subclass_of_a_config_is_of_the_same_family():
    class Mine(models.RobertaConfig):
        pass

    assert Mine().family is models.RobertaConfig().family


@pytest.mark.parametrize(
    ("room", "module", "line"),
    [
        ("longspan.models", "flax", "longspan.models needs flax: pip install 'longspan[flax]'"),
        ("longspan.nn", "flax", "longspan.nn needs flax: pip install 'longspan[flax]'"),
        ("longspan.hf", "flax", "longspan.hf needs flax: pip install 'longspan[hf]'"),
        ("longspan.hf", "safetensors", "longspan.hf needs safetensors: pip install 'longspan[hf]'"),
    ],
)
def test_a_missing_dependency_is_one_line_that_names_the_extra(room, module, line):
    program = f"import sys; sys.modules[{module!r}] = None; import {room}"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == f"ImportError: {line}"
    assert result.stderr.count("Traceback") == 1, "another error came before ours"


@pytest.mark.parametrize("module", [models, hf], ids=["models", "hf"])
def test_a_public_module_exports_no_helper_of_another(module):
    public = {name: x for name, x in vars(module).items() if not name.startswith("_")}
    objects = [name for name, x in public.items() if not isinstance(x, ModuleType)]
    assert not [name for name in objects if not public[name].__module__.startswith(module.__name__)]
