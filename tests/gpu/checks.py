"""What must hold on a card, without pytest: `python tests/gpu/checks.py` (part of `make gpu`).

    append, attend, commit   kernels on the device against the float64 references, small ragged cases full of NaN
    graph                    a captured attention step replays over new tables
    transfer                 a conversation copied out of arenas and into others
    conversations            whole conversations with commits and probes, on the GPU and on the CPU
    smollm2                  greedy text of engines/smollm2-135m on both, where it was built

The checks take what launches kernels, so the tests of this repository also run them with the emulation.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
for folder in (ROOT, ROOT / "tests" / "runtime"):  # run as a script: only its own folder is on the path
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402
from kernel_engine import POLICIES, SPEC, TURNS, Model, make_engine, talk  # noqa: E402
from transfer_cases import FORMATS, check_transfer  # noqa: E402

from plugins.append import reference as append_reference  # noqa: E402
from plugins.append.cuda import CudaAppend  # noqa: E402
from plugins.append.params import AppendParams  # noqa: E402
from plugins.attend import reference as attend_reference  # noqa: E402
from plugins.attend.cuda import CudaAttend  # noqa: E402
from plugins.attend.params import RECORD_SQUARES, AttendParams, AttendStep  # noqa: E402
from plugins.commit.cuda import SHARED_BYTES, CudaPublish  # noqa: E402
from plugins.kv_launch import single_layer  # noqa: E402
from plugins.layout import BlockLayout  # noqa: E402
from plugins.memory import KvMemory  # noqa: E402
from plugins.staging import TableStaging  # noqa: E402
from runtime.errors import CommitKVError, DeviceError  # noqa: E402
from runtime.executor_torch import TorchExecutor  # noqa: E402
from runtime.gpu import GpuKernels, gpu_executor, open_gpu, open_kernels  # noqa: E402
from runtime.kv_storage import ArenaPlace  # noqa: E402
from runtime.policy import registry  # noqa: E402
from tests.plugins.attend_cases import AttendCase, make_attend_case  # noqa: E402
from tests.plugins.commit_cuda_cases import GEOMETRIES, check, draw  # noqa: E402

TOLERANCE = 1e-2
# Logits this close may change places between a CPU's rounding and a GPU's: a few steps of the type at their size.
NEAR_TIE = {"fp16": 0.05, "bf16": 0.4}
ENGINE = ROOT / "engines" / "smollm2-135m"
PROMPTS = ("The capital of France is", "Once upon a time, in a village by the sea,", "Water boils at",
           "Q: What is 12 + 30?\nA:")  # fmt: skip
COMMON_PREFIX = 0.5  # share of the CPU's characters before the two texts may part

_SMALL = AttendCase("small", head_dim=64, dtype="bf16", kv_dtype="bf16", format="k8v4", max_entries=90)
_WIDE = AttendCase("wide", head_dim=128, dtype="fp16", kv_dtype="fp16", format="int4", page_tokens=16,
                   block_entries=64, max_entries=200, kv_heads=1, group_size=8)  # fmt: skip
ATTEND_CASES = tuple(
    dataclasses.replace(base, name=f"{base.name} {name}", **changes)
    for base in (_SMALL, _WIDE)
    for name, changes in (
        ("decode batch", {"rows": (1, 1, 1), "tokens": (5, 133, 1)}),
        ("no committed", {"tokens": (40,), "max_entries": 0}),
        ("no active", {"tokens": (0,)}),
        ("chunks over history", {"rows": (47, 1, 6), "tokens": (140, 12, 6), "record": "some", "record_skip": 3}),
        ("squares", {"rows": (47, 1, 6), "tokens": (140, 12, 6), "record_skip": 3, "marks": (RECORD_SQUARES,)}),
        ("holes", {"rows": (1, 5), "tokens": (20, 31), "holes": True}),
        ("extreme logits", {"rows": (5, 1), "tokens": (17, 8), "logit_scale": 1e3, "format": base.kv_dtype}),
        ("int8", {"rows": (1, 1), "tokens": (70, 9), "format": "int8"}),
    )
)  # fmt: skip


def close(what: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Raises AssertionError naming the largest difference; NaN must be where it is expected."""
    got, expected = got.detach().cpu().double(), expected.cpu().double()
    assert torch.equal(got.isnan(), expected.isnan()), f"{what}: NaN leaked or was lost"
    same = (got == expected) | expected.isnan()  # inf marks protected entries
    worst = float(torch.where(same, 0.0, got - expected).abs().max()) if got.numel() else 0.0
    assert worst <= tolerance, f"{what}: differs by {worst:.2e}, expected at most {tolerance:.0e}"


def check_append(kernels: GpuKernels) -> None:
    device = kernels.runner.device
    for rows, head_dim, dtype in ((1, 64, torch.bfloat16), (23, 128, torch.float16)):
        gen = torch.Generator().manual_seed(rows)
        angle = torch.rand(rows, head_dim // 2, generator=gen) * 50
        q, k, v = torch.randn(rows, 10, head_dim, generator=gen).to(dtype).split((6, 2, 2), dim=1)
        slots = torch.randperm(7 * 16, generator=gen)[:rows]
        pages = torch.full((7, 2, 2, 16, head_dim), torch.nan, dtype=dtype)
        seen = torch.full((7, 2, 16), 0.5, dtype=torch.float16)
        on_device = [x.to(device) for x in (q, k, v, angle.cos(), angle.sin(), slots, pages, seen)]
        nothing = torch.zeros(0, device=device)
        memory = KvMemory((on_device[6],), (on_device[7],), nothing, nothing, BlockLayout("int8", 16, head_dim))
        step = CudaAppend(kernels.runner).begin(on_device[5], (on_device[3], on_device[4]), memory)
        turned = step(0, *on_device[:3])
        exact = AppendParams(q.double(), k.double(), v.double(), angle.cos(), angle.sin(), slots, pages.double(), seen)
        close(f"append {rows} rows, q", turned, append_reference.append(exact))
        close(f"append {rows} rows, pages", on_device[6], exact.pages)
        close(f"append {rows} rows, seen", on_device[7], exact.seen, 0.0)


def on_device(params: AttendParams, device: torch.device) -> AttendParams:
    """A copy whose arenas lie on the device; tables stay on the host, where tiles are laid out."""
    moved = {
        name: getattr(params, name).clone().to(device) for name in ("q", "out", "pages", "seen", "blocks", "score")
    }
    return dataclasses.replace(params, **moved)


def check_attend(kernels: GpuKernels, cases: tuple[AttendCase, ...] = ATTEND_CASES) -> None:
    for case in cases:
        params = make_attend_case(case, seed=1)
        mine = on_device(params, kernels.runner.device)
        attend = CudaAttend(kernels.runner, TableStaging(kernels.runner.device), case.group_size, kernels.sm)
        attend(mine)
        out, seen, score = attend_reference.attend(params)
        for name, got, expected in (("out", mine.out, out), ("seen", mine.seen, seen), ("score", mine.score, score)):
            close(f"attend {case.name}, {name}", got, expected)
        assert torch.equal(mine.blocks.cpu(), params.blocks), f"attend {case.name}: blocks were written"


def check_commit(kernels: GpuKernels) -> None:
    device = kernels.runner.device
    publish = CudaPublish(kernels.runner, SHARED_BYTES[kernels.sm])
    for case in GEOMETRIES:
        commit = draw(dataclasses.replace(case, entries=3 * case.block_entries), 0.4, 0.35, seed=4)
        memory = commit.state.memory
        moved = KvMemory(
            tuple(x.clone().to(device) for x in memory.pages), tuple(x.clone().to(device) for x in memory.seen),
            memory.blocks.clone().to(device), memory.score.clone().to(device), memory.layout,
        )  # fmt: skip
        counts = publish(moved, commit.params, commit.decision)
        back = KvMemory(
            tuple(x.cpu() for x in moved.pages), tuple(x.cpu() for x in moved.seen), moved.blocks.cpu(),
            moved.score.cpu(), moved.layout,
        )  # fmt: skip
        check(commit, counts, back)


@contextmanager
def small_policies() -> Iterator[None]:
    """Registers the policies that make short conversations commit."""
    held = dict(registry.ALL_POLICIES)
    registry.ALL_POLICIES.update(POLICIES)
    try:
        yield
    finally:
        registry.ALL_POLICIES.clear()
        registry.ALL_POLICIES.update(held)


class MarginSpy:
    """A decoder that keeps, for every token it is asked for, how far the best logit lies over the second."""

    def __init__(self, decoder: Any) -> None:
        self.decoder, self.margins = decoder, []

    def forward(self, *arguments: Any) -> torch.Tensor | None:
        logits: torch.Tensor | None = self.decoder.forward(*arguments)
        if logits is not None and logits.shape[0]:
            best = logits.topk(2, dim=-1).values
            self.margins.append(float((best[:, 0] - best[:, 1]).min()))
        return logits


def check_conversations(kernels: GpuKernels) -> None:
    """Answers are the CPU's, token by token, up to the first near-tie that rounding may decide either way."""
    spies: list[MarginSpy] = []

    def on_cpu(model: Model) -> TorchExecutor:
        spies.append(MarginSpy(model.decoder))
        return TorchExecutor(spies[-1], SPEC, model.limits, model.storage)

    def on_gpu(model: Model) -> TorchExecutor:
        return gpu_executor(model.decoder, SPEC, model.limits, model.storage, kernels)

    with small_policies():
        for dtype in ("fp16", "bf16"):
            for policy in POLICIES:
                plain, _ = make_engine(on_cpu, dtype, ArenaPlace(poison=True))
                expected = talk(plain, (policy,))
                engine, manager = make_engine(on_gpu, dtype, ArenaPlace(kernels.runner.device, poison=True))
                near = [margin < NEAR_TIE[dtype] for margin in spies[-1].margins]
                same_text(f"{policy} in {dtype}", talk(engine, (policy,)), expected, near)
                manager.check_invariants()
                assert engine.stats().commits > 2 and engine.stats().probes > 2


def same_text(what: str, got: list[str], expected: list[str], near: list[bool]) -> None:
    """One character is one token; near: of every token of `expected` in order, whether another one was as likely."""
    mine, theirs = "".join(got), "".join(expected)
    first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if first is None:
        assert mine == theirs, f"{what}: answers end elsewhere"
        return
    assert near[first], f"{what}: token {first} of {len(theirs)} is {mine[first]!r}, expected {theirs[first]!r}"
    assert first >= len(TURNS), f"{what}: the answers part at token {first} already"


def check_smollm2(kernels: GpuKernels) -> None:
    """The default engine, where it was built in bf16 or fp16 and its packages are there."""
    if kernels.runner.device.type != "cuda" or not (ENGINE / "manifest.json").is_file():
        print(f"       smollm2 left out: no {ENGINE.relative_to(ROOT)}; python builder/build.py --dtype bf16 builds it")
        return
    from runtime.config import RuntimeConfig
    from runtime.request import Request, SamplingParams, TextEvent
    from runtime.wiring import load_engine

    texts: dict[str, list[str]] = {}
    for device in ("cpu", "cuda"):
        engine = load_engine(ENGINE, RuntimeConfig(kv_memory_bytes=256 << 20, device=device), verify=False)
        said = dict.fromkeys(PROMPTS, "")
        for prompt in PROMPTS:
            engine.submit(Request(prompt, prompt, SamplingParams(max_tokens=24)))
        while engine.has_turns():
            for event in engine.step()[0]:
                if isinstance(event, TextEvent):
                    said[event.request_id] += event.text
        texts[device] = list(said.values())
    for prompt, mine, theirs in zip(PROMPTS, texts["cuda"], texts["cpu"], strict=True):
        common = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(theirs))
        assert common >= COMMON_PREFIX * len(theirs), f"smollm2 {prompt!r}: got {mine!r}, on the CPU {theirs!r}"


def check_transfers(kernels: GpuKernels) -> None:
    """Checkpoints of every block format."""
    for block_format in FORMATS:
        check_transfer(kernels.runner.device, block_format)


def check_graph(kernels: GpuKernels) -> None:
    """A captured step replays over what was uploaded into the same places since: other queries, another table."""
    device = kernels.runner.device
    if device.type != "cuda":
        return
    case = dataclasses.replace(_SMALL, rows=(1, 1), tokens=(70, 33))
    on_host = make_attend_case(case, seed=1)
    mine = on_device(on_host, device)
    CudaAttend(kernels.runner, TableStaging(device), case.group_size, kernels.sm)(mine)  # compiles and loads
    staging, memory = TableStaging(device), single_layer(mine)[0]
    form = CudaAttend(kernels.runner, staging, case.group_size, kernels.sm)

    tables = single_layer(on_host)[1]

    def upload(page_lens: torch.Tensor) -> AttendStep:
        staging.begin()
        step = form.begin(memory, dataclasses.replace(tables, page_lens=page_lens), on_host.scale)
        staging.flush()
        torch.cuda.synchronize(device)
        return step

    step, graph = upload(tables.page_lens), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0, mine.q, mine.out)
    shorter = on_host.tables.page_lens.clone()
    shorter[0] = 3  # of the first conversation's pages
    changed = dataclasses.replace(
        on_host, q=-on_host.q, tables=dataclasses.replace(on_host.tables, page_lens=shorter), out=on_host.out
    )
    for params in (on_host, changed, on_host):
        upload(params.tables.page_lens)
        mine.q.copy_(params.q)
        mine.out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(device)
        close("graph, out", mine.out, attend_reference.attend(params)[0])


CHECKS: dict[str, Callable[[GpuKernels], None]] = {
    "append": check_append,
    "attend": check_attend,
    "commit": check_commit,
    "graph": check_graph,
    "transfer": check_transfers,
    "conversations": check_conversations,
    "smollm2": check_smollm2,
}


def main() -> int:
    """0: all hold; 1: one does not; 2: there is no GPU."""
    try:
        device = open_gpu()
        kernels = open_kernels(device)
    except DeviceError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    print(f"gpu: {torch.cuda.get_device_name(device)}, {kernels.sm}, torch {torch.__version__}", flush=True)
    failed = 0
    for name, run in CHECKS.items():
        started = time.monotonic()
        try:
            run(kernels)
        except (AssertionError, CommitKVError, RuntimeError, ValueError) as error:
            failed += 1
            print(f"FAILED {name}: {error}", flush=True)
        else:
            print(f"ok     {name} ({time.monotonic() - started:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
