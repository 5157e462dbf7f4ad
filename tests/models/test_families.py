"""Every family is one record, and a missing dependency is an error of one line."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from longspan import hf, models
from longspan.hf.config import from_json
from longspan.models.families import FAMILIES, UNSUPPORTED
from tests.made import made

ROOT = Path(__file__).parent.parent.parent
TINY = dict(vocab_size=7, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=5)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)


@every_family
def test_a_config_and_its_family_refer_to_each_other(family):
    assert family.config().family is family
    assert family.model_type == family.config().model_type


def test_no_two_families_have_the_same_name():
    kinds = {(family.model_type, family.variant) for family in FAMILIES}
    assert len(kinds) == len({family.name for family in FAMILIES}) == len(FAMILIES)
    shared = [family for family in FAMILIES if family.variant is not None]
    assert all(family.model_type == "gemma3_text" for family in shared) and len(shared) == 2


@every_family
def test_a_saved_model_of_every_family_and_task_loads(family, tmp_path):
    for task in family.tasks:
        model = made(task.model, family.config(**TINY))
        hf.save(model, tmp_path / task.model.task)
        again = hf.load(tmp_path / task.model.task)
        assert type(again) is task.model
        assert again.config.family is family


def test_the_table_of_families_in_the_docs_lists_all_and_no_others():
    page = (ROOT / "docs" / "checkpoints.md").read_text().splitlines()
    start = next(number for number, line in enumerate(page) if line.startswith("| checkpoints | config |"))
    listed, configs = set(), set()
    for line in page[start + 2 :]:
        if not line.startswith("|"):
            break
        types, names, _, *columns = (cell.strip() for cell in line.strip("|").split("|"))
        assert len(columns) == 6 and set(columns) <= {"yes", "no"}, line
        listed |= set(re.findall(r"`([^`]+)`", types)) - {"use_bidirectional_attention"}
        configs |= set(re.findall(r"`([^`]+)`", names))
    assert listed == {name for family in FAMILIES for name in (family.model_type, *family.inside)}
    assert configs == {family.config.__name__ for family in FAMILIES}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_type_that_is_not_supported_is_refused_with_what_is_missing(name):
    with pytest.raises(
        ValueError, match=f"has model_type='{name}', which Longspan does not support. It lacks "
    ) as error:
        from_json(dict(model_type=name))
    assert UNSUPPORTED[name] in str(error.value)


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
