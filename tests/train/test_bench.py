"""`python -m train.bench`: one line for a person and one for a machine, and less work where less is supervised."""

import json
from pathlib import Path

import pytest

from train import bench

DEBUG = str(Path(__file__).parents[2] / "recipes/debug/eagle3.yaml")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """The machine's own rate is not what is tested."""
    monkeypatch.setattr(bench, "matmul_rate", lambda dtype: 1e9)
    monkeypatch.setattr(bench.torch, "set_num_threads", lambda n: None)


def test_work_follows_the_supervised_tokens(tiny_target, capsys):
    """LM head, loss and later depths only where something is supervised."""
    bench.main([DEBUG, f"target.path={tiny_target}", "--seq", "64", "--steps", "1", "--supervised", "1.0", "0.25"])
    said = capsys.readouterr().out.splitlines()
    full, quarter = (json.loads(line) for line in said[1::2])
    assert [line.partition(":")[0] for line in said[::2]] == [
        f"eagle3 64 tokens, {share} supervised, 1 thread(s)" for share in ("100%", "25%")
    ]
    assert (full["supervised"], quarter["supervised"], full["seq"]) == (1.0, 0.25, 64)
    assert 0 < quarter["gflop"] < 0.7 * full["gflop"]
    for figures in (full, quarter):
        assert figures["tokens_per_cpu_second"] == pytest.approx(64 / figures["cpu_seconds"]) and "peak" in said[0]


def test_a_warm_up_hides_nothing(tiny_target, capsys):
    """The step that is timed trains all depths, whatever share of a run the first depth has to itself."""
    gflop = []
    for share in ("0.0", "0.9"):
        recipe = [DEBUG, f"target.path={tiny_target}", f"objective.depth_warmup={share}"]
        bench.main([*recipe, "--seq", "64", "--steps", "1", "--supervised", "1.0"])
        gflop.append(json.loads(capsys.readouterr().out.splitlines()[1])["gflop"])
    assert gflop[0] == gflop[1] > 0


def test_a_wrong_key_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main([DEBUG, "head.unrol_steps=1"])
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith("error: ")
