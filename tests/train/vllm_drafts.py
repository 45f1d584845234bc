"""Child of test_vllm_drafts.py: run engines one after another in one process and write down every draft that vLLM makes.

    python tests/train/vllm_drafts.py JOB.json OUT.json

JOB: a list of {"llm": engine arguments, "prompts": token ids, "max_tokens": int}. OUT: for each, {"outputs": token ids of
each prompt, "rounds": [[prompt number, tokens before the newest one, newest token, drafted ids]]}, or {"error": text}.
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

rounds: list[list] = []
prompt_number = 0
original = SpecDecodeBaseProposer.propose


def recording(self, *args, **kwargs):
    drafted = original(self, *args, **kwargs)
    rejected = kwargs.get("num_rejected_tokens_gpu")
    processed = int(kwargs["target_positions"][-1]) + 1 - (int(rejected[0]) if rejected is not None else 0)
    rounds.append([prompt_number, processed, int(kwargs["next_token_ids"][0]), drafted[0].tolist()])
    return drafted


def run(job: dict) -> dict:
    global prompt_number
    rounds.clear()
    llm = LLM(**job["llm"])
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = []
    for number, prompt in enumerate(job["prompts"]):
        prompt_number = number
        (done,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        outputs.append(list(done.outputs[0].token_ids))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"outputs": outputs, "rounds": list(rounds)}


if __name__ == "__main__":
    SpecDecodeBaseProposer.propose = recording
    torch.set_num_threads(1)
    results = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            results.append(run(job))
        except Exception as error:
            traceback.print_exc()
            results.append({"error": f"{type(error).__name__}: {error}"})
        Path(sys.argv[2]).write_text(json.dumps(results))
