"""The rules of DESIGN §1 that hold for all files: who may import whom, names of files, what gets installed."""

import ast
import doctest
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).parent.parent
PACKAGES = ("recipes", "heads", "data_prep", "train", "eval")

# package → what of ours it may import, besides itself
ALLOWED = {
    "recipes": (),
    "heads": ("recipes",),
    "data_prep": ("recipes", "heads.target", "heads.embedded", "heads.precision"),
    "train": ("recipes", "heads", "data_prep"),
    # of data_prep: prompts and their rendering, and two helpers of command lines; never the feature store
    "eval": ("recipes", "heads", *(f"data_prep.{part}" for part in ("render", "prompt_sets", "conversations", "progress", "stop"))),
}
SLOW_TO_IMPORT = ("datasets", "vllm", "matplotlib", "wandb", "tensorboard", "deepspeed")

FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}


def imported(nodes: Iterator[ast.AST] | list[ast.stmt], package: str) -> Iterator[tuple[str, ast.AST]]:
    """Dotted names that import statements among `nodes` ask for, `from a import b` as `a.b`; relative ones made absolute."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module
            yield from ((f"{base}.{alias.name}", node) for alias in node.names)


def forbidden_imports(source: str, package: str) -> list[str]:
    """Imports in `source`, a file of `package`, that the table does not allow."""
    allowed = (package, *ALLOWED[package])
    faults = []
    for name, node in imported(ast.walk(ast.parse(source)), package):
        ours = name.partition(".")[0] in (*PACKAGES, "tests")
        if ours and not any(name == a or name.startswith(a + ".") for a in allowed):
            faults.append(f"line {getattr(node, 'lineno', '?')}: {package} may not import {name}")
        if isinstance(node, ast.Import) and name.partition(".")[0] == "eval":
            faults.append(f"line {node.lineno}: `import {name}` hides the builtin eval; write `from {name} import …`")
    return faults


def test_imports_follow_the_table():
    faults = [f"{name}: {fault}" for name, source in SOURCES.items() for fault in forbidden_imports(source, name.partition("/")[0])]
    assert not faults


@pytest.mark.parametrize(
    ("package", "source", "fine"),
    [
        ("heads", "from recipes.errors import TargetError", True),
        ("heads", "def f():\n    from train.loop import fit", False),
        ("data_prep", "from heads.target import read_target", True),
        ("data_prep", "from heads import target", True),
        ("data_prep", "from heads.eagle3 import Eagle3Head", False),
        ("data_prep", "import heads.targets", False),
        ("recipes", "from .errors import RecipeError", True),
        ("eval", "from data_prep.render import render_prompt", True),
        ("eval", "from data_prep.store import FeatureStore", False),
        ("eval", "from train.export import export", False),
        ("train", "import eval.metrics", False),
        ("eval", "import eval.metrics", False),
        ("heads", "from evaluate import load", True),
    ],
)
def test_the_check_itself(package: str, source: str, fine: bool):
    assert (not forbidden_imports(source, package)) == fine


def test_slow_libraries_are_imported_where_used():
    """`--help` and a wrong key must answer at once."""
    top = {file: [name for name, _ in imported(ast.parse(source).body, "")] for file, source in SOURCES.items()}
    assert not [(file, name) for file, names in top.items() for name in names if name.partition(".")[0] in SLOW_TO_IMPORT]


def test_no_file_hides_a_standard_module():
    """A launched script's folder comes first on sys.path: train/profile.py would be everyone's `profile` (STYLE L3)."""
    assert not [name for name in SOURCES if set(Path(name).with_suffix("").parts[1:]) & sys.stdlib_module_names]


def test_files_are_short():
    """One job a file: where one reaches 400 lines, it has two. (data_prep/embedded/ holds prompts, not code.)"""
    code = {name: source for name, source in SOURCES.items() if not name.startswith("data_prep/embedded/")}
    assert not [(name, count) for name, source in code.items() if (count := len(source.splitlines())) >= 400]


@pytest.mark.parametrize("path", [path for path, source in SOURCES.items() if ">>>" in source])
def test_worked_examples(path: str):
    """Every example in a docstring gives what stands below it."""
    failed, run = doctest.testmod(import_module(path.removesuffix(".py").replace("/", ".")), extraglobs={"torch": torch})
    assert failed == 0 and run > 0


def test_every_package_is_installed_with_its_data():
    with open(ROOT / "pyproject.toml", "rb") as f:
        project = tomllib.load(f)["tool"]["setuptools"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in FILES}
    assert set(project["packages"]) == folders
    data = {path for package in PACKAGES for end in ("yaml", "json", "jsonl*") for path in (ROOT / package).rglob(f"*.{end}")}
    covered = {
        path for package, globs in project["package-data"].items() for g in globs for path in (ROOT / package.replace(".", "/")).glob(g)
    }
    assert data and not {str(path.relative_to(ROOT)) for path in data - covered}


def test_a_script_in_train_finds_the_other_packages_when_launched_by_path(tmp_path: Path):
    """What `accelerate launch train/eagle3.py` relies on: the checkout is installed, so its root need not be on sys.path."""
    code = "import heads, recipes, data_prep, train; print(heads.__file__)"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "heads" / "__init__.py"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "accelerate").glob("*.yaml")), ids=lambda p: p.stem)
def test_accelerate_reads_its_configs(path: Path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and any(f"--config_file recipes/accelerate/{path.name}" in line for line in lines)
    if config.distributed_type == "DEEPSPEED":
        settings = json.loads((ROOT / config.deepspeed_config["deepspeed_config_file"]).read_text(encoding="utf-8"))
        assert path.stem == f"deepspeed_zero{settings['zero_optimization']['stage']}"
    else:
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["mixed_precision"] == "no"  # precision is the recipe's


@pytest.mark.dist
def test_two_cpu_processes_through_accelerate(tmp_path: Path):
    """The config starts two processes that add up over gloo."""
    script = tmp_path / "add.py"
    script.write_text(
        "import torch, accelerate\n"
        "a = accelerate.Accelerator()\n"
        "total = a.reduce(torch.tensor([1.0 + a.process_index]), 'sum').item()\n"
        "a.print(a.num_processes, a.device.type, total)\n"
        "a.end_training()\n"
    )
    config = ROOT / "recipes" / "accelerate" / "two_cpu_processes.yaml"
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        str(config),
        "--main_process_port",
        "0",
    ]
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--main_process_port", "0", str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "cpu", "3.0"]
