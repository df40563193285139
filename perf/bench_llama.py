"""A worker that runs llama.cpp for `perf.bench`, in the environment of `make peers`: JSON lines in, JSON lines out.

It imports nothing of this repository. One cache, one sequence; tokens decoded or prefilled to be timed are forgotten.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import llama_cpp


class Worker:
    def __init__(self, options: argparse.Namespace) -> None:
        quantized = options.kv == "q8_0"  # which llama.cpp takes for V with flash attention only
        kv_type = llama_cpp.GGML_TYPE_Q8_0 if quantized else llama_cpp.GGML_TYPE_F16
        self._llama = llama_cpp.Llama(
            options.gguf, n_ctx=options.max_tokens, n_batch=512, n_threads=options.threads,
            n_threads_batch=options.threads, type_k=kv_type, type_v=kv_type, flash_attn=quantized, verbose=False,
        )  # fmt: skip

    def extend(self, tokens: list[int]) -> float:
        begin = time.perf_counter()
        self._llama.eval(tokens)
        self._llama._ctx.get_logits_ith(-1)  # waits for the result
        return time.perf_counter() - begin

    def timed(self, pieces: list[list[int]], budget_s: float) -> list[float]:
        """Seconds of each piece that began within `budget_s`, at least two; then they are forgotten."""
        before = self._llama.n_tokens
        seconds: list[float] = []
        end = time.perf_counter() + budget_s
        for piece in pieces:
            if len(seconds) >= 2 and time.perf_counter() > end:
                break
            seconds.append(self.extend(piece))
        self._llama.n_tokens = before
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv", choices=("f16", "q8_0"), required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    worker = Worker(parser.parse_args())
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "extend" in order:
            seconds = [worker.extend(order["extend"])]
        else:
            seconds = worker.timed(order["timed"], order["budget_s"])
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
