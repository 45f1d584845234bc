"""The loop: equal steps however they are cut, exact resume, clean interruption, honest metrics."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from safetensors.torch import load_file

from data_prep.__main__ import main as data_prep
from recipes.errors import FeatureError, HeadstartError, RecipeError, TargetError
from recipes.schema import Train, load_recipe
from train import loop, start
from train.eagle3 import Eagle3Objective
from train.loop import fit, learning_rate

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "recipes/debug/eagle3.yaml")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The debug recipe's features, made once."""
    folder = tmp_path_factory.mktemp("features")
    assert data_prep([DEBUG, f"features.dir={folder}"]) == 0
    return folder


def recipe_for(store, out, *changes):
    base = [
        f"features.dir={store}",
        f"train.dir={out}/run",
        f"export.dir={out}/export",
        "train.max_steps=6",
        "train.eval_every=100",
        "train.save_every=100",
    ]
    return load_recipe(DEBUG, [*base, *changes])


ONE_STEP = ("train.max_steps=1", "train.warmup=0", "train.lr=1e-4")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((out / "run").glob("step_*"))[-1] / "model.safetensors")


def losses(out: Path) -> list[float]:
    return [record["loss"] for line in (out / "run/metrics.jsonl").read_text().splitlines() if "loss" in (record := json.loads(line))]


def assert_same(a: dict, b: dict, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def test_one_big_batch_is_accumulation(store, tmp_path):
    """B38: rows of very different supervised counts, same parameters within 1e-6 after a step.

    Adam divides by the gradient's own size, so an element with almost no gradient turns rounding into a share of lr; lr is small here.
    """
    fit(recipe_for(store, tmp_path / "a", *ONE_STEP), Eagle3Objective)
    fit(recipe_for(store, tmp_path / "b", *ONE_STEP, "train.micro_batch_tokens=256"), Eagle3Objective)
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "b"), 1e-6)


def run_two_ranks(arguments: list[str], timeout: float = 120, script: Path = ROOT / "train/eagle3.py") -> subprocess.CompletedProcess:
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--master_port=29611",
        str(script),
        *arguments,
    ]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.dist
def test_two_ranks_take_the_same_step(store, tmp_path):
    """B36, B38: 2 gloo processes, one of them with less to do; same parameters within 1e-6."""
    changes = [*ONE_STEP, "train.micro_batch_tokens=512"]
    fit(recipe_for(store, tmp_path / "one", *changes), Eagle3Objective)
    out = tmp_path / "two"
    base = [f"features.dir={store}", f"train.dir={out}/run", f"export.dir={out}/export", "train.eval_every=100", "train.save_every=100"]
    result = run_two_ranks([DEBUG, *base, *changes])
    assert result.returncode == 0, result.stderr[-3000:]
    assert_same(weights(tmp_path / "one"), weights(out), 1e-6)


FAST_CLOCK = """
import os, time
from types import SimpleNamespace
from train import loop
from train.eagle3 import Eagle3Objective
if os.environ["RANK"] == "1":
    loop.time = SimpleNamespace(perf_counter=lambda: 2 * time.perf_counter(), process_time=time.process_time)
loop.main("eagle3", Eagle3Objective)
"""


@pytest.mark.dist
def test_two_ranks_stop_at_the_same_step_by_the_clock(store, tmp_path):
    """Clocks of ranks run apart; one that left for validation while the other took a step would wait for ever."""
    (tmp_path / "fast.py").write_text(FAST_CLOCK)
    base = [f"features.dir={store}", f"train.dir={tmp_path}/run", f"export.dir={tmp_path}/export", "train.eval_every=1000"]
    by_clock = ["train.max_steps=null", "train.max_minutes=0.05", "train.log_every=1"]
    result = run_two_ranks([DEBUG, *base, *by_clock], script=tmp_path / "fast.py")
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(losses(tmp_path)) > 2 and result.stdout.count("trained ") == 1


def test_processes_that_do_not_see_one_another_are_refused(store, tmp_path, monkeypatch):
    """Two ranks that each train alone would overwrite each other's run."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HeadstartError, match="2 processes were started, but each would train alone .*ACCELERATE_USE_CPU=true"):
        fit(recipe_for(store, tmp_path), Eagle3Objective)


DEEPSPEED = Path(sys.prefix) / "deepspeed"  # apart from the other packages: transformers and accelerate import it wherever they find it
DEEPSPEED_ON_CPU = """
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from train.eagle3 import Eagle3Objective
from train.loop import main
PartialState._prepare_backend = lambda self, *args, **more: ("gloo", DistributedType.MULTI_GPU)  # which has none for DeepSpeed on a CPU
main("eagle3", Eagle3Objective)
"""


@pytest.mark.dist
@pytest.mark.skipif(not DEEPSPEED.is_dir(), reason=".ci/setup.sh installs DeepSpeed there")
@pytest.mark.parametrize(("stage", "lengths"), [(1, (1,)), (2, (1, 2))])
def test_deepspeed_takes_the_same_steps(store, tmp_path, stage, lengths):
    """DeepSpeed's engine on two CPU processes: steps, clipping and resume as in one process; its export is accepted and the same (B38)."""
    (tmp_path / "cpu.py").write_text(DEEPSPEED_ON_CPU)
    env = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{DEEPSPEED}:{ROOT}",
    }
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"recipes/accelerate/deepspeed_zero{stage}.yaml"]
    launch += ["--num_processes", "2", "--main_process_port", "29612", str(tmp_path / "cpu.py"), DEBUG]
    for steps in lengths:
        changes = ("train.warmup=0", "train.lr=1e-4", "train.micro_batch_tokens=512", "train.clip_norm=0.3", f"train.max_steps={steps}")
        fit(recipe_for(store, tmp_path / "one", *changes), Eagle3Objective)
        here = [f"features.dir={store}", f"train.dir={tmp_path}/zero/run", f"export.dir={tmp_path}/zero/export"]
        result = subprocess.run([*launch, *here, *changes], env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, result.stderr[-3000:]
        one, zero = (load_file(tmp_path / run / "export/model.safetensors") for run in ("one", "zero"))
        assert_same(one, zero, 2e-6)
    assert "over 2 process(es)" in result.stdout and ("resuming from" in result.stdout) == (len(lengths) > 1)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "zero"), rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_is_the_uninterrupted_run(store, tmp_path, optimizer):
    """A run stopped after any step and resumed gives the same losses and the same weights."""
    every = ("train.log_every=1", "train.save_every=2", f"train.optimizer={optimizer}")
    fit(recipe_for(store, tmp_path / "whole", *every), Eagle3Objective)
    killed = recipe_for(store, tmp_path / "killed", *every)

    original, calls = loop.take_step, 0

    def dying(*args):
        nonlocal calls
        calls += 1
        if calls == 6:  # in the middle of the sixth step; the last checkpoint is that of step 4
            raise RuntimeError("killed")
        return original(*args)

    loop.take_step = dying
    try:
        with pytest.raises(RuntimeError, match="killed"):
            fit(killed, Eagle3Objective)
    finally:
        loop.take_step = original
    fit(killed, Eagle3Objective)
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "killed")
    assert resumed == whole[:5] + whole[4:]  # step 5 was taken twice, with the same loss
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "killed"), 0)


def test_a_half_written_checkpoint_is_not_one(store, tmp_path):
    fit(recipe_for(store, tmp_path, "train.max_steps=2"), Eagle3Objective)
    (tmp_path / "run/step_000009.tmp").mkdir()
    fit(recipe_for(store, tmp_path, "train.max_steps=3"), Eagle3Objective)
    assert (tmp_path / "run/step_000003").is_dir()


def test_sigterm_saves_and_exits(store, tmp_path):
    base = [
        f"features.dir={store}",
        f"train.dir={tmp_path}/run",
        f"export.dir={tmp_path}/export",
        "train.max_steps=100000",
        "train.eval_every=100000",
    ]
    command = [sys.executable, str(ROOT / "train/eagle3.py"), DEBUG, *base, "train.save_every=100000", "train.log_every=1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    log = tmp_path / "run/metrics.jsonl"
    deadline = time.time() + 120
    while not (log.is_file() and log.stat().st_size > 0) and time.time() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted at step" in output
    assert list((tmp_path / "run").glob("step_*")) and not list((tmp_path / "run").glob("*.tmp"))


def test_a_store_without_a_supervised_token_is_not_trained_on(tmp_path, monkeypatch):
    """B04: preparation drops such rows; a store that has none left otherwise stops training before the target is read."""
    nothing = SimpleNamespace(supervised=torch.zeros(3, dtype=torch.int64))
    monkeypatch.setattr(start.FeatureStore, "open", lambda folder, recipe: nothing)
    with pytest.raises(FeatureError, match=f"{tmp_path} holds no supervised token; look at a row with"):
        start.open_source(recipe_for(tmp_path, tmp_path))


def test_another_recipe_does_not_reuse_the_run(store, tmp_path):
    """B12: names the key, both values, and the remedy."""
    fit(recipe_for(store, tmp_path, "train.max_steps=1"), Eagle3Objective)
    with pytest.raises(RecipeError, match=r"train\.lr=0\.002, the recipe now says 0\.01"):
        fit(recipe_for(store, tmp_path, "train.max_steps=1", "train.lr=0.01"), Eagle3Objective)


def test_a_run_that_broke_before_its_first_checkpoint_may_be_changed(store, tmp_path, monkeypatch):
    """Loss NaN or memory full at once: the remedy that is printed works, nothing trained is there to be spoilt."""
    with monkeypatch.context() as broken, pytest.raises(HeadstartError, match="lower train.lr"):
        broken.setattr(loop, "take_step", lambda *_: (_ for _ in ()).throw(HeadstartError("loss is nan: lower train.lr")))
        fit(recipe_for(store, tmp_path, "train.max_steps=1"), Eagle3Objective)
    fit(recipe_for(store, tmp_path, "train.max_steps=1", "train.lr=0.001"), Eagle3Objective)
    assert "lr: 0.001" in (tmp_path / "run/recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [0.0, 0.5, 1.0, 0.5, 0.0]), ("cosine", [0.0, 0.5, 1.0, 0.5, 0.0]), ("constant", [0.0, 0.5, 1, 1, 1])],
)
def test_learning_rate_closed_form(schedule, expected):
    """B38: a function of the share of the run alone; 10 steps, 2 of warm-up."""
    cfg = Train(max_steps=10, warmup=0.2, lr=1.0, schedule=schedule)
    assert [learning_rate(cfg, step / 10) for step in (0, 1, 2, 6, 10)] == pytest.approx(expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_clips_by_the_recipe(stage):
    """DeepSpeed's engine clips by itself, at what its configuration says once accelerate's `prepare` has filled it in."""
    plugin = DeepSpeedPlugin(hf_ds_config=str(ROOT / f"recipes/deepspeed/zero{stage}.json"))  # reads and checks it without DeepSpeed
    plugin.set_mixed_precision("bf16")  # as accelerate does, which would turn the whole module into bfloat16
    loop.set_up_deepspeed(SimpleNamespace(deepspeed_plugin=plugin), 0.3, bf16=True)  # type: ignore[arg-type]
    plugin.deepspeed_config_process(
        must_match=False,
        **{"gradient_clipping": 1.0, "zero_optimization.stage3_gather_16bit_weights_on_model_save": False},  # as `prepare` calls it
    )
    config = plugin.deepspeed_config
    assert config["gradient_clipping"] == 0.3 and config["torch_autocast"]["enabled"]
    assert not config["bf16"]["enabled"] and not config["fp16"]["enabled"]


def test_zero_3_is_refused():
    """B37: its weights are empty outside their modules, where the losses read them."""
    plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    with pytest.raises(HeadstartError, match="zero_stage=3.*deepspeed_zero2.yaml"):
        loop.set_up_deepspeed(SimpleNamespace(deepspeed_plugin=plugin), 0.3, bf16=False)  # type: ignore[arg-type]


def test_an_lm_head_with_a_bias_is_refused(small_target):
    """The teacher's logits would lack it, in every objective."""
    start.check_lm_head(small_target)
    with pytest.raises(TargetError, match="the LM head has a bias .largest value 2"):
        start.check_lm_head(replace(small_target, lm_head_bias=torch.full((50,), -2.0)))


def test_deepspeed_is_told_before_prepare(store, tmp_path, monkeypatch):
    """`prepare` builds the engine: what it is told later, it does not read. Without DeepSpeed there is nobody to tell."""
    calls = []
    monkeypatch.setattr(loop, "set_up_deepspeed", lambda accelerator, clip_norm, bf16: calls.append(clip_norm))

    def prepare(*args):
        calls.append("prepare")
        raise KeyboardInterrupt

    monkeypatch.setattr(Accelerator, "prepare", prepare)
    with pytest.raises(KeyboardInterrupt):
        fit(recipe_for(store, tmp_path, "train.clip_norm=0.3"), Eagle3Objective)
    assert calls == [0.3, "prepare"]


def test_non_finite_loss_names_step_rank_and_rows(store, tmp_path):
    class Broken(Eagle3Objective):
        def forward(self, batch):
            out = super().forward(batch)
            out.loss_sum = out.loss_sum * float("nan")
            return out

    with pytest.raises(HeadstartError, match=r"loss is nan at step 0, rank 0, rows \["):
        fit(recipe_for(store, tmp_path), Broken)


def test_overfit_one_row_drafts_everything(tmp_path):
    """PEERS §5.5: one row, loss near 0, every draft accepted."""
    changes = ["data.max_rows=1", "data.holdout=0", f"features.dir={tmp_path}/features", "head.draft_vocab_size=null"]
    assert data_prep([DEBUG, *changes]) == 0
    recipe = recipe_for(
        tmp_path / "features",
        tmp_path,
        *changes[:2],
        changes[3],
        "train.max_steps=250",
        "train.lr=3e-3",
        "objective.loss=ce",
        "train.log_every=50",
    )
    fit(recipe, Eagle3Objective)
    meta = json.loads((tmp_path / "export/headstart.json").read_text())
    validation = meta["training"]["validation"]
    assert validation["accuracy"] == [1.0, 1.0, 1.0] and validation["al"]["3"] == 4.0
    assert losses(tmp_path)[-1] < 0.05
