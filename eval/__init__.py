"""What a head is worth: verification, reference decoding, vLLM, metrics, cost model, report. Write `from eval.x import y`."""
