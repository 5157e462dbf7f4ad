"""Ready to publish: versions agree, the source distribution is whole, workflows call what there is."""

import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import longspan

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = ["3.11", "3.12", "3.13"]


def test_version_changelog_and_citation_agree():
    version = longspan.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_the_changelog_says_everything_once():
    items = re.findall(r"^- (.*?)(?=^-|^#|^$|\Z)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    subjects = [re.split(r"[:;]|\.\s", item)[0].strip() for item in items]
    assert len(subjects) > 10 and len(set(subjects)) == len(subjects)


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_source_distribution_is_what_git_knows(tmp_path, monkeypatch):
    build = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    known = {name for name in names if (ROOT / name).is_file() and not name.startswith((".ci/", ".github/"))}
    assert packed - {"PKG-INFO"} == known
    assert {"CMakeLists.txt", "LICENSE", "native/kernel.cpp", "longspan/version.py", "tests/test_release.py"} <= packed


def test_users_dependencies_have_no_upper_caps():
    project = PROJECT["project"]
    wanted = list(project["dependencies"])
    for extra in ("flax", "hf", "cli", "plot"):
        wanted += project["optional-dependencies"][extra]
    assert not [text for text in wanted if "<" in text or "==" in text]


def test_every_supported_python_is_named_and_tested():
    named = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if ":: Python :: 3." in c]
    assert named == PYTHONS and PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    workflow = (ROOT / ".github/workflows/tests.yml").read_text("utf-8")  # all tests on the oldest, some on the others
    assert f'python-version: "{PYTHONS[0]}"' in workflow
    assert f"python: {PYTHONS[1:]}".replace("'", '"') in workflow


def test_one_wheel_a_platform_is_built_by_the_oldest_python():
    oldest = "cp" + PYTHONS[0].replace(".", "")
    built = PROJECT["tool"]["cibuildwheel"]["build"]
    assert PROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == "py3"
    assert {name.partition("-")[0] for name in built} == {oldest}
    assert {name.partition("-")[2] for name in built} == {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_parse_and_call_what_there_is(path):
    yaml = pytest.importorskip("yaml")
    text = path.read_text("utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["jobs"] and workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z0-9-]+)", text)) <= targets
    named = re.findall(r"(?:^|[ /])((?:tests|longspan|\.github)/[\w./-]+\.\w+)", text, re.MULTILINE)
    assert not [name for name in named if not (ROOT / name).exists()]
    for job in workflow["jobs"].values():
        assert "uses" in job or all(("uses" in step) != ("run" in step) for step in job["steps"])


@pytest.mark.parametrize("name", ["bug", "slow", "wish"])
def test_issue_forms_are_whole(name):
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text("utf-8"))
    assert {"name", "description", "body"} <= set(form)
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids) and all(part["attributes"]["label"] for part in form["body"])


def test_the_wheel_has_every_file_of_the_explorers_page(tmp_path, monkeypatch):
    build = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LONGSPAN_NATIVE", "0")
    with zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path))) as archive:
        packed = set(archive.namelist())
    for suffix in ("js", "html", "css"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "longspan" / "explorer").glob(f"*.{suffix}")}
        assert files and files <= packed
