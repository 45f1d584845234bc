"""Fine-tune the MTP layer of a target's own files (MiMo, DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5).

    accelerate launch train/mtp_native.py recipes/mimo-7b/fastmtp.yaml [train.max_steps=200 …]

FastMTP (arXiv 2509.18362): the layer is trained for being used again and again, on answers of the target itself. The
objective is that of `train/mtp.py`; the export is the whole target, in which only this layer's tensors differ
(`train/inside_target.py`).
"""

from __future__ import annotations

from train.mtp import MtpObjective


class MtpNativeObjective(MtpObjective):
    """Weighted mean over depths, through the target's own layer."""


if __name__ == "__main__":
    from train.loop import main

    main("mtp_native", MtpNativeObjective)
