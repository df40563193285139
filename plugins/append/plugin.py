"""TensorRT plugin of `append`: rotates q and k of one layer, stores k and v in the layer's pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from plugins.append.cuda import CudaAppendParams, append_kernel, launch_append
from plugins.kernel import Kernel
from plugins.trt_fields import CompileCubin, PluginFields
from plugins.trt_plugin import Call, PluginSpec, PluginTensor, TrtPlugin

PAGES = ("pages", "kv_heads", "2", "page_tokens", "head_dim")
SEEN = ("pages", "kv_heads", "page_tokens")

SPEC = PluginSpec(
    name="CommitKVAppend",
    inputs=(
        PluginTensor("q", "element", ("R", "q_heads", "head_dim")),
        PluginTensor("k", "element", ("R", "kv_heads", "head_dim")),
        PluginTensor("v", "element", ("R", "kv_heads", "head_dim")),
        PluginTensor("cos", "fp32", ("R", "head_dim/2")),
        PluginTensor("sin", "fp32", ("R", "head_dim/2")),
        PluginTensor("slots", "int32", ("R",)),
        PluginTensor("pages", "element", PAGES),
        PluginTensor("seen", "fp16", SEEN),
    ),
    outputs=(
        PluginTensor("q_out", "element", ("R", "q_heads", "head_dim")),
        PluginTensor("pages_out", "element", PAGES, alias="pages"),
        PluginTensor("seen_out", "fp16", SEEN, alias="seen"),
    ),
)


@dataclass(frozen=True)
class AppendFields(PluginFields):
    """append_cubin: of `kernel`, for `sm`."""

    append_cubin: bytes = field(repr=False)

    @cached_property
    def kernel(self) -> Kernel:
        return append_kernel(self.page, self.element_type)


def append_fields(base: PluginFields, compile_cubin: CompileCubin) -> AppendFields:
    """Attributes of the plugin, its kernel compiled. Raises what `compile_cubin` raises."""
    kernel = append_kernel(base.page, base.element_type)
    return AppendFields.extend(base, append_cubin=compile_cubin(kernel, base.sm))


class AppendPlugin(TrtPlugin[AppendFields]):
    """See `plugins.append.params` for what it computes."""

    spec = SPEC
    fields_type = AppendFields

    def cubins(self) -> Mapping[Kernel, bytes]:
        return {self.fields.kernel: self.fields.append_cubin}

    def workspace_bytes(self, size: Mapping[str, int]) -> int:
        return 0

    def launch(self, call: Call) -> None:
        size, dim = call.size, self.fields.head_dim
        names = ("q", "k", "v", "q_out", "pages", "seen", "cos", "sin", "slots")
        params = CudaAppendParams(
            **{name: call.address[name] for name in names},
            q_stride=size["q_heads"] * dim, k_stride=size["kv_heads"] * dim, v_stride=size["kv_heads"] * dim,
            rotary_stride=dim // 2, rows=size["R"], q_heads=size["q_heads"], kv_heads=size["kv_heads"],
            num_slots=size["pages"] * size["page_tokens"],
        )  # fmt: skip
        launch_append(call.runner, self.fields.kernel, params, call.stream)
