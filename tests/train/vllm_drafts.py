"""Child of test_vllm_drafts.py: run engines one after another in one process and write down every draft that vLLM makes.

    python tests/train/vllm_drafts.py JOB.json OUT.json

JOB: a list of {"llm": engine arguments, "prompts": token ids, "max_tokens": int}. OUT: for each, {"outputs": token ids of
each prompt, "rounds": for each prompt the drafted ids of every round}, or {"error": text}.
"""

import gc
import json
import sys
import traceback
from pathlib import Path

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.medusa import MedusaProposer

drafts: list[list[int]] = []  # of the prompt at hand


def record(proposer: type) -> None:
    """Let every draft of a proposer be written down; prompts run one at a time."""
    original = proposer.propose

    def recording(self, *args, **kwargs):
        drafted = original(self, *args, **kwargs)
        drafts.append(drafted[0].tolist())
        return drafted

    proposer.propose = recording


def run(job: dict) -> dict:
    llm = LLM(**job["llm"])
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    outputs, rounds = [], []
    for prompt in job["prompts"]:
        drafts.clear()
        (done,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        outputs.append(list(done.outputs[0].token_ids))
        rounds.append(list(drafts))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"outputs": outputs, "rounds": rounds}


if __name__ == "__main__":
    record(SpecDecodeBaseProposer)
    record(MedusaProposer)
    torch.set_num_threads(1)
    results = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            results.append(run(job))
        except Exception as error:
            traceback.print_exc()
            results.append({"error": f"{type(error).__name__}: {error}"})
        Path(sys.argv[2]).write_text(json.dumps(results))
